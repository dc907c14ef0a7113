"""One rank of a job that is killed in the middle of an epoch, and resumed on a different number of ranks.

torchrun starts it as ``python -m demo.resume JOB``, first on two ranks and then on three. Each rank logs the rows of
every step. After each step, rank 0 saves the model and the loader.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import zarr
from annbatch import DatasetCollection
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import StatefulLoader
from demo.job import KILLED_ON, Job
from demo.train import end_with_the_demo, tensors


def run(job: Job) -> None:
    """Train for an epoch, or resume it; on `KILLED_ON` ranks, the last one is killed halfway."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    collection = DatasetCollection(zarr.open_group(job.collection, mode="r"))
    classes = pd.Categorical(collection.obs([job.label])[job.label]).categories
    loader = StatefulLoader.from_collection(
        collection,
        mask=slice(0, job.n_train),
        batch_size=job.batch_size,
        dist_info="torch",
        seed=0,
        to="torch",
        return_index=True,
    )
    network = nn.Sequential(nn.LayerNorm(loader.n_var), nn.Linear(loader.n_var, len(classes)))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts: dict[str, Any] = {"loader": loader, "model": network, "optimizer": optimizer}
    checkpoint = Path(job.results) / "checkpoint.pt"
    if checkpoint.exists():
        states = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])

    with (Path(job.results) / f"{world_size}ranks-{rank}.jsonl").open("w") as log:
        for step, batch in enumerate(loader, start=loader.batches_done):
            if world_size == KILLED_ON and rank == world_size - 1 and step == len(loader) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            cells, labels = tensors(batch, job.label, classes)
            optimizer.zero_grad()
            cross_entropy(model(cells), labels).backward()
            optimizer.step()
            print(json.dumps({"step": step, "rows": batch["index"].tolist()}), file=log, flush=True)
            if rank == 0:
                torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)


if __name__ == "__main__":
    job = Job.read(Path(sys.argv[1]))
    end_with_the_demo(job.results)
    dist.init_process_group("gloo")
    try:
        run(job)
    except RuntimeError:
        if dist.get_world_size() != KILLED_ON:
            raise
        sys.exit(1)  # the last rank was killed on purpose
    dist.destroy_process_group()
