"""Train with Accelerate, and resume in the middle of an epoch after a stop.

Run it, stop it, and run it again with the last checkpoint, with as many processes as there are then::

    torchrun --standalone --nproc-per-node 2 examples/accelerate_ddp.py --collection cells.zarr
    torchrun --standalone --nproc-per-node 2 examples/accelerate_ddp.py --collection cells.zarr --resume checkpoints/epoch-0-step-20

With GPUs, ``accelerate launch --num_processes 2`` works too; without them, it starts a single process.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pandas as pd
import torch
from accelerate import Accelerator
from annbatch import DatasetCollection
from torch import nn
from torch.nn.functional import cross_entropy

from annbatch_distributed import StatefulLoader


def main(
    collection: Path,
    label: str,
    epochs: int,
    checkpoints: Path,
    every: int,
    resume: Path | None,
) -> None:
    """Run one rank."""
    # without GPUs and without cpu=True, Accelerate would treat every process as rank 0
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    cells = DatasetCollection(collection, mode="r")
    labels = cells.obs([label])[label]
    classes = pd.Categorical(labels).categories
    loader = StatefulLoader.from_collection(
        cells,
        batch_size=32,
        dist_info=accelerator,
        mask=labels.notna(),
        seed=0,
        to="torch",
    )

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(loader.n_var, 64), nn.ReLU(), nn.Linear(64, len(classes))
    )
    # the loader is sharded already: a DataLoader around it would be sharded a second
    # time, and raises an error
    model, optimizer = accelerator.prepare(
        network, torch.optim.AdamW(network.parameters(), lr=1e-3)
    )
    # save_state and load_state include it
    accelerator.register_for_checkpointing(loader)
    if resume is not None:
        accelerator.load_state(str(resume))
    # if the seed, state or collection of a rank differs, every rank raises
    loader.check_ranks_agree()

    for epoch in range(loader.next_epoch, epochs):
        loader.set_epoch(epoch)  # an epoch that was just loaded stays where it is
        for step, batch in enumerate(loader, start=loader.batches_done + 1):
            with accelerator.accumulate(model):
                # prepare moves only the batches of its own loaders
                counts = batch["X"].to(accelerator.device).to_dense().float()
                targets = torch.tensor(
                    classes.get_indexer(batch["obs"][label]), device=accelerator.device
                )
                loss = cross_entropy(model(counts), targets)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
            if step % every == 0:
                accelerator.save_state(str(checkpoints / f"epoch-{epoch}-step-{step}"))
        accelerator.print(
            f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean'):.3f}"
        )


def positive(text: str) -> int:
    """Parse a positive integer."""
    if (number := int(text)) < 1:
        msg = f"must be 1 or more, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


def existing(text: str) -> Path:
    """Parse a path that exists."""
    if not (path := Path(text)).exists():
        msg = f"{text!r} doesn't exist"
        raise argparse.ArgumentTypeError(msg)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collection", type=existing, required=True)
    parser.add_argument("--label", default="cell_type", help="column of obs to learn")
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        help="folder for checkpoints",
    )
    parser.add_argument(
        "--every", type=positive, default=10, help="number of steps between checkpoints"
    )
    parser.add_argument("--resume", type=existing, help="checkpoint to resume from")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # which accelerate sets for two processes or more
        parser.error(
            "start this with a launcher: "
            "torchrun --standalone --nproc-per-node 2 examples/accelerate_ddp.py ..."
        )

    main(**vars(arguments))
