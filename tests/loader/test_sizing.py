"""Sizes that are chosen: what they promise, and that annbatch's samplers take them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import MemoryStore, WrapperStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader, sizes

if TYPE_CHECKING:
    from pathlib import Path


@given(
    n_rows=st.integers(100, 10**6),
    world_size=st.integers(1, 9),
    row_bytes=st.integers(1, 100_000),
    store_chunk=st.integers(1, 300),
    memory=st.integers(10**6, 10**10),
    batch_size=st.integers(1, 2_000),
    read_ahead=st.integers(0, 2),
)
def test_sizes_fit_read_whole_chunks_and_lose_no_more_than_the_wished_batch_size(
    n_rows: int, world_size: int, row_bytes: int, store_chunk: int, memory: int, batch_size: int, read_ahead: int
) -> None:
    asked: dict[str, Any] = {"row_bytes": row_bytes, "store_chunk": store_chunk, "memory": memory}
    held = 2.5 + 1.5 * read_ahead
    least = math.lcm(store_chunk, batch_size) * row_bytes * held
    try:
        found = sizes(n_rows, world_size, batch_size=batch_size, read_ahead=read_ahead, **asked)
    except ValueError:
        found = None
    if found is None:
        assert least > memory or n_rows < world_size * batch_size
        return
    n_request = found.chunk_size * found.preload_nchunks
    assert found.bytes_in_memory == pytest.approx(n_request * row_bytes * held, abs=1)
    assert found.bytes_in_memory <= memory
    assert found.chunk_size % store_chunk == 0
    assert abs(found.batch_size - batch_size) <= batch_size // 4
    assert found.n_lost == n_rows % (world_size * found.batch_size)
    sampler = DistributedSampler(RandomSampler(**found.arguments), dist_info=Rank(0, world_size))
    assert sampler.plan(n_rows).n_lost == found.n_lost
    # a batch size is changed for fewer lost rows, or since whole chunks and batches of it are more than fits
    if found.batch_size != batch_size and least <= memory:
        assert found.n_lost < n_rows % (world_size * batch_size)


def test_the_wished_batch_size_stays_where_it_loses_few_rows() -> None:
    assert sizes(10**8, 8, row_bytes=1_000, batch_size=1_024).batch_size == 1_024  # 256 rows are lost
    assert sizes(20_000, 2, row_bytes=1_000, batch_size=250).batch_size == 250
    assert sizes(20_000, 2, row_bytes=1_000, batch_size=256).batch_size == 200  # a multiple of 8, and loses none


def test_more_memory_makes_larger_chunks_and_more_of_them() -> None:
    small, large = (sizes(10**7, 8, row_bytes=8_000, memory=memory) for memory in (1 << 28, 1 << 32))
    assert small.chunk_size < large.chunk_size <= 512
    assert small.preload_nchunks >= 32
    assert small.chunk_size * small.preload_nchunks * 10 < large.chunk_size * large.preload_nchunks


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_collection_says_its_rows_their_bytes_and_its_chunks(kind: str, tmp_path: Path) -> None:
    cells: Any = np.ones((5_000, 30), dtype=np.float32)
    if kind == "sparse":
        cells = sp.random(5_000, 100, density=0.1, format="csr", dtype=np.float32, random_state=0)
    ad.AnnData(cells).write_h5ad(tmp_path / "cells.h5ad")
    collection = DatasetCollection(tmp_path / "cells.zarr", mode="w")
    collection.add_adatas([tmp_path / "cells.h5ad"], n_obs_per_chunk=40)
    found = sizes(collection, 2, batch_size=64, memory=10**7)
    row_bytes = 30 * 4 if kind == "dense" else 10 * (4 + 4)
    again = sizes(5_000, 2, row_bytes=row_bytes, store_chunk=40, batch_size=64, memory=10**7)
    assert replace(found, n_requests=0) == replace(again, n_requests=0)
    assert sizes(collection, 2, batch_size=64, row_bytes=50 * row_bytes, memory=10**7).bytes_in_memory <= 10**7
    assert sizes(collection, 2, batch_size=64, store_chunk=50).chunk_size % 50 == 0


class Counting(WrapperStore[MemoryStore]):
    """Counts what is asked for."""

    n_requests = 0

    async def get(self, *args: Any, **kwargs: Any) -> Any:
        type(self).n_requests += 1
        return await super().get(*args, **kwargs)

    async def get_ranges(self, *args: Any, **kwargs: Any) -> Any:
        async for values in self._store.get_ranges(*args, **kwargs):
            type(self).n_requests += 1
            yield values


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_load_request_takes_as_many_requests_as_zarr_makes(kind: str, is_sharded: bool, tmp_path: Path) -> None:
    cells: Any = np.ones((4_096, 30), dtype=np.float32)
    ad.AnnData(cells if kind == "dense" else sp.csr_matrix(cells)).write_h5ad(tmp_path / "cells.h5ad")
    group = zarr.open_group(Counting(MemoryStore()))
    collection = DatasetCollection(group)
    collection.add_adatas([tmp_path / "cells.h5ad"], shuffle=False)
    if not is_sharded:
        for path in ["X"] if kind == "dense" else ["X/data", "X/indices"]:
            array: Any = group[f"dataset_0/{path}"]
            values, attributes = array[:], dict(array.attrs)
            again = group.create_array(f"dataset_0/{path}", data=values, chunks=array.chunks, overwrite=True)
            again.attrs.update(attributes)
    found = sizes(collection, 2, batch_size=64, memory=500_000 if kind == "dense" else 10**6)
    sampler = DistributedSampler(RandomSampler(**found.arguments), dist_info=Rank(0, 2), seed=0)
    batches = iter(StatefulLoader(batch_sampler=sampler, preload_to_gpu=False).use_collection(collection))
    next(batches)  # with which annbatch reads where sparse rows begin
    n_before, n_batches = Counting.n_requests, found.chunk_size * found.preload_nchunks // found.batch_size
    assert 2 * n_batches <= sampler.n_batches(4_096)
    list(islice(batches, n_batches))
    assert Counting.n_requests - n_before == found.n_requests


@pytest.mark.parametrize("part", [0.05, 0.5, 0.95, slice(10_000, 90_000)])
def test_under_a_mask_what_is_read_fits_too(part: float | slice) -> None:
    mask = np.random.default_rng(0).random(100_000) < part if isinstance(part, float) else part
    found = sizes(100_000, 2, row_bytes=200, memory=10**7, mask=mask, batch_size=64)
    distributed = DistributedSampler(RandomSampler(**found.arguments), dist_info=Rank(0, 2), mask=mask, seed=0)
    n_read = [sum(rows.stop - rows.start for rows in request["requests"]) for request in distributed.sample(100_000)]
    assert 0.7 * found.bytes_in_memory < 4 * 200 * max(n_read) < 1.1 * found.bytes_in_memory
    assert found.bytes_in_memory <= 10**7
    assert distributed.plan(100_000).n_lost == found.n_lost


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({}, TypeError, "needs row_bytes"),
        ({"row_bytes": 0}, ValueError, "row_bytes must be more than 0, got 0"),
        (
            {"row_bytes": 10, "batch_size": 600},
            ValueError,
            "1,000 rows are too few for a batch of 600 on each of 2",
        ),
        (
            {"row_bytes": 10**6, "memory": 10**8},
            ValueError,
            "A load request of 256 rows.* up to 1.02 GB .*100 MB",
        ),
        ({"row_bytes": 10, "store_chunk": 0}, ValueError, "store_chunk"),
        ({"row_bytes": 10, "memory": 0}, ValueError, "memory"),
        ({"row_bytes": 10, "mask": slice(0, 500)}, ValueError, "500 rows are too few for a batch of 256 on each of 2"),
        ({"row_bytes": 10, "mask": slice(0, 1_001)}, ValueError, "mask"),
    ],
)
def test_what_can_be_no_sizes_is_an_error(asked: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sizes(1_000, 2, **asked)


def test_a_table_gives_a_reason_for_each_size() -> None:
    found = sizes(60_000, 2, row_bytes=4_000)
    lines = str(found).splitlines()
    sizes_there = [[name, str(size)] for name, size in found.arguments.items()]
    assert [line.split()[:2] for line in lines] == [*sizes_there, ["requests", str(found.n_requests)]]
    assert lines[2].endswith("256 loses 96 rows; none of 60,000 rows are lost in an epoch")
