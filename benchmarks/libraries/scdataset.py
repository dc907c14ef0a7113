"""scDataset over an AnnData file that is read from disk, as its documentation has it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anndata as ad
from scdataset import BlockShuffling, scDataset
from torch.utils.data import DataLoader

from benchmarks.libraries.cells import matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    type Configuration = tuple[int, int, int]
    type Way = Callable[[int], Iterator[Any]]

PACKAGES = "scDataset", "anndata", "h5py", "numpy", "torch"
WORKERS = 2
#: Number of rows that are read together, as in annbatch's chunks; and its default number of batches.
BLOCK, FETCH = 64, 16


def write(source: Path, folder: Path) -> None:
    """Write an AnnData file."""
    folder.mkdir(parents=True)
    ad.AnnData(matrix(source)).write_h5ad(folder / "cells.h5ad")


def loaders(folder: Path, configuration: Configuration, rank: int, world_size: int) -> dict[str, Way]:
    """Return its loader without workers and with them."""
    ways: dict[str, Way] = {}
    for workers in (0, WORKERS):
        cells = ad.read_h5ad(folder / "cells.h5ad", backed="r")
        dataset = scDataset(
            cells,
            BlockShuffling(block_size=BLOCK),
            batch_size=configuration[2],
            fetch_factor=FETCH,
            fetch_transform=in_memory,
            drop_last=True,
            rank=rank,
            world_size=world_size,
            seed=0,
        )
        with_workers: dict[str, Any] = {
            "num_workers": workers,
            "persistent_workers": True,
            "prefetch_factor": FETCH + 1,
        }
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, **(with_workers if workers else {}))
        ways["scDataset, DataLoader" if workers else "scDataset"] = partial(epoch_of, loader)
    return ways


def in_memory(cells: ad.AnnData) -> Any:  # noqa: ANN401 an array, or a sparse one
    """Read the rows of several batches."""
    return cells.to_memory().X


def epoch_of(loader: DataLoader[Any], epoch: int) -> Iterator[Any]:  # noqa: ARG001 it counts epochs itself
    """Read an epoch."""
    yield from loader
