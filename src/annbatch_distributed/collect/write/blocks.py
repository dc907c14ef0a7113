"""Blocks: the rows of a matrix, in blocks that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from annbatch_distributed.collect.matrices import Node, dtype_of, is_dense

#: Number of entries of a CSC matrix that are read at a time.
_N_ENTRIES = 1 << 20


def blocks_of(values: Node, n_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges of rows of blocks of about ``n_bytes`` in memory."""
    n_rows, n_columns = values.shape
    if not n_rows:
        return []
    if is_dense(values):
        n_each = max(1, n_bytes // max(1, n_columns * values.dtype.itemsize))
        stops = np.append(np.arange(n_each, n_rows, n_each), n_rows)
    else:
        group = values.group
        n_entries = max(1, n_bytes // (group["data"].dtype.itemsize + group["indices"].dtype.itemsize))
        if values.format == "csc":  # the entries of a row aren't known, and are held with their rows and their columns
            n_blocks = -(-2 * int(group["data"].shape[0]) // n_entries)
            stops = np.linspace(0, n_rows, min(n_rows, n_blocks or 1) + 1).astype(np.int64)[1:]
        else:
            # rows of 3 1 4 2 entries have the bounds 0 3 4 8 10: blocks of at most 4 entries end at rows 2 3 4
            bounds, ends = np.asarray(group["indptr"][:], dtype=np.int64), [0]
            while ends[-1] < n_rows:
                most = int(np.searchsorted(bounds, bounds[ends[-1]] + n_entries, side="right")) - 1
                ends.append(min(n_rows, max(most, ends[-1] + 1)))
            stops = np.array(ends[1:])
    return [*pairwise([0, *map(int, stops)])]


def read_block(values: Node, start: int, stop: int) -> sp.csr_matrix:
    """Return the rows ``[start, stop)``; a ValueError if the matrix is damaged."""
    if is_dense(values):
        return sp.csr_matrix(_read(values, slice(start, stop)))
    group = values.group
    n_values = int(group["data"].shape[0])
    if (last := int(group["indptr"][-1])) != n_values:
        raise ValueError(f"indptr must end with the number of values, {n_values:,}, got {last:,}")
    if values.format == "csc":
        block = _rows_of_columns(values, start, stop)
    else:
        bounds = np.asarray(group["indptr"][start : stop + 1], dtype=np.int64)
        entries = slice(int(bounds[0]), int(bounds[-1]))
        arrays = _read(group["data"], entries), group["indices"][entries], bounds - bounds[0]
        block = sp.csr_matrix(arrays, shape=(stop - start, values.shape[1]))
    block.check_format(full_check=True)
    block.sum_duplicates()
    return block


def _read(array: Node, entries: slice) -> npt.NDArray[Any]:
    read = np.asarray(array[entries])
    return read.astype(dtype_of(read.dtype), copy=False)


def _rows_of_columns(values: Node, start: int, stop: int) -> sp.csr_matrix:
    """Return some rows of a CSC matrix, which is read as a whole, piece by piece."""
    bounds = np.asarray(values.group["indptr"][:], dtype=np.int64)
    rows, columns, data = map(np.concatenate, zip(*_pieces(values, bounds, start, stop), strict=True))
    return sp.coo_matrix((data, (rows, columns)), shape=(stop - start, values.shape[1])).tocsr()


def _pieces(values: Node, bounds: npt.NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[Any, Any, Any]]:
    n_rows = values.shape[0]
    for first in range(0, max(1, int(bounds[-1])), _N_ENTRIES):
        rows = np.asarray(values.group["indices"][first : first + _N_ENTRIES])
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < n_rows:
            raise ValueError(f"indices must be in [0, {n_rows:,}), got {rows.min()} to {rows.max()}")
        own = np.flatnonzero((rows >= start) & (rows < stop))
        # columns of 3 1 2 entries have the bounds 0 3 4 6: entries 2 3 4 are of columns 0 1 2
        columns = (np.searchsorted(bounds, first + own, side="right") - 1).astype(np.int32)
        data = _read(values.group["data"], slice(first, first + _N_ENTRIES))
        yield rows[own] - start, columns, data[own]
