"""A real job of torchrun, as a quick check without the rest of tests/processes and tests/frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.processes.configurations import DONORS, LABELS
from tests.processes.launch import forked_ranks, run, torchrun
from tests.processes.rows import check_reads_everything, read
from tests.processes.test_environment import check
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path

IN_A_TASK = {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


def test_torchrun_example_validates_each_cell_once(collection: Path, tmp_path: Path) -> None:
    """The example trains on some donors, and counts each cell of the held-out donors once.

    Each process has its own rank, also within a task of Slurm.
    """
    script = "-m", "tests.processes.job_environment", tmp_path, "examples/torchrun_ddp.py"
    options = "--collection", collection, "--label", "label", "--hold-out", "d1", "d4", "--epochs", 2
    (done,) = run(torchrun(*script, *options, ranks=2), environments=[IN_A_TASK])

    check(tmp_path)
    is_labeled, is_held_out = LABELS.codes >= 0, np.isin(DONORS, ["d1", "d4"])
    trained_on, held_out = (np.flatnonzero(is_labeled & of).tolist() for of in (~is_held_out, is_held_out))
    check_reads_everything(tmp_path, epochs=2, among=trained_on)
    for epoch in range(2):
        assert sorted(flat(read(tmp_path, f"validation-{epoch}"))) == held_out
        assert f"epoch {epoch}: 2 ranks have read {len(trained_on)} rows in " in done.stdout
    assert done.stdout.count(f"of {len(held_out)} cells of other donors") == 2


def test_torchrun_example_lists_donors_in_error(collection: Path) -> None:
    """If a held-out donor doesn't exist, the error lists all donors."""
    options = "--collection", collection, "--label", "label", "--hold-out", "d1", "d7"
    for done in run(*forked_ranks("examples/torchrun_ddp.py", *options, ranks=2), expect=1):
        assert "--hold-out: no cell's donor is d7; choose from d0, d1, d2, d3, d4" in done.stderr
