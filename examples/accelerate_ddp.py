"""Train with accelerate on every rank's own share of the cells, and go on in the middle of an epoch after a stop.

Run it, stop it, and run it again with the last checkpoint, with as many processes as there are then::

    accelerate launch --num_processes 2 examples/accelerate_ddp.py --checkpoints checkpoints/
    accelerate launch --num_processes 2 examples/accelerate_ddp.py --resume checkpoints/step-20

Without GPUs, accelerate starts one process; start two with ``torchrun --standalone --nproc-per-node 2``.
"""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import torch
import zarr
from accelerate import Accelerator
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from torch import nn
from torch.nn.functional import cross_entropy

from annbatch_distributed import DistributedSampler, StatefulLoader

BATCH_SIZE = 32


def main(
    collection: Path | None,
    label: str,
    epochs: int,
    checkpoints: Path,
    every: int,
    resume: Path | None,
    log: Path | None,
) -> None:
    """Run one rank."""
    # without cpu=True, and without GPUs, accelerate would take every process for rank 0
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    classes = pd.Categorical(labels_of(collection, label)).categories
    loader = load(collection, label, accelerator)

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(loader.n_var, 64), nn.ReLU(), nn.Linear(64, len(classes))
    )
    # the loader is this rank's already: a DataLoader around it would be shared out a
    # second time, and raises an error
    model, optimizer = accelerator.prepare(
        network, torch.optim.AdamW(network.parameters(), lr=1e-3)
    )
    # save_state and load_state take it along
    accelerator.register_for_checkpointing(loader)
    if resume is not None:
        accelerator.load_state(str(resume))
    # a rank with another seed, state or collection is an error on all of them now,
    # instead of a wrong result
    loader.check_ranks_agree()

    for epoch in range(loader.next_epoch, epochs):
        loader.set_epoch(epoch)  # changes nothing in the epoch that was just loaded
        rows = []
        for batch in loader:
            with accelerator.accumulate(model):
                # prepare moves the batches of its own loaders only
                cells = batch["X"].to(accelerator.device).to_dense().float()
                targets = torch.tensor(
                    classes.get_indexer(batch["obs"][label]), device=accelerator.device
                )
                loss = cross_entropy(model(cells), targets)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
            rows.append(batch["index"])
            if accelerator.step % every == 0:
                accelerator.save_state(str(checkpoints / f"step-{accelerator.step}"))
        if log is not None:
            np.save(
                log / f"train-{epoch}-rank{accelerator.process_index}.npy",
                np.concatenate(rows),
            )
        accelerator.print(
            f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean'):.3f}"
        )


def labels_of(collection: Path | None, label: str) -> pd.Series:
    """Give the label of each cell."""
    obs = (
        made_up_cells(label).obs
        if collection is None
        else DatasetCollection(collection, mode="r").obs([label])
    )
    return obs[label]


def load(
    collection: Path | None, label: str, accelerator: Accelerator
) -> StatefulLoader:
    """Open the cells that have a label, on this rank."""
    sampler = DistributedSampler(
        RandomSampler(chunk_size=BATCH_SIZE, preload_nchunks=8, batch_size=BATCH_SIZE),
        dist_info=accelerator,
        seed=0,
        mask=labels_of(collection, label).notna(),
    )
    loader = StatefulLoader(
        batch_sampler=sampler, return_index=True, to="torch", preload_to_gpu=False
    )
    if collection is None:
        return loader.add_adata(made_up_cells(label))
    return loader.use_collection(DatasetCollection(collection, mode="r"))


def made_up_cells(label: str) -> ad.AnnData:
    """Make up 2,001 cells of four types, the same on every rank."""
    rng = np.random.default_rng(0)
    types = rng.integers(4, size=2_001)
    counts = rng.poisson(1 + 2 * (np.arange(50) % 4 == types[:, None])).astype(
        np.float32
    )
    return ad.AnnData(
        X=counts,
        obs=pd.DataFrame(
            {label: types.astype(str)}, index=np.arange(2_001).astype(str)
        ),
    )


def positive(text: str) -> int:
    """Read a number that is 1 or more."""
    if (number := int(text)) < 1:
        msg = f"must be 1 or more, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


def existing(text: str) -> Path:
    """Read a path of something that is there."""
    if not (path := Path(text)).exists():
        msg = f"{text!r} is not there"
        raise argparse.ArgumentTypeError(msg)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--collection",
        type=existing,
        help="an annbatch collection; without one, cells are made up",
    )
    parser.add_argument(
        "--label", default="cell_type", help="the column of obs to learn"
    )
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        help="the folder for checkpoints",
    )
    parser.add_argument(
        "--every", type=positive, default=10, help="after how many steps to save one"
    )
    parser.add_argument("--resume", type=existing, help="the checkpoint to go on from")
    parser.add_argument(
        "--rows",
        type=existing,
        dest="log",
        help="a folder to write the rows to that each rank reads",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # which accelerate sets for two processes or more
        parser.error(
            "no launcher has started this: accelerate launch --num_processes 2 "
            "examples/accelerate_ddp.py, or without GPUs torchrun --standalone "
            "--nproc-per-node 2 examples/accelerate_ddp.py"
        )

    if find_spec("zarrs"):
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    elif os.environ["RANK"] == "0":
        print("cells are read faster with zarrs: pip install zarrs")
    main(**vars(arguments))
