"""Real jobs, by every launcher: each rank reads what it would read of the same configuration in a process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from annbatch_distributed import Rank
from tests.processes.configurations import GOOD, N_OBS, WRONG
from tests.processes.launch import forked, forked_ranks, free_port, run, torchrun
from tests.processes.rank import Told, marked
from tests.samplers import batches, flat

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 180  # the limit for a launch, which takes about ten


def told_by(collection: Path, folder: Path, launch: str) -> list[Told]:
    if launch == "torchrun, 2 ranks":
        run(torchrun("-m", "tests.processes.job_torch", collection, folder, ranks=2), seconds=SECONDS)
    elif launch == "3 ranks":  # where nothing divides evenly
        run(*forked_ranks("-m", "tests.processes.job_torch", collection, folder, ranks=3), seconds=SECONDS)
    else:
        job = "-m", "tests.processes.job_jax", collection, folder, f"127.0.0.1:{free_port()}", 2
        run(*(forked(*job, process) for process in range(2)), seconds=SECONDS)
    return [Told.read(path) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module", params=["torchrun, 2 ranks", "3 ranks", "JAX, 2 processes"])
def ranks(request: pytest.FixtureRequest, collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What each rank of a launch told."""
    return told_by(collection, tmp_path_factory.mktemp("results"), request.param)


def test_every_process_is_another_rank_of_the_same_world_once_the_framework_is_initialised(ranks: list[Told]) -> None:
    assert [rank.rank for rank in ranks] == list(range(len(ranks)))
    assert {rank.world_size for rank in ranks} == {len(ranks)}
    assert all("distributed is not init" in rank.uninitialised for rank in ranks)


@pytest.mark.parametrize("name", GOOD)
def test_each_rank_reads_what_it_reads_in_one_process_and_knows_what_the_others_do(
    ranks: list[Told], name: str
) -> None:
    for told in ranks:
        sampler = GOOD[name].sampler(Rank(told.rank, len(ranks)))
        if told.rank == 0:  # which has looked at a batch
            next(sampler.sample(N_OBS))
        for epoch, read in zip(GOOD[name].epochs, told.passes[name], strict=True):
            if epoch is not None:
                sampler.set_epoch(epoch)
            plan = sampler.plan(N_OBS)
            assert read.batches == batches(sampler.sample(N_OBS))
            assert read.n_batches == len(read.batches)
            assert read.shards == [list(plan.shard(rank).rows) for rank in range(len(ranks))]
            assert read.lost == list(plan.lost)
            assert read.repeated == marked(sampler)


def test_every_row_of_the_window_is_read_once_and_no_other(ranks: list[Told]) -> None:
    for name, configuration in GOOD.items():
        for passes in zip(*(rank.passes[name] for rank in ranks), strict=True):
            rows = flat(rank.rows for rank in passes)
            assert set(rows) <= set(configuration.rows)
            if configuration.remainder in {"keep", "exact"}:
                assert sorted(rows) == configuration.rows


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_for_one_rank_is_the_same_error_on_all_at_once_and_before_any_row_is_read(
    ranks: list[Told], name: str
) -> None:
    failures = [rank.failures[name] for rank in ranks]
    assert len({failure.message for failure in failures}) == 1
    assert failures[0].message
    assert all(failure.n_requests == 0 for failure in failures)
