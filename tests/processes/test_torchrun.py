"""One real job of torchrun's, for those who don't wait for all the others: tests/processes and tests/frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.processes.configurations import DONORS, LABELS
from tests.processes.launch import run, torchrun
from tests.processes.rows import check_reads_everything, read
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path


def test_the_torchrun_example_trains_on_some_donors_and_counts_every_cell_of_the_others_once(
    collection: Path, tmp_path: Path
) -> None:
    options = ["--collection", collection, "--label", "label", "--epochs", 2, "--rows", tmp_path]
    (done,) = run(torchrun("examples/torchrun_ddp.py", *options, ranks=2), seconds=90)

    is_labelled, is_other_donors = LABELS.codes >= 0, DONORS == "d4"
    is_held_out = is_labelled & is_other_donors
    check_reads_everything(tmp_path, epochs=2, among=np.flatnonzero(is_labelled & ~is_other_donors).tolist())
    for epoch in range(2):
        held_out, trained_on = (flat(read(tmp_path, f"{name}-{epoch}")) for name in ("validation", "train"))
        assert sorted(held_out) == np.flatnonzero(is_held_out).tolist()
        assert {*DONORS[trained_on]} == {"d0", "d1", "d2", "d3"}
        assert f"epoch {epoch}: 2 ranks have read {len(trained_on)} rows in " in done.stdout
    assert f"of {is_held_out.sum()} cells of other donors" in done.stdout
