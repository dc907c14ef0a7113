"""Ranks on a torch mesh of 2 x 2: which of them read the same, and what is said of those that shouldn't."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.job_mesh import N_OBS
from tests.processes.launch import forked_ranks, run
from tests.processes.told import told_by
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
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of four ranks told."""
    results = tmp_path_factory.mktemp("results")
    run(*forked_ranks("-m", "tests.processes.job_mesh", results, ranks=4))
    return told_by(results)


def test_each_process_has_the_rank_of_its_place(told: list[Any]) -> None:
    assert all(one.keys() == {*RANKS, "errors"} for one in told)
    for name, ranks in RANKS.items():
        assert [one[name]["rank"] for one in told] == [[rank, len(set(ranks))] for rank in ranks]


@pytest.mark.parametrize("name", RANKS)
def test_mesh_peers_read_same_rows_in_order(told: list[Any], name: str) -> None:
    """Processes of a rank read the same rows in the same order; all ranks, each row once."""
    by_rank: dict[int, list[list[int]]] = {}
    for rank, one in zip(RANKS[name], told, strict=True):
        assert one[name]["batches"] == by_rank.setdefault(rank, one[name]["batches"])
    assert sorted(flat(flat(by_rank.values()))) == list(range(N_OBS))
    assert len({len(batches) for batches in by_rank.values()}) == 1

    rows = f"{len(by_rank)} ranks have read {N_OBS} rows in 52 batches, as planned. Each of the {N_OBS} rows was"
    assert {one[name]["said"] for one in told} == {f"epoch 0: {rows} read once"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "too early",
            "RuntimeError: torch.distributed is not initialized. Start the script with torchrun",
        ),
        (
            "no names",
            "ValueError: The device mesh has 2 dimensions. Its dimensions are 'dp', 'tp'. Name its data-parallel",
        ),
        ("unknown name", "ValueError: The device mesh has no dimension 'pp'. Its dimensions are 'dp', 'tp'. (Instead"),
        ("a name twice", "ValueError: Names of data-parallel dimensions must be different"),
        (
            "names that there are not",
            "ValueError: The device mesh has no dimension 'dp'. Its dimensions have no names: pass",
        ),
        ("another's group", "ValueError: dist_info must be a process group with this process, got -100"),
    ],
)
def test_mesh_error_is_same_in_every_process(told: list[Any], name: str, message: str) -> None:
    """A wrong mesh raises the same error in every process."""
    (error,) = {one["errors"][name] for one in told}
    assert error.startswith(message)


def test_process_outside_mesh_raises(told: list[Any]) -> None:
    """A process that is not in the mesh raises."""
    errors = [one["errors"]["a mesh of others"] for one in told]
    assert errors[:2] == ["", ""]
    for rank in (2, 3):
        assert errors[rank].startswith(
            f"ValueError: This process, rank {rank}, is not in the device mesh of ranks (0, 1)."
        )


def test_mesh_peers_without_seed_raise_everywhere(told: list[Any]) -> None:
    """Peers without a seed would read in different orders, so every process raises."""
    (error,) = {one["errors"]["peers with other randomness"] for one in told}
    assert error.startswith(
        "ValueError: The ranks of this job don't agree:\n  randomness (a seed makes it the same), of"
    )
    assert "on process 0; " in error
    assert "on process 3\n" in error


def test_mesh_over_wrong_dimensions_is_detected(told: list[Any]) -> None:
    """Peers along different dimensions are detected, even if each rank has two processes."""
    (error,) = {one["errors"]["other dimensions"] for one in told}
    assert (
        "dist_info, of rank 0: 'dp' of a PyTorch device mesh on process 0; 'tp' of a PyTorch device mesh on p" in error
    )
