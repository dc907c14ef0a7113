"""Ranks on a PyTorch mesh of 2 x 2: peers read the same rows, and wrong meshes raise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.job_mesh import N_OBS
from tests.processes.launch import forked_ranks, run
from tests.processes.results import read_results
from tests.samplers import flat

#: For each dist_info, the rank of each process: (0, 0), (0, 1), (1, 0) and (1, 1) of the mesh.
RANKS = {
    "torch": [0, 1, 2, 3],
    "deferred": [0, 1, 2, 3],
    "a spawned worker": [0, 1, 2, 3],
    "the mesh of one dimension": [0, 1, 2, 3],
    "dp and tp": [0, 1, 2, 3],
    "tp and dp": [0, 2, 1, 3],
    "dp": [0, 0, 1, 1],
    "a deferred mesh": [0, 0, 1, 1],
    "a part of the mesh": [0, 0, 1, 1],
    "tp": [0, 1, 0, 1],
    "a group": [0, 1, 0, 1],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results of each of four ranks."""
    folder = tmp_path_factory.mktemp("results")
    run(*forked_ranks("-m", "tests.processes.job_mesh", folder, ranks=4))
    return read_results(folder)


def test_each_process_has_the_rank_of_its_place(results: list[Any]) -> None:
    assert all(one.keys() == {*RANKS, "errors"} for one in results)
    for name, ranks in RANKS.items():
        assert [one[name]["rank"] for one in results] == [[rank, len(set(ranks))] for rank in ranks]


@pytest.mark.parametrize("name", RANKS)
def test_mesh_peers_read_same_rows_in_order(results: list[Any], name: str) -> None:
    """Processes of a rank read the same rows in the same order; all ranks, each row once."""
    by_rank: dict[int, list[list[int]]] = {}
    for rank, one in zip(RANKS[name], results, strict=True):
        assert one[name]["batches"] == by_rank.setdefault(rank, one[name]["batches"])
    assert sorted(flat(flat(by_rank.values()))) == list(range(N_OBS))
    assert len({len(batches) for batches in by_rank.values()}) == 1

    rows = f"{len(by_rank)} ranks have read {N_OBS} rows in 52 batches, as planned. Each of the {N_OBS} rows was"
    assert {one[name]["verdict"] for one in results} == {f"epoch 0: {rows} read once"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "too early",
            "RuntimeError: torch.distributed is not initialized",
        ),
        (
            "no names",
            "ValueError: The device mesh has 2 dimensions",
        ),
        ("unknown name", "ValueError: The device mesh has no dimension 'pp'. Its dimensions are 'dp', 'tp'"),
        ("a name twice", "ValueError: Names of data-parallel dimensions must be different"),
        (
            "unnamed dimensions",
            "ValueError: The device mesh has no dimension 'dp'. Its dimensions have no names",
        ),
        ("a group without this process", "ValueError: dist_info must be a process group with this process, got -100"),
    ],
)
def test_mesh_error_is_same_in_every_process(results: list[Any], name: str, message: str) -> None:
    """A wrong mesh raises the same error in every process."""
    (error,) = {one["errors"][name] for one in results}
    assert error.startswith(message)


def test_process_outside_mesh_raises(results: list[Any]) -> None:
    """A process that is not in the mesh raises."""
    errors = [one["errors"]["a mesh without this process"] for one in results]
    assert errors[:2] == ["", ""]
    for rank in (2, 3):
        assert errors[rank].startswith(
            f"ValueError: This process, rank {rank}, is not in the device mesh of ranks (0, 1)."
        )


def test_mesh_peers_without_seed_raise_everywhere(results: list[Any]) -> None:
    """Peers without a seed would read in different orders, so every process raises."""
    (error,) = {one["errors"]["peers without a seed"] for one in results}
    assert error.startswith(
        "ValueError: The ranks of this job don't agree:\n  randomness (a seed makes it the same), of"
    )
    assert "on process 0; " in error
    assert "on process 3\n" in error


def test_mesh_over_wrong_dimensions_is_detected(results: list[Any]) -> None:
    """Peers along different dimensions are detected, even if each rank has two processes."""
    (error,) = {one["errors"]["other dimensions"] for one in results}
    assert (
        "dist_info, of rank 0: 'dp' of a PyTorch device mesh on process 0; 'tp' of a PyTorch device mesh on p" in error
    )
