"""Reads of a store, counted chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
import zarr
from annbatch.samplers import RandomSampler
from zarr.storage import MemoryStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from tests.samplers import request_rows
from tests.stores import Counting

if TYPE_CHECKING:
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


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("sharding", ["contiguous", "shuffled"])
@pytest.mark.parametrize("remainder", ["drop", "pad", "exact", "keep"])
@pytest.mark.parametrize("sizes", [SMALL, LARGE])
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
        ratio, rows = chunks_read(counted, sampler)
        assert sorted(rows) == sorted(sampler.plan(N_OBS).shard(1).rows)
        assert ratio <= (1.02 if fold == "all" else 1.05)


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
