"""Train on two collections that have different genes, and resume after a kill, on any number of ranks.

The first run makes the collections up. The second and third resume from the last checkpoint::

    torchrun --standalone --nproc-per-node 2 examples/mixture_ddp.py job/ --kill-at 35
    torchrun --standalone --nproc-per-node 1 examples/mixture_ddp.py job/ --kill-at 55
    torchrun --standalone --nproc-per-node 3 examples/mixture_ddp.py job/

An epoch is ``--n-steps`` steps, and by default the job is one epoch. With each checkpoint, rank 0 writes to
``job/cells/`` which cells every rank had in the steps since the last one.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
import torch.distributed as dist
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import DistributedSampler, MixedLoader, StatefulLoader

#: Cells, genes and weight of each source.
SOURCES = {"tahoe": (2_000, 60, 3), "census": (700, 40, 1)}


class Model(nn.Module):
    """An autoencoder with input and output layers for each source, and shared layers."""

    def __init__(self, n_genes: dict[str, int]) -> None:
        super().__init__()
        self.embed = nn.ModuleDict(
            {name: nn.Linear(n, 32) for name, n in n_genes.items()}
        )
        self.shared = nn.Sequential(nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.decode = nn.ModuleDict(
            {name: nn.Linear(32, n) for name, n in n_genes.items()}
        )

    def forward(self, source: str, counts: torch.Tensor) -> torch.Tensor:
        """Return the reconstructed counts."""
        expressed: torch.Tensor = self.decode[source](
            self.shared(self.embed[source](counts))
        )
        return expressed


def simulate(folder: Path) -> None:
    """Write the collections."""
    rng = np.random.default_rng(0)
    for name, (n_cells, n_genes, _) in SOURCES.items():
        counts = sp.csr_matrix(rng.poisson(0.5, (n_cells, n_genes)).astype("float32"))
        genes = pd.DataFrame(index=[f"{name}-{gene}" for gene in range(n_genes)])
        cells = pd.DataFrame(index=[f"cell {cell}" for cell in range(n_cells)])
        file = folder / f"{name}.h5ad"
        ad.AnnData(counts, obs=cells, var=genes).write_h5ad(file)
        DatasetCollection(folder / f"{name}.zarr").add_adatas([file], rng=rng)


def load(collection: Path) -> StatefulLoader:
    """Return the loader of a source."""
    sampler = DistributedSampler(
        RandomSampler(chunk_size=32, preload_nchunks=8, batch_size=32),
        dist_info="torch",
        seed=0,
        remainder="exact",  # each cell once in each epoch of its source
    )
    loader = StatefulLoader(
        batch_sampler=sampler, to="torch", preload_to_gpu=False, prefetch=1
    )
    return loader.use_collection(DatasetCollection(collection, mode="r"))


def save(folder: Path, job: str, steps: range, parts: dict[str, Any]) -> None:
    """Write a checkpoint, and a log of the cells of the steps since the last one."""
    if (folder / "job").read_text() != job:
        msg = f"a newer job writes to {folder}: stop this job"
        raise RuntimeError(msg)
    states = {name: part.state_dict() for name, part in parts.items()}
    epoch = states["mixture"]["epoch"]
    cells = parts["mixture"].cells_of(steps).assign(epoch=epoch)  # of all ranks
    columns = ["epoch", "step", "source", "rank", "cell"]
    # the log is written before the checkpoint and named by its first step: if the job is
    # killed in between, the next job overwrites it, so that it has each step once
    log = folder / "cells" / f"epoch{epoch}-step{steps[0]:06}.csv"
    cells.to_csv(log, columns=columns, index=False)
    torch.save(states, folder / "unfinished")
    (folder / "unfinished").replace(folder / "last.pt")


def main(
    folder: Path, epochs: int, n_steps: int, every: int, kill_at: int | None
) -> None:
    """Run one rank."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoint = folder / "last.pt"
    if rank == 0 and not (folder / "census.zarr").exists():
        simulate(folder)
    (folder / "cells").mkdir(exist_ok=True)
    dist.barrier()

    loaders = {name: load(folder / f"{name}.zarr") for name in SOURCES}
    weights = {name: weight for name, (*_, weight) in SOURCES.items()}
    mixture = MixedLoader(loaders, weights=weights, n_steps=n_steps, seed=0)
    torch.manual_seed(0)
    network = Model({name: loader.n_var for name, loader in loaders.items()})
    # each step trains only the layers of its source
    model = DistributedDataParallel(network, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts: dict[str, Any] = {
        "model": network,
        "optimizer": optimizer,
        "mixture": mixture,
    }
    first = 0
    if checkpoint.exists():
        states = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])
        first = states["mixture"]["done"]
    mixture.check_ranks_agree()
    job = uuid4().hex  # only the newest job writes checkpoints
    if rank == 0:
        (folder / "job").write_text(job)
        print(
            mixture.plan().round(2)
            if first == 0
            else f"from step {first}, world size {world_size}",
            flush=True,  # otherwise, a killed rank may not print it
        )

    for epoch in range(mixture.next_epoch, epochs):
        mixture.set_epoch(epoch)
        sources = []  # of the steps since the last checkpoint
        for step, batch in enumerate(mixture, start=mixture.batches_done):
            counts = batch["X"].to_dense()
            loss = mse_loss(model(batch["source"], counts), counts)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sources.append(batch["source"])
            if (step + 1) % every == 0 or step + 1 == n_steps:
                steps = range(step + 1 - len(sources), step + 1)
                if rank == 0:
                    line = f"steps {steps[0]} to {step}: {' '.join(sources)}"
                    print(line, flush=True)
                    save(folder, job, steps, parts)
                sources = []
            if step == kill_at and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        read = (
            mixture.check_epoch_read()
        )  # raises unless all ranks read the planned rows
        if rank == 0:
            print(read)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=1, help="number of epochs")
    parser.add_argument(
        "--n-steps", type=int, default=80, help="number of steps of an epoch"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=10,
        help="number of steps between checkpoints",
    )
    parser.add_argument(
        "--kill-at",
        type=int,
        help="step of an epoch at which to kill the last rank, to see the job resume",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start this with a launcher: torchrun --standalone --nproc-per-node 2 mixture_ddp.py job/"
        )
    arguments.folder.mkdir(exist_ok=True)
    main(**vars(arguments))
