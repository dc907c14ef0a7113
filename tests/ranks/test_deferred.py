"""Deferred ranks, which are queried at first use."""

from __future__ import annotations

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import set_spawning_popen
from threading import Barrier
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, deferred
from tests.loaders import numbered
from tests.samplers import batches
from tests.workers import as_worker

if TYPE_CHECKING:
    from collections.abc import Callable

N_OBS = 100


class Launcher:
    """A launcher that returns a rank once the job has begun."""

    def __init__(self) -> None:
        self.rank: tuple[int, int] | None = None
        self.n_queries = 0

    def __call__(self) -> tuple[int, int]:
        self.n_queries += 1
        if self.rank is None:
            msg = "the job has not begun"
            raise RuntimeError(msg)
        return self.rank


def make(dist_info: Any, **kwargs: Any) -> DistributedSampler:
    return DistributedSampler(RandomSampler(4, 2, 4, rng=np.random.default_rng(0)), dist_info=dist_info, **kwargs)


NEEDS_RANK: dict[str, Callable[[DistributedSampler], object]] = {
    "rank": lambda sampler: sampler.rank,
    "world_size": lambda sampler: sampler.world_size,
    "n_batches": lambda sampler: sampler.n_batches(N_OBS),
    "validate": lambda sampler: sampler.validate(N_OBS),
    "plan": lambda sampler: sampler.plan(N_OBS),
    "sample": lambda sampler: sampler.sample(N_OBS),
    "state_dict": lambda sampler: sampler.state_dict(batches_done=0),
    "check_ranks_agree": lambda sampler: sampler.check_ranks_agree(N_OBS),
}


@pytest.mark.parametrize("name", NEEDS_RANK)
def test_deferred_rank_raises_until_job_begins(name: str) -> None:
    """Uses of the rank raise before the job begins, and work afterwards."""
    launcher = Launcher()
    sampler = make(deferred(launcher))
    assert launcher.n_queries == 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the job has not begun"):
            NEEDS_RANK[name](sampler)
    launcher.rank = 0, 1
    NEEDS_RANK[name](sampler)
    assert launcher.n_queries == 3
    launcher.rank = 5, 7  # not queried again
    assert (sampler.rank, sampler.world_size, launcher.n_queries) == (0, 1, 3)


def test_settings_before_deferred_rank_persist() -> None:
    """An epoch or a mask that is set before the rank is known stays set."""
    state = make(Rank(1, 2), seed=3, remainder="exact", mask=slice(0, 90)).state_dict(batches_done=2)
    launcher = Launcher()
    early = make(deferred(launcher), seed=3, remainder="exact")
    early.mask = slice(0, 90)
    early.set_epoch(4)
    assert (early.epoch, early.batch_size, early.shuffle) == (4, 4, True)
    assert "rank=?, world_size=?" in repr(early)
    launcher.rank = 1, 2
    early.load_state_dict(state)
    assert (early.epoch, early.batches_done) == (0, 2)
    usual = make(Rank(1, 2), seed=3, remainder="exact", mask=slice(0, 90))
    usual.load_state_dict(state)
    assert batches(early.sample(N_OBS)) == batches(usual.sample(N_OBS))
    assert "rank=1, world_size=2" in repr(early)


def test_pickled_deferred_rank_is_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unpickled sampler queries its rank, because its process may be a different rank."""
    sampler = make(deferred("env"))
    duplicate = pickle.loads(pickle.dumps(sampler))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sampler.rank == 1
    monkeypatch.setenv("RANK", "0")
    assert duplicate.rank == 0
    assert pickle.loads(pickle.dumps(sampler)).rank == 0


def test_copies_query_deferred_rank_once() -> None:
    """All copies together query the rank once."""
    launcher = Launcher()
    sampler = make(deferred(launcher))
    copies = [sampler, copy.copy(sampler), copy.deepcopy(sampler)]
    launcher.rank = 1, 2
    assert [duplicate.rank for duplicate in copies] == [1, 1, 1]
    assert launcher.n_queries == 1


_HERE: dict[str, int] = {}


def _of_this_process() -> tuple[int, int]:
    """Return the rank of this process, or raise."""
    return _HERE["rank"], 2


def spawned(sampler: DistributedSampler) -> DistributedSampler:
    """Return a sampler as a spawned process receives it, before the process has a rank."""
    set_spawning_popen(object())
    try:
        sent = pickle.dumps(sampler)
    finally:
        set_spawning_popen(None)
    _HERE.clear()
    received: DistributedSampler = pickle.loads(sent)
    return received


@pytest.mark.parametrize("known", [False, True])
def test_spawned_process_queries_its_own_rank(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned process queries its own rank."""
    if known:
        monkeypatch.setitem(_HERE, "rank", 0)
    sampler = spawned(make(deferred(_of_this_process)))
    with pytest.raises(KeyError, match="rank"):
        _ = sampler.rank
    monkeypatch.setitem(_HERE, "rank", 1)
    assert sampler.rank == 1


def test_dataloader_worker_has_rank_of_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataLoader worker has the rank of its parent process."""
    monkeypatch.setitem(_HERE, "rank", 1)
    of_parent = make(deferred(_of_this_process))
    sampler = spawned(of_parent)
    with as_worker(0, 1):  # the first query in this process
        assert sampler.n_batches(N_OBS) == of_parent.n_batches(N_OBS)
        assert sampler.rank == 1


def test_threads_hear_one_answer() -> None:
    """Threads that need the rank at the same time ask once, and hear the same answer."""
    answers, together = iter(range(8)), Barrier(8)

    def ask() -> tuple[int, int]:
        time.sleep(0.05)  # so that all threads would ask
        return next(answers), 8

    sampler = make(deferred(ask), seed=0)

    def rank(_: int) -> int:
        together.wait(60)
        return sampler.rank

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(rank, range(8))] == [0] * 8


def test_trainer_stays_in_its_process() -> None:
    """A spawned worker has the rank of its parent, and no spawned process can query the parent's trainer."""
    trainer = type("Trainer", (), {"__module__": "lightning", "strategy": object()})()
    trainer.unpicklable = lambda: None
    sampler = spawned(make(trainer))
    with pytest.raises(RuntimeError, match="can't be sent to a child process"):
        _ = sampler.rank
    with as_worker(0, 1):
        assert (sampler.rank, sampler.world_size) == (0, 1)
        with pytest.raises(ValueError, match="was unpickled"):
            sampler.reshard()


def test_loader_length_needs_known_rank() -> None:
    """A loader has no length before the rank is known."""
    launcher = Launcher()
    loader = numbered(make(deferred(launcher)), N_OBS)
    with pytest.raises(RuntimeError, match="the job has not begun"):
        len(loader)
    launcher.rank = 0, 2
    assert len(loader) == len(list(loader)) == 12
