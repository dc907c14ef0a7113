"""Train on the cells of some donors, validate on every cell of the others, and go on from the last checkpoint.

Run it with torch's launcher, and after whatever has ended it run it again, on any number of ranks::

    torchrun --standalone --nproc-per-node 2 examples/from_h5ad/train.py --collection cells.zarr --checkpoint last.pt
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler, SequentialSampler
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import DistributedSampler, StatefulLoader

BATCH_SIZE = 32  # of each rank


def start() -> torch.device:
    """Join the job: with a GPU for each rank of this machine, or else on its CPU."""
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # before anything else uses a GPU
        dist.init_process_group("nccl")
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def split(
    collection: Path,
    label: str,
    donor: str,
) -> tuple[pd.Index, StatefulLoader, StatefulLoader]:
    """Return the classes, and loaders of cells to train on and of held-out ones."""
    cells = DatasetCollection(collection, mode="r")
    obs = cells.obs([label, donor])
    classes, donors = (
        pd.Index(sorted(obs[of].dropna().unique())) for of in (label, donor)
    )
    is_known = obs[label].notna()
    is_held_out = obs[donor].isin(donors[-max(1, len(donors) // 5) :])  # a fifth

    def load(
        sampler: RandomSampler | SequentialSampler, mask: pd.Series
    ) -> StatefulLoader:
        distributed = DistributedSampler(
            sampler,
            dist_info="torch",
            seed=0,
            mask=mask,
            remainder="exact",  # every cell once, in as many batches on every rank
        )
        return StatefulLoader(
            batch_sampler=distributed,
            return_index=True,
            to="torch",
            preload_to_gpu=False,  # batches go there when they are trained on
            read_ahead=1,  # meanwhile, the next ones are read
        ).use_collection(cells)

    sizes = {"chunk_size": 64, "preload_nchunks": 16, "batch_size": BATCH_SIZE}
    train = load(RandomSampler(**sizes), is_known & ~is_held_out)
    validation = load(SequentialSampler(**sizes), is_known & is_held_out)
    return classes, train, validation


def save(checkpoint: Path, parts: dict[str, Any]) -> None:
    """Write a checkpoint, which is there in whole or not at all."""
    unfinished = checkpoint.with_suffix(".unfinished")
    torch.save({name: part.state_dict() for name, part in parts.items()}, unfinished)
    unfinished.replace(checkpoint)


def tensors(
    batch: dict[str, Any], label: str, classes: pd.Index, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the counts of a batch, and number the classes of its cells."""
    counts = batch["X"].to(device).to_dense().float()
    per_cell = counts.sum(dim=1, keepdim=True).clamp(min=1)
    targets = torch.tensor(classes.get_indexer(batch["obs"][label]), device=device)
    return torch.log1p(1e4 * counts / per_cell), targets


def main(
    collection: Path,
    checkpoint: Path,
    label: str,
    donor: str,
    epochs: int,
    every: int,
    kill_at: int | None,
) -> None:
    """Run one rank."""
    device = start()
    classes, train, validation = split(collection, label, donor)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(train.n_var, 64),
        nn.ReLU(),
        nn.Linear(64, len(classes)),
    ).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # what a checkpoint holds; it is the same on every rank
    parts: dict[str, Any] = {"model": network, "optimizer": optimizer, "loader": train}
    if checkpoint.exists():
        states = torch.load(checkpoint, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])
    # another seed, mask, collection or checkpoint on one rank is an error on all of
    # them
    for loader in (train, validation):
        loader.check_ranks_agree()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    for epoch in range(train.next_epoch, epochs):
        train.set_epoch(epoch)
        first = train.sampler.batches_done + 1  # 1, unless a checkpoint was loaded
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
            if rank == 0 and step % every == 0 and step < len(train):
                save(checkpoint, parts)
            if rank == world_size - 1 and step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        read = train.check_epoch_read()  # an error, unless it is what was planned

        counts = torch.zeros(2, dtype=torch.int64, device=device)  # right, in all
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
                f"right about {counts[0] / counts[1]:.1%} "
                f"of {counts[1]:,} held-out cells"
            )
            save(checkpoint, parts)
    dist.destroy_process_group()


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
    parser.add_argument("--collection", type=existing, required=True)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="is written, and gone on from if it is there",
    )
    parser.add_argument(
        "--label", default="cell_type", help="the column of obs to learn"
    )
    parser.add_argument(
        "--donor",
        default="donor",
        help="the column of obs by which a fifth is held out",
    )
    parser.add_argument("--epochs", type=positive, default=2)
    parser.add_argument(
        "--every",
        type=positive,
        default=20,
        help="after how many steps to save a checkpoint",
    )
    parser.add_argument(
        "--kill-at",
        type=positive,
        help="at which step to kill the last rank, to see it go on",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "no launcher has started this: "
            "torchrun --standalone --nproc-per-node 2 train.py ..."
        )
    main(**vars(arguments))
