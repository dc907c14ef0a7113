"""Real jobs, by every launcher: what each rank read, compared with the rows enumerated one by one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.processes.configurations import BATCH_SIZE, CLASSES, CUT_CLASSES, DRAWS, GOOD, HELD_OUT, TRAINING, WRONG
from tests.processes.launch import forked, forked_ranks, free_port, python, run, torchrun
from tests.processes.rank import Told
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path

    from tests.processes.rank import OnePass

LAUNCHES = ["torchrun_with_2_ranks", "three_ranks", "two_agents", "two_jax_processes"]
EQUAL = [name for name, one in GOOD.items() if one.remainder != "keep"]
SHARED_OUT = [name for name in GOOD if name not in ("classes", "independent")]  # class samplers draw with replacement

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


def passes(ranks: list[Told], name: str) -> list[list[OnePass]]:
    """For each pass through a configuration, what every rank read."""
    return [list(one) for one in zip(*(rank.passes[name] for rank in ranks), strict=True)]


def rows(one_pass: list[OnePass]) -> list[int]:
    """The rows that all ranks read in a pass."""
    return flat(rank.rows for rank in one_pass)


def test_every_process_is_another_rank_of_the_same_world(ranks: list[Told]) -> None:
    assert [rank.rank for rank in ranks] == list(range(len(ranks)))
    assert {rank.world_size for rank in ranks} == {len(ranks)}


@pytest.mark.parametrize("name", EQUAL)
def test_every_rank_has_the_same_number_of_batches_which_is_the_number_promised(ranks: list[Told], name: str) -> None:
    for one in passes(ranks, name):
        assert len({len(rank.batches) for rank in one}) == 1
        assert all(rank.n_batches == len(rank.batches) for rank in one)
        assert all(1 <= len(batch) <= BATCH_SIZE for rank in one for batch in rank.batches)


def test_under_keep_a_rank_has_a_batch_more_and_each_rank_knows_its_own_number(ranks: list[Told]) -> None:
    for one in passes(ranks, "keep"):
        assert len({len(rank.batches) for rank in one}) == 2
        assert all(rank.n_batches == len(rank.batches) for rank in one)


@pytest.mark.parametrize("name", ["keep", "exact", "folds", "shuffled folds"])
def test_every_row_of_the_window_is_read_exactly_once(ranks: list[Told], name: str) -> None:
    for one in passes(ranks, name):
        assert sorted(rows(one)) == GOOD[name].rows


def test_under_pad_every_row_is_read_and_the_rows_read_again_are_those_marked(ranks: list[Told]) -> None:
    for one in passes(ranks, "pad"):
        read = Counter(rows(one))
        assert sorted(read) == GOOD["pad"].rows
        again = read - Counter(GOOD["pad"].rows)
        assert again
        assert again == Counter(flat(rank.repeated for rank in one))
        assert {len(batch) for rank in one for batch in rank.batches} == {BATCH_SIZE}


@pytest.mark.parametrize("name", ["drop", "another seed", "shuffled"])
def test_under_drop_no_row_is_read_twice_and_fewer_are_lost_than_fill_a_step(ranks: list[Told], name: str) -> None:
    for one in passes(ranks, name):
        read = rows(one)
        assert len(set(read)) == len(read)
        lost = set(GOOD[name].rows) - set(read)
        assert lost == set(one[0].lost)
        assert len(lost) < len(ranks) * BATCH_SIZE
        assert {len(batch) for rank in one for batch in rank.batches} == {BATCH_SIZE}


def test_the_rows_lost_under_drop_move_with_the_epoch_and_none_is_always_lost(ranks: list[Told]) -> None:
    lost = [set(GOOD["drop"].rows) - set(rows(one)) for one in passes(ranks, "drop")]
    epochs = dict(zip(GOOD["drop"].epochs[:3], lost, strict=False))
    last = GOOD["drop"].rows[-len(epochs[0]) :]
    assert epochs[0] == set(last)
    assert epochs[0].isdisjoint(epochs[1])
    assert epochs[1].isdisjoint(epochs[2])


@pytest.mark.parametrize("name", ["drop", "another seed", "shuffled", "classes", "independent"])
def test_no_held_out_row_is_ever_trained_on(ranks: list[Told], name: str) -> None:
    held_out = set(range(HELD_OUT.start, HELD_OUT.stop))
    assert all(held_out.isdisjoint(rows(one)) for one in passes(ranks, name))
    assert held_out == set(rows(passes(ranks, "exact")[0]))


@pytest.mark.parametrize("name", SHARED_OUT)
def test_each_rank_reads_what_every_rank_had_planned_for_it(ranks: list[Told], name: str) -> None:
    for one in passes(ranks, name):
        for rank, read in enumerate(one):
            assert all(sorted(read.rows) == sorted(other.shards[rank]) for other in one)


def test_a_class_sampler_draws_from_its_own_shard_and_batches_are_of_one_class(ranks: list[Told]) -> None:
    for one in passes(ranks, "classes"):
        shards = [set(shard) for shard in one[0].shards]
        assert all(set(range(TRAINING.stop)) >= shard for shard in shards)
        assert sum(map(len, shards)) == len(set().union(*shards))
        for rank, read in enumerate(one):
            assert len(read.rows) == 64
            assert set(read.rows) <= shards[rank]
            assert all(len(set(CLASSES[batch])) == 1 for batch in read.batches)


def test_setting_an_epoch_again_gives_its_order_again_and_any_other_pass_another_order(ranks: list[Told]) -> None:
    assert GOOD["drop"].epochs == (0, 1, 2, 0, None)
    for rank in ranks:
        first, other_epoch, _, again, one_more = rank.passes["drop"]
        assert again.batches == first.batches
        assert one_more.batches != first.batches
        assert other_epoch.batches != first.batches
        assert sorted(one_more.rows) == sorted(first.rows)


def test_under_shuffled_every_rank_has_other_rows_in_another_epoch_and_the_same_ones_again(ranks: list[Told]) -> None:
    assert GOOD["shuffled"].epochs == (0, 1, 2, 0, None)
    for rank in ranks:
        first, *other_epochs, again, one_more = (set(one.rows) for one in rank.passes["shuffled"])
        assert first == again == one_more
        assert all(first != other for other in other_epochs)
        assert other_epochs[0] != other_epochs[1]


def test_under_independent_the_job_makes_the_draws_of_one_sampler_and_every_rank_draws_from_all_classes(
    ranks: list[Told],
) -> None:
    for one in passes(ranks, "independent"):
        assert len({len(read.batches) for read in one}) == 1
        assert len(rows(one)) == DRAWS // (len(ranks) * BATCH_SIZE) * len(ranks) * BATCH_SIZE
        assert all(len(set(CUT_CLASSES[batch])) == 1 for read in one for batch in read.batches)
        assert len({tuple(read.rows) for read in one}) == len(ranks)
        assert all(read.shards == [list(range(TRAINING.stop))] * len(ranks) for read in one)


def test_another_seed_gives_another_order_of_the_same_rows(ranks: list[Told]) -> None:
    for rank in ranks:
        (other,), first = rank.passes["another seed"], rank.passes["drop"][0]
        assert other.rows != first.rows
        assert sorted(other.rows) == sorted(first.rows)


@pytest.mark.parametrize("launch", ["two_agents", "two_jax_processes"])
@pytest.mark.parametrize("name", GOOD)
def test_the_same_seed_gives_the_same_rows_in_the_same_order_in_another_launch(
    torchrun_with_2_ranks: list[Told], request: pytest.FixtureRequest, launch: str, name: str
) -> None:
    other = request.getfixturevalue(launch)
    for here, there in zip(passes(torchrun_with_2_ranks, name), passes(other, name), strict=True):
        assert [rank.batches for rank in here] == [rank.batches for rank in there]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_for_one_rank_is_the_same_error_on_all_at_once_and_before_any_row_is_read(
    ranks: list[Told], name: str
) -> None:
    failures = [rank.failures[name] for rank in ranks]
    assert len({failure.message for failure in failures}) == 1
    assert failures[0].message
    assert all(failure.n_requests == 0 for failure in failures)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_classes_cut_short_are_cut_short_on_one_rank_alone(world_size: int) -> None:
    rows = TRAINING.stop // world_size // BATCH_SIZE * BATCH_SIZE
    shards = [CUT_CLASSES[rank * rows : (rank + 1) * rows] for rank in range(world_size)]
    assert [min(Counter(shard.tolist()).values()) < 8 for shard in shards] == [True] + [False] * (world_size - 1)


def test_asked_before_torch_distributed_is_initialised_a_sampler_says_so(torchrun_with_2_ranks: list[Told]) -> None:
    assert all(rank.uninitialised.startswith("torch.distributed is not init") for rank in torchrun_with_2_ranks)


def test_asked_before_jax_distributed_is_initialised_a_sampler_says_so(two_jax_processes: list[Told]) -> None:
    assert all(rank.uninitialised.startswith("JAX distributed is not init") for rank in two_jax_processes)
