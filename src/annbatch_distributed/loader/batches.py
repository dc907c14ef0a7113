"""Batches: the rows of a load request in annbatch's form.

annbatch gathers sparse rows through SciPy, which converts and checks the indices of whole load requests. This takes
longer than reading. Here, a batch of rows is gathered by SciPy's function for it alone, and makes no object for a row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from annbatch.utils import CSRContainer, convert
from scipy.sparse._sparsetools import csr_row_index

from annbatch_distributed.core.request import Split
from annbatch_distributed.loader._annbatch import Loaded

_MOST_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True)
class CSRRows:
    """Rows of a CSR matrix as they are stored, in plain arrays or tensors, under ``dtype="stored"``.

    PyTorch has no CSR tensors with such narrow indices. Move the rows to a device before you widen them: 3 bytes of a
    value are copied there, and not 8.

    Examples
    --------
    >>> import torch
    >>> from annbatch_distributed.loader import CSRRows
    >>> rows = CSRRows(
    ...     torch.tensor([5, 7], dtype=torch.uint8),
    ...     torch.tensor([0, 2], dtype=torch.uint16),
    ...     torch.tensor([0, 0, 2], dtype=torch.int32),
    ...     (2, 3),
    ... )
    >>> rows.to("cpu").to_dense()
    tensor([[0., 0., 0.],
            [5., 0., 7.]])
    """

    data: Any
    """Values, of shape ``(n_values,)``, in the dtype in which they are stored."""
    indices: Any
    """Gene of each value, of shape ``(n_values,)``, in the smallest unsigned dtype for the number of genes."""
    indptr: Any
    """First value of each row, and the number of values, of shape ``(n_rows + 1,)``."""
    shape: tuple[int, int]
    """Number of rows and of genes."""

    def __len__(self) -> int:
        return self.shape[0]

    def _each(self, function: Callable[[Any], Any]) -> Self:
        return replace(self, data=function(self.data), indices=function(self.indices), indptr=function(self.indptr))

    def to(self, device: Any, *, non_blocking: bool = False) -> Self:  # noqa: ANN401 as PyTorch takes it
        """Return the rows on a device; tensors only."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the rows in memory from which a GPU can copy; tensors only."""
        return self._each(lambda part: part.pin_memory())

    def to_dense(self, dtype: Any = None) -> Any:  # noqa: ANN401 a tensor
        """Return the rows as a dense tensor, of float32 by default; tensors only."""
        import torch

        data = self.data.to(torch.float32 if dtype is None else dtype)
        indices = self.indices.to(self.indptr.dtype)
        with torch.sparse.check_sparse_tensor_invariants(enable=False), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
            return torch.sparse_csr_tensor(self.indptr, indices, data, size=self.shape).to_dense()


def batches_of(
    loaded: Loaded,
    splits: Sequence[Split],
    dtype: np.dtype[Any] | None,
    to: Literal["torch", "jax"] | None,
    *,
    is_plain: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the batches of a load request; values of ``X`` have ``dtype``, or the dtype in which they are stored.

    Under ``is_plain``, sparse rows are plain arrays.
    """
    rows = loaded.rows
    if isinstance(rows, CSRContainer):
        check_indptr(rows.elems[2])
        rows = with_one_index_dtype(rows)
    # a table of all batches, whose slices are cheap: pandas takes long to gather rows, however few
    obs = loaded.obs(loaded.places[np.concatenate([[], *splits]).astype(np.intp)])
    first = 0
    for split in splits:
        at = loaded.places[split]
        x = rows_at(rows, at, dtype, is_plain=is_plain)
        yield {
            "X": x if to is None else in_framework(x, to),
            "obs": None if obs is None else obs.iloc[first : first + len(at)],
            "var": loaded.var,
            "index": None if loaded.index is None else loaded.index[at],
        }
        first += len(at)


def rows_at(
    rows: CSRContainer | npt.NDArray[Any],
    at: npt.NDArray[np.intp],
    dtype: np.dtype[Any] | None,
    *,
    is_plain: bool = False,
) -> sp.csr_matrix | CSRRows | npt.NDArray[Any]:
    """Return the rows at some places."""
    if not isinstance(rows, CSRContainer):
        return converted(rows[at], dtype)
    data, indices, indptr = _gathered(*rows.elems, at)
    if is_plain:
        return CSRRows(data, indices.astype(np.min_scalar_type(rows.shape[1] - 1)), indptr, (len(at), rows.shape[1]))
    values = converted(data, dtype, is_sparse=True)
    # SciPy would check and convert what is as it needs it
    result = sp.csr_matrix((len(at), rows.shape[1]), dtype=values.dtype)
    index_dtype = _index_dtype(indptr[-1], result.shape)  # of one batch, even if the load request is too large for it
    result.data, result.indices, result.indptr = (
        values,
        *(part.astype(index_dtype, copy=False) for part in (indices, indptr)),
    )
    return result


def _gathered(
    data: npt.NDArray[Any], indices: npt.NDArray[Any], indptr: npt.NDArray[Any], at: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Return data, indices and indptr of the rows at some places of a CSR matrix, with indices and indptr alike.

    SciPy's function is private: the public one copies and checks the matrix for each batch, and takes up to 9 times as
    long. ``tests/loader/test_batches.py`` fails if it changes.
    """
    n_each = indptr[at + 1] - indptr[at]
    bounds = np.zeros(len(at) + 1, indptr.dtype)
    np.cumsum(n_each, out=bounds[1:])
    # bytes of any dtype, also of those that SciPy has no matrices of
    own = data.view(f"u{data.itemsize}")
    to_data, to_indices = np.empty(bounds[-1], own.dtype), np.empty(bounds[-1], indices.dtype)
    csr_row_index(len(at), at.astype(indptr.dtype), indptr, indices, own, to_indices, to_data)
    return to_data.view(data.dtype), to_indices, bounds


def _index_dtype(n_values: int, shape: tuple[int, ...]) -> type[np.int32 | np.int64]:
    """Return the dtype of indices that SciPy chooses."""
    return np.int32 if max(n_values, *shape) <= _MOST_INT32 else np.int64


def with_one_index_dtype(rows: CSRContainer) -> CSRContainer:
    """Return rows whose ``indices`` and ``indptr`` have one dtype, as SciPy chooses it."""
    data, indices, indptr = rows.elems
    dtype = _index_dtype(indptr[-1], rows.shape)
    return CSRContainer((data, indices.astype(dtype, copy=False), indptr.astype(dtype)), rows.shape, rows.dtype)


def in_framework(x: sp.csr_matrix | CSRRows | npt.NDArray[Any], to: Literal["torch", "jax"]) -> Any:  # noqa: ANN401 a tensor or array
    """Return rows as a tensor or as a JAX array; a ValueError if JAX can't hold a value in its bits."""
    if isinstance(x, CSRRows):
        return x._each(lambda part: in_framework(part, to))
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
