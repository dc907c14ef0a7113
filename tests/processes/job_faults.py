"""One rank of a training in which a machine is gone: ``torchrun ... -m tests.processes.job_faults COLLECTION FOLDER``.

What it trains is the list of the rows that it was trained on: every step adds the rows of all ranks, as a step of DDP
adds up their gradients, so that every rank has the same list. What belongs into a checkpoint is that list and the
loader's state. In the end, the list says what the training came to.
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
from tests.processes.told import tell
from tests.samplers import flat

EPOCHS = 3
#: The donor whose cells are not trained on.
HELD_OUT = "d4"
#: Checkpoints are made after so many steps and every multiple: in the middle of a load request, which has four.
EVERY = 6
#: The epoch and the step in which the machine is gone: between two checkpoints, so that steps are lost.
DIES_IN = (1, 9)
#: The world size before.
WORLD_SIZE = 3


@dataclass(frozen=True)
class Step:
    """What one rank trained on in one step."""

    world_size: int
    rank: int
    epoch: int
    step: int
    """Counted from 1, for each epoch and world size anew."""
    rows: list[int]


def switch_off_once() -> None:
    """End the rank that is alone on a machine, and torchrun's agent there, when the first job comes by."""
    if dist.get_world_size() == WORLD_SIZE and os.environ["LOCAL_WORLD_SIZE"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def train(collection: Path, folder: Path) -> None:
    """Train to the end, from the checkpoint if there is one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cells = DatasetCollection(collection, mode="r")
    mask = cells.obs(["donor"])["donor"] != HELD_OUT
    sampler = DistributedSampler(RandomSampler(**CHUNKS), dist_info="torch", remainder="exact", seed=0, mask=mask)
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, to="torch", read_ahead=1)
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
                    unfinished.replace(checkpoint)  # which is there in whole or not at all
    tell(folder, rank, model)


if __name__ == "__main__":
    collection, folder = map(Path, sys.argv[1:])
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    dist.init_process_group("gloo")
    train(collection, folder)
    dist.destroy_process_group()
