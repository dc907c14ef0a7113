"""Hugging Face's Trainer, on two ranks: a job that goes on from a checkpoint, compared with one that ran through."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.processes.launch import forked_ranks, run
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(500)

N_BATCHES = 10  # of each rank, in each of three epochs; two make a step


def rows(folder: Path, name: str) -> list[list[list[int]]]:
    """The batches of each rank."""
    return [json.loads((folder / f"{name}-rank{rank}.json").read_text()) for rank in range(2)]


def test_a_job_goes_on_from_a_checkpoint_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    job = "-m", "tests.frameworks.job_transformers", tmp_path
    run(*forked_ranks(*job, ranks=2), seconds=180)
    whole = rows(tmp_path, "whole")
    for epoch in range(3):
        both = [flat(rank[epoch * N_BATCHES : (epoch + 1) * N_BATCHES]) for rank in whole]
        assert sorted(both[0] + both[1]) == list(range(160))
    run(*forked_ranks(*job, tmp_path / "checkpoint-9", ranks=2), seconds=180)  # in the second epoch
    assert rows(tmp_path, "checkpoint-9") == [rank[2 * 9 :] for rank in whole]
