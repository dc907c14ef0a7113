"""This package: planning, resuming and reading from object storage. Other loaders are in the module of annbatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.collect import collect
from benchmarks.libraries.cells import anndata_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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


def write(source: Path, folder: Path) -> None:
    """Write a collection."""
    folder.mkdir(parents=True)
    anndata_of(source).write_h5ad(folder / "cells.h5ad")
    collect(folder / "cells.h5ad", folder / "cells.zarr", tell=lambda _: None)
    (folder / "cells.h5ad").unlink()


def remote(place: str, cache: str, batch_size: str) -> Callable[[int], Iterator[Any]]:
    """Read a collection at a URL or a path, through a cache unless its path is empty."""
    loader = StatefulLoader.from_collection(
        f"{place}/cells.zarr", cache=cache or None, dist_info=Rank(0, 1), names=False, batch_size=int(batch_size)
    )

    def way(epoch: int) -> Iterator[Any]:
        loader.set_epoch(epoch)
        return (batch["X"] for batch in loader)

    return way
