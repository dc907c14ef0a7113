"""One rank that reads all configurations: ``-m tests.processes.job_launch torch|jax COLLECTION RESULTS``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import zarr
from annbatch import DatasetCollection, Loader
from jax.experimental.multihost_utils import assert_equal

from tests.processes.configurations import GOOD, N_OBS, WRONG
from tests.processes.in_job import in_job
from tests.processes.told import tell

if TYPE_CHECKING:
    from annbatch_distributed import DistributedSampler
    from tests.processes.in_job import Framework


def ask_too_early(framework: Framework) -> str:
    """Make a sampler before the framework is initialised, and return what it says."""
    try:
        GOOD["drop"].sampler(framework)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def keep_step(framework: Framework, step: int) -> None:
    """Wait for the other ranks, and make sure that all of them are in the same step."""
    if framework == "jax":
        assert_equal(np.array(step), "the processes are not in the same step")
    else:
        total = torch.tensor(step)
        dist.all_reduce(total)
        assert total == step * dist.get_world_size()


def read(framework: Framework, collection: Path, name: str) -> list[dict[str, Any]]:
    """Read the passes of a configuration; tell the rows of each batch, and how many batches the sampler promised."""
    configuration = GOOD[name]
    sampler = configuration.sampler(framework)
    loader = Loader(batch_sampler=sampler, return_index=True, to="torch")
    loader.use_collection(DatasetCollection(collection, mode="r"))
    if sampler.rank == 0:  # as when one rank alone looks at a batch to see its shape
        next(iter(loader))
    passes: list[dict[str, Any]] = []
    for epoch in configuration.epochs:
        if epoch is not None:
            sampler.set_epoch(epoch)
        passes.append({"n_batches": len(loader), "batches": []})
        for step, batch in enumerate(loader):
            if configuration.remainder != "keep":
                keep_step(framework, step)
            # each row of the collection says in its first column which row it is
            assert np.array_equal(batch["X"].to_dense()[:, 0].numpy(), batch["index"] + 1)
            passes[-1]["batches"].append(batch["index"].tolist())
    return passes


def fail(sampler: DistributedSampler) -> tuple[str, int]:
    """Return the error of a sampler, and how many load requests had come before."""
    n_requests = 0
    try:
        for _ in sampler.sample(N_OBS):
            n_requests += 1
    except ValueError as error:
        return str(error), n_requests
    return "", n_requests


def main(framework: Framework, collection: Path, results: Path) -> None:
    """Run through all configurations."""
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    too_early = ask_too_early(framework)
    with in_job(framework) as rank:
        sampler = GOOD["drop"].sampler(framework)
        told = {
            "rank": (sampler.rank, sampler.world_size),
            "too early": too_early,
            "passes": {name: read(framework, collection, name) for name in GOOD},
            "failures": {name: fail(configuration.sampler(framework)) for name, configuration in WRONG.items()},
        }
        tell(results, rank, told)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
