"""Layout: how cells lie in memory or in their store, and whether annbatch's loader can read rows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import scipy.sparse as sp
import zarr

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_layout", "has_whole_rows", "n_rows_of"]

_CSC = (sp.csc_matrix, sp.csc_array, ad.abc.CSCDataset)


def check_layout(cells: object, name: str) -> None:
    """Raise if rows of cells can't be read, or would be read wrongly.

    ``cells`` is what an ``X`` is, in memory, or as zarr or anndata have opened it; ``name`` is what a message calls it.
    A TypeError if they lie column by column, a ValueError if chunks don't have all columns of their rows.
    """
    encoding = cells.attrs.get("encoding-type") if isinstance(cells, zarr.Group) else None
    if isinstance(cells, _CSC) or encoding == "csc_matrix":
        raise TypeError(
            f"{name} is a CSC matrix, which lies column by column, and rows are read from CSR. Make it CSR before it "
            "is written to a collection: adata.X = adata.X.tocsr(), for instance in the load_adata of add_adatas."
        )
    if isinstance(cells, zarr.Array) and not has_whole_rows(cells):
        chunks, shape = _stored_shape(cells), tuple(cells.shape)
        raise ValueError(
            f"{name} has the shape {shape} and lies in chunks (or shards) of {chunks}, which don't have all columns of "
            "their rows, and annbatch reads such rows wrongly. Write it with DatasetCollection.add_adatas, or in "
            f"chunks of ({chunks[0]}, {', '.join(map(str, shape[1:]))})."
        )


def has_whole_rows(array: zarr.Array[Any] | zarr.AsyncArray[Any]) -> bool:
    """Whether all that is stored under one key are all columns of some rows."""
    return all(size >= n_columns for size, n_columns in zip(_stored_shape(array)[1:], array.shape[1:], strict=True))


def _stored_shape(array: zarr.Array[Any] | zarr.AsyncArray[Any]) -> Sequence[int]:
    """The shape of what is stored under the first key: a shard, or a chunk where there are no shards."""
    try:
        return array.shards or array.chunks
    except NotImplementedError:  # where chunks differ in their sizes
        return [sizes[0] if sizes else 0 for sizes in array.write_chunk_sizes]


def n_rows_of(cells: Any, name: str) -> int:  # noqa: ANN401 an array or a group of zarr's
    """Return how many rows stored cells have; a TypeError or a ValueError as :func:`check_layout` raises it."""
    check_layout(cells, name)
    return int(cells.shape[0] if isinstance(cells, zarr.Array) else cells["indptr"].shape[0] - 1)
