"""What one rank does with the configurations: read, and tell what it read. Other ranks are asked only to keep step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import zarr
from annbatch import DatasetCollection, Loader

from tests.processes.configurations import GOOD, N_OBS, WRONG
from tests.samplers import batches, flat, repeats

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from annbatch_distributed import DistributedSampler
    from annbatch_distributed.ranks import DistInfo
    from tests.processes.configurations import Configuration


@dataclass(frozen=True)
class OnePass:
    """What a rank read in one pass, and what it had expected of all ranks."""

    batches: list[list[int]]
    """The rows of each batch."""
    n_batches: int
    """How many batches the sampler had promised."""
    shards: list[list[int]]
    """The rows of each rank, as planned on this one."""
    lost: list[int]
    """The rows of no rank, as planned on this one."""
    repeated: list[int]
    """The rows marked as repeats in this rank's load requests."""

    @property
    def rows(self) -> list[int]:
        """The rows that were read, in their order."""
        return flat(self.batches)


@dataclass(frozen=True)
class Failure:
    """What a rank got from a configuration that is wrong."""

    message: str
    n_requests: int
    """How many load requests had come before."""


@dataclass(frozen=True)
class Told:
    """All that one rank tells."""

    rank: int
    world_size: int
    uninitialised: str
    """What it said when it was asked for its rank before the framework knew."""
    passes: dict[str, list[OnePass]]
    """What it read, by the name of the configuration."""
    failures: dict[str, Failure]
    """What was wrong, by the name of the configuration."""

    def write(self, folder: Path) -> None:
        """Write it to a file of this rank."""
        (folder / f"rank{self.rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read such a file."""
        told = json.loads(path.read_text())
        told["passes"] = {name: [OnePass(**one) for one in passes] for name, passes in told["passes"].items()}
        told["failures"] = {name: Failure(**one) for name, one in told["failures"].items()}
        return cls(**told)


def ask_too_early(dist_info: DistInfo) -> str:
    """Make a sampler before the framework is initialised, and return what it says."""
    try:
        GOOD["drop"].sampler(dist_info)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def read_all(collection: Path, dist_info: DistInfo, *, uninitialised: str, keep_step: Callable[[int], None]) -> Told:
    """Run through all configurations.

    Parameters
    ----------
    collection
        The collection to read.
    dist_info
        Says which rank this is.
    uninitialised
        What `ask_too_early` returned.
    keep_step
        Waits for the other ranks in every step, and makes sure that it is the same step for all of them.
    """
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    passes = {}
    for name, configuration in GOOD.items():
        sampler = configuration.sampler(dist_info)
        loader = Loader(batch_sampler=sampler, return_index=True, to="torch")
        loader.use_collection(DatasetCollection(collection, mode="r"))
        if sampler.rank == 0:  # as when one rank alone looks at a batch to see its shape
            next(iter(loader))
        passes[name] = [_read(loader, sampler, configuration, epoch, keep_step) for epoch in configuration.epochs]
    failures = {name: _fail(configuration.sampler(dist_info)) for name, configuration in WRONG.items()}
    return Told(sampler.rank, sampler.world_size, uninitialised, passes, failures)


def _read(
    loader: Loader,
    sampler: DistributedSampler,
    configuration: Configuration,
    epoch: int | None,
    keep_step: Callable[[int], None],
) -> OnePass:
    if epoch is not None:
        sampler.set_epoch(epoch)
    plan = sampler.plan(N_OBS)
    n_batches = len(loader)
    read = []
    for step, batch in enumerate(loader):
        if configuration.remainder != "keep":
            keep_step(step)
        # each row of the collection says in its first column which row it is
        assert np.array_equal(batch["X"].to_dense()[:, 0].numpy(), batch["index"] + 1)
        read.append(batch["index"].tolist())
    return OnePass(
        batches=read,
        n_batches=n_batches,
        shards=[plan.shard(rank).rows.to_array().tolist() for rank in range(plan.world_size)],
        lost=plan.lost.to_array().tolist(),
        repeated=marked(sampler),
    )


def marked(sampler: DistributedSampler) -> list[int]:
    """Give the rows that the load requests of one more pass mark as repeats."""
    if sampler.plan(N_OBS).remainder != "pad":
        return []
    requests = list(sampler.sample(N_OBS))
    marks = flat(repeats(requests))
    return [row for row, repeated in zip(flat(batches(requests)), marks, strict=True) if repeated]


def _fail(sampler: DistributedSampler) -> Failure:
    n_requests = 0
    try:
        for _ in sampler.sample(N_OBS):
            n_requests += 1
    except ValueError as error:
        return Failure(str(error), n_requests)
    return Failure("", n_requests)
