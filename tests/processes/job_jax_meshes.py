"""One of two JAX processes with two devices each: ``-m tests.processes.job_jax_meshes COLLECTION RESULTS``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from annbatch_distributed import DistributedSampler
from annbatch_distributed.checks import Tally
from annbatch_distributed.integrations.jax import global_batch
from annbatch_distributed.ranks.jax import mesh
from tests.processes.configurations import BATCH_SIZE, CHUNKS
from tests.processes.in_job import in_job
from tests.processes.results import write_result

N_ROWS = 80
KINDS = (
    "jax",
    "scipy",
    "dense",
)  # types of X in batches, one for each sharding in turn; the first is sparse in JAX


def devices() -> np.ndarray:
    """Return the devices of process 0 in the first row, and of process 1 in the second row."""
    return np.array([jax.local_devices(0), jax.local_devices(1)])


def shardings() -> dict[str, NamedSharding]:
    """Return all shardings of batches, by name."""
    across, along = devices(), devices().T
    names = "data", "model"
    return {
        "data across processes, columns split": NamedSharding(Mesh(across, names), PartitionSpec("data", "model")),
        "model across processes": NamedSharding(Mesh(along, names), PartitionSpec("data")),
        "both, processes in turn": NamedSharding(Mesh(along, names), PartitionSpec(names)),
        "both, process 1 first": NamedSharding(Mesh(across[::-1], names), PartitionSpec(names)),
        "none": NamedSharding(Mesh(across, names), PartitionSpec()),
    }


def spans(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the start and stop of a part of an array in each dimension."""
    return [span.indices(length)[:2] for span, length in zip(index, shape, strict=True)]


def shards(array: jax.Array) -> list[Any]:
    """Return the position in the array, and the values, of the part of each device of this process."""
    return [[spans(shard.index, array.shape), np.asarray(shard.data).tolist()] for shard in array.addressable_shards]


def read(collection: Path, sharding: NamedSharding, kind: str) -> dict[str, Any]:
    """Read all batches, and return their rows and the parts of devices."""
    to: Any = "jax" if kind == "jax" else None
    member = mesh(sharding)
    sampler = DistributedSampler(RandomSampler(**CHUNKS, mask=slice(0, N_ROWS)), dist_info=member, seed=0)
    loader = Loader(batch_sampler=sampler, return_index=True, preload_to_gpu=False, to=to)
    loader.use_collection(DatasetCollection(collection, mode="r"))
    sampler.check_ranks_agree(loader.n_obs)
    add_up = jax.jit(lambda batch: batch["X"].sum())
    steps, tally = [], Tally()
    for batch in loader:
        tally.add(batch["index"])
        if kind == "dense":
            batch["X"] = batch["X"].toarray()
        placed = global_batch(batch, sharding)
        parts = {"cells": placed["X"], "types": placed["obs"]["cell_type"], "index": placed["index"]}
        steps.append(
            {
                "read": batch["index"].tolist(),
                "shapes": {name: part.shape for name, part in parts.items()},
                "shards": {name: shards(part) for name, part in parts.items()},
                "sum": float(add_up(placed)),
            }
        )
    return {
        "rank": member.rank,
        "world_size": member.world_size,
        "n_peers": member.n_peers,
        "processes": member.processes,
        "source": member.source,
        "steps": steps,
        "verdict": sampler.check_epoch_read(loader.n_obs, tally),
    }


def sets() -> dict[str, Any]:
    """Return the numbers of sets of this process in the global batch, and of a column of obs with the same name."""
    sharding = shardings()["data across processes, columns split"]
    numbers = np.arange(BATCH_SIZE) // (BATCH_SIZE // 2)
    batch = {"X": np.ones((BATCH_SIZE, 2)), "set": numbers, "obs": pd.DataFrame({"set": numbers})}
    placed = global_batch({"rna": batch}, sharding)["rna"]

    def here(array: jax.Array) -> list[int]:
        return sorted({int(value) for shard in array.addressable_shards for value in np.asarray(shard.data).ravel()})

    return {"set": here(placed["set"]), "obs": here(placed["obs"]["set"])}


def fail(attempt: Any) -> str:
    """Return the error of an attempt, or an empty string."""
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return ""


def failures() -> dict[str, str]:
    """Return the errors of this process."""
    rows = np.ones((BATCH_SIZE - 1, 4), np.float32)
    split = shardings()["data across processes, columns split"]
    return {
        "the mesh of process 0": fail(lambda: mesh(Mesh(devices()[0], ("data",)))),
        "a batch in the mesh of process 0": fail(
            lambda: global_batch(rows, NamedSharding(Mesh(devices()[0], ("data",)), PartitionSpec()))
        ),
        "columns that don't divide": fail(lambda: global_batch(np.ones((BATCH_SIZE, 3)), split)),
    }


def main(collection: Path, results: Path) -> None:
    """Read with every sharding, and collect every error."""
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    jax.config.update("jax_num_cpu_devices", 2)
    with in_job("jax") as process:
        passes = {
            name: read(collection, sharding, KINDS[number % len(KINDS)])
            for number, (name, sharding) in enumerate(shardings().items())
        }
        write_result(results, process, {"read": passes, "failures": failures(), "sets": sets()})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
