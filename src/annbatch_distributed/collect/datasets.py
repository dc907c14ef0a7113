"""Datasets: the cells of a collection in random order, as many at a time as the memory holds.

Cells are cut into slices of consecutive cells. A dataset has random slices, whose cells are shuffled, or sorted by
columns. It is the order of annbatch's ``add_adatas``. Processes can write different datasets at the same time. The rows
of each dataset are read slice by slice, and then put in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.sparse as sp
import zarr

from annbatch_distributed.collect.storage import Storage, write_stored
from annbatch_distributed.core.values import Int64Array

#: Peak memory of writing a dataset, in sizes of its values.
PEAK = 5
#: Number of consecutive cells that stay in one dataset, as of annbatch.
SLICE = 1_000


class Piece(NamedTuple):
    """Rows of a part."""

    path: Path
    """Folder of the part."""
    start: int
    """First row within the part."""
    stop: int
    genes: int
    """Index of the genes of its file."""


class Dataset(NamedTuple):
    """Cells that are shuffled at a time."""

    path: Path
    """Folder of the collection."""
    number: int
    pieces: list[Piece]
    order: Int64Array
    """Rows of the pieces, in the order of the dataset."""
    genes: list[sp.csr_matrix]
    """For the genes of some files, the matrix by which their rows are multiplied to have the collection's genes."""
    obs: pd.DataFrame
    """Names and labels, in the order of the dataset."""
    var: pd.DataFrame
    measured: npt.NDArray[np.bool_]
    """True for genes that a file has; of shape ``(n_genes, n_files)``."""
    files: list[str]
    storage: Storage


def slices_of(n_cells: int, n_rows: int, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
    """Return the slices of each dataset of up to ``n_rows`` cells, ascending."""
    size = min(SLICE, n_rows)
    slices = [(start, min(start + size, n_cells)) for start in range(0, n_cells, size)]
    rng.shuffle(slices)
    # 5 slices in datasets of up to 2 are 2 2 1
    n_each = n_rows // size if n_rows < n_cells else len(slices)
    bounds = [*range(0, len(slices), n_each), len(slices)]
    return [sorted(slices[start:stop]) for start, stop in pairwise(bounds)]


def order_of(obs: pd.DataFrame, rng: np.random.Generator, group_by: Sequence[str] | None) -> Int64Array:
    """Return the cells of a dataset in random order, or sorted by columns, and in random order among equal ones."""
    order: Int64Array = rng.permutation(len(obs))
    if group_by is None:
        return order
    table = obs[[*group_by]].iloc[order].reset_index(drop=True)
    by_group: Int64Array = order[table.sort_values([*group_by], kind="stable").index.to_numpy()]
    return by_group


def write_dataset(dataset: Dataset) -> None:
    """Write a dataset into the folder of the collection."""
    cells = ad.AnnData(_values(dataset), obs=dataset.obs, var=dataset.var)
    cells.varm["measured"] = dataset.measured
    write_stored(dataset.path / f"dataset_{dataset.number}", cells, dataset.storage, dataset.files)


def _values(dataset: Dataset) -> sp.csr_matrix | npt.NDArray[Any]:
    """Return the values of a dataset, in its order."""
    rows = (_rows(piece, dataset) for piece in dataset.pieces)
    if dataset.storage.is_dense:
        # one by one, as sparse rows of these cells may take several times the memory
        return np.concatenate([some.toarray() for some in rows])[dataset.order]
    values = sp.vstack([*rows], "csr")[dataset.order]
    values.sort_indices()
    return values


def _rows(piece: Piece, dataset: Dataset) -> sp.csr_matrix:
    """Return the rows of a piece with the genes of the collection."""
    part: Any = zarr.open_group(piece.path, mode="r")
    rows = ad.io.sparse_dataset(part["X"], should_cache_indptr=False)[piece.start : piece.stop]
    return (rows @ dataset.genes[piece.genes]).astype(dataset.storage.dtype, copy=False)


def selection_of(places: npt.NDArray[np.integer[Any]], n_genes: int) -> sp.csr_matrix:
    """Return the matrix that takes genes to their places among all genes; -1 for genes that are not kept.

    >>> selection_of(np.array([1, -1, 0]), 2).toarray().astype(int).tolist()
    [[0, 1], [0, 0], [1, 0]]
    """
    kept = np.flatnonzero(places >= 0)
    return sp.csr_matrix((np.ones(len(kept), np.bool_), (kept, places[kept])), shape=(len(places), n_genes))
