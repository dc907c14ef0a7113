"""Workers of PyTorch's DataLoader: real workers, and simulated ones for many cases."""

from __future__ import annotations

import json
import os
import pickle
import threading
import warnings
from contextlib import contextmanager
from itertools import islice
from multiprocessing.context import set_spawning_popen
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from annbatch import Loader
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader, get_worker_info
from zarr.storage import MemoryStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.checks import Tally
from annbatch_distributed.core.rows import Rows
from annbatch_distributed.core.worker import current_worker, hidden_worker
from tests.loaders import numbered, rows
from tests.meeting import verdict
from tests.samplers import batches, flat
from tests.stores import Counting
from tests.workers import as_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def loader(kind: str = "random", rank: int = 0, *, prefetch: int = 0, **options: Any) -> StatefulLoader:
    return numbered(distributed(kind, rank, **options), N_OBS, prefetch=prefetch)


def annbatchs(kind: str = "random", **options: Any) -> Loader:
    """annbatch's own Loader, whose batches a plain DataLoader can collect."""
    empty = Loader(batch_sampler=distributed(kind, **options), return_index=True, preload_to_gpu=False)
    return empty.add_adata(ad.AnnData(np.arange(float(N_OBS))[:, None]))


def torchs(source: Any, n_workers: int = 2, start: str = "fork", **options: Any) -> DataLoader:
    return DataLoader(source, batch_size=None, num_workers=n_workers, multiprocessing_context=start, **options)


#: Most tests fork real workers, which is fast; on systems without fork, spawned workers are still tested.
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

# real workers


def workers_of(source: StatefulLoader, n_workers: int = 2, start: str = "fork", **options: Any) -> Any:
    return source.to_dataloader(num_workers=n_workers, multiprocessing_context=start, **options)


# a spawned worker imports everything again, which takes seconds
@pytest.mark.parametrize(("start", "n_workers"), [("spawn", 1), pytest.param("fork", 2, marks=forks)])
def test_epoch_and_state_reach_persistent_workers(start: str, n_workers: int) -> None:
    """An epoch that is set and a state that is loaded reach persistent workers, forked or spawned."""
    source = loader(sharding="shuffled", prefetch=int(start == "spawn"))
    expected = loader(sharding="shuffled")
    dataloader = workers_of(source, n_workers, start)
    first, second = rows(dataloader), rows(dataloader)
    for own in (first, second):  # epochs 0 and 1
        assert len(dataloader) == len(own)
        assert sorted(own) == sorted(rows(expected))
    dataloader.set_epoch(3)
    third = rows(dataloader)
    expected.set_epoch(3)
    assert sorted(third) == sorted(rows(expected))
    dataloader.set_epoch(0)
    assert rows(dataloader) == first
    dataloader.set_epoch(3)
    list(islice(dataloader, 4))  # prefetched batches don't count
    dataloader.load_state_dict(json.loads(json.dumps(dataloader.state_dict())))
    assert rows(dataloader) == third[4:]
    dataloader.set_epoch(3)
    assert [rows(dataloader), len(dataloader)] == [third, len(third)]


@forks
def test_plain_dataloader_reads_the_current_epoch() -> None:
    """annbatch's own Loader in PyTorch's DataLoader reads the epoch that is set before each iteration."""
    source = annbatchs(sharding="shuffled")
    sampler: Any = source.batch_sampler
    dataloader = torchs(source)
    for epoch in (0, 3, 1):
        sampler.set_epoch(epoch)
        alone = loader(sharding="shuffled")
        alone.set_epoch(epoch)
        assert sorted(rows(dataloader)) == sorted(rows(alone))


@forks
@pytest.mark.parametrize("persistent", [False, True])
def test_iterations_without_set_epoch_are_the_same(persistent: bool) -> None:
    """Each iteration of workers without `set_epoch` reads the same epoch, and one worker warns."""
    dataloader = torchs(annbatchs(), persistent_workers=persistent)
    passes = [rows(dataloader), rows(dataloader)]
    assert passes[0] == passes[1]
    assert sorted(passes[0]) == sorted(rows(loader()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"worker process 0(.|\n)*read epoch 0 in every iteration"):
            rows(torchs(annbatchs()))


@forks
def test_worker_of_unknown_pass_suggests_to_dataloader() -> None:
    """A worker raises if a state was loaded, or if it has read a pass since an epoch was set."""
    source = annbatchs()
    sampler: Any = source.batch_sampler
    dataloader = torchs(source, persistent_workers=True)
    sampler.set_epoch(0)
    rows(dataloader)
    sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match=r"can't know the position.*to_dataloader\(num_workers=...\)"):
        rows(dataloader)
    state = sampler.state_dict(batches_done=0) | {"segments": [[2, 1, 5]]}
    for sets_epoch in (False, True):
        sampler.load_state_dict(state)
        if sets_epoch:
            sampler.set_epoch(1)
        with pytest.raises(RuntimeError, match="can't know the position"):
            rows(torchs(source))


@forks
def test_pass_of_plain_dataloader_has_no_state() -> None:
    """A pass that workers of a plain DataLoader have read has no state; setting an epoch allows states again."""
    source = annbatchs()
    sampler: Any = source.batch_sampler
    sampler.set_epoch(0)
    assert sampler.state_dict(batches_done=3)["segments"] == [[2, 1, 3]]
    rows(torchs(source))
    assert sampler.state_dict(batches_done=0)["segments"] == [[2, 1, 0]]
    calls = (lambda: sampler.state_dict(batches_done=3), lambda: sampler.rows_of(N_OBS, 0))
    for call in (*calls, lambda: sampler.check_epoch_read(N_OBS, Tally())):
        with pytest.raises(RuntimeError, match="position in the epoch is unknown"):
            call()
    sampler.set_epoch(0)
    assert sampler.state_dict(batches_done=3)["segments"] == [[2, 1, 3]]
    # a spawned worker shares no memory with this process
    with monkeypatched_spawning():
        pickle.dumps(sampler)
    with pytest.raises(RuntimeError, match="position in the epoch is unknown"):
        sampler.state_dict(batches_done=3)


@contextmanager
def monkeypatched_spawning() -> Iterator[None]:
    """Pickle within a context as for a process to spawn."""
    set_spawning_popen(object())
    try:
        yield
    finally:
        set_spawning_popen(None)


@forks
def test_unrelated_fork_changes_no_state() -> None:
    """A process that is forked for something else has no effect on the state."""
    source = loader()
    source.set_epoch(1)
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    assert source.state_dict()["segments"] == [[2, 1, 0]]
    assert source.sampler.state_dict(batches_done=3)["segments"] == [[2, 1, 3]]


@forks
@pytest.mark.parametrize("n_passes", [0, 1])
def test_plain_dataloader_of_stateful_loader_raises(n_passes: int) -> None:
    """The error in the worker names `to_dataloader`, and the loader continues as before."""
    source = loader()
    for _ in range(n_passes):
        rows(source)
    with pytest.raises(RuntimeError, match="to_dataloader"):
        rows(torchs(source))
    assert len(rows(source)) == len(source)


@forks
@pytest.mark.parametrize(("name", "persistent"), [("mask", True), ("rng", False), ("rng", True)])
def test_workers_use_a_mask_or_rng_assigned_later(name: str, persistent: bool) -> None:
    """A mask or generator that is assigned after a pass of workers applies to their next pass."""
    source, expected = loader(), loader()
    values = {"mask": slice(0, 100), "rng": np.random.default_rng(3)}
    workers = workers_of(source, persistent_workers=persistent)
    rows(workers)
    for one in (source, expected):
        setattr(one.sampler, name, values[name])
    assert sorted(flat(rows(workers))) == sorted(flat(rows(expected)))


@forks
def test_forked_workers_read_with_zarrs_own_codecs(tmp_path: Any) -> None:
    """Forked workers read a collection on disk with zarr's own codecs."""
    data = np.arange(N_OBS, dtype="float32").reshape(-1, 1)
    zarr.create_array(tmp_path / "X", data=data, chunks=(8, 1))
    pipeline = zarr.config.get("codec_pipeline.path")
    source = StatefulLoader(batch_sampler=distributed(), return_index=True, preload_to_gpu=False)
    with zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}):
        source.add_dataset(zarr.open_array(tmp_path / "X", mode="r"))
        next(iter(source))  # this process has read before it forks
        source.set_epoch(0)
        assert sorted(rows(workers_of(source))) == sorted(rows(loader()))
    assert zarr.config.get("codec_pipeline.path") == pipeline


# simulated workers


@pytest.mark.parametrize(("kind", "shared"), [("random", 2), ("sequential", 0)])
def test_workers_share_hardly_any_chunk(kind: str, shared: int) -> None:
    """Workers share the chunks of at most two load requests, and share none if nothing is shuffled."""
    store = Counting(MemoryStore())
    data = np.arange(N_OBS, dtype="float32").reshape(-1, 1)
    array = zarr.create_array(store, name="X", data=data, chunks=(8, 1))
    store.n_read.clear()
    workers = (
        # no gap is a whole chunk
        DistributedSampler(SAMPLERS[kind], dist_info=Rank(0, 1), seed=0, remainder="drop", max_gap=7)
        for _ in range(3)
    )
    for worker, sampler in enumerate(workers):
        sampler.set_epoch(0)
        source = Loader(batch_sampler=sampler, return_index=True, preload_to_gpu=False).add_dataset(array)
        with as_worker(worker, 3):
            rows(source)
    assert len(store.n_read) == N_OBS // 8
    # 4 chunks in a load request: at most two requests belong to two workers
    assert store.n_read.total() - len(store.n_read) <= 4 * shared


def test_hiding_a_worker_is_thread_safe() -> None:
    """Threads that hide the worker at the same time leave it unchanged."""

    def hide() -> None:
        for _ in range(200):
            with hidden_worker():
                assert get_worker_info() is None
            workers.append(current_worker())

    workers: list[Any] = []
    with as_worker(1, 3):
        threads = [threading.Thread(target=hide) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current_worker() == (1, 3)
    assert workers == [(1, 3)] * 800


def test_shardings_are_the_same_in_workers() -> None:
    """The sharding of a user doesn't see in which worker it is called, so it can't give each worker other rows."""
    seen: list[Any] = []

    def sharding(rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        seen.append(get_worker_info())
        return rows

    sampler = DistributedSampler(SequentialSampler(4, 1, 4), dist_info=Rank(0, 2), seed=0, sharding=sharding)
    with as_worker(1, 3):
        batches(sampler.sample(N_OBS))
    assert seen
    assert set(seen) == {None}


# loaders of workers


def test_loaders_made_in_workers_read_the_epoch_that_is_set() -> None:
    """Workers that make their own loaders can read any number of epochs."""
    passes: list[list[list[int]]] = [[], [], []]
    for worker in range(2):
        with as_worker(worker, 2):
            source = distributed()
            for epoch, part in enumerate(passes):
                source.set_epoch(epoch)
                part.extend(batches(source.sample(N_OBS)))
    whole = distributed()
    assert [sorted(each) for each in passes] == [sorted(batches(whole.sample(N_OBS))) for _ in passes]


# to_dataloader


@forks
@pytest.mark.parametrize("begins", ["new", "set", "loaded"])
def test_state_before_a_pass_knows_the_workers(begins: str) -> None:
    """Before a pass, a DataLoader's state and cells are those of the batches that its workers would yield."""
    whole, skipping, resumed = (workers_of(loader(), persistent_workers=False) for _ in range(3))
    epoch = int(begins == "set")
    whole.set_epoch(epoch)
    batches = iter(whole)
    read = rows(islice(batches, 3))
    if begins == "set":
        skipping.set_epoch(epoch)
    if begins == "loaded":
        skipping.load_state_dict(whole.state_dict())
    read += rows(batches)
    cells = skipping.cells_of(slice(None), ranks=0)
    assert [own.tolist() for _, own in cells.groupby("step")["row"]] == read
    resumed.load_state_dict(skipping.state_dict(batches_done=5))
    assert rows(resumed) == read[5:]


@forks
def test_rows_of_workers_are_checked_by_index() -> None:
    """The rows that workers read are checked by the index of their batches."""
    loaders = [loader(rank=rank) for rank in range(2)]
    ranks = list(map(workers_of, loaders))
    for source in ranks:
        source.set_epoch(1)
        assert len(rows(source)) == len(source)
    (message,) = set(verdict(ranks))
    assert message.startswith("epoch 1: 2 ranks have read")
    ranks[0].set_epoch(1)
    list(islice(ranks[0], 3))
    assert "rank 0 has read" in verdict(ranks)[1]
    source = workers_of(numbered(distributed(), N_OBS, return_index=False))
    assert len(list(source)) == len(source)
    with pytest.raises(TypeError, match="no row indices"):
        source.check_epoch_read()


@forks
@pytest.mark.parametrize(("older", "newer"), [(0, 0), (0, 1), (0, 2), (2, 0)])
def test_newer_pass_ends_older_pass(older: int, newer: int) -> None:
    """A loader and its DataLoaders have one pass at a time, and the iterator of an older pass raises."""
    source = loader()
    readers = [workers_of(source), workers_of(source), source]
    first = iter(readers[older])
    next(first)
    assert sorted(flat(rows(readers[newer]))) == sorted(flat(rows(loader())))
    with pytest.raises(RuntimeError, match="This iterator has ended"):
        next(first)
    assert readers[newer].state_dict()["finished"]


@forks
def test_dead_workers_are_replaced() -> None:
    """A Ctrl-C in the terminal reaches persistent workers, too; a state from then resumes with new workers."""
    dataloader = workers_of(loader())
    dataloader.set_epoch(1)
    batches = iter(dataloader)
    read = [next(batches)["index"].tolist() for _ in range(3)]
    state = dataloader.state_dict()
    for worker in dataloader._workers._iterator._workers:
        worker.kill()
        worker.join()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(batches)
    dataloader.load_state_dict(state)
    whole = loader()
    whole.set_epoch(1)
    assert sorted(read + rows(dataloader)) == sorted(rows(whole))


def test_dataloader_offers_the_loaders_methods() -> None:
    """A DataLoader has the sizes, the plan, the cells and the checks of its loader."""
    source = loader()
    dataloader = workers_of(source)
    assert (dataloader.n_obs, dataloader.n_var, len(dataloader)) == (source.n_obs, source.n_var, len(source))
    assert str(dataloader.plan()) == str(source.plan())
    assert dataloader.cells_of(0).equals(source.cells_of(0))  # step 0 is of the first worker
    with pytest.raises(ValueError, match="rank 1 belongs to no process"):
        dataloader.check_ranks_agree(gather=lambda text: [text, text])


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"])
def test_dataloader_refuses_options_that_divide_rows(option: str) -> None:
    """`to_dataloader` refuses options that would divide the rows again or change the order of batches."""
    with pytest.raises(TypeError, match=f"except batch_size, .*, got {option}"):
        loader().to_dataloader(num_workers=0, **{option: option != "in_order" and 3})


@forks
def test_dataloaders_of_a_loader_have_its_state() -> None:
    """A loader and its DataLoaders have the state of the newest pass, whoever reads it."""
    source = loader()
    dataloader = workers_of(source, 1)
    list(islice(dataloader, 3))
    assert dataloader.state_dict()["segments"] == [[2, 1, 3]]
    next(iter(source))
    assert dataloader.state_dict() == source.state_dict()
    other = workers_of(source, 1)
    next(iter(other))
    assert dataloader.state_dict() == source.state_dict() == other.state_dict()
