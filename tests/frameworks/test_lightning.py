"""The example of Lightning on two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.processes.configurations import DONORS, LABELED
from tests.processes.launch import forked_ranks, run
from tests.processes.rows import check_reads_everything, read
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path

TRAINING = [row for row in LABELED if DONORS[row] != "d4"]
HELD_OUT = [row for row in LABELED if DONORS[row] == "d4"]


def test_lightning_example_reads_every_row(collection: Path, tmp_path: Path) -> None:
    """The example trains on every row, validates on every held-out row, and saves checkpoints."""
    script = "-m", "tests.processes.logging_rows", tmp_path, "examples/lightning_ddp.py", "--collection", collection
    options = "--label", "label", "--hold-out", "d4", "--epochs", 3, "--devices", 2, "--every", 3
    run(*forked_ranks(*script, *options, "--checkpoints", tmp_path / "checkpoints", ranks=2))

    check_reads_everything(tmp_path, epochs=3, among=TRAINING)
    for epoch in range(3):
        # Lightning's sanity check reads two batches of the validation before, which are all of them
        times = 2 if epoch == 0 else 1
        assert sorted(flat(read(tmp_path, f"validation-{epoch}"))) == sorted(times * HELD_OUT)
    # 258 rows to train on: 5 batches for each of two ranks
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert {f"epoch={(step - 1) // 5}-step={step}.ckpt" for step in (3, 6, 9, 12, 15)} <= names
