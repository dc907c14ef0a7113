"""Ranks that check each other in the store of their framework: all of them hear the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.job_agreement import N_OBS
from tests.processes.launch import forked_ranks, run
from tests.processes.told import told_by


@pytest.fixture(scope="module", params=["torch", "jax"])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of three ranks told."""
    results = tmp_path_factory.mktemp("results")
    job = "-m", "tests.processes.job_agreement", request.param, results
    # a rank that waits for another hears a TimeoutError long before
    run(*forked_ranks(*job, ranks=3))
    return told_by(results)


@pytest.mark.parametrize(
    ("what", "heard"),
    [
        ("nothing", ""),
        ("seed", "  seed: 0 on ranks 0 and 2; 1 on rank 1\n"),
        ("all rows read", f"3 ranks have read {N_OBS} rows in 51 batches, as planned. Each of the {N_OBS} rows was"),
        ("a batch left out", "  rank 1 has read 63 rows in 16 batches, not 67 rows in 17 batches"),
    ],
)
def test_all_ranks_hear_the_same_of_what_one_of_them_has_that_the_others_do_not(
    told: list[Any], what: str, heard: str
) -> None:
    (message,) = {rank[what] for rank in told}
    assert heard in message
    assert bool(heard) == bool(message)


def test_a_job_of_some_of_the_processes_needs_no_other(told: list[Any]) -> None:
    first, _, last = told
    assert first["nothing in a part"] == last["nothing in a part"] == ""
    assert first["seed in a part"] == last["seed in a part"]
    assert "seed: 0 on rank 0; 2 on rank 1\n" in first["seed in a part"]


def test_a_rank_that_never_comes_is_named_on_all_others(told: list[Any]) -> None:
    (message,) = {rank["a rank"] for rank in told if "a rank" in rank}
    assert message.startswith(
        "TimeoutError: The ranks can't be checked: of 3 processes, process 1 didn't come within 3 seconds."
    )
