"""One of four ranks in a 2 x 2 mesh: ``-m tests.processes.job_mesh RESULTS``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import torch.distributed as dist
from annbatch.samplers import RandomSampler
from torch.distributed.device_mesh import init_device_mesh

from annbatch_distributed import DistributedSampler, StatefulLoader, deferred, mesh_ranks
from annbatch_distributed.checks import Tally
from tests.processes.in_job import in_job
from tests.processes.told import tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from annbatch_distributed.ranks import Deferred, DistInfo

N_OBS = 203


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


def placements(square: DeviceMesh, half: dist.ProcessGroup) -> dict[str, DistInfo | Deferred]:
    """All that tells a rank, by name."""
    return {
        "torch": "torch",
        "deferred": deferred("torch"),
        "dp": mesh_ranks(square, "dp"),
        "tp": mesh_ranks(square, ["tp"]),
        "dp and tp": mesh_ranks(square, ("dp", "tp")),
        "tp and dp": mesh_ranks(square, ("tp", "dp")),
        "the mesh of one dimension": init_device_mesh("cpu", (4,)),
        "a part of the mesh": square["dp"],
        "a group": half,
        "a deferred mesh": deferred(lambda: mesh_ranks(square, "dp")),
    }


def read(dist_info: DistInfo | Deferred) -> dict[str, Any]:
    """Tell which rank this is, the rows of each batch that it reads, and what is said of all that was read."""
    sampler = make(dist_info)
    sampler.check_ranks_agree(N_OBS)
    loader = load(sampler)
    return {
        "rank": (sampler.rank, sampler.world_size),
        "batches": [batch["index"].tolist() for batch in loader],
        "said": loader.check_epoch_read(),
    }


def read_by_a_worker(sampler: DistributedSampler, rank: int) -> dict[str, Any]:
    """Tell the same where the last rank has a spawned worker, which is in no process group."""
    options = {"num_workers": 1, "multiprocessing_context": "spawn"} if rank == 3 else {}
    tally, loader, batches = Tally(), load(sampler), []
    for batch in loader.to_dataloader(**options):
        tally.add(batch["index"])
        batches.append(batch["index"].tolist())
    said = loader.check_epoch_read(tally)
    return {"rank": (sampler.rank, sampler.world_size), "batches": batches, "said": said}


def errors(rank: int, square: DeviceMesh, other_half: dist.ProcessGroup) -> dict[str, str]:
    """What is wrong, by what is tried; empty if nothing is."""
    unseeded = make(mesh_ranks(square, "dp"), seed=None)
    # two of them take the other dimension for the data-parallel one, and each rank has two processes all the same
    mixed = make(mesh_ranks(square, "tp" if rank in {1, 2} else "dp"))
    return {
        "no names": error(lambda: make(square)),
        "unknown name": error(lambda: mesh_ranks(square, ("dp", "pp"))),
        "a name twice": error(lambda: mesh_ranks(square, ("dp", "dp"))),
        "names that there are not": error(lambda: mesh_ranks(init_device_mesh("cpu", (4,)), "dp")),
        "another's group": error(lambda: make(other_half)),
        "a mesh of others": error(lambda: make(init_device_mesh("cpu", (2,))) if rank > 1 else None),
        "peers with other randomness": error(lambda: unseeded.check_ranks_agree(N_OBS)),
        "other dimensions": error(lambda: mixed.check_ranks_agree(N_OBS)),
    }


def main(results: Path) -> None:
    """Read in every way, and fail in every way."""
    early = make(deferred("torch"))  # as a framework does that builds its loaders first
    too_early = error(lambda: early.n_batches(N_OBS))
    with in_job("torch") as rank:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        halves: Any = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        told = {name: read(dist_info) for name, dist_info in placements(square, halves[rank // 2]).items()}
        told["a spawned worker"] = read_by_a_worker(early, rank)
        told["errors"] = {"too early": too_early, **errors(rank, square, halves[1 - rank // 2])}
        tell(results, rank, told)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
