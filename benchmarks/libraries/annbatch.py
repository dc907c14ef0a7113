"""annbatch alone, and with this package; both also in a DataLoader with workers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import annbatch.samplers
import anndata as ad
import numpy as np
import zarr
import zarrs  # noqa: F401 registers the codecs that annbatch recommends
from annbatch import DatasetCollection, Loader, write_sharded
from annbatch.samplers import RandomSampler
from torch.utils.data import DataLoader

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.collect import collect
from annbatch_distributed.loader.workers import WorkerDataLoader
from benchmarks.libraries.cells import anndata_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    type Configuration = tuple[int, int, int]
    type Way = Callable[[int], Iterator[Any]]

PACKAGES = "annbatch", "annbatch-distributed", "anndata", "numpy", "torch", "zarr", "zarrs"
WORKERS = 2
UNCOMPRESSED = "uncompressed"
#: Collections that ``annbatch-distributed collect`` writes: by default, and with ``--compression none``.
COLLECTED, COLLECTED_UNCOMPRESSED = "collect", "collect, uncompressed"
#: In narrow dtypes, as they are stored.
AS_STORED = "as stored"
#: Without the checksums of ``collect``, which this package verifies by default.
UNVERIFIED = "not verified"


def write(source: Path, folder: Path) -> None:
    """Write collections: of annbatch, by default in chunks of 64 rows and compressed, and of this package."""
    cells = anndata_of(source)
    folder.mkdir(parents=True)
    for name, options in {"annbatch": {}, UNCOMPRESSED: {"compressors": None}}.items():
        write_sharded(zarr.open_group(folder / name / "dataset_0", mode="w"), cells, **options)
    cells.write_h5ad(folder / "cells.h5ad")
    for name, compression in {COLLECTED: "lz4", COLLECTED_UNCOMPRESSED: "none"}.items():
        collect(folder / "cells.h5ad", folder / name, compression=compression, tell=lambda line: None)  # noqa: ARG005 it is not shown


def loader(folder: Path, configuration: Configuration, dist_info: Rank, way: str) -> Loader[Any, Any]:
    """Return a rank's loader of a collection."""
    sampler = RandomSampler(*configuration, drop_last=True, rng=np.random.default_rng(0))
    if "distributed" not in way:
        share = partial(tuple, (dist_info.rank, dist_info.world_size))
        theirs = annbatch.samplers.DistributedSampler(sampler, dist_info=share)
        made: Loader[Any, Any] = Loader(batch_sampler=theirs, preload_to_gpu=False)
    else:
        ours = DistributedSampler(sampler, dist_info=dist_info, seed=0)
        dtype = "stored" if way.endswith(AS_STORED) else None
        made = StatefulLoader(batch_sampler=ours, preload_to_gpu=False, prefetch=int("prefetch" in way), dtype=dtype)
    # the longest name, as one is a part of another
    stores = [name for name in (COLLECTED_UNCOMPRESSED, UNCOMPRESSED, COLLECTED) if name in way]
    if stores and stores[0] != UNCOMPRESSED:
        collection = DatasetCollection(zarr.open_group(folder / stores[0], mode="r"))
        # as from_collection does
        return made.use_collection(collection, **{"names": False} if isinstance(made, StatefulLoader) else {})
    group: Any = zarr.open_group(folder / (stores[0] if stores else "annbatch") / "dataset_0", mode="r")
    cells = group["X"] if isinstance(group["X"], zarr.Array) else ad.io.sparse_dataset(group["X"])
    return made.add_adata(ad.AnnData(cells, obs=ad.io.read_elem(group["obs"])))


def epoch_of(made: Loader[Any, Any], epoch: int, *, verifies: bool = True) -> Iterator[Any]:
    """Read an epoch."""
    if isinstance(made, StatefulLoader):
        made.set_epoch(epoch)
    with zarr.config.set({"codec_pipeline.validate_checksums": verifies}):
        for batch in made:
            yield batch["X"]


def epoch_of_workers(workers: DataLoader[Any] | WorkerDataLoader, epoch: int) -> Iterator[Any]:
    """Read an epoch in workers."""
    if isinstance(workers, WorkerDataLoader):
        workers.set_epoch(epoch)
    for batch in workers:
        yield batch["X"]


def loaders(folder: Path, configuration: Configuration, rank: int, world_size: int) -> dict[str, Way]:
    """Return the ways to read a collection."""
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    ways: dict[str, Way] = {}
    ours = "annbatch-distributed", "annbatch-distributed, prefetch=1"
    others = [f"annbatch, {UNCOMPRESSED}"]
    # annbatch, too, so that storage and code can be told apart
    others += [f"{name}, {store}" for store in (COLLECTED, COLLECTED_UNCOMPRESSED) for name in ("annbatch", *ours)]
    others += [f"annbatch-distributed, {COLLECTED_UNCOMPRESSED}, {AS_STORED}"]
    others += [f"annbatch-distributed, {store}, {UNVERIFIED}" for store in (COLLECTED, COLLECTED_UNCOMPRESSED)]
    for name in ("annbatch", "annbatch, again", *ours, *others):
        made = loader(folder, configuration, Rank(rank, world_size), name)
        ways[name] = partial(epoch_of, made, verifies=UNVERIFIED not in name)
    for name in ("annbatch", "annbatch-distributed"):
        made = loader(folder, configuration, Rank(rank, world_size), name)
        # zarrs's threads don't survive a fork
        options: dict[str, Any] = {"num_workers": WORKERS, "multiprocessing_context": "spawn"}
        options |= {"persistent_workers": True, "worker_init_fn": with_zarrs}
        if isinstance(made, StatefulLoader):
            workers: DataLoader[Any] | WorkerDataLoader = made.to_dataloader(**options)
        else:
            workers = DataLoader(made, batch_size=None, **options)
        ways[f"{name}, DataLoader"] = partial(epoch_of_workers, workers)
    return ways


def with_zarrs(worker: int) -> None:  # noqa: ARG001 how a DataLoader calls it
    """Read with zarrs in a worker as well."""
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})


def sampler(configuration: Configuration, rank: int, world_size: int) -> Any:  # noqa: ANN401 of annbatch
    """Return annbatch's own sampler of a rank."""
    share = partial(tuple, (rank, world_size))
    return annbatch.samplers.DistributedSampler(RandomSampler(*configuration), dist_info=share)


def plan(n_obs: int, *numbers: int) -> Callable[[], object]:
    """Ask for the first load request."""
    *configuration, rank, world_size = numbers
    return lambda: next(iter(sampler(tuple(configuration), rank, world_size).sample(n_obs)))
