"""Train on the cells of some donors, validate on every cell of the others, and resume from the last checkpoint.

Start it with torchrun. After a stop, run it again, on any number of ranks::

    torchrun --standalone --nproc-per-node 2 examples/from_h5ad/train.py --collection cells.zarr --checkpoint last.pt \
        --hold-out d09 d10
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pandas as pd
import torch
import torch.distributed as dist
from annbatch import DatasetCollection
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import StatefulLoader


def start() -> torch.device:
    """Join the job, with one GPU for each rank of this machine, or on CPUs."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # before anything else uses a GPU
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def split(
    collection: Path, label: str, donor: str, hold_out: list[str]
) -> tuple[pd.Index, StatefulLoader, StatefulLoader]:
    """Return the classes, and the loaders of training cells and held-out cells."""
    cells = DatasetCollection(collection, mode="r")
    obs = cells.obs([label, donor])
    if missing := {label, donor} - {*obs.columns}:
        columns = ", ".join(cells.obs().columns)
        msg = f"obs has no column {', '.join(sorted(missing))}; it has {columns}"
        raise ValueError(msg)
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
            batch_size=32,  # on each rank
            dist_info="torch",
            mask=mask,
            shuffle=shuffle,
            seed=0,
            to="torch",
        )

    # a cell without a donor may be of one that is held out
    is_known, is_held_out = obs.notna().all(axis=1), donors.isin(hold_out)
    train = load(is_known & ~is_held_out, shuffle=True)
    validation = load(is_known & is_held_out, shuffle=False)
    return classes, train, validation


def save(checkpoint: Path, parts: dict[str, Any], job: str) -> None:
    """Write a checkpoint completely or not at all, and never replace a newer job's."""
    if checkpoint.with_suffix(".job").read_text() != job:
        msg = f"a newer job writes {checkpoint}: stop this job"
        raise RuntimeError(msg)
    unfinished = checkpoint.with_suffix(".unfinished")
    torch.save({name: part.state_dict() for name, part in parts.items()}, unfinished)
    unfinished.replace(checkpoint)


def tensors(
    batch: dict[str, Any], label: str, classes: pd.Index, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize the counts of a batch, and return them with the class indices."""
    counts = batch["X"].to(device).to_dense().float()
    per_cell = counts.sum(dim=1, keepdim=True).clamp(min=1)
    targets = torch.tensor(classes.get_indexer(batch["obs"][label]), device=device)
    return torch.log1p(1e4 * counts / per_cell), targets


def main(
    collection: Path,
    checkpoint: Path,
    label: str,
    donor: str,
    hold_out: list[str],
    epochs: int,
    every: int,
    kill_at: int | None,
) -> None:
    """Run one rank."""
    device = start()
    classes, train, validation = split(collection, label, donor, hold_out)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(train.n_var, 64),
        nn.ReLU(),
        nn.Linear(64, len(classes)),
    ).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # content of a checkpoint, the same on every rank
    parts: dict[str, Any] = {"loader": train, "model": network, "optimizer": optimizer}
    if checkpoint.exists():
        states = torch.load(checkpoint, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])
    # if the seed, mask, collection or checkpoint of a rank differs, every rank raises
    for loader in (train, validation):
        loader.check_ranks_agree()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    job = uuid4().hex  # only the newest job writes the checkpoint
    if rank == 0:
        checkpoint.with_suffix(".job").write_text(job)
    if rank == 0 and train.next_epoch >= epochs:
        print(f"{checkpoint}: all {epochs} epochs are done")
    for epoch in range(train.next_epoch, epochs):
        train.set_epoch(epoch)
        first = train.batches_done  # 0 unless a checkpoint was loaded
        if rank == 0:
            print(
                f"epoch {epoch} from step {first} of {len(train)} on {world_size} ranks"
            )
        for step, batch in enumerate(train, start=first):
            inputs, targets = tensors(batch, label, classes, device)
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            n_done = step + 1
            if rank == 0 and n_done % every == 0 and n_done < len(train):
                save(checkpoint, parts, job)
            if rank == world_size - 1 and step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        read = train.check_epoch_read()  # raises unless all ranks read the planned rows

        counts = torch.zeros(2, dtype=torch.int64, device=device)  # correct, all
        for batch in validation:
            inputs, targets = tensors(batch, label, classes, device)
            with torch.no_grad():
                counts[0] += (network(inputs).argmax(dim=1) == targets).sum()
            counts[1] += len(targets)
        dist.all_reduce(counts)
        validation.check_epoch_read()
        if rank == 0:
            print(read)
            print(
                f"{counts[0] / counts[1]:.1%} of {counts[1]:,} held-out cells "
                "are predicted correctly"
            )
            save(checkpoint, parts, job)
    dist.destroy_process_group()


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
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="file to save to, and to resume from if it exists",
    )
    parser.add_argument("--label", default="cell_type", help="column of obs to learn")
    parser.add_argument(
        "--donor",
        default="donor",
        help="column of obs with the donors",
    )
    parser.add_argument(
        "--hold-out",
        nargs="+",
        required=True,
        metavar="DONOR",
        help="donors to validate on",
    )
    parser.add_argument("--epochs", type=positive, default=2)
    parser.add_argument(
        "--every",
        type=positive,
        default=20,
        help="number of steps between checkpoints",
    )
    parser.add_argument(
        "--kill-at",
        type=positive,
        help="step at which to kill the last rank, to see the job resume",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start this with a launcher: "
            "torchrun --standalone --nproc-per-node 2 train.py ..."
        )
    main(**vars(arguments))
