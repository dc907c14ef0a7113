"""Batches: the rows of a load request in annbatch's form.

annbatch gathers sparse rows through SciPy, which converts and checks the indices of whole load requests. This takes
longer than reading. Here, the values of a row are a slice, and the slices of a batch are joined and converted at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from annbatch.utils import CSRContainer, convert

from annbatch_distributed.core.request import Split
from annbatch_distributed.loader._annbatch import Loaded

_MOST_INT32 = np.iinfo(np.int32).max


def batches_of(
    loaded: Loaded, splits: Sequence[Split], dtype: np.dtype[Any] | None, to: Literal["torch", "jax"] | None
) -> Iterator[dict[str, Any]]:
    """Yield the batches of a load request; values of ``X`` have ``dtype``, or the dtype in which they are stored."""
    if isinstance(loaded.rows, CSRContainer):
        check_indptr(loaded.rows.elems[2])
    # a table of all batches, whose slices are cheap: pandas takes long to gather rows, however few
    obs = None if loaded.obs is None else loaded.obs.iloc[loaded.places[np.concatenate([[], *splits]).astype(np.intp)]]
    first = 0
    for split in splits:
        at = loaded.places[split]
        x = rows_at(loaded.rows, at, dtype)
        yield {
            "X": x if to is None else in_framework(x, to),
            "obs": None if obs is None else obs.iloc[first : first + len(at)],
            "var": loaded.var,
            "index": None if loaded.index is None else loaded.index[at],
        }
        first += len(at)


def rows_at(
    rows: CSRContainer | npt.NDArray[Any], at: npt.NDArray[np.intp], dtype: np.dtype[Any] | None
) -> sp.csr_matrix | npt.NDArray[Any]:
    """Return the rows at some places."""
    if not isinstance(rows, CSRContainer):
        return converted(rows[at], dtype)
    data, indices, bounds = rows.elems
    starts, stops = bounds[at], bounds[at + 1]
    indptr = np.zeros(len(at) + 1, dtype=np.int64)
    np.cumsum(stops - starts, out=indptr[1:])
    # as SciPy chooses it, which would otherwise convert what it gets
    index_dtype = np.int32 if max(indptr[-1], *rows.shape) <= _MOST_INT32 else np.int64
    slices = [*map(slice, starts.tolist(), stops.tolist())]
    values, columns = converted(_joined(data, slices), dtype, is_sparse=True), _joined(indices, slices)
    return sp.csr_matrix(
        (values, columns.astype(index_dtype, copy=False), indptr.astype(index_dtype)), shape=(len(at), rows.shape[1])
    )


def in_framework(x: sp.csr_matrix | npt.NDArray[Any], to: Literal["torch", "jax"]) -> Any:  # noqa: ANN401 a tensor or array
    """Return rows as a tensor or as a JAX array; a ValueError if JAX can't hold a value in its bits."""
    return convert(_in_bits_of_jax(x) if to == "jax" else x, preload_to_gpu=False, to=to)


def _in_bits_of_jax(x: sp.csr_matrix | npt.NDArray[Any]) -> sp.csr_matrix | npt.NDArray[Any]:
    """Return rows in a dtype that JAX has: without 64 bits, it would wrap integers around and round floats."""
    import jax

    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if dtype == x.dtype:
        return x
    with np.errstate(over="ignore"):  # of values that become infinite, which are reported
        narrow = x.astype(dtype)
    before, after = (np.asarray(rows.data if sp.issparse(rows) else rows) for rows in (x, narrow))
    # NaN, which differs from itself, stays NaN
    if (changes := (after != before) & (before == before)).any():  # noqa: PLR0124 NaN differs from itself
        raise ValueError(
            f"JAX holds values of X as {dtype}, which can't hold {before[changes].flat[0]}. Pass dtype='float32' to "
            "round them, or call jax.config.update('jax_enable_x64', True) before anything else."
        )
    return narrow


def _joined(values: npt.NDArray[Any], slices: Sequence[slice]) -> npt.NDArray[Any]:
    """Return slices of an array one after the other; faster than ``numpy.concatenate``."""
    view = memoryview(values)
    return np.frombuffer(bytearray().join([view[one] for one in slices]), values.dtype)


def check_indptr(indptr: npt.NDArray[Any]) -> None:
    """Raise a ValueError if rows of a load request have negative numbers of values, which SciPy doesn't notice."""
    if (wrong := indptr[1:] < indptr[:-1]).any():
        place = int(np.argmax(wrong))
        raise ValueError(
            f"indptr of a sparse matrix is damaged: a row has {int(indptr[place + 1]) - int(indptr[place])} values. "
            "Write the collection again."
        )


def converted(values: npt.NDArray[Any], dtype: np.dtype[Any] | None, *, is_sparse: bool = False) -> npt.NDArray[Any]:
    """Return values of ``X`` in a dtype, or as they are for None; a ValueError if the dtype can't hold them."""
    if dtype is None:
        return values
    if is_sparse and dtype == np.float16:
        raise ValueError("dtype='float16' is for dense cells, as SciPy has no sparse ones. Pass dtype='float32'.")
    if dtype.kind in "iu" and not np.can_cast(values.dtype, dtype):
        with np.errstate(invalid="ignore"):  # of NaN, which is reported
            wrong = values[values.astype(dtype) != values]
        if len(wrong):
            raise ValueError(
                f"dtype={str(dtype)!r} must hold all values of X, got {wrong.flat[0]}. Pass a larger dtype."
            )
    return values.astype(dtype, copy=False)


def with_dtype(rows: CSRContainer | npt.NDArray[Any], dtype: np.dtype[Any]) -> CSRContainer | npt.NDArray[Any]:
    """Return rows of a load request with values of a dtype; raise as :func:`converted`."""
    if not isinstance(rows, CSRContainer):
        return converted(rows, dtype)
    data, indices, indptr = rows.elems
    return CSRContainer((converted(data, dtype, is_sparse=True), indices, indptr), rows.shape, dtype)
