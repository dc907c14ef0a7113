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

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader, deferred
from annbatch_distributed.checks import Tally
from tests.processes.in_job import in_job
from tests.processes.results import write_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from annbatch_distributed.ranks import DistInfo

N_OBS = 203


def make(dist_info: DistInfo, *, seed: int | None = 0) -> DistributedSampler:
    """Make a sampler; without a seed, each process has its own randomness."""
    return DistributedSampler(RandomSampler(4, 2, 4), dist_info=dist_info, remainder="exact", seed=seed)


def load(sampler: DistributedSampler) -> StatefulLoader:
    """Make a loader of cells, each with the number of its row as its only value."""
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
    return loader.add_adata(ad.AnnData(np.arange(float(N_OBS)).reshape(N_OBS, 1)))


def error(call: Callable[[], object]) -> str:
    """Return the error of a call, or an empty string."""
    try:
        call()
    except (RuntimeError, TimeoutError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def placements(square: DeviceMesh, half: dist.ProcessGroup) -> dict[str, DistInfo]:
    """Return every kind of dist_info, by name."""
    return {
        "torch": "torch",
        "deferred": deferred("torch"),
        "dp": Rank.from_mesh(square, "dp"),
        "tp": Rank.from_mesh(square, ["tp"]),
        "dp and tp": Rank.from_mesh(square, ("dp", "tp")),
        "tp and dp": Rank.from_mesh(square, ("tp", "dp")),
        "the mesh of one dimension": init_device_mesh("cpu", (4,)),
        "a part of the mesh": square["dp"],
        "a group": half,
        "a deferred mesh": deferred(lambda: Rank.from_mesh(square, "dp")),
    }


def read(dist_info: DistInfo) -> dict[str, Any]:
    """Return the rank, the rows of each batch, and the result of check_epoch_read."""
    sampler = make(dist_info)
    sampler.check_ranks_agree(N_OBS)
    loader = load(sampler)
    return {
        "rank": (sampler.rank, sampler.world_size),
        "batches": [batch["index"].tolist() for batch in loader],
        "verdict": loader.check_epoch_read(),
    }


def read_by_a_worker(sampler: DistributedSampler, rank: int) -> dict[str, Any]:
    """Return the same as `read`; the last rank has a spawned worker, which is in no process group."""
    options = {"num_workers": 1, "multiprocessing_context": "spawn"} if rank == 3 else {}
    tally, loader, batches = Tally(), load(sampler), []
    for batch in loader.to_dataloader(**options):
        tally.add(batch["index"])
        batches.append(batch["index"].tolist())
    verdict = loader.check_epoch_read(tally)
    return {"rank": (sampler.rank, sampler.world_size), "batches": batches, "verdict": verdict}


def errors(rank: int, square: DeviceMesh, other_half: dist.ProcessGroup) -> dict[str, str]:
    """Return the error of each wrong call, or an empty string, by name."""
    unseeded = make(Rank.from_mesh(square, "dp"), seed=None)
    # two processes take a different dimension as data-parallel, but each rank still has two processes
    mixed = make(Rank.from_mesh(square, "tp" if rank in {1, 2} else "dp"))
    return {
        "no names": error(lambda: make(square)),
        "unknown name": error(lambda: Rank.from_mesh(square, ("dp", "pp"))),
        "a name twice": error(lambda: Rank.from_mesh(square, ("dp", "dp"))),
        "unnamed dimensions": error(lambda: Rank.from_mesh(init_device_mesh("cpu", (4,)), "dp")),
        "a group without this process": error(lambda: make(other_half)),
        "a mesh without this process": error(lambda: make(init_device_mesh("cpu", (2,))) if rank > 1 else None),
        "peers without a seed": error(lambda: unseeded.check_ranks_agree(N_OBS)),
        "other dimensions": error(lambda: mixed.check_ranks_agree(N_OBS)),
    }


def main(results: Path) -> None:
    """Read with every dist_info, and collect every error."""
    early = make(deferred("torch"))  # like a framework that builds its loaders first
    too_early = error(lambda: early.n_batches(N_OBS))
    with in_job("torch") as rank:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        halves: Any = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        report = {name: read(dist_info) for name, dist_info in placements(square, halves[rank // 2]).items()}
        report["a spawned worker"] = read_by_a_worker(early, rank)
        report["errors"] = {"too early": too_early, **errors(rank, square, halves[1 - rank // 2])}
        write_result(results, rank, report)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
