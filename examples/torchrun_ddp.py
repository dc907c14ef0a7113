"""Train on every rank's own share of the cells of some donors, and validate on every cell of the others exactly once.

Run it with torch's launcher, on cells that it makes up or on a collection of yours::

    torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py --collection cells.zarr --donor donor_id
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
import torch.distributed as dist
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler, SequentialSampler
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import DistributedSampler, StatefulLoader

BATCH_SIZE = 32


def main(
    device: torch.device,
    collection: Path | None,
    label: str,
    donor: str,
    epochs: int,
    log: Path | None,
) -> None:
    """Run one rank."""
    cells = (
        made_up_cells(label, donor)
        if collection is None
        else DatasetCollection(collection, mode="r")
    )
    obs = cells.obs if isinstance(cells, ad.AnnData) else cells.obs([label, donor])
    classes, donors = (pd.Categorical(obs[name]).categories for name in (label, donor))

    # two masks of the cells that have a label: what is held out is never trained on
    is_labelled = obs[label].notna()
    is_held_out = obs[donor].isin(donors[-max(1, len(donors) // 5) :])
    train_sampler = DistributedSampler(
        RandomSampler(
            chunk_size=BATCH_SIZE,
            preload_nchunks=8,
            batch_size=BATCH_SIZE,
            rng=np.random.default_rng(0),
        ),
        dist_info="torch",
        mask=is_labelled & ~is_held_out,
    )
    # "exact": every row once, and still the same number of batches on every rank
    validation_sampler = DistributedSampler(
        SequentialSampler(
            chunk_size=BATCH_SIZE, preload_nchunks=8, batch_size=BATCH_SIZE
        ),
        dist_info="torch",
        remainder="exact",
        mask=is_labelled & is_held_out,
    )
    train, validation = load(train_sampler, cells), load(validation_sampler, cells)
    # a rank with another seed, mask or collection is an error on all of them now,
    # instead of a wrong result
    train.check_ranks_agree()
    validation.check_ranks_agree()

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(train.n_var, 64), nn.ReLU(), nn.Linear(64, len(classes))
    )
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(epochs):
        train_sampler.set_epoch(epoch)  # another order, and other rows are left out
        rows = []
        for batch in train:
            cells = batch["X"].to(device).to_dense().float()
            targets = torch.tensor(
                classes.get_indexer(batch["obs"][label]), device=device
            )
            loss = cross_entropy(model(cells), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows.append(batch["index"])
        log_rows(log, f"train-{epoch}", rows)
        # an error, should it not be what was planned
        trained_on = train.check_epoch_read()

        counts = torch.zeros(2, dtype=torch.int64, device=device)  # right, all
        rows = []
        for batch in validation:
            cells = batch["X"].to(device).to_dense().float()
            targets = torch.tensor(
                classes.get_indexer(batch["obs"][label]), device=device
            )
            with torch.no_grad():
                right = model(cells).argmax(dim=1) == targets
            counts[0] += right.sum()
            counts[1] += len(right)
            rows.append(batch["index"])
        log_rows(log, f"validation-{epoch}", rows)
        dist.all_reduce(counts)
        if dist.get_rank() == 0:
            print(
                f"{trained_on}: {counts[0] / counts[1]:.1%} of {counts[1]:,} "
                "cells of other donors are told right"
            )


def load(
    sampler: DistributedSampler, cells: ad.AnnData | DatasetCollection
) -> StatefulLoader:
    """Open the cells with a sampler."""
    loader = StatefulLoader(
        batch_sampler=sampler, return_index=True, to="torch", preload_to_gpu=False
    )
    return (
        loader.add_adata(cells)
        if isinstance(cells, ad.AnnData)
        else loader.use_collection(cells)
    )


def made_up_cells(label: str, donor: str) -> ad.AnnData:
    """Make up 2,001 cells of four types and ten donors, the same on every rank."""
    rng = np.random.default_rng(0)
    types = rng.integers(4, size=2_001)
    counts = rng.poisson(1 + 2 * (np.arange(50) % 4 == types[:, None])).astype(
        np.float32
    )
    obs = pd.DataFrame(
        {label: types.astype(str), donor: rng.integers(10, size=2_001).astype(str)}
    )
    return ad.AnnData(X=counts, obs=obs.set_index(obs.index.astype(str)))


def log_rows(folder: Path | None, name: str, rows: list[np.ndarray]) -> None:
    """Write down which rows this rank read."""
    if folder is not None:
        np.save(folder / f"{name}-rank{dist.get_rank()}.npy", np.concatenate(rows))


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
    parser.add_argument(
        "--donor",
        default="donor",
        help="the column of obs by which a fifth is held out",
    )
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument(
        "--rows",
        type=existing,
        dest="log",
        help="a folder to write the rows to that each rank reads",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "no launcher has started this: "
            "torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py"
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
