"""Datasets: the cells of a collection in random order, as many at a time as the memory holds.

Cells are cut into slices of consecutive cells. A dataset has random slices, whose cells are shuffled, or sorted by
columns. It is the order of annbatch's ``add_adatas``. Processes can write different datasets at the same time. The rows
of each dataset are read slice by slice, and then put in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.sparse as sp
import zarr

from annbatch_distributed.collect.matrices import Cells
from annbatch_distributed.collect.options import Options
from annbatch_distributed.collect.write.parts import Part
from annbatch_distributed.collect.write.storage import Storage, write_stored
from annbatch_distributed.core.values import Int64Array

#: Peak memory of writing a dataset, in sizes of its values.
_PEAK = 5
#: Number of consecutive cells that stay in one dataset, as of annbatch.
_SLICE = 1_000


class Piece(NamedTuple):
    """Rows of a part."""

    path: Path
    """Folder of the part."""
    start: int
    """First row within the part."""
    stop: int
    genes: sp.csr_matrix
    """Matrix by which the rows are multiplied to have the genes of the collection."""


class Dataset(NamedTuple):
    """Cells that are shuffled at a time."""

    path: Path
    pieces: list[Piece]
    order: Int64Array
    """Rows of the pieces, in the order of the dataset."""
    obs: pd.DataFrame
    """Names and labels, in the order of the dataset."""
    var: pd.DataFrame
    measured: pd.DataFrame
    """True for genes that a file has; its columns are the files."""
    storage: Storage


def datasets_of(
    cells: Cells,
    parts: Sequence[Sequence[Part]],
    storage: Storage,
    options: Options,
    folder: Path,
    n_values: int,
    n_bytes: int,
    start: int,
) -> Iterator[Dataset]:
    """Yield the datasets of a collection, numbered from ``start`` on.

    ``parts`` has the parts of each file, which have ``n_values`` values in all. ``n_bytes`` is the memory of a process.
    """
    pieces = [
        Piece(part.path, 0, part.stop - part.start, matrix.genes)
        for matrix, own in zip(cells.matrices, parts, strict=True)
        for part in own
    ]
    firsts: Int64Array = np.append(0, np.cumsum([piece.stop for piece in pieces]))
    n_rows = _n_rows(cells, storage, n_values, n_bytes)
    rng = np.random.default_rng(options.seed)
    for number, slices in enumerate(_slices(len(cells.obs), n_rows, rng), start):
        rows = np.concatenate([np.arange(*bounds) for bounds in slices])
        order = _order(cells.obs.iloc[rows], rng, options.group_by)
        yield Dataset(
            folder / f"dataset_{number}",
            [*chain.from_iterable(_cut(pieces, firsts, *bounds) for bounds in slices)],
            order,
            cells.obs.iloc[rows[order]],
            cells.var,
            cells.measured,
            storage,
        )


def _n_rows(cells: Cells, storage: Storage, n_values: int, n_bytes: int) -> int:
    """Return the number of cells of a dataset that a process with some memory can write."""
    if storage.is_dense:
        row_bytes: float = len(cells.var) * storage.dtype.itemsize
    else:
        # indices of a CSR matrix in memory have 4 bytes
        row_bytes = 8 + n_values / len(cells.obs) * (storage.dtype.itemsize + 4)
    return max(_SLICE, int(n_bytes / (_PEAK * row_bytes)))


def _slices(n_cells: int, n_rows: int, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
    """Return the slices of each dataset of up to ``n_rows`` cells, ascending."""
    size = min(_SLICE, n_rows)
    slices = [(start, min(start + size, n_cells)) for start in range(0, n_cells, size)]
    rng.shuffle(slices)
    # 5 slices in datasets of up to 2 are 2 2 1
    n_each = n_rows // size if n_rows < n_cells else len(slices)
    bounds = [*range(0, len(slices), n_each), len(slices)]
    return [sorted(slices[start:stop]) for start, stop in pairwise(bounds)]


def _order(obs: pd.DataFrame, rng: np.random.Generator, group_by: Sequence[str] | None) -> Int64Array:
    """Return the cells of a dataset in random order, or sorted by columns, and in random order among equal ones."""
    order: Int64Array = rng.permutation(len(obs))
    if group_by is None:
        return order
    table = obs[[*group_by]].iloc[order].reset_index(drop=True)
    by_group: Int64Array = order[table.sort_values([*group_by], kind="stable").index.to_numpy()]
    return by_group


def _cut(pieces: Sequence[Piece], firsts: Int64Array, start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces of the cells ``[start, stop)``; ``firsts`` are the first cells of all pieces.

    >>> pieces = [Piece(Path(name), 0, 100, None) for name in "abc"]
    >>> [piece[:3] for piece in _cut(pieces, np.array([0, 100, 200, 300]), 90, 110)]
    [(PosixPath('a'), 90, 100), (PosixPath('b'), 0, 10)]
    """
    low, high = np.searchsorted(firsts, (start, stop - 1), side="right") - 1
    for at in range(int(low), int(high) + 1):
        first, end = int(firsts[at]), int(firsts[at + 1])
        yield pieces[at]._replace(start=max(start, first) - first, stop=min(stop, end) - first)


def write_dataset(dataset: Dataset) -> None:
    """Write a dataset into the folder of the collection, where it appears when it is complete."""
    cells = ad.AnnData(_values(dataset), obs=dataset.obs, var=dataset.var)
    cells.varm["measured"] = dataset.measured.to_numpy()
    path = dataset.path
    unfinished = path.parent.parent / f"{path.name}.unfinished"
    write_stored(unfinished, cells, dataset.storage, [*dataset.measured])
    unfinished.rename(path)


def _values(dataset: Dataset) -> sp.csr_matrix | npt.NDArray[Any]:
    """Return the values of a dataset, in its order."""
    rows = (_rows(piece, dataset.storage.dtype) for piece in dataset.pieces)
    if dataset.storage.is_dense:
        # one by one, as sparse rows of these cells may take several times the memory
        return np.concatenate([some.toarray() for some in rows])[dataset.order]
    values = sp.vstack([*rows], "csr")[dataset.order]
    values.sort_indices()
    return values


def _rows(piece: Piece, dtype: np.dtype[Any]) -> sp.csr_matrix:
    """Return the rows of a piece with the genes of the collection."""
    part: Any = zarr.open_group(piece.path, mode="r")
    rows = ad.io.sparse_dataset(part["X"], should_cache_indptr=False)[piece.start : piece.stop]
    return (rows @ piece.genes).astype(dtype, copy=False)
