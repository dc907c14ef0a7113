"""StatefulLoader: states, errors, threads and memory."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
import weakref
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import jax
import numpy as np
import pandas as pd
import pytest
import zarr
from annbatch import Loader
from annbatch.samplers import RandomSampler
from annbatch.utils import convert
from zarr.storage import MemoryStore, WrapperStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader, deferred
from tests.core.test_counts import Growing
from tests.loaders import numbered, rows
from tests.meeting import agreement
from tests.samplers import job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


N_OBS = 101
SIZES = {"chunk_size": 4, "preload_nchunks": 4, "batch_size": 4}


#: Options of each loader in these tests.
READING: dict[str, Any] = {}


@pytest.fixture(autouse=True, params=[0, 1])
def _reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READING, "prefetch", request.param)


def empty(rank: int = 0, world_size: int = 2, **options: Any) -> StatefulLoader:
    """Create one rank's loader, without datasets."""
    reading = {name: options.pop(name) for name in ("to", "return_index") if name in options}
    options = {"seed": 0, "dist_info": Rank(rank, world_size)} | options
    sampler = DistributedSampler(RandomSampler(**SIZES), **options)
    return StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, **{"return_index": True} | reading | READING)


def loader(rank: int = 0, world_size: int = 2, *, n_obs: int = N_OBS, **options: Any) -> StatefulLoader:
    """Create one rank's loader of cells, each with the number of its row as its only value."""
    return empty(rank, world_size, **options).add_adata(ad.AnnData(np.arange(float(n_obs))[:, None]))


def test_epoch_and_state_of_sampler_count() -> None:
    """An epoch or a state that is set on the sampler itself applies to its loader."""
    before = loader()
    list(islice(before, 5))
    state = before.state_dict()
    before.sampler.set_epoch(1)
    assert (before.state_dict()["epoch"], before.state_dict()["segments"]) == (1, [[2, 1, 0]])
    list(before)
    before.sampler.set_epoch(2)
    assert (before.state_dict()["epoch"], before.state_dict()["segments"]) == (2, [[2, 1, 0]])
    before.sampler.load_state_dict(state)
    assert before.state_dict() == state
    before.sampler.mask = slice(0, 90)
    assert before.state_dict()["segments"] == [[2, 1, 0]]


def test_loader_has_sampler_for_frameworks() -> None:
    """The loader is an annbatch Loader, with its sampler in the attributes that frameworks read."""
    reader = loader()
    assert isinstance(reader, Loader)
    assert reader.sampler is reader.batch_sampler is reader.batch_sampler.sampler
    reader.batch_sampler.sampler.set_epoch(3)
    assert reader.state_dict()["epoch"] == 3


def test_prefetching_to_gpu_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading to a GPU can't be combined with workers or prefetch."""

    def init(self: Any, **_: Any) -> None:
        self._preload_to_gpu = True  # without this, a GPU and its libraries are required

    monkeypatch.setattr(Loader, "__init__", init)
    sampler = DistributedSampler(RandomSampler(**SIZES), dist_info=Rank(0, 2))
    reader = StatefulLoader(batch_sampler=sampler)
    with pytest.raises(ValueError, match=r"num_workers.* preload_to_gpu=False"):
        reader.to_dataloader(num_workers=2)
    with pytest.raises(ValueError, match=r"prefetch.* Pass preload_to_gpu=False"):
        StatefulLoader(batch_sampler=sampler, prefetch=1)


@pytest.mark.parametrize("to", ["torch", "jax"])
def test_batches_are_converted_in_consumer_thread(to: str) -> None:
    """Batches are converted to tensors in the thread that takes them."""
    reader = loader(to=to)
    with jax.enable_x64(True):  # only in this thread
        batches = [(str(batch["X"].dtype), batch["X"][:, 0].tolist(), batch["index"].tolist()) for batch in reader]
    assert len(batches) == 12
    assert {kind for kind, _, _ in batches} == {"torch.float64" if to == "torch" else "float64"}
    assert all(row == index for _, row, index in batches)


@pytest.mark.parametrize("return_index", [False, True])
def test_check_notices_wrong_rows_of_annbatch(return_index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If annbatch returns different rows than requested, check_epoch_read raises."""
    reader = loader(0, 1, remainder="exact", return_index=return_index)
    planned = "epoch 0: 1 rank has read 101 rows in 26 batches, as planned"
    for batch in reader:
        if return_index:
            batch["index"] += 1000  # the check doesn't depend on changes of a batch
    assert reader.check_epoch_read().startswith(planned)

    def read(self: StatefulLoader, request: Any) -> Iterator[Any]:
        for batch in whole(self, request):
            yield batch | {"index": None if batch["index"] is None else np.maximum(batch["index"], 1)}

    whole = StatefulLoader._read_request
    monkeypatch.setattr(StatefulLoader, "_read_request", read)
    reader.set_epoch(0)
    list(reader)
    if return_index:
        with pytest.raises(ValueError, match="rank 0 has read 101 rows in 26 batches as planned, but different rows"):
            reader.check_epoch_read()
    else:
        assert reader.check_epoch_read().startswith(planned)  # without the index, only the requested rows are known


def test_unconvertible_batch_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose conversion to a tensor raises does not count as done."""
    reader = loader(to="torch")
    expected = rows(reader)
    n_calls = count()

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(n_calls) == 5:
            raise MemoryError("no room for a tensor")
        return convert(*arguments, **options)

    monkeypatch.setattr("annbatch_distributed.loader.batches.convert", failing)
    reader.set_epoch(0)
    batches = iter(reader)
    assert rows(islice(batches, 5)) == expected[:5]
    with pytest.raises(MemoryError, match="no room"):
        next(batches)
    state = reader.state_dict()
    assert state["segments"] == [[2, 1, 5]]
    again = loader()
    again.load_state_dict(state)
    assert rows(again) == expected[5:]


def test_check_names_ranks_with_reordered_datasets() -> None:
    """check_ranks_agree names ranks with the same datasets in a different order."""
    assert agreement([of_sizes(48, 96), of_sizes(48, 96, rank=1)]) == ["", ""]
    (text,) = set(agreement([of_sizes(48, 96), of_sizes(96, 48, rank=1)]))
    assert "\n  datasets: [[48, 1], [96, 1]] on rank 0; [[96, 1], [48, 1]] on rank 1\n" in text


def test_new_iteration_ends_previous_iterator() -> None:
    """A new iteration ends the previous iterator, and states are of the new one."""
    reader = loader()
    first, second = iter(reader), iter(reader)
    list(islice(first, 4))
    assert reader.state_dict()["segments"] == [[2, 1, 4]]  # the second has not started yet
    list(islice(second, 2))
    with pytest.raises(RuntimeError, match="This iterator has ended"):
        next(first)
    assert reader.state_dict()["segments"] == [[2, 1, 2]]
    after = loader()
    after.load_state_dict(reader.state_dict())
    assert rows(after) == [batch["index"].tolist() for batch in second] == rows(loader())[2:]


def test_length_is_of_the_epoch_set_last() -> None:
    """The length is of the epoch that is read or that was set last, even if a loop over an earlier epoch is open."""
    (sampler, _), loops = job(Growing(4), 2, remainder="keep"), []
    reader = numbered(sampler, 40, **READING)
    for epoch, n_batches in ((0, 5), (1, 10), (0, 5)):
        reader.set_epoch(epoch)
        assert len(reader) == n_batches
        loops.append(iter(reader))
        next(loops[-1])
        assert len(reader) == n_batches
    assert sum(1 for _ in loops[-1]) == 4


def test_loaders_with_same_sampler_are_independent() -> None:
    """An iteration of another loader with the same sampler does not belong to this loader."""
    sampler = DistributedSampler(RandomSampler(**SIZES), dist_info=Rank(0, 2), seed=0)
    one, other = (numbered(sampler, N_OBS, **READING) for _ in range(2))
    list(islice(one, 4))
    next(iter(other))
    assert other.state_dict()["segments"] == [[2, 1, 1]]
    with pytest.raises(RuntimeError, match="its own sampler"):
        one.state_dict()


def of_sizes(*sizes: int, rank: int = 0, n_var: int = 1, **options: Any) -> StatefulLoader:
    """Create one rank's loader of datasets of these sizes, with different values in each dataset."""
    reader = empty(rank, **{"remainder": "exact"} | options)
    for size in sizes:
        add_cells(reader, size, n_var)
    return reader


def add_cells(reader: StatefulLoader, size: int, n_var: int = 1) -> None:
    """Add a dataset of `size` cells; the value of a cell is 10,000 * size + its number."""
    cells = np.repeat(np.arange(size, dtype="float32")[:, None] + 10_000 * size, n_var, axis=1)
    reader.add_adata(ad.AnnData(cells))


def cells(batches: Iterable[Any]) -> list[float]:
    return [cell for batch in batches for cell in batch["X"][:, 0].tolist()]


@pytest.mark.parametrize("others", [(756, 244), (1000,), (244, 755), (244, 756, 1), (100, 144, 756)])
def test_resume_refuses_different_datasets(others: tuple[int, ...]) -> None:
    """A resumed epoch refuses different datasets, and datasets in a different order."""
    reader = of_sizes(244, 756)
    list(islice(reader, 40))
    state = json.loads(json.dumps(reader.state_dict()))
    other = of_sizes(*others)
    with pytest.raises(ValueError, match=r"datasets is '\[\[244, 1\], \[756, 1\]\]' in the state and '"):
        other.load_state_dict(state)
    assert cells(other) == cells(of_sizes(*others))
    with pytest.raises(ValueError, match=r"datasets is '.*' in the state and '\[\[244, 2\], \[756, 2\]\]' here"):
        of_sizes(244, 756, n_var=2).load_state_dict(state)


def interrupted(reader: StatefulLoader) -> tuple[list[float], list[float], dict[str, Any]]:
    """Return the cells of a whole epoch, and the cells and the state of the same epoch after 40 batches."""
    whole = cells(reader)
    reader.set_epoch(0)
    trained_on = cells(islice(reader, 40))
    return whole, trained_on, reader.state_dict()


def test_datasets_added_after_state_are_compared() -> None:
    """Datasets that are added after a state was loaded are compared at the first batch."""
    reader = of_sizes(244, 756)
    whole, trained_on, state = interrupted(reader)
    messages = set()
    for rank in range(2):
        late = of_sizes(rank=rank)
        late.load_state_dict(state)
        add_cells(late, 756)
        add_cells(late, 244)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"datasets is '\[\[244, 1\], .* and '\[\[756, 1\], \[244, 1\]\]' here"
            ) as error:
                iter(late)
            messages.add(str(error.value))
        late.set_epoch(1)  # this discards the rest of the epoch
        assert len(list(late)) == len(late)
    assert len(messages) == 1
    in_order = of_sizes()
    in_order.load_state_dict(state)
    add_cells(in_order, 244)
    add_cells(in_order, 756)
    assert trained_on + cells(in_order) == whole
    assert len(cells(in_order)) == len(whole)


def test_state_without_datasets_resumes() -> None:
    """A state without datasets resumes, and so does a state that is loaded on the sampler."""
    reader = of_sizes(244, 756)
    whole, trained_on, state = interrupted(reader)
    # the state of a sampler, or of an earlier version
    bare = reader.sampler.state_dict(batches_done=40)
    assert "datasets" not in bare["identity"]
    after = of_sizes(244, 756)
    after.load_state_dict(bare)
    assert trained_on + cells(after) == whole
    alone = of_sizes(244, 756)
    alone.sampler.load_state_dict(state)
    assert trained_on + cells(alone) == whole


def test_datasets_may_change_between_epochs() -> None:
    reader = of_sizes(244, 756)
    list(reader)
    state = reader.state_dict()
    after = of_sizes(756, 244)
    after.load_state_dict(state)
    assert len(set(cells(after) + cells(of_sizes(756, 244, rank=1)))) == 1000
    assert after.state_dict()["identity"]["datasets"] == [[756, 1], [244, 1]]


def test_state_has_a_digest_of_many_datasets() -> None:
    reader = of_sizes(*range(20, 40))
    next(iter(reader))
    state = reader.state_dict()
    assert state["identity"]["datasets"]["length"] == 20
    with pytest.raises(ValueError, match=r"datasets.digest is '.*' in the state and '.*' here"):
        of_sizes(*range(20, 38), 39, 38).load_state_dict(state)


def named(names: Iterable[str], **options: Any) -> StatefulLoader:
    """Create a loader of cells with names."""
    reader = empty(**{"remainder": "exact"} | options)
    obs = pd.DataFrame(index=list(names))
    return reader.add_adata(ad.AnnData(np.zeros((len(names), 1), dtype="float32"), obs=obs))


def test_resume_refuses_reshuffled_collection() -> None:
    """A second collection of the same files has the same shapes, and is refused in mid-epoch."""
    names = [f"cell {number}" for number in range(2000)]
    reader = named(names)
    state = reader.state_dict()
    for _ in zip(range(3), reader, strict=False):
        state = reader.state_dict()
    named(names).load_state_dict(state)
    others = np.random.default_rng(0).permutation(names)
    with pytest.raises(ValueError, match=r"cells\.first is 'cell 0' in the state and 'cell \d+' here"):
        named(others).load_state_dict(state)
    list(reader)
    named(others).load_state_dict(reader.state_dict())  # at the end of an epoch, there is no order to restore
    (text,) = set(agreement([named(names), named(others, rank=1)]))
    assert "\n  cells.first: cell 0 on rank 0" in text


def test_ranks_agree_without_datasets_in_state() -> None:
    """Ranks agree whether or not a state has datasets."""
    reader = of_sizes(244, 756)
    next(iter(reader))
    state = reader.state_dict()
    ranks = [of_sizes(244, 756, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    list(islice(ranks[0], 1))
    ranks[0].load_state_dict(state)
    assert agreement(ranks) == ["", ""]


def test_rank_is_queried_in_consumer_thread() -> None:
    """The source of the rank is queried in the thread that takes the batches."""
    asked_in = []

    def who() -> tuple[int, int]:
        asked_in.append(threading.current_thread())
        return 0, 2

    assert rows(loader(dist_info=deferred(who))) == rows(loader())
    assert set(asked_in) == {threading.current_thread()}


def test_released_batches_are_freed() -> None:
    """The loader keeps no batch that its consumer has released."""
    references: list[weakref.ref[Any]] = []
    for batch in loader():
        references.append(weakref.ref(batch["X"]))
        assert [number for number, one in enumerate(references[:-2]) if one() is not None] == []
    assert len(references) == 12


class Weighing(WrapperStore[MemoryStore]):
    """A store that records the bytes in use at each read of a chunk."""

    n_bytes: list[int]

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        self.n_bytes.append(tracemalloc.get_traced_memory()[0])
        return await super().get(key, *args, **kwargs)


def test_request_is_freed_before_next_is_read() -> None:
    """Without prefetching, a load request is freed before the next one is read."""
    store = Weighing(MemoryStore())
    store.n_bytes = []
    cells = zarr.create_array(store, shape=(4_096, 2_000), chunks=(16, 2_000), dtype="float32")
    cells[:] = 1
    sampler = DistributedSampler(RandomSampler(16, 32, 64), dist_info=Rank(0, 1), seed=0)
    reader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, **READING).add_dataset(cells)
    tracemalloc.start()
    try:
        with zarr.config.set({"async.concurrency": 4}):  # number of chunks that are decoded at a time
            for number, batch in enumerate(reader):
                if number % 8 == 0:  # time for a thread to read the next load request while this one is in memory
                    time.sleep(0.1)
                del batch
    finally:
        tracemalloc.stop()
    # the load request that is being read, the one before it if prefetching, and decoded chunks
    most = 1 + READING["prefetch"]
    assert 0.9 < max(store.n_bytes) / (512 * 2_000 * 4) < most + 0.7


def test_adding_datasets_during_iteration_raises() -> None:
    """Adding datasets raises while an iterator is open."""
    reader = loader()
    batches = iter(reader)
    for _ in islice(batches, 5):
        with pytest.raises(RuntimeError, match="Cannot add datasets"):
            reader.add_adata(ad.AnnData(np.zeros((1, 1), dtype="float32")))
    batches.close()
    reader.add_adata(ad.AnnData(np.zeros((1, 1), dtype="float32")))
    assert reader.n_obs == N_OBS + 1
