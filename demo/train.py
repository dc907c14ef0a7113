"""One rank of the demo: it trains on its shard of the training rows, and validates on its shard of the held-out rows.

torchrun starts it as ``python -m demo.train JOB``, with a pipe from the demo as its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler, SequentialSampler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import DistributedSampler
from demo.cells import write_collection
from demo.job import Job

if TYPE_CHECKING:
    from annbatch.types import LoaderOutput


def run(job: Job) -> None:
    """Train, and write the rows and the accuracy to the folder of results."""
    rank = dist.get_rank()
    if rank == 0 and not Path(job.collection).exists():
        write_collection(job)
    dist.barrier()
    collection = DatasetCollection(zarr.open_group(job.collection, mode="r"))
    classes = pd.Categorical(collection.obs([job.label])[job.label]).categories

    # one collection, two masks: no row is in both
    training = DistributedSampler(
        RandomSampler(
            chunk_size=job.batch_size,
            preload_nchunks=8,
            batch_size=job.batch_size,
            mask=slice(0, job.n_train),
            rng=np.random.default_rng(0),
        ),
        dist_info="torch",
        virtual_ranks=job.virtual_ranks,
    )
    # "exact": each held-out row once, in the same number of batches on every rank
    validation = DistributedSampler(
        SequentialSampler(
            chunk_size=job.batch_size,
            preload_nchunks=8,
            batch_size=job.batch_size,
            mask=slice(job.n_train, None),
        ),
        dist_info="torch",
        remainder="exact",
    )
    train_loader, validation_loader = (
        Loader(batch_sampler=sampler, return_index=True, to="torch", preload_to_gpu=False).use_collection(collection)
        for sampler in (training, validation)
    )

    for sampler in (training, validation):
        sampler.check_ranks_agree(train_loader.n_obs)

    torch.manual_seed(0)
    # a norm, for any scale of the matrix; batch statistics and dropout would depend on the number of ranks
    inputs = [nn.BatchNorm1d(train_loader.n_var), nn.Dropout(0.2)]
    model = DistributedDataParallel(
        nn.Sequential(
            *(inputs if job.virtual_ranks is None else [nn.LayerNorm(train_loader.n_var)]),
            nn.Linear(train_loader.n_var, 128),
            nn.ReLU(),
            nn.Linear(128, len(classes)),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    rows: dict[str, np.ndarray] = {}
    history = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, disable=rank != 0) as progress:
        bar = progress.add_task("", total=job.epochs * len(train_loader))
        for epoch in range(job.epochs):
            training.set_epoch(epoch)  # each epoch has its own order and drops different rows
            model.train()
            began = time.perf_counter()
            read, losses = [], []
            for batch in train_loader:
                cells, labels = tensors(batch, job.label, classes)
                loss = cross_entropy(model(cells), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                read.append(batch["index"])
                losses += [] if job.virtual_ranks is None else [_mean(loss)]
                progress.update(bar, advance=1, description=f"epoch {epoch + 1}, loss {loss.item():.2f}")
            seconds = time.perf_counter() - began
            rows |= _of_epoch("training", epoch, read)

            model.eval()
            read = []
            counts = torch.zeros(2, dtype=torch.int64)  # correct, all
            for batch in validation_loader:
                cells, labels = tensors(batch, job.label, classes)
                with torch.no_grad():
                    right = model(cells).argmax(dim=1) == labels
                counts += torch.tensor([right.sum(), len(right)])
                read.append(batch["index"])
            rows |= _of_epoch("validation", epoch, read)
            dist.all_reduce(counts)
            history.append({"right": int(counts[0]), "counted": int(counts[1]), "seconds": seconds, "losses": losses})

    results = Path(job.results)
    np.savez(results / f"rank{rank}.npz", **rows)
    if rank == 0:
        (results / "history.json").write_text(json.dumps(history))


def _mean(loss: torch.Tensor) -> float:
    """Return the mean loss over all ranks, whose batches have the same size."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def tensors(batch: LoaderOutput, label: str, classes: pd.Index) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cells of a batch as a dense matrix, and their class indices."""
    codes = pd.Categorical(batch["obs"][label], categories=classes).codes
    return batch["X"].to_dense().float(), torch.tensor(codes, dtype=torch.int64)


def _of_epoch(split: str, epoch: int, read: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the rows of an epoch and the sizes of its batches, by name."""
    return {
        f"{split} rows {epoch}": np.concatenate(read),
        f"{split} batches {epoch}": np.array([len(batch) for batch in read]),
    }


def end_with_the_demo(results: str) -> None:
    """End this process when the demo ends, and remove its folder, which a killed demo can't do.

    The system closes the pipe when the demo ends, however it ends. A thread notices that on every system; the signal at
    the death of a parent exists on Linux only.
    """

    def wait() -> None:
        os.read(0, 1)  # nothing is ever written
        # unlike an exit, this ends all threads at once, so nothing writes to the folder
        os.execlp("rm", "rm", "-rf", results)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    job = Job.read(Path(sys.argv[1]))
    end_with_the_demo(job.results)
    dist.init_process_group("gloo")
    try:
        run(job)
    finally:
        dist.destroy_process_group()
