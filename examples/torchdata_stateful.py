"""Train with torchdata's StatefulDataLoader, which counts for its workers too, and resume in the middle of an epoch.

Run it, stop it, and run it again with the last checkpoint of every rank::

    torchrun --standalone --nproc-per-node 2 examples/torchdata_stateful.py --collection cells.zarr
    torchrun --standalone --nproc-per-node 2 examples/torchdata_stateful.py --collection cells.zarr --resume checkpoints/epoch-0-batch-20
"""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
import zarr
from annbatch import DatasetCollection
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from annbatch_distributed import StatefulLoader


def main(
    device: torch.device,
    collection: Path,
    label: str,
    epochs: int,
    num_workers: int,
    checkpoints: Path,
    every: int,
    resume: Path | None,
) -> None:
    """Run one rank."""
    cells = DatasetCollection(collection, mode="r")
    labels = cells.obs([label])[label]
    classes = pd.Categorical(labels).categories
    loader = StatefulLoader.from_collection(
        cells,
        batch_size=32,
        dist_info="torch",
        mask=labels.notna(),
        seed=0,
        to="torch",
    )
    # a rank with another seed or collection raises on every rank, instead of giving
    # a wrong result
    loader.check_ranks_agree()
    batches = StatefulDataLoader(
        loader,
        batch_size=None,  # they are batches already
        num_workers=num_workers,
        # zarrs's threads don't survive a fork; and workers that persisted would not hear of
        # the epoch that is set
        multiprocessing_context="spawn" if num_workers else None,
    )
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(loader.n_var, 64), nn.ReLU(), nn.Linear(64, len(classes))
    )
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first, done = 0, 0
    if resume is not None:
        saved = torch.load(
            resume / f"rank{dist.get_rank()}.pt", weights_only=True, map_location=device
        )
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        # loaded when the next pass begins, not now
        batches.load_state_dict(saved["batches"])
        first, done = saved["epoch"], saved["done"]

    for epoch in range(first, epochs):
        loader.set_epoch(epoch)
        for batch in batches:
            targets = torch.tensor(
                classes.get_indexer(batch["obs"][label]), device=device
            )
            loss = cross_entropy(
                model(batch["X"].to(device).to_dense().float()), targets
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            # a state after the last batch would undo the set_epoch of the next epoch
            if done % every == 0 and done < len(batches):
                folder = checkpoints / f"epoch-{epoch}-batch-{done}"
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "batches": batches.state_dict(),
                        "epoch": epoch,
                        "done": done,
                    },
                    folder / f"rank{dist.get_rank()}.pt",
                )
        done = 0
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f} after {len(batches)} batches")


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
        "--label", default="cell_type", help="the column of obs to learn"
    )
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument(
        "--num-workers", type=int, default=0, help="processes of each rank that read"
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        help="the folder for checkpoints",
    )
    parser.add_argument(
        "--every", type=positive, default=10, help="after how many batches to save one"
    )
    parser.add_argument("--resume", type=existing, help="the checkpoint to resume from")
    arguments = parser.parse_args()
    if arguments.num_workers < 0:
        parser.error(
            f"argument --num-workers: must be 0 or more, got {arguments.num_workers}"
        )
    if "RANK" not in os.environ:
        parser.error(
            "no launcher has started this: "
            "torchrun --standalone --nproc-per-node 2 examples/torchdata_stateful.py ..."
        )

    if find_spec("zarrs"):
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    elif os.environ["RANK"] == "0":
        print("cells are read faster with zarrs: pip install zarrs")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        # first of all: what doesn't ask takes GPU 0 on every rank otherwise
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    main(device, **vars(arguments))
    dist.destroy_process_group()
