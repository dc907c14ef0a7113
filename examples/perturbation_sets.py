"""Predict the effect of drugs from sets of treated cells and matched controls, and resume after a kill.

A batch has 4 sets: 16 cells of a cell line and a drug each, with 16 untreated cells of the same line. The first run
makes the collection up, and the second and third resume from the last checkpoint::

    torchrun --standalone --nproc-per-node 2 examples/perturbation_sets.py job/ --kill-at 5
    torchrun --standalone --nproc-per-node 3 examples/perturbation_sets.py job/

With each checkpoint, rank 0 writes to ``job/cells/`` which cells every rank had in the steps since the last one.
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

from annbatch_distributed import CellSets, StatefulLoader

LINES = ["A549", "HeLa", "K562"]
DRUGS = ["DMSO", "afatinib", "bosutinib", "cisplatin", "dasatinib", "erlotinib"]
N_GENES = 30


def simulate(folder: Path) -> None:
    """Write a collection in which the cells of a line and a drug lie together."""
    rng = np.random.default_rng(0)
    lines, drugs = (rng.choice(names, 2_000) for names in (LINES, DRUGS))
    cells = pd.DataFrame({"line": lines, "drug": drugs}).astype("category")
    cells.index = pd.Index([f"cell {cell}" for cell in range(len(cells))])
    # each line has its own expression, and each drug but DMSO the same effect in all lines
    expression = rng.normal(size=(len(LINES), N_GENES))
    effect = rng.normal(size=(len(DRUGS), N_GENES))
    effect[0] = 0
    codes = [cells[name].cat.codes for name in ("line", "drug")]
    counts = rng.poisson(np.exp(expression[codes[0]] + effect[codes[1]]))
    file = folder / "cells.h5ad"
    ad.AnnData(sp.csr_matrix(counts.astype("float32")), obs=cells).write_h5ad(file)
    DatasetCollection(folder / "cells.zarr").add_adatas(
        [file], groupby=["line", "drug"], rng=rng
    )


def effects(batch: dict[str, Any]) -> torch.Tensor:
    """Return the mean of each set's cells minus the mean of its controls: (sets, genes)."""
    expressed = torch.log1p(batch["X"].to_dense())
    # set 0, its controls, set 1, its controls, ...: means 0, 1, 2, 3, ...
    which = torch.from_numpy(2 * batch["set"] + batch["is_control"])
    n_cells = torch.bincount(which).unsqueeze(1)
    sums = torch.zeros(len(n_cells), N_GENES).index_add(0, which, expressed)
    means = (sums / n_cells).reshape(-1, 2, N_GENES)
    return means[:, 0] - means[:, 1]


def drugs_of(batch: dict[str, Any]) -> torch.Tensor:
    """Return the number of each set's drug."""
    is_first = np.unique(batch["set"], return_index=True)[1]
    names = batch["obs"]["drug"].iloc[is_first]
    return torch.tensor([DRUGS.index(name) for name in names])


def save(folder: Path, job: str, steps: range, parts: dict[str, Any]) -> None:
    """Write a checkpoint, and a log of the cells of the steps since the last one."""
    if (folder / "job").read_text() != job:
        msg = f"a newer job writes to {folder}: stop this job"
        raise RuntimeError(msg)
    states = {name: part.state_dict() for name, part in parts.items()}
    epoch = states["loader"]["epoch"]
    cells = parts["loader"].cells_of(steps, ["line", "drug"]).assign(epoch=epoch)
    # the log is written before the checkpoint and named by its first step: if the job is
    # killed in between, the next job overwrites it, so that it has each step once
    log = folder / "cells" / f"epoch{epoch}-step{steps[0]:06}.csv"
    cells.to_csv(log, index=False)
    torch.save(states, folder / "unfinished")
    (folder / "unfinished").replace(folder / "last.pt")


def main(folder: Path, epochs: int, every: int, kill_at: int | None) -> None:
    """Run one rank."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoint = folder / "last.pt"
    if rank == 0 and not (folder / "cells.zarr").exists():
        simulate(folder)
    (folder / "cells").mkdir(exist_ok=True)
    dist.barrier()

    collection = DatasetCollection(folder / "cells.zarr", mode="r")
    sets = CellSets.from_obs(
        collection.obs(["line", "drug"]),
        by=["line", "drug"],
        set_size=16,
        controls={"drug": "DMSO"},
        match=["line"],
        remainder="keep",  # every treated cell is in a set
    )
    loader = StatefulLoader.from_collection(
        collection, sets=sets, batch_size=4, dist_info="torch", seed=0, to="torch"
    )
    torch.manual_seed(0)
    network = nn.Embedding(len(DRUGS), N_GENES)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
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
        first = saved = loader.batches_done  # 0 unless a checkpoint was loaded
        if rank == 0:
            start = f"epoch {epoch} from step {first}, world size {world_size}"
            print(start, flush=True)  # otherwise, a killed rank may not print it
        n_steps, errors = len(loader), []
        for step, batch in enumerate(loader, start=first):
            loss = mse_loss(model(drugs_of(batch)), effects(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            errors.append(loss.item())
            if rank == 0 and ((step + 1) % every == 0 or step + 1 == n_steps):
                save(folder, job, range(saved, step + 1), parts)
                saved = step + 1
            if step == kill_at and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        read = (
            loader.check_epoch_read()
        )  # raises unless all ranks read the planned rows
        if rank == 0:
            print(read, flush=True)
            print(f"squared error on rank 0: {np.mean(errors):.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=4, help="number of epochs")
    parser.add_argument(
        "--every", type=int, default=2, help="number of steps between checkpoints"
    )
    parser.add_argument(
        "--kill-at",
        type=int,
        help="step of an epoch at which to kill the last rank, to see the job resume",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start this with a launcher: torchrun --standalone --nproc-per-node 2 perturbation_sets.py job/"
        )
    arguments.folder.mkdir(exist_ok=True)
    main(**vars(arguments))
