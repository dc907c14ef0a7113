"""Real jobs, by every launcher: each rank reads what it would read of the same configuration in a process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from annbatch_distributed import Rank
from tests.processes.configurations import GOOD, HELD_OUT, N_OBS, WRONG
from tests.processes.launch import forked, forked_ranks, free_port, python, run, torchrun
from tests.processes.rank import Told, marked
from tests.samplers import batches, flat

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHES = ["torchrun_with_2_ranks", "three_ranks", "two_agents", "two_jax_processes"]

SECONDS = 180  # the limit for a launch, which takes about ten
JOB = "-m", "tests.processes.job_torch"


@pytest.fixture(scope="module")
def torchrun_with_2_ranks(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What each rank told of a job on one machine."""
    results = tmp_path_factory.mktemp("results")
    run(torchrun(*JOB, collection, results, ranks=2), seconds=SECONDS)
    return [Told.read(path) for path in sorted(results.iterdir())]


@pytest.fixture(scope="module")
def three_ranks(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What each rank told of a job on one machine, where nothing divides evenly."""
    results = tmp_path_factory.mktemp("results")
    run(*forked_ranks(*JOB, collection, results, ranks=3), seconds=SECONDS)
    return [Told.read(path) for path in sorted(results.iterdir())]


@pytest.fixture(scope="module")
def two_agents(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What each rank told of a job on two machines, as far as torch can tell."""
    results = tmp_path_factory.mktemp("results")
    agent = ["--nnodes=2", "--nproc-per-node=1", "--local-addr=127.0.0.1"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command = python("-m", "torch.distributed.run", *agent, *meeting, *JOB, collection, results)
    run(command, command, seconds=SECONDS)
    return [Told.read(path) for path in sorted(results.iterdir())]


@pytest.fixture(scope="module")
def two_jax_processes(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What each process told of a JAX job."""
    results = tmp_path_factory.mktemp("results")
    job = "-m", "tests.processes.job_jax", collection, results, f"127.0.0.1:{free_port()}", 2
    run(*(forked(*job, process) for process in range(2)), seconds=SECONDS)
    return [Told.read(path) for path in sorted(results.iterdir())]


@pytest.fixture(params=LAUNCHES)
def ranks(request: pytest.FixtureRequest) -> list[Told]:
    """What each rank of a launch told."""
    told: list[Told] = request.getfixturevalue(request.param)
    return told


def test_every_process_is_another_rank_of_the_same_world(ranks: list[Told]) -> None:
    assert [rank.rank for rank in ranks] == list(range(len(ranks)))
    assert {rank.world_size for rank in ranks} == {len(ranks)}


@pytest.mark.parametrize("name", GOOD)
def test_each_rank_reads_what_it_reads_in_one_process_and_knows_what_the_others_do(
    ranks: list[Told], name: str
) -> None:
    for told in ranks:
        sampler = GOOD[name].sampler(Rank(told.rank, len(ranks)))
        if told.rank == 0:  # which has looked at a batch
            next(sampler.sample(N_OBS))
        for epoch, one in zip(GOOD[name].epochs, told.passes[name], strict=True):
            if epoch is not None:
                sampler.set_epoch(epoch)
            plan = sampler.plan(N_OBS)
            assert one.batches == batches(sampler.sample(N_OBS))
            assert one.n_batches == len(one.batches)
            assert one.shards == [list(plan.shard(rank).rows) for rank in range(len(ranks))]
            assert one.lost == list(plan.lost)
            assert one.repeated == marked(sampler)


@pytest.mark.parametrize("name", ["keep", "exact", "folds", "shuffled folds"])
def test_every_row_of_the_window_is_read_exactly_once(ranks: list[Told], name: str) -> None:
    for one in zip(*(rank.passes[name] for rank in ranks), strict=True):
        assert sorted(flat(rank.rows for rank in one)) == GOOD[name].rows


@pytest.mark.parametrize("name", ["drop", "another seed", "shuffled", "classes", "independent"])
def test_no_held_out_row_is_ever_trained_on(ranks: list[Told], name: str) -> None:
    for one in zip(*(rank.passes[name] for rank in ranks), strict=True):
        assert {*range(HELD_OUT.start, HELD_OUT.stop)}.isdisjoint(flat(rank.rows for rank in one))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_for_one_rank_is_the_same_error_on_all_at_once_and_before_any_row_is_read(
    ranks: list[Told], name: str
) -> None:
    failures = [rank.failures[name] for rank in ranks]
    assert len({failure.message for failure in failures}) == 1
    assert failures[0].message
    assert all(failure.n_requests == 0 for failure in failures)


@pytest.mark.parametrize(
    ("launch", "framework"), [("torchrun_with_2_ranks", "torch.distributed"), ("two_jax_processes", "JAX distributed")]
)
def test_asked_before_the_framework_is_initialised_a_sampler_says_so(
    request: pytest.FixtureRequest, launch: str, framework: str
) -> None:
    told: list[Told] = request.getfixturevalue(launch)
    assert all(rank.uninitialised.startswith(f"{framework} is not init") for rank in told)
