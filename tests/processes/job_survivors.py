"""One process of a job that continues when processes die or join: ``job_survivors NAME COLLECTION FOLDER``.

Processes a, b, c and d start. c is killed in epoch 1, and the others create a new group. e joins them in epoch 2. The
loop over the loader stays open. A step gathers the rows of all ranks, as a step of DDP adds their gradients, and each
process writes the gathered rows to a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from torch._C._distributed_c10d import FileStore

from annbatch_distributed import DistributedSampler, StatefulLoader
from tests.processes.configurations import CHUNKS

EPOCHS = 3
#: Epoch and number of steps that are done when c is killed, and when e joins.
DIES_AT, JOINS_AT = (1, 4), (2, 3)


def meet(folder: Path, name: str, generation: int, n_processes: int) -> None:
    """Create a new group, once all of its processes are there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    place = folder / f"generation{generation}"
    place.mkdir(exist_ok=True)
    (place / name).touch()
    while len(names := sorted(path.name for path in place.iterdir())) < n_processes:
        time.sleep(0.05)
    store = FileStore(str(folder / f"store{generation}"), n_processes)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=names.index(name),
        world_size=n_processes,
        timeout=timedelta(seconds=10),
    )


def gather(value: object) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main(name: str, collection: Path, folder: Path) -> None:
    """Train to the end."""
    joins = name == "e"
    if joins:
        while not (folder / "generation2").exists():
            time.sleep(0.05)
    meet(folder, name, 2 if joins else 0, 4)
    sampler = DistributedSampler(RandomSampler(**CHUNKS), dist_info="torch", remainder="exact", seed=0)
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False, prefetch=1)
    loader.use_collection(DatasetCollection(collection, mode="r"))
    if joins:
        loader.load_state_dict(gather(None)[0])
        loader.check_ranks_agree()

    with (folder / f"{name}.steps").open("w") as steps:
        for epoch in range(loader.next_epoch, EPOCHS):
            loader.set_epoch(epoch)
            n_done = loader.batches_done
            for batch in loader:
                if name == "c" and (epoch, n_done) == DIES_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    rows = gather(batch["index"].tolist())
                except RuntimeError:  # a process is gone, and the step isn't done
                    meet(folder, name, 1, 3)
                    n_done = min(gather(n_done))
                    loader.reshard(batches_done=n_done)
                    loader.check_ranks_agree()
                    continue
                loader.step_done()
                n_done += 1
                print(json.dumps([epoch, rows]), file=steps, flush=True)
                if (epoch, n_done) == JOINS_AT and not joins:
                    meet(folder, name, 2, 4)
                    gather(loader.state_dict())
                    loader.reshard()
                    loader.check_ranks_agree()
            print(loader.check_epoch_read(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
    dist.destroy_process_group()
