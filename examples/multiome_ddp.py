"""Predict the proteins of cells from their RNA, and resume after a kill, on any number of ranks.

RNA and proteins are two collections. Each batch has the same cells of both. The first run makes the collections up, and
the second and third resume from the last checkpoint::

    torchrun --standalone --nproc-per-node 2 examples/multiome_ddp.py job/ --kill-at 35
    torchrun --standalone --nproc-per-node 1 examples/multiome_ddp.py job/ --kill-at 75
    torchrun --standalone --nproc-per-node 3 examples/multiome_ddp.py job/
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
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import AlignedLoader

N_CELLS, N_GENES, N_PROTEINS = 3_000, 50, 8


def simulate(folder: Path) -> None:
    """Write a collection of the RNA and one of the proteins of the same cells."""
    rng = np.random.default_rng(0)
    counts = rng.poisson(0.5, (N_CELLS, N_GENES)).astype("float32")
    # every protein follows from the genes: 3,000 x 50 @ 50 x 8
    proteins = np.log1p(counts) @ rng.normal(size=(N_GENES, N_PROTEINS))
    proteins = (proteins - proteins.mean(axis=0)) / proteins.std(axis=0)
    cells = pd.DataFrame(index=[f"cell {cell}" for cell in range(N_CELLS)])
    modalities = {"rna": sp.csr_matrix(counts), "protein": proteins.astype("float32")}
    for name, values in modalities.items():
        file = folder / f"{name}.h5ad"
        ad.AnnData(values, obs=cells).write_h5ad(file)
        # with the same rng and sizes, annbatch shuffles both collections in the same order
        DatasetCollection(folder / f"{name}.zarr").add_adatas(
            [file],
            rng=np.random.default_rng(0),
            dataset_size=1_000,
            shuffle_chunk_size=100,
        )


def save(folder: Path, job: str, parts: dict[str, Any]) -> None:
    """Write a checkpoint, unless a newer job does."""
    if (folder / "job").read_text() != job:
        msg = f"a newer job writes to {folder}: stop this job"
        raise RuntimeError(msg)
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save(states, folder / "unfinished")
    (folder / "unfinished").replace(folder / "last.pt")


def main(folder: Path, epochs: int, every: int, kill_at: int | None) -> None:
    """Run one rank."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoint = folder / "last.pt"
    if rank == 0 and not (folder / "protein.zarr").exists():
        simulate(folder)
    dist.barrier()

    modalities = {
        name: DatasetCollection(folder / f"{name}.zarr", mode="r")
        for name in ("rna", "protein")
    }
    # each cell is read once in each epoch: remainder="exact" is the default
    loader = AlignedLoader.from_collections(
        modalities, dist_info="torch", batch_size=32, seed=0, to="torch"
    )
    n_genes, n_proteins = (loader.modalities[name].n_var for name in modalities)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(n_genes, 32), nn.ReLU(), nn.Linear(32, n_proteins)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts: dict[str, Any] = {"loader": loader, "model": network, "optimizer": optimizer}
    if checkpoint.exists():
        states = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])
    loader.check_ranks_agree()
    job = uuid4().hex  # only the newest job writes checkpoints
    if rank == 0:
        (folder / "job").write_text(job)

    for epoch in range(loader.next_epoch, epochs):
        loader.set_epoch(epoch)
        first = loader.batches_done  # 0 unless a checkpoint was loaded
        if rank == 0:
            start = f"epoch {epoch} from step {first}, world size {world_size}"
            print(start, flush=True)  # otherwise, a killed rank may not print it
        errors = []
        for step, batch in enumerate(loader, start=first):
            counts, proteins = batch["rna"]["X"].to_dense(), batch["protein"]["X"]
            loss = mse_loss(model(torch.log1p(counts)), proteins)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            errors.append(loss.item())
            if rank == 0 and (step + 1) % every == 0:
                save(folder, job, parts)
            if step == kill_at and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        read = (
            loader.check_epoch_read()
        )  # raises unless all ranks read the planned rows
        if rank == 0:
            save(folder, job, parts)
            print(read, flush=True)
            # each protein has a variance of 1, so the error would stay at 1 if RNA and
            # proteins were of different cells
            print(f"squared error on rank 0: {np.mean(errors):.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2, help="number of epochs")
    parser.add_argument(
        "--every", type=int, default=10, help="number of steps between checkpoints"
    )
    parser.add_argument(
        "--kill-at",
        type=int,
        help="step of an epoch at which to kill the last rank, to see the job resume",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start this with a launcher: torchrun --standalone --nproc-per-node 2 multiome_ddp.py job/"
        )
    arguments.folder.mkdir(exist_ok=True)
    main(**vars(arguments))
