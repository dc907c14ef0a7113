"""Suggested sizes fit into memory, and annbatch's samplers accept them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import CellSets, DistributedSampler, Rank, suggest_sizes
from annbatch_distributed.loader.sizes import sizes_of_sets

if TYPE_CHECKING:
    from pathlib import Path


@given(
    n_rows=st.integers(100, 10**6),
    world_size=st.integers(1, 9),
    row_bytes=st.integers(1, 100_000),
    store_chunk=st.integers(1, 300),
    memory=st.integers(10**6, 10**10),
    batch_size=st.integers(1, 2_000),
    prefetch=st.integers(0, 2),
)
def test_sizes_fit_memory_in_whole_chunks(
    n_rows: int, world_size: int, row_bytes: int, store_chunk: int, memory: int, batch_size: int, prefetch: int
) -> None:
    """Sizes fit into the memory, in whole chunks and whole batches."""
    options: dict[str, Any] = {"row_bytes": row_bytes, "store_chunk": store_chunk, "memory": memory}
    options |= {"batch_size": batch_size, "prefetch": prefetch}
    peak_bytes = row_bytes * (2.5 + 1.5 * prefetch)
    if batch_size * peak_bytes > memory:
        with pytest.raises(ValueError, match=r"A load request of one batch|batch_size must be at most"):
            suggest_sizes(n_rows, world_size, **options)
        return
    sizes = suggest_sizes(n_rows, world_size, **options)
    n_request = sizes.chunk_size * sizes.preload_nchunks
    assert sizes.bytes_in_memory == pytest.approx(n_request * peak_bytes, abs=1)
    assert sizes.bytes_in_memory <= memory
    assert sizes.batch_size == batch_size
    least_rows = math.lcm(store_chunk, batch_size)
    if least_rows * peak_bytes <= memory:
        assert sizes.chunk_size % store_chunk == 0
    # one more step of whole chunks and whole batches would not fit, or would be more than a rank has
    step = math.lcm(sizes.chunk_size, batch_size)
    assert (n_request + step) * peak_bytes > memory or n_request + step > n_rows // world_size
    sampler = DistributedSampler(RandomSampler(**sizes), dist_info=Rank(0, world_size))
    assert sizes.n_dropped == n_rows % (world_size * batch_size)
    if n_rows >= world_size * batch_size:
        assert sampler.plan(n_rows).n_dropped == sizes.n_dropped


def test_sizes_are_mapping_of_sampler_arguments() -> None:
    """Sizes can be unpacked as the arguments of a sampler."""
    sizes = suggest_sizes(10_000, 2, row_bytes=1_000, batch_size=128)
    assert {**sizes} == {"chunk_size": 128, "preload_nchunks": 39, "batch_size": 128}
    assert len(sizes) == 3
    assert "n_dropped" not in sizes
    assert suggest_sizes(10_000, row_bytes=1_000) == suggest_sizes(10_000, 1, row_bytes=1_000)


def test_batch_of_more_rows_than_there_are_is_named() -> None:
    """A batch that doesn't fit into memory isn't advised more memory if there are fewer rows than it has."""
    for mask, n_rows in ((None, "5,000"), (slice(10, 100), "90")):
        with pytest.raises(
            ValueError, match=f"batch_size must be at most the number of rows, {n_rows}, got 10,000,000"
        ):
            suggest_sizes(5_000, row_bytes=1_000, batch_size=10**7, mask=mask)
    sets = CellSets.from_obs(pd.DataFrame({"donor": ["a", "b"] * 50}), by="donor", set_size=10)
    limits: dict[str, Any] = {"row_bytes": 10**6, "memory": 10**7, "prefetch": 0, "max_gap": 0}
    with pytest.raises(ValueError, match="batch_size must be at most the number of sets, 10, got 11"):
        sizes_of_sets(sets, 0, batch_size=11, **limits)
    with pytest.raises(ValueError, match="The sets of one batch read 100 rows"):
        sizes_of_sets(sets, 0, batch_size=10, **limits)


def test_more_memory_gives_larger_and_more_chunks() -> None:
    """More memory gives larger chunks, and more of them."""
    small, large = (suggest_sizes(10**7, 8, row_bytes=8_000, memory=memory) for memory in (1 << 28, 1 << 32))
    assert small.chunk_size < large.chunk_size <= 512
    assert small.preload_nchunks >= 32
    assert small.chunk_size * small.preload_nchunks * 10 < large.chunk_size * large.preload_nchunks


def test_chunks_are_cut_when_memory_is_small() -> None:
    """Chunks are cut if whole chunks and whole batches don't fit together."""
    options: dict[str, Any] = {"row_bytes": 100, "store_chunk": 64, "batch_size": 96, "prefetch": 0}
    assert suggest_sizes(10_000, memory=192 * 250, **options)["chunk_size"] == 64
    assert {**suggest_sizes(10_000, memory=191 * 250, **options)} == {
        "chunk_size": 32,
        "preload_nchunks": 3,
        "batch_size": 96,
    }


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_sizes_read_collection_metadata(kind: str, tmp_path: Path) -> None:
    """Rows, bytes of a row and chunks come from the metadata of the collection."""
    cells: Any = np.ones((5_000, 30), dtype=np.float32)
    if kind == "sparse":
        cells = sp.random(5_000, 100, density=0.1, format="csr", dtype=np.float32, random_state=0)
    ad.AnnData(cells).write_h5ad(tmp_path / "cells.h5ad")
    collection = DatasetCollection(tmp_path / "cells.zarr", mode="w")
    collection.add_adatas([tmp_path / "cells.h5ad"], n_obs_per_chunk=40)
    options: dict[str, Any] = {"batch_size": 64, "memory": 10**7}
    row_bytes = 30 * 4 if kind == "dense" else 10 * (4 + 4)
    store_chunk = 40 if kind == "dense" else 4 * 40
    expected = suggest_sizes(5_000, 2, row_bytes=row_bytes, store_chunk=store_chunk, **options)
    assert suggest_sizes(collection, 2, **options) == expected
    # arguments override the metadata of the collection
    assert suggest_sizes(collection, 2, row_bytes=50 * row_bytes, **options) == suggest_sizes(
        5_000, 2, row_bytes=50 * row_bytes, store_chunk=store_chunk, **options
    )
    assert suggest_sizes(collection, 2, store_chunk=50, **options).chunk_size % 50 == 0


@pytest.mark.parametrize("part", [0.05, 0.5, 0.95, slice(10_000, 90_000), [slice(0, 20_000), slice(80_000, None)]])
def test_sizes_fit_memory_under_mask(part: float | slice | list[slice]) -> None:
    mask = np.random.default_rng(0).random(100_000) < part if isinstance(part, float) else part
    sizes = suggest_sizes(100_000, 2, row_bytes=200, memory=10**7, mask=mask, batch_size=64)
    distributed = DistributedSampler(RandomSampler(**sizes), dist_info=Rank(0, 2), mask=mask, seed=0)
    n_read = [sum(rows.stop - rows.start for rows in request["requests"]) for request in distributed.sample(100_000)]
    assert 0.7 * sizes.bytes_in_memory < 4 * 200 * max(n_read) < 1.1 * sizes.bytes_in_memory
    assert sizes.bytes_in_memory <= 10**7
    assert distributed.plan(100_000).n_dropped == sizes.n_dropped
