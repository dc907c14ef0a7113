"""Chunks that a collection has lost, for which zarr reads fill values and raises nothing.

Writers leave out chunks that hold the fill value only, as columns of ``obs`` may. A chunk of cells, names or categories
that isn't in the store counts as lost: it would have to be of cells without a single count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zarr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch import DatasetCollection

__all__ = ["lost"]


def lost(collection: DatasetCollection) -> list[str]:
    """Return a line for each array that has lost chunks."""
    groups = list(collection)
    if not _lists_keys(groups[0]):
        return []
    return [
        f"{group.basename} lacks chunks of {array.path.removeprefix(f'{group.path}/')}"
        for group in groups
        for array in _arrays(group)
        if array.nchunks_initialized < array.nchunks
    ]


def _lists_keys(group: zarr.Group) -> bool:
    """Whether a store says which keys it has: some web servers and buckets don't."""
    try:
        return any(zarr.open_group(group.store, path=group.path, mode="r", use_consolidated=False).keys())
    except Exception:  # noqa: BLE001 each store has its own error where listing isn't allowed
        return False


def _arrays(group: Any) -> Iterator[zarr.Array[Any]]:  # noqa: ANN401 a group of zarr's
    """Yield the arrays of a data set of which writers leave no chunk out."""
    cells, obs, var = group["X"], group["obs"], group["var"]
    if isinstance(cells, zarr.Array):
        yield cells
    elif cells["data"].size:
        yield from (cells["indptr"], cells["data"])
        if cells["indices"].nchunks_initialized:  # none are written if all values are of the first gene
            yield cells["indices"]
    names = [table[table.attrs.get("_index", "_index")] for table in (obs, var)]
    columns = [obs[name] for name in obs.attrs["column-order"]]
    names += [column["categories"] for column in columns if isinstance(column, zarr.Group) and "categories" in column]
    arrays = (array if isinstance(array, zarr.Array) else array["values"] for array in names)
    yield from (array for array in arrays if array.size > 1)  # a name may be empty
