"""Samplers and passes in processes that begin from nothing, as on every platform but Linux by default."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from annbatch_distributed import Rank
from tests.processes.configurations import GOOD, N_OBS
from tests.processes.launch import SECONDS
from tests.samplers import batches

if TYPE_CHECKING:
    from collections.abc import Iterator


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

    assert done + batches(rest.result(timeout=SECONDS)) == whole
    assert done + batches(begun) == whole  # here too, as if it had not been sent
    there = batches(spawned.submit(list, following.result(timeout=SECONDS)).result(timeout=SECONDS))
    assert there == batches(sampler.sample(N_OBS))
