"""Ranks on a torch mesh of 2 x 2: which of them read the same, and what is said of those that shouldn't."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.launch import forked_ranks, run
from tests.processes.meshes import N_OBS, OnMesh
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(500)

#: For each dist_info, the rank of each process: (0, 0), (0, 1), (1, 0) and (1, 1) of the mesh.
RANKS = {
    "torch": [0, 1, 2, 3],
    "deferred": [0, 1, 2, 3],
    "spawned workers": [0, 1, 2, 3],
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
def told(tmp_path_factory: pytest.TempPathFactory) -> list[OnMesh]:
    """What each of four ranks told."""
    results: Path = tmp_path_factory.mktemp("results")
    run(*forked_ranks("-m", "tests.processes.job_mesh", results, ranks=4), seconds=200)
    return [OnMesh.read(path) for path in sorted(results.iterdir())]


def test_four_processes_told(told: list[OnMesh]) -> None:
    assert [one.process for one in told] == [0, 1, 2, 3]
    assert all(one.ranks.keys() == RANKS.keys() for one in told)


@pytest.mark.parametrize("name", RANKS)
def test_each_process_has_the_rank_of_its_place(told: list[OnMesh], name: str) -> None:
    assert [list(one.ranks[name]) for one in told] == [[rank, len(set(RANKS[name]))] for rank in RANKS[name]]


@pytest.mark.parametrize("name", RANKS)
def test_processes_of_a_rank_read_the_same_rows_in_the_same_order_and_all_ranks_each_row_once(
    told: list[OnMesh], name: str
) -> None:
    by_rank: dict[int, list[list[int]]] = {}
    for rank, one in zip(RANKS[name], told, strict=True):
        assert one.batches[name] == by_rank.setdefault(rank, one.batches[name])
    assert sorted(flat(flat(by_rank.values()))) == list(range(N_OBS))
    assert len({len(batches) for batches in by_rank.values()}) == 1


@pytest.mark.parametrize("name", RANKS)
def test_what_was_read_is_said_to_be_the_plan_in_every_process(told: list[OnMesh], name: str) -> None:
    n_ranks = len(set(RANKS[name]))
    rows = f"{n_ranks} ranks have read {N_OBS} rows in 52 batches, as planned. Each of the {N_OBS} rows was read once"
    assert {one.said[name] for one in told} == {f"epoch 0: {rows}"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "too early",
            "RuntimeError: torch.distributed is not initialized. Call torch.distributed.init_process_group()",
        ),
        (
            "workers read",
            "ValueError: The ranks of this job can't be compared:\n  RuntimeError: The workers of a DataLoader",
        ),
        (
            "no names",
            "ValueError: The device mesh has 2 dimensions. Its dimensions are 'dp', 'tp'. Say which of them",
        ),
        ("unknown name", "ValueError: The device mesh has no dimension 'pp'. Its dimensions are 'dp', 'tp'. (One"),
        ("a name twice", "ValueError: Name each of the data-parallel dimensions of the device mesh once"),
        (
            "names that there are not",
            "ValueError: The device mesh has no dimension 'dp'. Its dimensions have no names: give",
        ),
        ("another's group", "ValueError: dist_info is -100, which torch.distributed.new_group gives to a process that"),
    ],
)
def test_what_is_wrong_is_the_same_error_in_every_process(told: list[OnMesh], name: str, message: str) -> None:
    assert len({one.errors[name] for one in told}) == 1
    assert told[0].errors[name].startswith(message)


def test_a_process_that_is_not_in_the_mesh_is_told_so(told: list[OnMesh]) -> None:
    assert [one.errors["a mesh of others"] for one in told] == ["", ""] + [
        f"ValueError: This process, rank {rank}, is not in the device mesh, which is one of ranks (0, 1)."
        for rank in (2, 3)
    ]


def test_peers_without_a_seed_would_read_in_other_orders_and_all_hear_of_it(told: list[OnMesh]) -> None:
    (error,) = {one.errors["peers with other randomness"] for one in told}
    assert error.startswith(
        "ValueError: The ranks of this job don't agree:\n  randomness (a seed makes it the same), of"
    )
    assert "on process 0; " in error
    assert "on process 3\n" in error


def test_peers_along_other_dimensions_are_found_even_where_each_rank_has_two_processes(told: list[OnMesh]) -> None:
    (error,) = {one.errors["other dimensions"] for one in told}
    assert "dist_info, of rank 0: 'dp' of a torch device mesh on process 0; 'tp' of a torch device mesh on p" in error
