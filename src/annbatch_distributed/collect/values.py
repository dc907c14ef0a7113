"""Values: the counts of a file, read in blocks of rows, and what kind of values they are."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

#: An array of h5py or zarr, or a group of the arrays of a sparse matrix.
type Node = Any

#: Number of values that tell the kind of a file before all are read, at its beginning, in its middle and at its end.
_N_SAMPLED = 100_000
#: Number of entries of a CSC matrix that are read at a time.
_N_ENTRIES = 1 << 20


class Kind(IntEnum):
    """Kind of values; a larger one says more."""

    COUNTS = 1
    """Integers from 0."""
    NONNEGATIVE = 2
    """Numbers from 0, such as normalized counts, or NaN."""
    NEGATIVE = 3
    """Numbers of which some are negative, as after scaling."""

    @property
    def described(self) -> str:
        """Words for a message."""
        return {1: "counts", 2: "values that are not integers", 3: "negative values"}[int(self)]


def kind_of(values: npt.NDArray[Any]) -> Kind | None:
    """Return the kind of some values; None if all are 0, which says nothing.

    >>> kind_of(np.array([0.0, 2.0])).name, kind_of(np.array([-0.5, 2.0])).name
    ('COUNTS', 'NEGATIVE')
    """
    if not values.any():
        return None
    if (values < 0).any():
        return Kind.NEGATIVE
    # NaN isn't equal to itself, and infinity is its own integer
    is_whole = values.dtype.kind in "iub" or bool((values == np.rint(values)).all() and np.isfinite(values.max()))
    return Kind.COUNTS if is_whole else Kind.NONNEGATIVE


def is_sparse(values: Node) -> bool:
    """Return True if values are a sparse matrix."""
    return hasattr(values, "keys")


def is_csc(values: Node) -> bool:
    """Return True if values are a sparse matrix in columns."""
    return is_sparse(values) and "csc" in str(values.attrs.get("encoding-type", values.attrs.get("h5sparse_format")))


def shape_of(values: Node) -> tuple[int, ...]:
    """Return the numbers of cells and genes."""
    shape = values.attrs.get("shape", values.attrs.get("h5sparse_shape")) if is_sparse(values) else values.shape
    return tuple(map(int, shape))


def dtype_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values are read, for those that SciPy or PyTorch has no sparse matrices of.

    >>> dtype_of(np.dtype("float16")), dtype_of(np.dtype(">i4"))
    (dtype('float32'), dtype('int32'))
    """
    native = dtype.newbyteorder("=")
    return np.dtype({"float16": np.float32, "bool": np.uint8}.get(str(native), native))


def sampled(values: Node) -> npt.NDArray[Any]:
    """Return some values of a matrix: at its beginning, in its middle and at its end."""
    stored = values["data"] if is_sparse(values) else values
    n_rows = stored.shape[0]
    n_each = min(n_rows, max(1, _N_SAMPLED // max(1, int(np.prod(stored.shape[1:])))))
    starts = sorted({0, (n_rows - n_each) // 2, n_rows - n_each})
    return np.concatenate([np.asarray(stored[start : start + n_each]).ravel() for start in starts])


def blocks_of(values: Node, n_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges of rows of blocks of about ``n_bytes`` in memory."""
    n_rows, n_columns = shape_of(values)
    if not n_rows:
        return []
    if not is_sparse(values):
        n_each = max(1, n_bytes // max(1, n_columns * values.dtype.itemsize))
        stops = np.append(np.arange(n_each, n_rows, n_each), n_rows)
    else:
        n_entries = max(1, n_bytes // (values["data"].dtype.itemsize + values["indices"].dtype.itemsize))
        if is_csc(values):  # the entries of a row aren't known, and are held with their rows and their columns
            n_blocks = -(-2 * int(values["data"].shape[0]) // n_entries)
            stops = np.linspace(0, n_rows, min(n_rows, n_blocks or 1) + 1).astype(np.int64)[1:]
        else:
            # rows of 3 1 4 2 entries have the bounds 0 3 4 8 10: blocks of at most 4 entries end at rows 2 3 4
            bounds, ends = np.asarray(values["indptr"][:], dtype=np.int64), [0]
            while ends[-1] < n_rows:
                most = int(np.searchsorted(bounds, bounds[ends[-1]] + n_entries, side="right")) - 1
                ends.append(min(n_rows, max(most, ends[-1] + 1)))
            stops = np.array(ends[1:])
    return [*pairwise([0, *map(int, stops)])]


def read_block(values: Node, start: int, stop: int) -> sp.csr_matrix:
    """Return the rows ``[start, stop)``; a ValueError if the matrix is damaged."""
    _, n_columns = shape_of(values)
    if not is_sparse(values):
        return sp.csr_matrix(_read(values, slice(start, stop)))
    n_values = int(values["data"].shape[0])
    if (last := int(values["indptr"][-1])) != n_values:
        raise ValueError(f"indptr must end with the number of values, {n_values:,}, got {last:,}")
    if is_csc(values):
        block = _rows_of_columns(values, start, stop)
    else:
        bounds = np.asarray(values["indptr"][start : stop + 1], dtype=np.int64)
        entries = slice(int(bounds[0]), int(bounds[-1]))
        arrays = _read(values["data"], entries), values["indices"][entries], bounds - bounds[0]
        block = sp.csr_matrix(arrays, shape=(stop - start, n_columns))
    block.check_format(full_check=True)
    block.sum_duplicates()
    return block


def _read(array: Node, entries: slice) -> npt.NDArray[Any]:
    read = np.asarray(array[entries])
    return read.astype(dtype_of(read.dtype), copy=False)


def _rows_of_columns(values: Node, start: int, stop: int) -> sp.csr_matrix:
    """Return some rows of a CSC matrix, which is read as a whole, piece by piece."""
    bounds = np.asarray(values["indptr"][:], dtype=np.int64)
    rows, columns, data = map(np.concatenate, zip(*_pieces(values, bounds, start, stop), strict=True))
    return sp.coo_matrix((data, (rows, columns)), shape=(stop - start, shape_of(values)[1])).tocsr()


def _pieces(values: Node, bounds: npt.NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[Any, Any, Any]]:
    for first in range(0, max(1, int(bounds[-1])), _N_ENTRIES):
        rows = np.asarray(values["indices"][first : first + _N_ENTRIES])
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < shape_of(values)[0]:
            raise ValueError(f"indices must be in [0, {shape_of(values)[0]:,}), got {rows.min()} to {rows.max()}")
        own = np.flatnonzero((rows >= start) & (rows < stop))
        # columns of 3 1 2 entries have the bounds 0 3 4 6: entries 2 3 4 are of columns 0 1 2
        columns = (np.searchsorted(bounds, first + own, side="right") - 1).astype(np.int32)
        data = _read(values["data"], slice(first, first + _N_ENTRIES))
        yield rows[own] - start, columns, data[own]
