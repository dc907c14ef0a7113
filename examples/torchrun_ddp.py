"""Train with DDP on the cells of some donors, and validate on each cell of the held-out donors once.

Run it with torch's launcher::

    torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py --collection cells.zarr --hold-out d09 d10
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from annbatch import DatasetCollection
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import StatefulLoader


def main(
    device: torch.device,
    collection: Path,
    label: str,
    donor: str,
    hold_out: list[str],
    epochs: int,
) -> None:
    """Run one rank."""
    cells = DatasetCollection(collection, mode="r")
    obs = cells.obs([label, donor])
    classes = pd.Categorical(obs[label]).categories
    donors = obs[donor].astype(str)
    if unknown := {*hold_out} - {*donors}:
        msg = (
            f"--hold-out: no cell's {donor} is {', '.join(sorted(unknown))}; "
            f"choose from {', '.join(sorted({*donors}))}"
        )
        raise ValueError(msg)

    def load(mask: pd.Series, *, shuffle: bool) -> StatefulLoader:
        return StatefulLoader.from_collection(
            cells,
            batch_size=32,
            dist_info="torch",
            mask=mask,
            shuffle=shuffle,
            seed=0,
            to="torch",
        )

    # two masks, so that held-out cells are never trained on; a cell without a donor may be one of them
    is_known, is_held_out = obs.notna().all(axis=1), donors.isin(hold_out)
    train = load(is_known & ~is_held_out, shuffle=True)
    validation = load(is_known & is_held_out, shuffle=False)
    # if the seed, mask or collection of a rank differs, every rank raises
    train.check_ranks_agree()
    validation.check_ranks_agree()

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(train.n_var, 64), nn.ReLU(), nn.Linear(64, len(classes))
    )
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(epochs):
        train.set_epoch(epoch)  # each epoch has its own order
        for batch in train:
            counts = batch["X"].to(device).to_dense().float()
            targets = torch.tensor(
                classes.get_indexer(batch["obs"][label]), device=device
            )
            loss = cross_entropy(model(counts), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # raises unless all ranks read the planned rows
        trained_on = train.check_epoch_read()

        totals = torch.zeros(2, dtype=torch.int64, device=device)  # correct, all
        for batch in validation:
            counts = batch["X"].to(device).to_dense().float()
            targets = torch.tensor(
                classes.get_indexer(batch["obs"][label]), device=device
            )
            with torch.no_grad():
                totals[0] += (model(counts).argmax(dim=1) == targets).sum()
            totals[1] += len(targets)
        dist.all_reduce(totals)
        if dist.get_rank() == 0:
            print(
                f"{trained_on}: {totals[0] / totals[1]:.1%} of {totals[1]:,} "
                "cells of other donors are predicted correctly"
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
    parser.add_argument(
        "--donor", default="donor", help="column of obs with the donors"
    )
    parser.add_argument(
        "--hold-out",
        nargs="+",
        required=True,
        metavar="DONOR",
        help="donors to validate on",
    )
    parser.add_argument("--epochs", type=positive, default=3)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start this with a launcher: "
            "torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py ..."
        )

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        # first of all: otherwise, every rank uses GPU 0
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    main(device, **vars(arguments))
    dist.destroy_process_group()
