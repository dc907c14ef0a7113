"""Chunks that a collection has lost, for which zarr reads fill values and raises nothing.

1. Each array's metadata promise a key for each chunk, or for each shard; the store lists the keys that are there.
2. Writers leave out chunks that hold only the fill value. A missing chunk is lost if it can't be such a chunk:

   - names of several cells, genes or categories: always, since names differ;
   - ``indptr``: unless what zarr reads is that of a CSR matrix;
   - ``indices``: if a row has two values in it, since a row has each column once;
   - dense cells and ``data``: unless a cell or value that is there holds fill values only;
   - other arrays of ``obs``: likewise, but not where all chunks are missing, since columns can be constant.
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
    #: Whether missing chunks are lost: given the array, the regions that are there, and those that are missing.
    type Rule = Callable[[Any, list[Region], list[Region]], bool]

__all__ = ["lost"]

#: How many chunks are read at once where fill values are looked for.
_AT_ONCE = 16


def lost(collection: DatasetCollection) -> list[str]:
    """Return a line for each array that has lost chunks."""
    groups = list(collection)
    root = groups[0].path.rpartition("/")[0]
    keys = _keys(groups[0].store, root)
    # without the metadata, which have been read, the store can't list its keys: some web servers and buckets can't
    if keys.isdisjoint(f"{root}/{name}".lstrip("/") for name in ("zarr.json", ".zgroup")):
        return []
    lines = []
    for group in groups:
        for array, is_lost in _arrays(group):
            there, missing = _regions(array, keys)
            if missing and is_lost(array, there, missing):
                count = f"{len(missing)} of {len(there) + len(missing)}"
                lines.append(f"{group.basename} lacks {count} chunks of {array.path.removeprefix(f'{group.path}/')}")
    return lines


def _keys(store: Store, path: str) -> set[str]:
    async def listed() -> set[str]:
        return {key async for key in store.list_prefix(path)}

    try:
        return sync(listed())
    except Exception:  # noqa: BLE001 each store has its own error where listing isn't allowed
        return set()


def _regions(array: zarr.Array[Any], keys: set[str]) -> tuple[list[Region], list[Region]]:
    """Return the regions of an array whose keys are there, and of those whose keys are missing."""
    there: list[Region] = []
    missing: list[Region] = []
    try:
        sizes = array.shards or array.chunks
    except NotImplementedError:  # chunks of several sizes, which annbatch doesn't write
        return there, missing
    for place in product(*(range(-(-extent // size)) for extent, size in zip(array.shape, sizes, strict=True))):
        bounds = zip(place, sizes, array.shape, strict=True)
        region = tuple(slice(at * size, min((at + 1) * size, extent)) for at, size, extent in bounds)
        key = f"{array.path}/{array.metadata.encode_chunk_key(place)}"
        (there if key in keys else missing).append(region)
    return there, missing


def _arrays(group: Any) -> Iterator[tuple[zarr.Array[Any], Rule]]:  # noqa: ANN401 a group of zarr's
    """Yield each array of a data set that is read, and the rule for its missing chunks."""
    cells, obs, var = group["X"], group["obs"], group["var"]
    if isinstance(cells, zarr.Array):
        yield cells, _lost_values
    else:
        yield cells["indptr"], lambda *_: not _is_csr(cells)
        yield cells["indices"], lambda _array, _there, missing: _has_two_of_a_row(cells, missing)
        yield cells["data"], _lost_values
    indices = [frame[frame.attrs.get("_index", "_index")] for frame in (obs, var)]
    for element in [*indices, *(obs[name] for name in obs.attrs.get("column-order", []))]:
        members = [("", element)] if isinstance(element, zarr.Array) else element.members(max_depth=None)
        for path, member in members:
            if isinstance(member, zarr.Array):
                has_names = (element in indices or path.startswith("categories")) and not path.endswith("mask")
                yield member, _always if has_names and member.size > 1 else _lost_of_column


def _always(*_: object) -> bool:
    return True


def _is_csr(cells: Any) -> bool:  # noqa: ANN401 a group of zarr's
    pointers = np.asarray(cells["indptr"][:], dtype=np.int64)
    steps = np.diff(pointers)
    ends = pointers[0], pointers[-1]
    return ends == (0, cells["data"].size) and bool(((steps >= 0) & (steps <= cells.attrs["shape"][1])).all())


def _has_two_of_a_row(cells: Any, missing: list[Region]) -> bool:  # noqa: ANN401 a group of zarr's
    pointers = np.asarray(cells["indptr"][:], dtype=np.int64)
    return any((np.diff(np.clip(pointers, values.start, values.stop)) > 1).any() for (values,) in missing)


def _lost_values(array: Any, there: list[Region], missing: list[Region]) -> bool:  # noqa: ANN401 an array of zarr's
    fill = np.asarray(array[tuple(part.start for part in missing[0])])  # as zarr reads what is missing
    step = _AT_ONCE * array.chunks[0]
    for rows, *columns in there:
        for start in range(rows.start, rows.stop, step):
            block = np.asarray(array[(slice(start, min(start + step, rows.stop)), *columns)])
            is_fill = block == fill if fill == fill else block != block  # noqa: PLR0124 NaN
            if is_fill.reshape(len(block), -1).all(axis=1).any():
                return False
    return True


def _lost_of_column(array: Any, there: list[Region], missing: list[Region]) -> bool:  # noqa: ANN401 an array of zarr's
    return bool(there) and _lost_values(array, there, missing)
