"""Blocks: the rows of a matrix, in blocks that fit into memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from annbatch_distributed.collect.matrices import Node, dtype_of, is_dense
from annbatch_distributed.core.values import Int64Array

#: Number of entries of a CSC matrix that are read at a time.
_N_ENTRIES = 1 << 19


def in_columns(values: Node) -> bool:
    """Return True for a CSC matrix, whose rows are scattered over the whole file."""
    return not is_dense(values) and values.format == "csc"


def blocks_of(values: Node, n_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges of rows of blocks of about ``n_bytes`` in memory."""
    n_rows, n_columns = values.shape
    if not n_rows:
        return []
    if is_dense(values):
        n_each = max(1, n_bytes // max(1, n_columns * values.dtype.itemsize))
        return [*pairwise([*range(0, n_rows, n_each), n_rows])]
    n_entries = n_bytes // (values.group["data"].dtype.itemsize + values.group["indices"].dtype.itemsize)
    # entries of a CSC matrix are held with their rows and their columns, and then once more as rows
    n_entries = max(1, n_entries // 2 if in_columns(values) else n_entries)
    # rows of 3 1 4 2 entries have the bounds 0 3 4 8 10: blocks of at most 4 entries end at rows 2 3 4
    bounds, ends = _bounds_of_rows(values), [0]
    while ends[-1] < n_rows:
        most = int(np.searchsorted(bounds, bounds[ends[-1]] + n_entries, side="right")) - 1
        ends.append(min(n_rows, max(most, ends[-1] + 1)))
    return [*pairwise(ends)]


def _bounds_of_rows(values: Node) -> Int64Array:
    """Return the number of entries above each row of a sparse matrix, and at last of all entries."""
    if not in_columns(values):
        return np.asarray(values.group["indptr"][:], dtype=np.int64)
    bounds = np.zeros(values.shape[0] + 1, dtype=np.int64)
    for _, rows in _pieces(values):
        bounds[1:] += np.bincount(rows, minlength=values.shape[0])
    return bounds.cumsum()


def read_blocks(values: Node, blocks: Sequence[tuple[int, int]], scratch: Path) -> Iterator[sp.csr_matrix]:
    """Yield some blocks of rows, in ascending order; a ValueError if the matrix is damaged.

    A CSC matrix is read once for all of them, and its entries are held in the folder ``scratch`` meanwhile.
    """
    if not is_dense(values):
        n_values, last = int(values.group["data"].shape[0]), int(values.group["indptr"][-1])
        if last != n_values:
            raise ValueError(f"indptr must end with the number of values, {n_values:,}, got {last:,}")
    for block in _of_columns(values, blocks, scratch) if in_columns(values) else _of_rows(values, blocks):
        block.check_format(full_check=True)
        block.sum_duplicates()
        yield block


def _of_rows(values: Node, blocks: Sequence[tuple[int, int]]) -> Iterator[sp.csr_matrix]:
    for start, stop in blocks:
        if is_dense(values):
            yield sp.csr_matrix(_read(values, slice(start, stop)))
            continue
        bounds = np.asarray(values.group["indptr"][start : stop + 1], dtype=np.int64)
        entries = slice(int(bounds[0]), int(bounds[-1]))
        arrays = _read(values.group["data"], entries), values.group["indices"][entries], bounds - bounds[0]
        yield sp.csr_matrix(arrays, shape=(stop - start, values.shape[1]))


def _of_columns(values: Node, blocks: Sequence[tuple[int, int]], scratch: Path) -> Iterator[sp.csr_matrix]:
    """Yield blocks of rows of a CSC matrix: its entries are appended to a file for each block, which is then read."""
    bounds = np.asarray(values.group["indptr"][:], dtype=np.int64)
    if [*blocks] == [(0, values.shape[0])]:  # all rows fit into memory
        arrays = _read(values.group["data"], slice(None)), np.asarray(values.group["indices"][:]), bounds
        whole = sp.csc_matrix(arrays, shape=values.shape)
        whole.check_format(full_check=True)
        yield whole.tocsr()
        return
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    starts, stops = (np.array(ends, dtype=np.int64) for ends in zip(*blocks, strict=True))
    paths = [scratch / str(number) for number in range(len(blocks))]
    dtypes = np.dtype([("row", np.int32), ("column", np.int32), ("value", dtype_of(values.group["data"].dtype))])
    for path in paths:
        path.touch()
    for first, rows in _pieces(values):
        data = _read(values.group["data"], slice(first, first + len(rows)))
        # columns of 3 1 2 entries have the bounds 0 3 4 6: of entries 2 3 4, they have 1 1 1, and so are 0 1 2
        n_own = np.diff(np.clip(bounds, first, first + len(rows)))
        columns = np.repeat(np.arange(len(n_own), dtype=np.int32), n_own)
        # the block of each entry, and the entries in the order of their blocks; small integers are sorted in one pass
        number = np.searchsorted(stops, rows, side="right").astype(np.min_scalar_type(len(blocks)))
        order = np.argsort(number, kind="stable")
        ends = np.searchsorted(number[order], np.arange(len(blocks) + 1))
        for path, start, own in zip(paths, starts, map(slice, ends, ends[1:]), strict=True):
            some = order[own]
            some = some[rows[some] >= start]  # rows between blocks are not asked for
            entries = np.empty(len(some), dtypes)
            entries["row"], entries["column"], entries["value"] = rows[some] - start, columns[some], data[some]
            with path.open("ab") as file:
                file.write(entries.tobytes())  # tofile() loses the rest without an error if the disk is full
    for path, start, stop in zip(paths, starts, stops, strict=True):
        yield _block_in(path, dtypes, (int(stop - start), values.shape[1]))
        path.unlink()
    scratch.rmdir()


def _block_in(path: Path, dtypes: np.dtype[Any], shape: tuple[int, int]) -> sp.csr_matrix:
    """Return a block of entries in a file."""
    entries = np.fromfile(path, dtypes)
    # copies, so that the memory of the entries is free before they are sorted
    rows, columns, data = (np.ascontiguousarray(entries[name]) for name in ("row", "column", "value"))
    del entries
    return sp.coo_matrix((data, (rows, columns)), shape=shape).tocsr()


def _pieces(values: Node) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the rows of the entries of a CSC matrix, some at a time, with the number of the first entry."""
    n_rows, indices = values.shape[0], values.group["indices"]
    for first in range(0, indices.shape[0], _N_ENTRIES):
        rows = np.asarray(indices[first : first + _N_ENTRIES])
        if not 0 <= int(rows.min()) <= int(rows.max()) < n_rows:
            raise ValueError(f"indices must be in [0, {n_rows:,}), got {rows.min()} to {rows.max()}")
        yield first, rows


def _read(array: Node, entries: slice) -> npt.NDArray[Any]:
    read = np.asarray(array[entries])
    return read.astype(dtype_of(read.dtype), copy=False)
