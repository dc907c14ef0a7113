"""Chunks: those that a collection has lost, for which zarr reads fill values and raises nothing.

1. The keys that the metadata of each array promise are compared with those that the store lists: one for each shard, or
   for each chunk where there are no shards. If none is missing, nothing is read.
2. Writers leave out a chunk that holds only the fill value. Steps 3 to 7 say which missing chunks are lost instead.
3. Several names of cells, of genes or of categories: all, since names differ.
4. ``indptr``: all, unless what zarr reads ascends from 0 to the number of values, by at most the number of columns for
   each row.
5. ``indices``: those with two values of a row, since a row has each column once.
6. Dense cells, and the values in ``data``: all, unless a cell or a value that is there is one of fill values.
7. Other arrays of ``obs``: likewise, but none where the whole array is missing, since columns can be constant.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.core.sync import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from annbatch import DatasetCollection
    from zarr.abc.store import Store

    type Region = tuple[slice, ...]
    type Rule = Callable[[_Stored], list[Region]]

__all__ = ["lost"]

#: How many chunks are read at once where fill values are looked for.
_AT_ONCE = 16


def lost(collection: DatasetCollection) -> list[str]:
    """Return a line for each array that has lost chunks."""
    groups = list(collection)
    root = groups[0].path.rpartition("/")[0]
    keys = _keys(groups[0].store, root)
    # the metadata have been read, so a store without them lists nothing: some web servers and buckets don't
    if keys.isdisjoint(f"{root}/{name}".lstrip("/") for name in ("zarr.json", ".zgroup")):
        return []
    lines = []
    for group in groups:
        cells = group["X"]
        for array, rule in _arrays(group, cells):
            stored = _Stored(array, cells, keys)
            if stored.missing and (n_lost := len(rule(stored))):
                n_chunks = len(stored.there) + len(stored.missing)
                name = array.path.removeprefix(f"{group.path}/")
                lines.append(f"{group.basename} lacks {n_lost} of {n_chunks} chunks of {name}")
    return lines


def _keys(store: Store, path: str) -> set[str]:
    """Return the keys that a store lists below a path."""

    async def listed() -> set[str]:
        return {key async for key in store.list_prefix(path)}

    try:
        return sync(listed())
    except Exception:  # noqa: BLE001 each store has its own where listing isn't allowed
        return set()


class _Stored:
    """An array of a data set: which parts of it are there, which are missing, and which of those are lost."""

    def __init__(self, array: zarr.Array[Any], cells: zarr.Array[Any] | zarr.Group, keys: set[str]) -> None:
        self.array: Any = array
        self.cells: Any = cells
        self.there: list[Region] = []
        self.missing: list[Region] = []
        try:
            sizes = array.shards or array.chunks
        except NotImplementedError:  # chunks of several sizes, which annbatch doesn't write, aren't looked for
            return
        for place in product(*(range(-(-extent // size)) for extent, size in zip(array.shape, sizes, strict=True))):
            bounds = zip(place, sizes, array.shape, strict=True)
            region = tuple(slice(at * size, min((at + 1) * size, extent)) for at, size, extent in bounds)
            is_there = f"{array.path}/{array.metadata.encode_chunk_key(place)}" in keys
            (self.there if is_there else self.missing).append(region)

    def lost_names(self) -> list[Region]:  # step 3
        return self.missing

    def lost_pointers(self) -> list[Region]:  # step 4
        pointers = np.asarray(self.array[:], dtype=np.int64)
        steps, n_values, n_columns = np.diff(pointers), self.cells["data"].size, self.cells.attrs["shape"][1]
        is_right = (pointers[0], pointers[-1]) == (0, n_values) and ((steps >= 0) & (steps <= n_columns)).all()
        return [] if is_right else self.missing

    def lost_indices(self) -> list[Region]:  # step 5
        pointers = np.asarray(self.cells["indptr"][:], dtype=np.int64)
        return [
            (values,)
            for (values,) in self.missing
            if (np.diff(np.clip(pointers, values.start, values.stop)) > 1).any()  # how many are of each row
        ]

    def lost_values(self) -> list[Region]:  # step 6
        fill = np.asarray(self.array[tuple(part.start for part in self.missing[0])])  # as zarr reads what is missing
        step = _AT_ONCE * self.array.chunks[0]
        for rows, *columns in self.there:
            for start in range(rows.start, rows.stop, step):
                block = np.asarray(self.array[(slice(start, min(start + step, rows.stop)), *columns)])
                is_fill = block == fill if fill == fill else block != block  # noqa: PLR0124 NaN alone is not itself
                if is_fill.reshape(len(block), -1).all(axis=1).any():
                    return []
        return self.missing

    def lost_of_column(self) -> list[Region]:  # step 7
        return self.lost_values() if self.there else []


def _arrays(group: zarr.Group, cells: Any) -> Iterator[tuple[zarr.Array[Any], Rule]]:  # noqa: ANN401 of either kind
    """Yield each array of a data set that is read, and what says which of its missing chunks are lost."""
    if isinstance(cells, zarr.Array):
        yield cells, _Stored.lost_values
    else:
        yield cells["indptr"], _Stored.lost_pointers
        yield cells["indices"], _Stored.lost_indices
        yield cells["data"], _Stored.lost_values
    obs: Any = group["obs"]
    var: Any = group["var"]
    elements = [(frame[frame.attrs.get("_index", "_index")], {"", "values"}) for frame in (obs, var)]
    elements += [(obs[name], {"categories", "categories/values"}) for name in obs.attrs.get("column-order", [])]
    for element, names in elements:
        members = [("", element)] if isinstance(element, zarr.Array) else element.members(max_depth=None)
        for path, member in members:
            if isinstance(member, zarr.Array):
                has_names = path in names and member.size > 1
                yield member, _Stored.lost_names if has_names else _Stored.lost_of_column
