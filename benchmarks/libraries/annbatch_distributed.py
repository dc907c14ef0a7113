"""This package: planning and resuming. Its loaders are in the module of annbatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = "annbatch", "annbatch-distributed", "numpy"


def sampler(configuration: list[int], rank: int, world_size: int) -> DistributedSampler:
    """Return a rank's sampler, as its process makes it."""
    chunk_size, preload_nchunks, batch_size = configuration
    random = RandomSampler(chunk_size, preload_nchunks, batch_size)
    return DistributedSampler(random, dist_info=Rank(rank, world_size), sharding="shuffled", seed=0)


def plan(n_obs: int, *numbers: int) -> Callable[[], object]:
    """Ask for the first load request."""
    *configuration, rank, world_size = numbers
    return lambda: next(sampler(configuration, rank, world_size).sample(n_obs))


def resume(n_obs: int, *numbers: int) -> Callable[[], object]:
    """Go on in the middle of an epoch, on any number of ranks."""
    *configuration, rank, old, new = numbers
    before = sampler(configuration, rank, old)
    state = before.state_dict(batches_done=before.n_batches(n_obs) // 2)

    def go_on() -> object:
        after = sampler(configuration, rank, new)
        after.load_state_dict(state)
        return next(after.sample(n_obs))

    return go_on
