"""One rank of a training in which one dies: ``torchrun -m tests.processes.job_faults COLLECTION FOLDER POLICY WHO``.

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
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, StatefulLoader
from tests.processes.configurations import CHUNKS

if TYPE_CHECKING:
    from annbatch_distributed.plan import Remainder

EPOCHS = 3
#: The donor whose cells are not trained on.
HELD_OUT = "d4"
#: Checkpoints are made after so many steps and every multiple: in the middle of a load request, which has four.
EVERY = 6
#: The epoch and the step in which a rank dies: between two checkpoints, so that steps are lost.
DIES_IN = (1, 9)
#: The world size of the run in which a rank dies.
WORLD_SIZE = 3


@dataclass(frozen=True)
class Step:
    """What one rank trained on in one step."""

    attempt: int
    """How many times torchrun had started the ranks before."""
    world_size: int
    rank: int
    epoch: int
    step: int
    """Counted from 1, for each epoch and attempt anew."""
    rows: list[int]


@dataclass(frozen=True)
class Model:
    """What the training has come to."""

    epochs: dict[int, list[int]]
    """For each epoch, the rows of all ranks that it was trained on."""
    lost: dict[int, list[int]]
    """For each epoch that is done, the rows that its plan gave to no rank."""

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)

    @classmethod
    def of_dict(cls, saved: dict[str, Any]) -> Self:
        """Read it again: JSON has made texts of the epochs."""
        return cls(*({int(epoch): rows for epoch, rows in saved[name].items()} for name in ("epochs", "lost")))


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is there in whole or not at all, whenever the process is killed."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(path)


def die_once(folder: Path, who: str) -> None:
    """Die if it is this rank's turn: one that is killed, or one that is alone on a machine that is switched off."""
    alone = os.environ["LOCAL_WORLD_SIZE"] == "1"
    if dist.get_world_size() < WORLD_SIZE or (folder / "died").exists():
        return
    if alone if who == "machine" else dist.get_rank() == 1:
        (folder / "died").touch()
        if who == "machine":
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun's agent
        os.kill(os.getpid(), signal.SIGKILL)


def train(collection: Path, folder: Path, remainder: Remainder, who: str) -> None:
    """Train to the end, from the checkpoint if there is one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cells = DatasetCollection(collection, mode="r")
    mask = cells.obs(["donor"])["donor"] != HELD_OUT
    sampler = DistributedSampler(RandomSampler(**CHUNKS), dist_info="torch", remainder=remainder, seed=0, mask=mask)
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, to="torch", read_ahead=1)
    loader.use_collection(cells)
    model, checkpoint = Model({}, {}), folder / "checkpoint.json"
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        model = Model.of_dict(saved["model"])
        loader.load_state_dict(saved["state"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (folder / f"{os.getpid()}.steps").open("a") as steps:
        for epoch in range(sampler.epoch, EPOCHS):
            loader.set_epoch(epoch)
            plan, n_batches = sampler.plan(loader.n_obs), sampler.n_batches(loader.n_obs)
            for step, batch in enumerate(loader, start=1):
                if (epoch, step) == DIES_IN:
                    die_once(folder, who)
                rows: list[list[int]] = [[]] * world_size
                dist.all_gather_object(rows, batch["index"].tolist())
                model.epochs.setdefault(epoch, []).extend(row for own in rows for row in own)
                done = Step(attempt, world_size, rank, epoch, step, rows[rank])
                print(json.dumps(asdict(done)), file=steps, flush=True)
                if rank == 0 and step % EVERY == 0 and step < n_batches:
                    write(checkpoint, {"model": model.to_dict(), "state": loader.state_dict()})
            model.lost[epoch] = plan.lost.to_array().tolist()
    write(folder / f"trained{rank}.json", model.to_dict())


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    (folder / f"{os.getpid()}.process").touch()
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    train(Path(sys.argv[1]), folder, *sys.argv[3:])
    dist.destroy_process_group()
