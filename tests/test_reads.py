"""Reads of a store, counted chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from zarr.storage import MemoryStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from tests.samplers import request_rows
from tests.stores import Counting

if TYPE_CHECKING:
    from pathlib import Path

    from annbatch_distributed.core.lanes import Remainder
    from annbatch_distributed.core.masks import AnyMask

N_OBS, CHUNK = 20_011, 64


@pytest.fixture(scope="module")
def counted() -> tuple[Counting, ad.AnnData]:
    store = Counting(MemoryStore())
    cells = zarr.create_array(store, name="X", shape=(N_OBS, 2), chunks=(CHUNK, 2), dtype="float32")
    cells[:, 0] = np.arange(N_OBS, dtype="float32")
    return store, ad.AnnData(X=cells)


def chunks_read(counted: tuple[Counting, ad.AnnData], sampler: DistributedSampler) -> tuple[float, list[int]]:
    """Read an epoch; return the ratio of chunks read to chunks filled by the rows, and the rows."""
    store, cells = counted
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
    loader.add_adata(cells)
    store.n_read.clear()
    rows = [np.asarray(batch["X"])[:, 0].astype(int).tolist() for batch in loader]
    assert [batch for batch in rows if not batch] == []
    flat = [row for batch in rows for row in batch]
    return sum(store.n_read.values()) / (len(flat) / CHUNK), flat


SMALL, LARGE = (64, 32, 256), (512, 8, 1024)
FOLDS: dict[str, AnyMask | None] = {
    "all": None,
    "a range": slice(37, 18_001),
    "two ranges": [slice(101, 7_000), slice(9_001, 19_999)],
}


#: Each pair of values of two arguments is in one of these cases.
CASES = [
    (remainder, fold, (SMALL, LARGE)[(row + column) % 2], ("contiguous", "shuffled")[(row // 2 + column) % 2])
    for row, remainder in enumerate(("drop", "pad", "exact", "keep"))
    for column, fold in enumerate(FOLDS)
]


@pytest.mark.parametrize(("remainder", "fold", "sizes", "sharding"), CASES)
def test_epoch_reads_few_chunks_twice(
    counted: tuple[Counting, ad.AnnData],
    sizes: tuple[int, int, int],
    remainder: Remainder,
    sharding: Any,
    fold: str,
) -> None:
    """An epoch reads at most 2% more chunks than its rows fill, or 5% under a mask."""
    for epoch in range(3):
        sampler = DistributedSampler(
            RandomSampler(*sizes),
            dist_info=Rank(1, 2),
            seed=3,
            remainder=remainder,
            sharding=sharding,
            mask=FOLDS[fold],
        )
        sampler.set_epoch(epoch)
        planned = sampler.plan(N_OBS).shard(1).rows
        ratio, rows = chunks_read(counted, sampler)
        assert sorted(rows) == sorted(planned)
        assert ratio <= (1.02 if fold == "all" else 1.05)


@pytest.fixture(scope="module")
def counted_sparse() -> tuple[Counting, ad.AnnData]:
    """Cells with a lognormal number of genes, as of real cells, in chunks of the mean number of values of 64 cells."""
    rng = np.random.default_rng(0)
    indptr = np.append(0, np.cumsum(np.clip(25 * np.exp(0.5 * rng.standard_normal(N_OBS)), 2, 200).astype(np.int64)))
    indices = np.arange(indptr[-1]) - np.repeat(indptr[:-1], np.diff(indptr))
    data = np.repeat(np.arange(N_OBS, dtype="float32"), np.diff(indptr))
    store = Counting(MemoryStore())
    group = zarr.create_group(store).create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [N_OBS, 200]})
    chunk = len(data) * CHUNK // N_OBS
    for name, values in {"data": data, "indices": indices, "indptr": indptr}.items():
        array = group.create_array(name, shape=values.shape, chunks=(chunk,), dtype=values.dtype)
        array[:] = values
    return store, ad.AnnData(ad.io.sparse_dataset(group))


@pytest.mark.parametrize(("chunk_size", "most"), [(64, 2.1), (256, 1.3), (512, 1.17)])
@pytest.mark.parametrize("fold", FOLDS)
def test_long_runs_decode_few_values_that_no_row_has(
    counted_sparse: tuple[Counting, ad.AnnData], fold: str, chunk_size: int, most: float
) -> None:
    """Runs of cells rarely end where chunks of values end, so the last chunk of a run is decoded for few values."""
    store, cells = counted_sparse
    array: Any = cells.X.group["data"]
    sampler = RandomSampler(chunk_size, 2_048 // chunk_size, 256)
    distributed = DistributedSampler(sampler, dist_info=Rank(1, 2), seed=3, mask=FOLDS[fold])
    loader = StatefulLoader(batch_sampler=distributed, return_index=True, preload_to_gpu=False).add_adata(cells)
    store.n_read.clear()
    rows = distributed.plan(N_OBS).shard(1).rows
    batches = [*loader]
    assert sorted(np.concatenate([batch["index"] for batch in batches])) == sorted(rows)
    assert all((batch["X"].data == np.repeat(batch["index"], np.diff(batch["X"].indptr))).all() for batch in batches)
    n_decoded = sum(n for key, n in store.n_read.items() if "data/c/" in key) * array.chunks[0]
    assert 1 < n_decoded / sum(batch["X"].nnz for batch in batches) < most


def test_collection_of_sparse_cells_is_read_in_runs_of_four_chunks(tmp_path: Path) -> None:
    """from_collection reads runs of at least four chunks, even if little memory leaves room for few runs."""
    cells = ad.AnnData(sp.random(4_000, 100, density=0.2, format="csr", dtype=np.float32, random_state=0))
    cells.write_h5ad(tmp_path / "cells.h5ad")
    collection = DatasetCollection(tmp_path / "cells.zarr").add_adatas([tmp_path / "cells.h5ad"], n_obs_per_chunk=40)
    for memory in (250_000, 10**6, 10**9):
        loader = StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), memory=memory, batch_size=32)
        assert loader.state_dict()["identity"]["sampler"]["chunk_size"] >= 4 * 40


@pytest.mark.parametrize("sharding", ["contiguous", "shuffled"])
@pytest.mark.parametrize("remainder", ["drop", "pad", "exact", "keep"])
def test_resumed_job_reads_whole_chunks(remainder: Remainder, sharding: Any) -> None:
    """Resuming on fewer ranks reads at most 5% more chunks than the rows fill, in hundreds of load requests."""
    n_obs = 1_000_003
    options: dict[str, Any] = {"seed": 3, "remainder": remainder, "sharding": sharding}
    before = DistributedSampler(RandomSampler(*SMALL), dist_info=Rank(0, 3), **options)
    before.set_epoch(1)
    for done in (8, 11):  # after a whole load request, and within one
        for rank in range(2):
            after = DistributedSampler(RandomSampler(*SMALL), dist_info=Rank(rank, 2), **options)
            after.load_state_dict(before.state_dict(batches_done=done))
            n_chunks = n_rows = 0
            for request in after.sample(n_obs):
                n_chunks += len({row // CHUNK for row in request_rows(request)})
                n_rows += sum(map(len, request["splits"]))
            assert n_chunks / (n_rows / CHUNK) <= 1.05
