"""Samplers and passes in processes that begin from nothing, as on every platform but Linux by default."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import pytest
from annbatch import DatasetCollection, Loader
from torch.utils.data import DataLoader

from annbatch_distributed import Rank
from tests.processes.configurations import GOOD, HELD_OUT, N_OBS
from tests.samplers import batches, flat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def spawned() -> Iterator[ProcessPoolExecutor]:
    """One spawned process, for whatever is sent to it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("name", GOOD)
def test_passes_and_samplers_sent_in_mid_pass_go_on_alike_in_a_spawned_process(
    spawned: ProcessPoolExecutor, name: str
) -> None:
    sampler = GOOD[name].sampler(Rank(1, 2))
    whole = batches(sampler.sample(N_OBS))
    sampler.set_epoch(0)
    begun = sampler.sample(N_OBS)
    done = batches(islice(begun, 1))
    assert 0 < len(done) < len(whole)
    rest = spawned.submit(list, begun)
    following = spawned.submit(sampler.sample, N_OBS)

    assert done + batches(rest.result(timeout=150)) == whole
    assert done + batches(begun) == whole  # here too, as if it had not been sent
    there = batches(spawned.submit(list, following.result(timeout=150)).result(timeout=150))
    assert there == batches(sampler.sample(N_OBS))


def test_spawned_dataloader_workers_give_each_row_of_the_shard_once_in_the_promised_number_of_batches(
    collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZARR_CODEC_PIPELINE__PATH", "zarrs.ZarrsCodecPipeline")  # the workers' zarr reads it
    sampler = GOOD["exact"].sampler(Rank(0, 2))
    loader = Loader(batch_sampler=sampler, return_index=True).use_collection(DatasetCollection(collection, mode="r"))
    workers = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="spawn", timeout=150)

    read = [batch["index"].tolist() for batch in workers]

    assert sorted(flat(read)) == list(range(HELD_OUT.start, HELD_OUT.start + 48))
    assert len(read) == len(workers) == 7  # six would do, but rank 1 has 49 rows
