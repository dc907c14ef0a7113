"""One rank of a training in which a machine dies: ``torchrun ... -m tests.processes.job_faults COLLECTION FOLDER``.

The model is the list of the rows that it was trained on: each step adds the rows of all ranks, as a step of DDP adds
their gradients, so every rank has the same list. A checkpoint has this list and the state of the loader. At the end,
the list has all rows of the training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, StatefulLoader
from tests.processes.configurations import CHUNKS
from tests.processes.results import write_result
from tests.samplers import flat

EPOCHS = 3
#: Donor whose cells are held out.
HELD_OUT = "d4"
#: Number of steps between checkpoints: in the middle of a load request of four batches.
EVERY = 6
#: Epoch and step in which the machine dies: between two checkpoints, so steps are discarded.
DIES_IN = (1, 9)
#: World size before the machine dies.
WORLD_SIZE = 3


@dataclass(frozen=True)
class Step:
    """The rows that one rank trained on in one step."""

    world_size: int
    rank: int
    epoch: int
    step: int
    """Number of the step, from 1 in each epoch and world size."""
    rows: list[int]


def switch_off_once() -> None:
    """Kill the only rank of a machine, and torchrun's agent there, in the first job."""
    if dist.get_world_size() == WORLD_SIZE and os.environ["LOCAL_WORLD_SIZE"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def train(collection: Path, folder: Path) -> None:
    """Train to the end, from the checkpoint if there is one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cells = DatasetCollection(collection, mode="r")
    mask = cells.obs(["donor"])["donor"] != HELD_OUT
    sampler = DistributedSampler(RandomSampler(**CHUNKS), dist_info="torch", remainder="exact", seed=0, mask=mask)
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, to="torch", prefetch=1)
    loader.use_collection(cells)
    model: list[list[int]] = [[] for _ in range(EPOCHS)]
    checkpoint = folder / "checkpoint.json"
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        model = saved["model"]
        loader.load_state_dict(saved["state"])
    with (folder / f"{os.getpid()}.steps").open("a") as steps:
        for epoch in range(sampler.epoch, EPOCHS):
            loader.set_epoch(epoch)
            n_batches = sampler.n_batches(loader.n_obs)
            for step, batch in enumerate(loader, start=1):
                if (epoch, step) == DIES_IN:
                    switch_off_once()
                rows: list[list[int]] = [[]] * world_size
                dist.all_gather_object(rows, batch["index"].tolist())
                model[epoch] += flat(rows)
                print(json.dumps(asdict(Step(world_size, rank, epoch, step, rows[rank]))), file=steps, flush=True)
                if rank == 0 and step % EVERY == 0 and step < n_batches:
                    unfinished = checkpoint.with_suffix(".unfinished")
                    unfinished.write_text(json.dumps({"model": model, "state": loader.state_dict()}))
                    unfinished.replace(checkpoint)  # so that there is no incomplete checkpoint
    write_result(folder, rank, model)


if __name__ == "__main__":
    collection, folder = map(Path, sys.argv[1:])
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    dist.init_process_group("gloo")
    train(collection, folder)
    dist.destroy_process_group()
