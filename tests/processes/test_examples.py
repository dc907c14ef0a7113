"""The examples, run as their docstrings say: what they print, and which rows each rank read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.processes.configurations import N_OBS
from tests.processes.launch import MPIRUN, OPEN_MPI, free_port, python, run, torchrun

if TYPE_CHECKING:
    from pathlib import Path

MADE_UP = 2_001  # how many cells the examples make up
BATCH_SIZE = 32


def rows(folder: Path, name: str) -> list[np.ndarray]:
    """The rows that each rank of two wrote down."""
    return [np.load(folder / f"{name}-rank{rank}.npy") for rank in range(2)]


def check_training(read: list[np.ndarray], n_train: int) -> None:
    """Check that two ranks read as many rows, all different, all to be trained on, and all that fill a step."""
    assert len(read[0]) == len(read[1])
    together = np.concatenate(read)
    assert set(together) <= set(range(n_train))
    assert len(set(together)) == len(together)
    assert n_train - len(together) < 2 * BATCH_SIZE


def test_the_torchrun_example_trains_on_disjoint_rows_and_counts_every_held_out_cell_once(
    collection: Path, tmp_path: Path
) -> None:
    options = ["--collection", collection, "--epochs", 2, "--rows", tmp_path]
    (done,) = run(torchrun("examples/torchrun_ddp.py", *options, ranks=2), seconds=90)

    n_train = N_OBS * 4 // 5
    for epoch in range(2):
        check_training(rows(tmp_path, f"train-{epoch}"), n_train)
        assert sorted(np.concatenate(rows(tmp_path, f"validation-{epoch}"))) == list(range(n_train, N_OBS))
        rows_read = sum(map(len, rows(tmp_path, f"train-{epoch}")))
        assert f"epoch {epoch}: 2 ranks have read {rows_read} rows in " in done.stdout
    assert f"of {N_OBS - n_train} held-out cells" in done.stdout


def test_the_jax_example_trains_on_disjoint_rows_in_batches_that_span_all_devices(tmp_path: Path) -> None:
    job = ["--num-processes", 2, "--coordinator", f"127.0.0.1:{free_port()}", "--epochs", 2, "--rows", tmp_path]
    first, _ = run(*(python("examples/jax_pmap.py", "--process-id", process, *job) for process in range(2)), seconds=90)

    for epoch in range(2):
        check_training(rows(tmp_path, f"train-{epoch}"), MADE_UP)
    assert set(np.concatenate(rows(tmp_path, "train-0"))) != set(np.concatenate(rows(tmp_path, "train-1")))
    assert f"batches of {2 * BATCH_SIZE} on 4 devices" in first.stdout
    assert "epoch 1: 2 ranks have read 1984 rows in 62 batches, as planned" in first.stdout


@pytest.mark.parametrize("who", ["env", "mpi"])
def test_the_ranks_example_reads_every_row_once_and_adds_up_every_count(who: str, tmp_path: Path) -> None:
    command = python("examples/custom_ranks.py", "--ranks", who, tmp_path)
    if who == "mpi":
        (done,) = run([MPIRUN, "-n", "2", *command], environments=[OPEN_MPI], seconds=90)
        assert "2 ranks have read 2001 rows in 64 batches, as planned" in done.stdout
    else:
        run(command, command, environments=[{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)], seconds=90)

    ranks = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(2)]
    assert sorted(np.concatenate([rank["rows"] for rank in ranks])) == list(range(MADE_UP))
    cells = np.random.default_rng(0).poisson(2, size=(MADE_UP, 50))
    assert np.array_equal(sum(rank["counts"] for rank in ranks), cells.sum(axis=0))
