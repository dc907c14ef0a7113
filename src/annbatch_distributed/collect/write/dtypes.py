"""Dtypes: the form in which the values of all files are stored, by their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from annbatch_distributed.collect.matrices import Cells, Kind
from annbatch_distributed.collect.options import Options
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.write.parts import Statistics
from annbatch_distributed.collect.write.storage import Storage, Stored, smallest
from annbatch_distributed.core.values import few

#: Largest integer up to which a dtype of floats holds each one.
_MOST_EXACT = {"float32": 2**24, "float64": 2**53}


def kind_in(statistics: Sequence[Statistics]) -> Kind | None:
    """Return the kind of the values of some parts; None if all are 0."""
    return max((part.kind for part in statistics if part.kind is not None), default=None)


def storage_of(
    cells: Cells, statistics: Sequence[Sequence[Statistics]], options: Options, before: Stored | None = None
) -> Storage:
    """Return the form of the cells; ``statistics`` are of the parts of each file.

    ``before`` is the form of a collection to which they are added. Raises Problems if a dtype doesn't hold all values.
    """
    dtypes = [matrix.dtype for matrix in cells.matrices]
    every = [*chain.from_iterable(statistics)]
    are_counts, most = kind_in(every) in (None, Kind.COUNTS), max(part.most for part in every)
    # a file whose values are all 0 says nothing
    of_values = {own for own, parts in zip(dtypes, statistics, strict=True) if kind_in(parts) is not None}
    different = of_values or {*dtypes}
    file_dtype = _file_dtype(different, most, are_counts=are_counts) if before is None else before.file_dtype
    if before is not None:
        is_held = _holds(file_dtype, most) if are_counts else np.result_type(*different, file_dtype) == file_dtype
        if not is_held:
            what = f"counts up to {int(most):,}" if are_counts else few(sorted(map(str, different)), 10)
            raise Problems(f"{file_dtype} of the collection must hold the values of all files, got {what}")
    if options.dtype is not None:
        chosen = stored = np.dtype(options.dtype)
        if (are_counts and not _holds(chosen, most)) or not (are_counts or chosen.kind == "f"):
            what = f"counts up to {int(most):,}" if are_counts else "values that are not counts"
            raise Problems(
                f"dtype={options.dtype!r}: must hold the values of all files, got {what}. Choose another one"
            )
        file_dtype = chosen if before is None else file_dtype
    else:
        _check_integers(dtypes, statistics, file_dtype)
        stored = smallest(most, file_dtype) if are_counts else file_dtype
    is_dense = _is_dense(cells, statistics, stored) if before is None else before.is_dense
    return Storage(stored, file_dtype, options.compression, is_dense)


def _holds(dtype: np.dtype[Any], most: float) -> bool:
    """Return True if a dtype holds each integer up to a number."""
    return most <= (_MOST_EXACT[str(dtype)] if str(dtype) in _MOST_EXACT else np.iinfo(dtype).max)


def _check_integers(
    dtypes: Sequence[np.dtype[Any]], statistics: Sequence[Sequence[Statistics]], file_dtype: np.dtype[Any]
) -> None:
    """Raise Problems if integers of some files are too large for the floats of others."""
    of_integers = (parts for own, parts in zip(dtypes, statistics, strict=True) if own.kind in "iu")
    most = max((part.most for parts in of_integers for part in parts), default=0)
    if file_dtype.kind == "f" and most > _MOST_EXACT["float64"]:
        raise Problems(
            f"integers must be below 2**53 in files of different dtypes, got {int(most):,} and "
            f"{few(sorted({*map(str, dtypes)}), 10)}. Leave files out"
        )


def _file_dtype(dtypes: set[np.dtype[Any]], most: float, *, are_counts: bool) -> np.dtype[Any]:
    """Return the dtype of the files, or one that holds the values of all of them."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    if are_counts:
        return np.dtype(np.float32 if most <= _MOST_EXACT["float32"] else np.float64)
    return np.result_type(*dtypes)


def _is_dense(cells: Cells, statistics: Sequence[Sequence[Statistics]], dtype: np.dtype[Any]) -> bool:
    """Return True if all files are dense, and dense values take less space than sparse ones before compression."""
    if not all(matrix.is_dense for matrix in cells.matrices):
        return False
    # genes that are left out are taken to have as many values as the others
    n_values = sum(
        part.n_values * matrix.genes.nnz / matrix.shape[1]
        for matrix, parts in zip(cells.matrices, statistics, strict=True)
        for part in parts
    )
    n_genes = len(cells.var)
    dense_bytes = len(cells.obs) * n_genes * dtype.itemsize
    # a sparse matrix also has an index for each value
    return bool(dense_bytes <= n_values * (dtype.itemsize + np.min_scalar_type(n_genes).itemsize))
