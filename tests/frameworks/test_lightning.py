"""The example of Lightning on two ranks and on one: an uninterrupted job, and resumes from its checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.configurations import DONORS, LABELED
from tests.processes.launch import forked_ranks, run
from tests.processes.rows import check_continues, check_reads_everything, read, read_batches
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path


SCRIPT = "examples/lightning_ddp.py"
TRAINING = [row for row in LABELED if DONORS[row] != "d4"]
HELD_OUT = [row for row in LABELED if DONORS[row] == "d4"]

# 258 rows to train on: 5 batches for each of two ranks


@pytest.fixture(scope="module")
def runs(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the logs of consecutive jobs."""
    folder = tmp_path_factory.mktemp("lightning")

    def job(name: str, devices: int, resume: str | None = None) -> list[object]:
        (folder / name).mkdir()
        script = "-m", "tests.processes.logging_rows", folder / name, SCRIPT
        cells = "--collection", collection, "--label", "label", "--hold-out", "d4"
        options = [*script, *cells, "--epochs", 3, "--devices", devices]
        if resume is None:
            return [*options, "--checkpoints", folder / f"{name}-checkpoints", "--every", 1]
        return [*options, "--checkpoints", folder / "unused", "--every", 1000, "--resume", folder / resume]

    run(*forked_ranks(*job("two", 2), ranks=2))
    for name, devices, checkpoint in (
        # more batches remain than are done: otherwise Lightning would count from 0, and a length of only the remaining
        # batches would pass, too
        ("middle", 2, "two-checkpoints/epoch=1-step=6.ckpt"),
        ("shrunk", 1, "two-checkpoints/epoch=0-step=1.ckpt"),
    ):
        run(*forked_ranks(*job(name, devices, checkpoint), ranks=devices))
    return folder


def check_validates(folder: Path, *, epoch: int, ranks: int = 2, times: int = 1) -> None:
    """Check that every held-out row was read `times` times."""
    assert sorted(flat(read(folder, f"validation-{epoch}", ranks))) == sorted(times * HELD_OUT)


def test_uninterrupted_job_reads_every_row(runs: Path) -> None:
    """An uninterrupted job trains on every row and validates on every held-out row."""
    check_reads_everything(runs / "two", epochs=3, among=TRAINING)
    for epoch in range(3):
        # Lightning's sanity check reads two batches of the validation before, which are all of them
        check_validates(runs / "two", epoch=epoch, times=2 if epoch == 0 else 1)


def test_job_resumes_as_if_uninterrupted(runs: Path) -> None:
    """A job resumes in the middle of an epoch as if it had not been interrupted."""
    check_continues(runs / "two", runs / "middle", epoch=1, n_batches=4)
    check_continues(runs / "two", runs / "middle", epoch=2, n_batches=5)
    for epoch in (1, 2):
        assert read(runs / "two", f"validation-{epoch}") == read(runs / "middle", f"validation-{epoch}")
    assert not list((runs / "middle").glob("train-0-*"))


def test_job_resumes_on_different_number_of_devices(runs: Path) -> None:
    """A job resumes on a different number of devices."""
    read_before = flat(batches[0] for batches in read_batches(runs / "two", "train-0"))
    (read_after,) = read(runs / "shrunk", "train-0", 1)
    assert sorted([*read_before, *read_after]) == TRAINING
    for later in (1, 2):
        (rows,) = read(runs / "shrunk", f"train-{later}", 1)
        assert sorted(rows) == TRAINING
    for epoch_read in range(3):
        check_validates(runs / "shrunk", epoch=epoch_read, ranks=1)
