"""One real job of torchrun's, for those who don't wait for all the others: tests/processes and tests/frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.processes.configurations import N_OBS
from tests.processes.launch import run, torchrun
from tests.processes.rows import check_reads_everything, read
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path


def test_the_torchrun_example_trains_on_disjoint_rows_and_counts_every_held_out_cell_once(
    collection: Path, tmp_path: Path
) -> None:
    options = ["--collection", collection, "--epochs", 2, "--rows", tmp_path]
    (done,) = run(torchrun("examples/torchrun_ddp.py", *options, ranks=2), seconds=90)

    n_train = N_OBS * 4 // 5
    check_reads_everything(tmp_path, epochs=2, n_rows=n_train)
    for epoch in range(2):
        assert sorted(flat(read(tmp_path, f"validation-{epoch}"))) == list(range(n_train, N_OBS))
        rows_read = len(flat(read(tmp_path, f"train-{epoch}")))
        assert f"epoch {epoch}: 2 ranks have read {rows_read} rows in " in done.stdout
    assert f"of {N_OBS - n_train} held-out cells" in done.stdout
