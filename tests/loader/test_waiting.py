"""How long the consumer of a loader has waited for batches, by a clock that only reading and training turn."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, MixedLoader, Rank
from annbatch_distributed.loader import waiting
from annbatch_distributed.loader.epoch_loader import EpochLoader
from tests.loaders import numbered

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS_TO_READ, SECONDS_OF_STEP = 3.0, 100.0


class Clock:
    """A clock that stands still unless it is turned."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Turn a clock by 3 seconds for each batch that is read."""
    clock, read = Clock(), EpochLoader.__dict__["_batches_of"]
    monkeypatch.setattr(waiting, "perf_counter", clock)

    def slow(self: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in read(self, *arguments, **options):
            clock.now += SECONDS_TO_READ
            yield batch

    monkeypatch.setattr(EpochLoader, "_batches_of", slow)
    return clock


def train(batches: Any, clock: Clock) -> int:
    n_batches = 0
    for _ in batches:
        clock.now += SECONDS_OF_STEP
        n_batches += 1
    return n_batches


@pytest.mark.parametrize("kind", ["loader", "mixture", "workers"])
def test_loader_knows_how_long_its_consumer_waits(kind: str, clock: Clock) -> None:
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0)
    loader: Any = numbered(sampler, 48)
    loader = MixedLoader({"one": loader}, weights={"one": 1}, n_steps=6) if kind == "mixture" else loader
    loader = loader.to_dataloader() if kind == "workers" else loader
    assert loader.waited == (0, 0)
    assert "waited" not in repr(loader)
    n_batches = train(loader, clock)
    assert n_batches > 2
    assert loader.waited == (n_batches * SECONDS_TO_READ, n_batches)
    assert f"waited: {n_batches * 3} s for {n_batches} batches" in repr(loader)
    # each iteration is measured separately, as far as it was read
    loader.set_epoch(1)
    assert train(islice(loader, 2), clock) == 2
    assert loader.waited == (2 * SECONDS_TO_READ, 2)
