"""Datasets: the cells of a collection in random order, as many at a time as the memory holds.

Cells are cut into slices of consecutive cells. A dataset has random slices, whose cells are shuffled, or sorted by
columns. It is the order of annbatch's ``add_adatas``. Processes can write different datasets at the same time. Each
dataset holds one copy of its values: each slice is read, and its rows are copied to their places in the dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import anndata as ad
import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.sparse as sp
import zarr

from annbatch_distributed.collect.storage import Storage, write_stored
from annbatch_distributed.core.values import Int64Array

#: Peak memory of writing a dataset, in sizes of its values.
PEAK = 4
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
    places: Int64Array
    """Place of each row of the pieces in the dataset."""
    genes: list[npt.NDArray[np.int32]]
    """For the genes of some files, the index of each among all genes; -1 for genes that are not kept."""
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
    values = _dense_values(dataset) if dataset.storage.is_dense else _sparse_values(dataset)
    cells = ad.AnnData(values, obs=dataset.obs, var=dataset.var)
    cells.varm["measured"] = dataset.measured
    write_stored(dataset.path / f"dataset_{dataset.number}", cells, dataset.storage, dataset.files)


def _dense_values(dataset: Dataset) -> npt.NDArray[Any]:
    """Return the values of a dataset as a dense matrix."""
    values, first = np.zeros((len(dataset.obs), len(dataset.var)), dataset.storage.dtype), 0
    for piece in dataset.pieces:
        rows = _rows(piece, dataset)
        places = dataset.places[first : first + rows.shape[0]]
        values[np.repeat(places, np.diff(rows.indptr)), rows.indices] = rows.data
        first += rows.shape[0]
    return values


def _sparse_values(dataset: Dataset) -> sp.csr_matrix:
    """Return the values of a dataset as a CSR matrix, of which no second copy is made."""
    pieces = dataset.pieces
    lengths = np.concatenate([_lengths(piece, dataset) for piece in pieces])
    # rows of 3 1 2 values at the places 1 2 0 begin at the values 2 5 0
    in_order = np.empty_like(lengths)
    in_order[dataset.places] = lengths
    bounds = np.append(0, np.cumsum(in_order))
    data = np.empty(bounds[-1], dataset.storage.dtype)
    indices = np.empty(bounds[-1], np.int32)
    first = 0
    for piece in pieces:
        rows = _rows(piece, dataset)
        places = dataset.places[first : first + rows.shape[0]]
        # value j of a row goes to the beginning of the row there, plus j
        target = np.repeat(bounds[places] - rows.indptr[:-1], np.diff(rows.indptr)) + np.arange(rows.nnz)
        data[target], indices[target] = rows.data, rows.indices
        first += rows.shape[0]
    values = sp.csr_matrix((data, indices, bounds), shape=(len(dataset.obs), len(dataset.var)))
    values.sort_indices()
    return values


def _lengths(piece: Piece, dataset: Dataset) -> Int64Array:
    """Return the number of values of each row of a piece."""
    if (dataset.genes[piece.genes] < 0).any():
        bounds = _rows(piece, dataset).indptr
    else:
        group: Any = zarr.open_group(piece.path, mode="r")
        bounds = np.asarray(group["X/indptr"][piece.start : piece.stop + 1])
    return np.diff(np.asarray(bounds, dtype=np.int64))


def _rows(piece: Piece, dataset: Dataset) -> sp.csr_matrix:
    """Return the rows of a piece with the genes of the collection."""
    values: Any = cast("Any", zarr.open_group(piece.path, mode="r")["X"])
    bounds = np.asarray(values["indptr"][piece.start : piece.stop + 1], dtype=np.int64)
    entries = slice(int(bounds[0]), int(bounds[-1]))
    data, indices = (
        np.asarray(values["data"][entries]),
        dataset.genes[piece.genes][np.asarray(values["indices"][entries])],
    )
    bounds -= bounds[0]
    if (is_dropped := indices < 0).any():
        # of values 5 6 7 of genes 0 -1 2 in rows of 2 and 1, 5 and 7 are left: bounds 0 2 3 become 0 1 2
        bounds -= np.append(0, np.cumsum(is_dropped))[bounds]
        data, indices = data[~is_dropped], indices[~is_dropped]
    return sp.csr_matrix((data, indices, bounds), shape=(len(bounds) - 1, len(dataset.var)))
