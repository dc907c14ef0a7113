"""One of four ranks in a 2 x 2 mesh: ``python -m torch.distributed.run ... -m tests.processes.job_mesh RESULTS``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import torch.distributed as dist
from annbatch.samplers import RandomSampler
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from annbatch_distributed import DistributedSampler, StatefulLoader, Tally, deferred, mesh_ranks
from tests.processes.meshes import N_OBS, OnMesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch_distributed.ranks import Deferred, DistInfo


def make(dist_info: DistInfo | Deferred, *, seed: int | None = 0) -> DistributedSampler:
    """Make a sampler; without a seed, its randomness is that of this process."""
    return DistributedSampler(RandomSampler(4, 2, 4), dist_info=dist_info, remainder="exact", seed=seed)


def load(sampler: DistributedSampler) -> StatefulLoader:
    """Make a loader of cells whose only gene is the number of their row."""
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
    return loader.add_adata(ad.AnnData(np.arange(float(N_OBS)).reshape(N_OBS, 1)))


def error(call: Callable[[], object]) -> str:
    """Return the error of a call, nothing if there is none."""
    try:
        call()
    except (RuntimeError, TimeoutError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


if __name__ == "__main__":
    results = Path(sys.argv[1])
    early = make(deferred("torch"))  # as a framework does that builds its loaders first
    too_early = error(lambda: early.n_batches(N_OBS))
    dist.init_process_group("gloo")
    told = OnMesh(dist.get_rank(), errors={"too early": too_early})

    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[told.process // 2]
    assert not isinstance(half, int)
    infos: dict[str, DistInfo | Deferred] = {
        "torch": "torch",
        "deferred": deferred("torch"),
        "dp": mesh_ranks(square, "dp"),
        "tp": mesh_ranks(square, ["tp"]),
        "dp and tp": mesh_ranks(square, ("dp", "tp")),
        "tp and dp": mesh_ranks(square, ("tp", "dp")),
        "the mesh of one dimension": line,
        "a part of the mesh": square["dp"],
        "a group": half,
        "a deferred mesh": deferred(lambda: mesh_ranks(square, "dp")),
    }
    for name, info in infos.items():
        sampler = make(info)
        sampler.check_ranks_agree(N_OBS, timeout=60)
        loader = load(sampler)
        told.ranks[name] = sampler.rank, sampler.world_size
        told.batches[name] = [batch["index"].tolist() for batch in loader]
        told.said[name] = loader.check_epoch_read(timeout=60)

    # spawned workers are in no process group
    read, loader = Tally(), load(early)
    workers = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    told.batches["spawned workers"] = []
    for batch in workers:
        read.add(batch["index"])
        told.batches["spawned workers"].append(batch["index"].tolist())
    told.ranks["spawned workers"] = early.rank, early.world_size
    told.errors["workers read"] = error(loader.check_epoch_read)
    told.said["spawned workers"] = loader.check_epoch_read(read, timeout=60)

    told.errors["no names"] = error(lambda: make(square))
    told.errors["unknown name"] = error(lambda: mesh_ranks(square, ("dp", "pp")))
    told.errors["a name twice"] = error(lambda: mesh_ranks(square, ("dp", "dp")))
    told.errors["names that there are not"] = error(lambda: mesh_ranks(line, "dp"))
    told.errors["another's group"] = error(partial(make, halves[1 - told.process // 2]))
    told.errors["a mesh of others"] = error(lambda: make(init_device_mesh("cpu", (2,))) if told.process > 1 else None)
    unseeded = make(mesh_ranks(square, "dp"), seed=None)
    told.errors["peers with other randomness"] = error(lambda: unseeded.check_ranks_agree(N_OBS, timeout=60))
    # two of them take the other dimension for the data-parallel one, and each rank has two processes all the same
    mixed = make(mesh_ranks(square, "tp" if told.process in {1, 2} else "dp"))
    told.errors["other dimensions"] = error(lambda: mixed.check_ranks_agree(N_OBS, timeout=60))
    told.write(results)
    dist.destroy_process_group()
