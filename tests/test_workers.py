"""Workers of torch's DataLoader: real ones, and simulated ones where there are many cases."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import pickle
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from annbatch import Loader
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info
from zarr.storage import MemoryStore, WrapperStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.ranks.worker import current_worker, worker_info_hidden
from tests.samplers import batches, flat
from tests.strategies import jobs
from tests.workers import Workers, as_worker, forked, in_turn, share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.strategies import Job

N_OBS = 201
LABELS = pd.Categorical(np.repeat(["B", "NK", "T"], [80, 60, 61]))
SAMPLERS = {
    "random": RandomSampler(8, 4, 8),
    "sequential": SequentialSampler(8, 4, 8),
    "class": ClassSampler(8, 4, 8, classes=LABELS, num_samples=N_OBS),
    "replacement": RandomSampler(8, 4, 8, replacement=True),
}


def distributed(kind: str = "random", rank: int = 0, world_size: int = 2, **options: Any) -> DistributedSampler:
    options = {"seed": 0, "remainder": "exact"} | options
    return DistributedSampler(SAMPLERS[kind], dist_info=Rank(rank, world_size), **options)


def loader(kind: str = "random", rank: int = 0, *, of: type[Loader] = StatefulLoader, **options: Any) -> Any:
    made = of(batch_sampler=distributed(kind, rank, **options), return_index=True, preload_to_gpu=False)
    return made.add_adata(ad.AnnData(np.arange(N_OBS, dtype="float32").reshape(-1, 1)))


def rows(found: Iterable[Any]) -> list[list[int]]:
    """The rows of each batch, which its data must agree with."""
    listed = []
    for batch in found:
        assert batch["X"][:, 0].tolist() == batch["index"].tolist()
        listed.append(batch["index"].tolist())
    return listed


def torchs(source: Any, n_workers: int = 2, start: str = "fork", **options: Any) -> DataLoader:
    return DataLoader(source, batch_size=None, num_workers=n_workers, multiprocessing_context=start, **options)


#: Most tests of real workers fork them, which takes no time; where that can't be, spawned ones are tested nevertheless.
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

# real workers


@pytest.mark.parametrize("start", multiprocessing.get_all_start_methods())
def test_what_is_set_and_loaded_reaches_workers_that_persist_however_they_are_started(start: str) -> None:
    made = loader(sharding="shuffled")
    whole = rows(loader(sharding="shuffled"))
    collected = torchs(made, start=start, persistent_workers=True)
    first, second = rows(collected), rows(collected)
    assert len(collected) == len(first) == len(whole)
    assert sorted(first) == sorted(whole)
    assert sorted(flat(second)) == sorted(flat(first))  # of the same shard, since no epoch was set
    assert second != first
    made.set_epoch(3)
    third = rows(collected)
    expected = loader(sharding="shuffled")
    expected.set_epoch(3)
    assert sorted(third) == sorted(rows(expected))
    made.set_epoch(0)
    assert rows(collected) == first
    made.set_epoch(3)
    list(islice(iter(collected), 4))  # what is fetched ahead doesn't count
    made.load_state_dict(json.loads(json.dumps(made.state_dict(batches_done=4))))
    assert rows(collected) == third[4:]
    assert sorted(flat(rows(collected))) == sorted(flat(third))
    assert len(collected) == len(third)


@pytest.mark.parametrize("start", multiprocessing.get_all_start_methods())
def test_workers_can_read_ahead_however_they_are_started(start: str) -> None:
    def made(read_ahead: int) -> StatefulLoader:
        sampler = distributed(remainder="pad")
        found = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False, read_ahead=read_ahead)
        return found.add_adata(ad.AnnData(np.arange(N_OBS, dtype="float32").reshape(-1, 1)))

    ahead = torchs(made(1), start=start, persistent_workers=True)
    expected = torchs(made(0), start=start, persistent_workers=True)
    for _ in range(2):
        assert rows(ahead) == rows(expected)


@forks
def test_workers_that_are_started_anew_for_each_epoch_have_a_new_order_and_one_that_was_left() -> None:
    made = loader()
    collected = torchs(made)
    first = rows(collected)
    state = made.state_dict(batches_done=5)
    again = rows(collected)  # nobody has called set_epoch
    assert sorted(flat(again)) == sorted(flat(first))
    assert again != first

    for n_workers in (1, 2, 3):
        after = loader()
        after.load_state_dict(state)
        list(islice(iter(torchs(after, n_workers, prefetch_factor=1)), 2))  # given up
        rest = rows(torchs(after, n_workers))
        assert sorted(rest) == sorted(first[5:])
        assert (rest == first[5:]) is (n_workers == 2)
        assert after.sampler.n_batches(N_OBS) == len(first)


@forks
@pytest.mark.parametrize("remainder", ["drop", "keep", "exact", "pad"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_workers_take_every_policy_and_the_samplers_that_annbatch_refuses(kind: str, remainder: str) -> None:
    sharding = "independent" if kind in ("class", "replacement") else "contiguous"
    for rank in range(2):
        found = rows(torchs(loader(kind, rank, remainder=remainder, sharding=sharding), n_workers=3))
        expected = rows(loader(kind, rank, remainder=remainder, sharding=sharding))
        if kind == "sequential":
            assert found == expected
        assert sorted(found) == sorted(expected)


@forks
def test_annbatchs_own_loader_has_workers_too() -> None:
    made = loader(of=Loader)
    collected = torchs(made)
    found = rows(collected)
    assert sorted(found) == sorted(rows(loader()))
    state = made.batch_sampler.state_dict(batches_done=7)
    after = loader(of=Loader)
    after.batch_sampler.load_state_dict(state)
    assert rows(torchs(after)) == found[7:]


@forks
def test_a_collection_on_disk_is_read_by_forked_workers_with_zarrs_own_codecs(tmp_path: Any) -> None:
    data = np.arange(N_OBS, dtype="float32").reshape(-1, 1)
    zarr.create_array(tmp_path / "X", data=data, chunks=(8, 1))
    pipeline = zarr.config.get("codec_pipeline.path")
    made = StatefulLoader(batch_sampler=distributed(), return_index=True, preload_to_gpu=False)
    with zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}):
        made.add_dataset(zarr.open_array(tmp_path / "X", mode="r"))
        next(iter(made))  # this process has read something before
        made.set_epoch(0)
        assert sorted(rows(torchs(made))) == sorted(rows(loader()))
    assert zarr.config.get("codec_pipeline.path") == pipeline


# simulated ones


@given(jobs(), st.integers(0, 2), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4), st.data())
def test_every_batch_of_a_pass_comes_once_however_many_workers_there_are_and_however_often_that_changes(
    drawn: Job, epoch: int, runs: list[tuple[int, int]], data: st.DataObject
) -> None:
    which = data.draw(st.integers(0, drawn.world_size - 1))
    rank = drawn.ranks()[which]
    try:
        rank.validate(drawn.n_obs)
    except ValueError:
        assume(False)
    rank.set_epoch(epoch)
    expected = batches(rank.sample(drawn.n_obs))
    rank.set_epoch(epoch)
    found: list[list[int]] = []
    for n_workers, n in [*runs, (data.draw(st.integers(0, 5)), len(expected))]:
        if len(found) == len(expected):
            break
        assert rank.n_batches(drawn.n_obs) == len(expected) - len(found)
        source = Workers(rank, n_workers, n_obs=drawn.n_obs) if n_workers else batches(rank.sample(drawn.n_obs))
        found += islice(source, n)
        state = json.loads(json.dumps(rank.state_dict(batches_done=len(found))))
        assert len(json.dumps(state)) < 2_000
        rank = drawn.ranks()[which]
        rank.load_state_dict(state)
    event(f"{drawn.kind}, {len(runs)} runs")
    assert sorted(found) == sorted(expected)
    if not rank.shuffle:
        assert found == expected


@given(st.integers(1, 5), st.integers(0, 12), st.sampled_from(sorted(SAMPLERS)))
def test_as_many_workers_go_on_bit_for_bit(n_workers: int, done: int, kind: str) -> None:
    whole = list(Workers(distributed(kind, rank=1), n_workers, n_obs=N_OBS))
    before = distributed(kind, rank=1)
    assert list(islice(Workers(before, n_workers, n_obs=N_OBS), done)) == whole[:done]
    after = distributed(kind, rank=1)
    after.load_state_dict(before.state_dict(batches_done=done))
    workers = Workers(after, n_workers, n_obs=N_OBS)
    assert list(workers) == whole[done:]
    # what was left is done, so that a whole pass comes next, in an order of its own
    assert after.n_batches(N_OBS) == len(whole)
    following = list(workers)
    assert len(following) == len(whole)
    if kind != "sequential" and done:
        assert following != whole


@pytest.mark.parametrize("persistent", [False, True])
def test_no_order_comes_twice_by_accident_and_that_of_an_epoch_comes_again_on_purpose(persistent: bool) -> None:
    made = distributed()
    workers = Workers(made, 2, n_obs=N_OBS, persistent=persistent)
    shard = sorted(flat(workers))
    made.set_epoch(0)
    passes = [list(workers) for _ in range(4)]
    made.set_epoch(1)
    passes += [list(workers) for _ in range(3)]
    assert all(sorted(flat(one)) == shard for one in passes)
    assert len({str(one) for one in passes}) == len(passes)
    made.set_epoch(0)
    assert list(workers) == passes[0]
    made.set_epoch(1)
    assert list(workers) == passes[4]
    alone = distributed()
    assert sorted(batches(alone.sample(N_OBS))) == sorted(passes[0])


def test_passes_without_workers_and_with_them_take_turns_and_have_orders_of_their_own() -> None:
    made = distributed()
    workers = Workers(made, 2, n_obs=N_OBS)
    orders = []
    for _ in range(3):
        orders += [sorted(batches(made.sample(N_OBS))), sorted(workers), sorted(workers)]
    assert len({str(order) for order in orders}) == len(orders)


def test_an_epoch_or_a_state_that_is_set_again_begins_again_also_after_workers_have_read_it() -> None:
    made = distributed()
    whole, state = batches(made.sample(N_OBS)), distributed().state_dict(batches_done=5)
    workers = Workers(made, 2, n_obs=N_OBS)
    for _ in range(2):
        made.set_epoch(0)
        list(workers)
        assert made.next_epoch == 1
        made.set_epoch(0)
        assert made.next_epoch == 0
        assert batches(made.sample(N_OBS)) == whole
    for _ in range(2):
        made.load_state_dict(state)
        assert made.n_batches(N_OBS) == len(whole) - 5
        assert sorted(workers) == sorted(whole[5:])
        assert made.n_batches(N_OBS) == len(whole)
    made.set_epoch(0)  # not that of the state any more, which has been read to its end
    assert batches(made.sample(N_OBS)) == whole


def test_a_mask_or_rng_that_is_assigned_reaches_workers_that_are_started_later_and_is_an_error_in_others() -> None:
    made = distributed()
    workers = Workers(made, 2, n_obs=N_OBS, persistent=True)
    list(workers)
    for name, value in (("mask", slice(0, 100)), ("rng", np.random.default_rng(3))):
        setattr(made, name, value)
        with pytest.raises(RuntimeError, match=r"The mask or rng of a sampler was assigned after .* Make a new"):
            list(workers)
        again = Workers(made, 2, n_obs=N_OBS, persistent=True)
        assert sorted(flat(again)) == list(range(50))
        made.set_epoch(1)
        assert sorted(flat(again)) == list(range(50))


def test_whatever_torch_draws_the_shards_are_the_same() -> None:
    read = []
    for rank in range(2):
        workers = Workers(distributed(rank=rank, sharding="shuffled"), 3, n_obs=N_OBS)
        read += [sorted(flat(workers)) for _ in range(2)]
    assert read[0] == read[1]
    assert read[2] == read[3]
    assert sorted(read[0] + read[2]) == list(range(N_OBS))


class CountingStore(WrapperStore[MemoryStore]):
    """A store that counts how often each chunk is read."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.reads: dict[str, int] = {}

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        self.reads[key] = self.reads.get(key, 0) + 1
        return await super().get(key, *args, **kwargs)


@pytest.mark.parametrize(("kind", "shared"), [("random", 2), ("sequential", 0)])
def test_hardly_a_chunk_is_read_by_more_than_one_worker(kind: str, shared: int) -> None:
    store = CountingStore(MemoryStore())
    data = np.arange(N_OBS, dtype="float32").reshape(-1, 1)
    array = zarr.create_array(store, name="X", data=data, chunks=(8, 1))
    store.reads.clear()
    origin, *workers = (
        # no hole is a whole chunk
        DistributedSampler(SAMPLERS[kind], dist_info=Rank(0, 1), seed=0, remainder="drop", read_through=7)
        for _ in range(4)
    )
    for worker, sampler in enumerate(workers):
        share(origin, sampler)  # a copy of a loader would read from a copy of the store
        made = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False).add_dataset(array)
        with as_worker(worker, 3):
            rows(made)
    reads = [n for key, n in store.reads.items() if "c/" in key]
    assert len(reads) == N_OBS // 8
    # 4 chunks in a load request: two requests at most belong to two workers
    assert sum(reads) - len(reads) <= 4 * shared


def test_in_a_worker_others_are_told_that_there_is_none() -> None:
    assert current_worker() is None
    with worker_info_hidden(current_worker()):
        assert current_worker() is None
    with as_worker(1, 3):
        assert current_worker() == (1, 3)
        with worker_info_hidden(current_worker()):
            assert get_worker_info() is None
        with pytest.raises(RuntimeError, match="left"), worker_info_hidden(current_worker()):
            raise RuntimeError("left")
        assert get_worker_info().id == 1


def test_threads_of_a_worker_that_hide_it_at_once_leave_it_as_it_was() -> None:
    def hide() -> None:
        for _ in range(200):
            with worker_info_hidden(current_worker()):
                assert get_worker_info() is None
            found.append(current_worker())

    found: list[Any] = []
    with as_worker(1, 3):
        threads = [threading.Thread(target=hide) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current_worker() == (1, 3)
    assert found == [(1, 3)] * 800


def test_when_a_pass_begins_torch_is_asked_once_whether_this_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    origin, asked = distributed(), []
    made = forked(origin)

    def ask() -> Any:
        asked.append(get_worker_info())
        return asked[-1]

    with as_worker(1, 3):
        made.plan(N_OBS)  # for which annbatch's samplers ask as well
        monkeypatch.setattr(torch.utils.data, "get_worker_info", ask)
        made.sample(N_OBS)
    assert [info.id for info in asked] == [1]


# states of workers


def worker_states(made: StatefulLoader, n_workers: int, done: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """The first batches that are collected, and each worker's state at its last one, as torchdata keeps them."""
    found, states, iterators = [], [], []
    duplicates = [forked(made) for _ in range(n_workers)]
    for worker, duplicate in enumerate(duplicates):
        with as_worker(worker, n_workers):
            iterators.append(iter(duplicate))
            states.append(duplicate.state_dict())
    for number in range(done):
        worker = number % n_workers
        with as_worker(worker, n_workers):
            found += rows([next(iterators[worker])])
            states[worker] = json.loads(json.dumps(duplicates[worker].state_dict()))
    return found, states


@pytest.mark.parametrize("kind", ["random", "sequential"])
@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("done", [0, 1, 2, 7, 8])
def test_each_worker_goes_on_with_the_state_that_it_had_at_its_last_batch(kind: str, before: int, done: int) -> None:
    whole = list(Workers(loader(kind), 3))
    state = loader(kind).state_dict()
    if before:
        first = loader(kind)
        assert list(islice(Workers(first, 3), before)) == whole[:before]
        state = first.state_dict(batches_done=before)
    made = loader(kind)
    made.load_state_dict(state)
    found, states = worker_states(made, 3, done)
    assert found == whole[before : before + done]

    again = loader(kind)
    rest = []
    for worker, state in enumerate(states):
        with as_worker(worker, 3):
            duplicate = forked(again)
            duplicate.load_state_dict(state)
            rest.append(rows(duplicate))
    assert sorted(flat(rest[0] + rest[1] + rest[2])) == sorted(flat(whole[before + done :]))
    turn = [(done + number) % 3 for number in range(3)]
    collected = list(in_turn([iter(rest[worker]) for worker in turn]))
    assert collected == whole[before + done :]
    # this process doesn't know where they were
    with pytest.raises(RuntimeError, match="have loaded a state each"):
        again.state_dict(batches_done=done)


def test_the_state_of_a_worker_is_refused_elsewhere() -> None:
    _, states = worker_states(loader(), 3, 4)
    with pytest.raises(ValueError, match=r"is that of worker 1 of 3 of a DataLoader\. Load the whole state"):
        loader().load_state_dict(states[1])
    with as_worker(1, 2), pytest.raises(ValueError, match="is that of worker 1 of 3"):
        loader().load_state_dict(states[1])


def test_how_many_batches_were_trained_on_must_be_said_where_workers_take_them() -> None:
    made = loader()
    assert made.state_dict()["segments"] == [[2, 1, 0]]
    list(islice(Workers(made, 2), 3))
    with pytest.raises(RuntimeError, match=r"state_dict\(batches_done=...\), or use torchdata's StatefulDataLoader"):
        made.state_dict()
    assert made.state_dict(batches_done=3)["segments"] == [[2, 2, 3]]
    with pytest.raises(ValueError, match="batches_done must be at most 13"):
        made.state_dict(batches_done=14)
    next(iter(made))  # whether the workers' pass is still gone on with isn't known here
    with pytest.raises(RuntimeError, match="2 passes were begun since the epoch was set"):
        made.state_dict()
    made.set_epoch(0)
    list(islice(made, 2))
    assert made.state_dict()["segments"] == [[2, 1, 2]]


def test_passes_that_nobody_has_set_an_epoch_for_can_be_resumed_on_any_number_of_ranks() -> None:
    ranks = [distributed(rank=rank) for rank in range(2)]
    for rank in ranks:
        list(Workers(rank, 2, n_obs=N_OBS))
    second = [list(islice(Workers(rank, 2, n_obs=N_OBS), 5)) for rank in ranks]
    states = [rank.state_dict(batches_done=5) for rank in ranks]
    assert states[0] == states[1]
    assert states[0]["pass"] == 1
    read = flat(flat(second))
    for which in range(3):
        rank = distributed(rank=which, world_size=3)
        rank.load_state_dict(states[0])
        read += flat(Workers(rank, 2, n_obs=N_OBS))
    assert sorted(read) == list(range(N_OBS))


# what goes wrong


def test_an_epoch_that_is_set_while_workers_begin_a_pass_is_that_of_the_next_one() -> None:
    made = distributed(sharding="shuffled")
    workers = Workers(made, 2, n_obs=N_OBS, persistent=True)
    list(workers)
    second: list[list[int]] = []
    passes = []
    for worker in range(2):
        with as_worker(worker, 2):
            passes.append(workers.copies[worker].sample(N_OBS))
        made.set_epoch(1)  # worker 1 has not begun when it is set first
    for worker in range(2):
        with as_worker(worker, 2):
            second += batches(passes[worker])
    alone = distributed(sharding="shuffled")
    assert sorted(flat(second)) == sorted(flat(batches(alone.sample(N_OBS))))
    made.set_epoch(1)
    alone.set_epoch(1)
    assert sorted(workers) == sorted(batches(alone.sample(N_OBS)))


def test_iterations_that_are_begun_at_once_are_whole_passes_each() -> None:
    made = distributed()
    found: list[list[list[int]]] = [[], []]
    copies = [[forked(made) for _ in range(2)] for _ in range(2)]
    for worker in (1, 0):
        for which in range(2):
            with as_worker(worker, 2):
                found[which] += batches(copies[which][worker].sample(N_OBS))
    whole = sorted(batches(distributed().sample(N_OBS)))
    assert sorted(found[0]) == whole
    assert sorted(flat(found[1])) == sorted(flat(whole))


def test_copies_that_a_worker_makes_for_each_pass_have_a_pass_each() -> None:
    made = distributed()
    workers = [forked(made) for _ in range(2)]
    orders = []
    for _ in range(3):
        found = []
        for worker, sampler in enumerate(workers):
            with as_worker(worker, 2):
                found += batches(copy.deepcopy(sampler).sample(N_OBS))
        assert sorted(flat(found)) == sorted(flat(batches(distributed().sample(N_OBS))))
        orders.append(sorted(found))
    assert len({str(order) for order in orders}) == 3


def test_threads_that_set_epochs_and_start_workers_at_once_leave_each_other_whole() -> None:
    made = distributed(sharding="shuffled")

    def set_and_fork() -> None:
        for _ in range(30):
            made.set_epoch(3)
            forked(made)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(set_and_fork) for _ in range(4)]:
            done.result()
    folder = made._cursor._journal._folder
    assert folder is not None
    assert sorted(int(entry.name) for entry in folder.iterdir()) == list(range(len(list(folder.iterdir()))))
    alone = distributed(sharding="shuffled")
    alone.set_epoch(3)
    assert sorted(Workers(made, 2, n_obs=N_OBS)) == sorted(batches(alone.sample(N_OBS)))


def test_an_epoch_that_can_not_be_told_to_workers_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    made = distributed()
    list(Workers(made, 2, n_obs=N_OBS))

    def fail(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", fail)
        with pytest.raises(
            RuntimeError, match=r"need hard links in .*Operation not supported.* Let TMPDIR be elsewhere"
        ):
            made.set_epoch(2)
    assert made.epoch == 0
    made.set_epoch(2)
    assert made.epoch == 2


def test_workers_that_make_their_loaders_themselves_take_as_many_passes_as_they_like() -> None:
    found: list[list[list[int]]] = [[], [], []]
    for worker in range(2):
        with as_worker(worker, 2):
            made = distributed()
            for part in found:
                part.extend(batches(made.sample(N_OBS)))
    whole = sorted(flat(batches(distributed().sample(N_OBS))))
    assert [sorted(flat(each)) for each in found] == [whole] * 3
    assert len({str(each) for each in found}) == 3


def _in_a_process_of_its_own(made: StatefulLoader, answers: Any) -> None:
    """What a rank does that another process has made the loader for."""
    collected = torchs(made, persistent_workers=True)
    iterator = iter(collected)
    done = [next(iterator)["index"].tolist() for _ in range(5)]
    state = made.state_dict(batches_done=5)
    after = loader(sharding="shuffled")
    after.load_state_dict(state)
    rest = rows(torchs(after))
    del iterator
    made.set_epoch(3)
    answers.put((state["segments"], done + rest, rows(collected)))


@forks
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_rank_whose_loader_came_from_another_process_has_workers_of_its_own(start: str) -> None:
    context: Any = multiprocessing.get_context(start)
    answers = context.Queue()
    process = context.Process(target=_in_a_process_of_its_own, args=(loader(sharding="shuffled"), answers))
    process.start()
    segments, whole, third = answers.get(timeout=100)
    process.join(timeout=20)
    assert process.exitcode == 0
    assert segments == [[2, 2, 5]]
    alone = loader(sharding="shuffled")
    assert sorted(whole) == sorted(rows(alone))
    alone.set_epoch(3)
    assert sorted(third) == sorted(rows(alone))


def test_a_copy_knows_what_workers_had_begun_and_goes_its_own_way() -> None:
    made = distributed()
    workers = Workers(made, 2, n_obs=N_OBS)
    whole = list(workers)
    for duplicate in (copy.deepcopy(made), copy.copy(made), pickle.loads(pickle.dumps(made))):
        state = duplicate.state_dict(batches_done=5)
        assert state["segments"] == [[2, 2, 5]]
        after = distributed()
        after.load_state_dict(state)
        assert list(Workers(after, 2, n_obs=N_OBS)) == whole[5:]
        assert duplicate.next_epoch == made.next_epoch == 1
        duplicate.set_epoch(4)
        assert made.epoch == 0


@forks
def test_epochs_under_the_same_seed_of_torch_are_whole_passes_however_slow_a_worker_starts() -> None:
    def late(worker: int) -> None:
        time.sleep(0.5 * (worker == 0))

    made = loader()
    whole = sorted(rows(loader()))
    orders = []
    for n_workers in (2, 3, 2):
        torch.manual_seed(0)
        orders.append(rows(torchs(made, n_workers, worker_init_fn=late)))
        assert sorted(flat(orders[-1])) == sorted(flat(whole))
    assert sorted(orders[0]) == whole
    assert len({str(sorted(order)) for order in orders}) == 3  # a pass each


@forks
def test_two_dataloaders_at_once_over_one_loader_have_a_whole_pass_each() -> None:
    made = loader()
    whole = sorted(flat(rows(loader())))
    for together in (2, 3):
        found: list[list[Any]] = [[] for _ in range(together)]
        for step in zip(*(torchs(made, n_workers=2) for _ in range(together)), strict=True):
            for batches_of_one, batch in zip(found, step, strict=True):
                batches_of_one.append(batch)
        read = [rows(one) for one in found]
        assert [sorted(flat(one)) for one in read] == [whole] * together
        assert len({str(sorted(one)) for one in read}) == together


def test_iterations_that_two_threads_begin_at_once_have_a_whole_pass_each() -> None:
    made = distributed()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        copies = [[thread.submit(forked, made).result() for thread in (one, other)] for _ in range(2)]
    found: list[list[list[int]]] = [[], []]
    for worker in range(2):
        for which in range(2):
            with as_worker(worker, 2):
                found[which] += batches(copies[worker][which].sample(N_OBS))
    whole = sorted(flat(batches(distributed().sample(N_OBS))))
    assert [sorted(flat(one)) for one in found] == [whole] * 2
    assert sorted(found[0]) != sorted(found[1])


def test_what_a_worker_that_was_killed_has_left_half_written_is_not_read() -> None:
    made = distributed()
    killed, *others = [forked(made) for _ in range(3)]
    folder = killed._cursor._journal._folder
    assert folder is not None
    (folder / "aside-1-2").write_text('{"begin": [')
    found = []
    for worker, sampler in enumerate(others, start=1):
        with as_worker(worker, 3):
            found += batches(sampler.sample(N_OBS))
    again = Workers(made, 3, n_obs=N_OBS)
    assert set(map(tuple, found)) < set(map(tuple, batches(distributed().sample(N_OBS))))
    assert sorted(flat(again)) == sorted(flat(batches(distributed().sample(N_OBS))))


@forks
def test_nothing_is_left_behind_when_a_loader_is_gone_also_if_its_workers_were_given_up() -> None:
    made = loader()
    list(islice(iter(torchs(made)), 2))
    rows(torchs(made))
    journal = made.sampler._cursor._journal._folder
    assert len(list(journal.iterdir())) >= 2
    del made
    gc.collect()
    assert not journal.exists()


@forks
def test_workers_whose_journal_is_gone_say_where_it_should_be() -> None:
    made = loader()
    collected = torchs(made, persistent_workers=True)
    rows(collected)
    journal = made.sampler._cursor._journal._folder
    shutil.rmtree(journal)
    with pytest.raises(RuntimeError, match=rf"through files in {journal}, which isn't there.* Let TMPDIR be"):
        rows(collected)


@forks
def test_loaders_that_come_of_one_pickle_have_workers_of_their_own() -> None:
    pickled = pickle.dumps(loader())
    for made in (pickle.loads(pickled), pickle.loads(pickled)):
        assert sorted(rows(torchs(made, timeout=20))) == sorted(rows(loader()))


def _read_with_workers(made: StatefulLoader, folders: Any) -> None:
    rows(torchs(made, timeout=20))
    folders.put(made.sampler._cursor._journal._folder)


@forks
def test_a_rank_that_was_forked_leaves_nothing_behind() -> None:
    context = multiprocessing.get_context("fork")
    folders = context.Queue()
    made = loader()
    process = context.Process(target=_read_with_workers, args=(made, folders))
    process.start()
    folder = folders.get(timeout=100)
    process.join(timeout=20)
    assert process.exitcode == 0
    assert not folder.exists()


# to_dataloader


@forks
def test_a_dataloader_of_a_loader_has_its_epoch_its_length_and_its_sampler_in_front() -> None:
    made = loader(sharding="shuffled")
    collected = made.to_dataloader(num_workers=2, multiprocessing_context="fork")
    assert (collected.sampler, collected.dataset, collected.num_workers) == (made.sampler, made, 2)
    for epoch in (0, 3, 1):
        collected.sampler.set_epoch(epoch)  # as Lightning does
        alone = loader(sharding="shuffled")
        alone.set_epoch(epoch)
        found = rows(collected)
        assert sorted(found) == sorted(rows(alone))
        assert len(found) == len(collected)
    collected.set_epoch(0)
    assert collected.sampler.epoch == 0


@forks
@pytest.mark.parametrize("remainder", ["keep", "exact"])
@pytest.mark.parametrize("n_workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_state_of_a_dataloader_is_that_after_the_batch_that_it_gave_last(
    n_workers: int, remainder: str, persistent: bool
) -> None:
    options = {"multiprocessing_context": "fork", "persistent_workers": persistent} if n_workers else {}

    def make() -> Any:
        return loader(remainder=remainder, mask=slice(0, 97)).to_dataloader(num_workers=n_workers, **options)

    collected = make()
    states = [collected.state_dict()]
    whole = []
    for batch in collected:
        whole += rows([batch])
        states.append(json.loads(json.dumps(collected.state_dict())))
    following = rows(collected)
    for done in (0, 1, 4, len(whole)):
        again = make()
        again.load_state_dict(states[done])
        assert again.next_epoch == (1 if done == len(whole) else 0)
        left = rows(again)
        assert left == (whole[done:] if done < len(whole) else following)
        assert len(again) == len(whole)


@forks
def test_an_iteration_over_a_dataloader_ends_with_an_error_when_another_one_is_begun() -> None:
    collected = loader().to_dataloader(num_workers=2, multiprocessing_context="fork")
    first = iter(collected)
    next(first)
    whole = rows(collected)
    assert sorted(flat(whole)) == sorted(flat(rows(loader())))
    with pytest.raises(RuntimeError, match=r"Another iteration over this DataLoader was begun.*make another loader"):
        next(first)
    assert collected.state_dict()["pass"] == 2


@forks
def test_a_dataloader_whose_loader_was_looked_at_says_that_it_can_not_tell() -> None:
    made = loader()
    collected = made.to_dataloader(num_workers=1, multiprocessing_context="fork")
    for _ in islice(collected, 3):
        pass
    assert collected.state_dict()["segments"] == [[2, 1, 3]]
    next(iter(made))
    with pytest.raises(RuntimeError, match="2 passes were begun since the epoch was set"):
        collected.state_dict()
    list(made)
    with pytest.raises(RuntimeError, match="is not one of this DataLoader"):
        collected.state_dict()


@pytest.mark.parametrize("wrong", [None, 1.5, True, "2", np.float64(1), -1])
def test_a_dataloader_without_a_number_of_workers_is_an_error(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^num_workers must be (an integer|at least 0), got "):
        loader().to_dataloader(num_workers=wrong)


def test_a_dataloader_takes_a_number_of_workers_of_numpys() -> None:
    assert loader().to_dataloader(num_workers=np.int64(0)).num_workers == 0


@forks
@pytest.mark.parametrize("n_workers", [0, 2])
def test_the_state_of_a_dataloader_is_never_that_of_another_one_whichever_of_them_goes_on(n_workers: int) -> None:
    made = loader()
    options = {"multiprocessing_context": "fork"} if n_workers else {}
    one, other = (made.to_dataloader(num_workers=n_workers, **options) for _ in range(2))
    first, second = iter(one), iter(other)
    for batches_of in (first, second, first, first):
        next(batches_of)
    with pytest.raises(RuntimeError, match=r"is not one of this DataLoader|2 passes were begun"):
        one.state_dict()


def test_a_look_at_the_loader_leaves_the_state_of_a_dataloader_without_workers() -> None:
    made = loader()
    collected = made.to_dataloader(num_workers=0)
    iterator = iter(collected)
    next(iterator)
    next(iter(made))
    next(iterator)  # of the load request that was taken before
    assert collected.state_dict()["segments"] == [[2, 1, 2]]


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"])
def test_a_dataloader_does_not_take_what_would_divide_the_rows_once_more(option: str) -> None:
    with pytest.raises(TypeError, match=f"but for batch_size, .*, got {option}\\. The loader makes the batches"):
        loader().to_dataloader(num_workers=0, **{option: 1})
