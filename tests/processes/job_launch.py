"""One rank that reads all configurations, and checks that ranks agree.

``-m tests.processes.job_launch torch|jax COLLECTION RESULTS``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler
from jax.experimental.multihost_utils import assert_equal

from annbatch_distributed import DistributedSampler
from annbatch_distributed.checks.exchange import store_of
from tests.processes.configurations import GOOD, N_OBS
from tests.processes.in_job import in_job
from tests.processes.results import write_result

if TYPE_CHECKING:
    from tests.processes.in_job import Framework

#: The rank that differs from the others.
ODD = 1


def ask_too_early(framework: Framework) -> str:
    """Return the error of a sampler that is made before the framework is initialized."""
    try:
        GOOD["drop"].sampler(framework)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def keep_step(framework: Framework, step: int) -> None:
    """Wait for the other ranks, and check that all of them are in the same step."""
    if framework == "jax":
        assert_equal(np.array(step), "the processes are not in the same step")
    else:
        total = torch.tensor(step)
        dist.all_reduce(total)
        assert total == step * dist.get_world_size()


def read(framework: Framework, collection: Path, name: str) -> list[dict[str, Any]]:
    """Read a configuration. Return the rows of each batch, and the length of the loader."""
    configuration = GOOD[name]
    sampler = configuration.sampler(framework)
    loader = Loader(batch_sampler=sampler, return_index=True, to="torch")
    loader.use_collection(DatasetCollection(collection, mode="r"))
    if sampler.rank == 0:  # like a script that looks at the shape of a batch on one rank
        next(iter(loader))
    passes: list[dict[str, Any]] = []
    for epoch in configuration.epochs:
        if epoch is not None:
            sampler.set_epoch(epoch)
        passes.append({"n_batches": len(loader), "batches": []})
        for step, batch in enumerate(loader):
            if configuration.remainder != "keep":
                keep_step(framework, step)
            # the first column of each row is the number of the row + 1
            assert np.array_equal(batch["X"].to_dense()[:, 0].numpy(), batch["index"] + 1)
            passes[-1]["batches"].append(batch["index"].tolist())
    return passes


def check_store(rank: int) -> None:
    """Write to JAX's store like two processes that time out together: the first message stays."""
    store = store_of("jax")
    for text in ("first", "second"):
        store.compare_set(f"of {rank}", "", text)
    assert store.get(f"of {rank}") == b"first"


def compare(framework: Framework, *, seed: int = 0, timeout: float = 60.0) -> str:
    """Return the error of check_ranks_agree, or an empty string."""
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=framework, seed=seed)
    try:
        sampler.check_ranks_agree(N_OBS, timeout=timeout)
    except (ValueError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(framework: Framework, collection: Path, results: Path) -> None:
    """Read all configurations."""
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    too_early = ask_too_early(framework)
    with in_job(framework) as rank:
        sampler = GOOD["drop"].sampler(framework)
        report = {
            "rank": (sampler.rank, sampler.world_size),
            "too early": too_early,
            "passes": {name: read(framework, collection, name) for name in GOOD},
            "same": compare(framework),
            "other seed": compare(framework, seed=int(rank == ODD)),
        }
        if rank != ODD:  # this rank does not make the call
            report["missing"] = compare(framework, timeout=3)
        if framework == "jax":
            check_store(rank)
        write_result(results, rank, report)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
