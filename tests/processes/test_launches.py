"""Real jobs of either framework: each rank reads what it would read of the same configuration in a process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from annbatch_distributed import Rank
from tests.processes.configurations import GOOD, N_OBS, WRONG
from tests.processes.launch import forked_ranks, run
from tests.processes.told import told_by
from tests.samplers import batches, flat

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module", params=["3 ranks of torch", "2 ranks of jax"])
def ranks(request: pytest.FixtureRequest, collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank of a job told."""
    folder = tmp_path_factory.mktemp("results")
    n_ranks, *_, framework = request.param.split()
    job = "-m", "tests.processes.job_launch", framework, collection, folder
    run(*forked_ranks(*job, ranks=int(n_ranks)))
    return told_by(folder)


def test_every_process_is_another_rank_of_the_same_world_once_the_framework_is_initialised(ranks: list[Any]) -> None:
    assert [told["rank"] for told in ranks] == [[rank, len(ranks)] for rank in range(len(ranks))]
    assert all("distributed is not init" in told["too early"] for told in ranks)


@pytest.mark.parametrize("name", GOOD)
def test_each_rank_reads_what_it_reads_in_one_process(ranks: list[Any], name: str) -> None:
    for rank, told in enumerate(ranks):
        sampler = GOOD[name].sampler(Rank(rank, len(ranks)))
        if rank == 0:  # which has looked at a batch
            next(sampler.sample(N_OBS))
        for epoch, read in zip(GOOD[name].epochs, told["passes"][name], strict=True):
            if epoch is not None:
                sampler.set_epoch(epoch)
            assert read["batches"] == batches(sampler.sample(N_OBS))
            assert read["n_batches"] == len(read["batches"])


def test_every_row_of_the_window_is_read_once_and_no_other(ranks: list[Any]) -> None:
    for name, configuration in GOOD.items():
        for passes in zip(*(told["passes"][name] for told in ranks), strict=True):
            rows = flat(flat(read["batches"]) for read in passes)
            assert set(rows) <= set(configuration.rows)
            if configuration.remainder in {"keep", "exact"}:
                assert sorted(rows) == configuration.rows


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_for_one_rank_is_the_same_error_on_all_at_once_and_before_any_row_is_read(
    ranks: list[Any], name: str
) -> None:
    (failure,) = {tuple(told["failures"][name]) for told in ranks}
    message, n_requests = failure
    assert message
    assert n_requests == 0
