"""Sample cell types by weight on several ranks: here, rare types more often than common ones.

Write a collection in which the cells of each type lie together, and start as many ranks as you like::

    annbatch-distributed collect h5ad/*.h5ad --out cells.zarr --group-by cell_type
    torchrun --standalone --nproc-per-node 2 examples/class_weights.py cells.zarr
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from annbatch import DatasetCollection
from annbatch.samplers import WeightedClassSampler

from annbatch_distributed import DistributedSampler, StatefulLoader

PRELOAD_NCHUNKS, BATCH_SIZE = 128, 64
NOT_SAMPLED = "not sampled"


def weigh(labels: pd.Series, chunk_size: int) -> tuple[pd.Categorical, pd.Series]:
    """Return the type of each cell, as class samplers take it, and the weight of each type."""
    # every cell needs a type: cells without a label get a type that isn't sampled
    types = pd.Categorical(labels).add_categories(NOT_SAMPLED).fillna(NOT_SAMPLED)
    # so do cells in runs that are shorter than a chunk
    starts = np.flatnonzero(np.diff(types.codes, prepend=-1))
    lengths = np.diff(starts, append=len(types))
    is_short = np.repeat(lengths < chunk_size, lengths)
    if is_short.mean() > 0.5:
        raise SystemExit(
            f"cells of the same {labels.name} are not stored together: write the collection with "
            f"annbatch-distributed collect --group-by {labels.name}"
        )
    types[is_short] = NOT_SAMPLED
    if dist.get_rank() == 0:
        lost = labels.astype(object)[types == NOT_SAMPLED].value_counts(dropna=False)
        print("cells that aren't sampled:", lost.to_dict())

    # choose your own; equal weights sample the same number of cells of each type
    weights = np.sqrt(types.value_counts())
    weights[NOT_SAMPLED] = 0
    return types, weights


def sample(
    collection: Path, label: str, num_samples: int | None, chunk_size: int
) -> None:
    """Run one rank."""
    cells = DatasetCollection(collection, mode="r")
    types, weights = weigh(cells.obs([label])[label], chunk_size)
    sampler = DistributedSampler(
        # or ClassSampler, which samples one type for each batch
        WeightedClassSampler(
            chunk_size,
            PRELOAD_NCHUNKS,
            BATCH_SIZE,
            classes=types,
            class_weights=weights.to_numpy(),
            num_samples=num_samples or len(types),  # of all ranks together
        ),
        dist_info="torch",
        sharding="independent",  # every rank samples from all cells, by these weights
        remainder="exact",
        seed=0,
    )
    loader = StatefulLoader(batch_sampler=sampler, to="torch", preload_to_gpu=False)
    loader.use_collection(cells)
    loader.check_ranks_agree()

    sampled = torch.zeros(len(weights), dtype=torch.int64)
    for batch in loader:
        # train here, as in examples/from_h5ad/train.py
        targets = torch.tensor(types.categories.get_indexer(batch["obs"][label]))
        sampled += torch.bincount(targets, minlength=len(sampled))
    dist.all_reduce(sampled)
    if dist.get_rank() == 0:
        table = pd.DataFrame(
            {
                "cells": types.value_counts(),
                "weight": weights / weights.sum(),
                "sampled": sampled / sampled.sum(),
            }
        )
        print(table.round(3))
        print(f"{dist.get_world_size()} ranks sampled {sampled.sum():,} cells")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("collection", type=Path)
    parser.add_argument(
        "--label", default="cell_type", help="column of obs with the classes"
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        help="number of cells to sample (default: the number of cells)",
    )
    parser.add_argument(
        "--chunk-size",
        type=int,
        default=16,
        help="number of cells that are sampled together; types with fewer cells are not "
        "sampled (default: 16)",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start this with a launcher: "
            "torchrun --standalone --nproc-per-node 2 examples/class_weights.py ..."
        )
    else:
        dist.init_process_group("gloo")
        sample(**vars(arguments))
        dist.destroy_process_group()
