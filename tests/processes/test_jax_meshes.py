"""Two JAX processes with two devices each: their ranks on a mesh, and the rows of each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.processes.configurations import BATCH_SIZE, CLASSES
from tests.processes.job_jax_meshes import N_ROWS
from tests.processes.launch import forked_ranks, run
from tests.processes.results import read_results
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path

type Result = dict[str, Any]

HALVES = slice(0, BATCH_SIZE // 2), slice(BATCH_SIZE // 2, BATCH_SIZE)
WHOLE = slice(0, BATCH_SIZE)

# for each sharding, the ranks of both processes, and the parts of the global batch: a rank, and rows of its batch
SHARDINGS = {
    "data across processes, columns split": ((0, 1), [(0, WHOLE), (1, WHOLE)]),
    "model across processes": ((0, 0), [(0, WHOLE)]),
    # process 0 has the first and the third part
    "both, processes in turn": ((0, 1), [(0, HALVES[0]), (1, HALVES[0]), (0, HALVES[1]), (1, HALVES[1])]),
    "both, process 1 first": ((1, 0), [(0, WHOLE), (1, WHOLE)]),
    "none": ((0, 0), [(0, WHOLE)]),
}


@pytest.fixture(scope="module")
def processes(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Return the results of each process."""
    results = tmp_path_factory.mktemp("results")
    run(*forked_ranks("-m", "tests.processes.job_jax_meshes", collection, results, ranks=2))
    return read_results(results)


def test_jax_rank_is_position_along_row_axes(processes: list[Result]) -> None:
    """The rank of a process is its position along the axes that split rows."""
    assert set(SHARDINGS) == set(processes[0]["read"])
    for name, (ranks, _) in SHARDINGS.items():
        for process, rank in zip(processes, ranks, strict=True):
            result = process["read"][name]
            assert result["rank"] == rank
            assert result["world_size"] == len(set(ranks))
            assert result["n_peers"] == 2 // len(set(ranks))
            assert result["processes"] == [0, 1]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("data across processes, columns split", "axis 'data' of a JAX mesh"),
        ("both, process 1 first", "axes 'data', 'model' of a JAX mesh"),
        ("none", "no axis of a JAX mesh"),
    ],
)
def test_placement_shows_its_axes(processes: list[Result], name: str, source: str) -> None:
    assert [process["read"][name]["source"] for process in processes] == [source] * 2


def test_sets_are_numbered_through_all_processes(processes: list[Result]) -> None:
    """Sets of two processes have different numbers in the global batch; a column of obs keeps its values."""
    assert [process["sets"]["set"] for process in processes] == [[0, 1], [2, 3]]
    assert [process["sets"]["obs"] for process in processes] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("name", SHARDINGS)
def test_jax_peers_read_same_rows_in_order(processes: list[Result], name: str) -> None:
    """Peers read the same rows in the same order, and other ranks read none of them."""
    ranks, _ = SHARDINGS[name]
    here, there = ([step["read"] for step in process["read"][name]["steps"]] for process in processes)
    assert len(here) == len(there) == N_ROWS // (len(set(ranks)) * BATCH_SIZE)
    if len(set(ranks)) == 1:
        assert here == there
    else:
        assert not set(flat(here)) & set(flat(there))
    have = "1 rank has" if here == there else "2 ranks have"
    rows = f"{have} read {N_ROWS:,} rows in {N_ROWS // BATCH_SIZE} batches, as planned. Each of the {N_ROWS:,} rows was"
    verdicts = {process["read"][name]["verdict"] for process in processes}
    assert verdicts == {f"epoch 0: {rows} read once; the mask selects 0:{N_ROWS}"}


@pytest.mark.parametrize("name", SHARDINGS)
def test_devices_hold_rows_of_their_ranks(processes: list[Result], name: str) -> None:
    """Each device holds the rows of its rank, and sums over all devices are right."""
    ranks, parts = SHARDINGS[name]
    for steps in zip(*(process["read"][name]["steps"] for process in processes), strict=True):
        by_rank = {rank: step["read"] for rank, step in zip(ranks, steps, strict=True)}
        rows = [row for rank, part in parts for row in by_rank[rank][part]]
        # the first column of each row is one more than the row's number, and the others are empty
        whole = {"cells": np.zeros((len(rows), 4)), "types": CLASSES[rows], "index": np.array(rows)}
        whole["cells"][:, 0] = np.array(rows) + 1
        for step in steps:
            assert step["shapes"] == {name: list(array.shape) for name, array in whole.items()}
            for part, array in whole.items():
                assert len(step["shards"][part]) == 2
                for index, values in step["shards"][part]:
                    assert np.array_equal(array[tuple(slice(*span) for span in index)], values)
            assert step["sum"] == whole["cells"].sum()


def test_split_axes_give_devices_different_parts(processes: list[Result]) -> None:
    """Devices hold different parts along each axis that splits an array."""
    n_parts = {name: 4 for name in SHARDINGS if "both" in name or "columns split" in name}
    n_parts |= {"model across processes": 2, "none": 1}
    for name, n in n_parts.items():
        steps = [process["read"][name]["steps"][0]["shards"]["cells"] for process in processes]
        assert len({str(index) for shards in steps for index, _ in shards}) == n


def test_process_without_mesh_devices_raises(processes: list[Result]) -> None:
    """A process without devices in the mesh raises, and the other process does not."""
    for failure in ("the mesh of process 0", "a batch in the mesh of process 0"):
        inside, outside = (process["failures"][failure] for process in processes)
        assert not inside
        assert outside.startswith("Process 1 must have devices in the JAX mesh, which has only devices of process 0.")


def test_indivisible_columns_raise_in_every_process(processes: list[Result]) -> None:
    """Columns that don't divide evenly raise in every process."""
    for process in processes:
        assert f"full shape: ({2 * BATCH_SIZE}, 3)" in process["failures"]["columns that don't divide"]
