"""Damage: files of a collection that aren't stored as they were written.

What is noticed depends on the writer:

=====================  ======================================  ==========================
writer                 a chunk that changed or is missing      a file of another shard
=====================  ======================================  ==========================
``collect``            its checksum, or the digest of a file   the digest of a file
others                 if it can't be decoded                  nothing
=====================  ======================================  ==========================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from zarr import Array, Group

from annbatch_distributed.core.values import SHARD_DIGESTS, file_digest
from annbatch_distributed.loader.shards import Shards


class Stored(NamedTuple):
    """File of an array, or all files of one that only zarr can read."""

    array: str
    """Name of the array in its dataset."""
    folder: str
    """Path of the array."""
    number: int | None
    """Number of the shard; None for all files."""


class Damage(NamedTuple):
    """Rows of an array that aren't stored as they were written."""

    problem: str
    """What is wrong, with the path of the file."""
    start: int
    """First row of the array."""
    stop: int


class Cells(NamedTuple):
    """Cells that have a part in rows of an array."""

    start: int
    stop: int


def files_of(group: Group) -> Iterator[Stored]:
    """Yield the files of the arrays of a dataset on a local disk."""
    for name, array in arrays_of(group):
        numbers: Iterable[int | None] = range(-(-array.shape[0] // _rows_of_file(array)))
        if SHARD_DIGESTS not in array.attrs and Shards.of(array.async_array) is None:
            numbers = [None]
        yield from (Stored(name, str(_folder(array)), number) for number in numbers)


def arrays_of(group: Group) -> Iterator[tuple[str, Array[Any]]]:
    """Yield the name and the array of each array of a dataset; single values only tell what is absent."""
    for name, member in sorted(group.members(max_depth=None)):
        if isinstance(member, Array) and member.shape:
            yield name, member


def damage_in(stored: Stored) -> list[Damage]:
    """Return what is damaged in a file."""
    array = _opened(stored.folder)
    if stored.number is None:
        return _unreadable(array)
    digests: Any = array.attrs.get(SHARD_DIGESTS)
    start = stored.number * _rows_of_file(array)
    stop = min(start + _rows_of_file(array), array.shape[0])
    metadata: Any = array.metadata
    path = _folder(array) / metadata.encode_chunk_key((stored.number, *(0,) * (array.ndim - 1)))
    if digests is not None:
        if not path.exists():
            return [Damage(f"{path} is damaged: it isn't stored.", start, stop)]
        if file_digest(path) == digests[stored.number]:
            return []
    shards = Shards.of(array.async_array)
    errors = [] if shards is None else shards.damage(stored.number)
    found = [Damage(str(error), error.start, error.stop) for error in errors]
    if not found and digests is not None:
        found = [Damage(f"{path} is damaged: it isn't the file that was written here.", start, stop)]
    return found


def _unreadable(array: Array[Any]) -> list[Damage]:
    """Return what zarr can't read of an array."""
    try:
        array[...]
    except Exception as error:  # noqa: BLE001 codecs raise many types
        problem = f"{_folder(array)} is damaged: {type(error).__name__}: {error}."
        return [Damage(problem, 0, array.shape[0])]
    return []


def cells_with(damage: Damage, name: str, group: Group) -> Cells:
    """Return the cells of a dataset that have a part in rows of an array, by the name of the array; maybe all cells."""
    cells: Any = group["X"]
    n_obs = cells.shape[0] if isinstance(cells, Array) else int(cells.attrs["shape"][0])
    folder, _, kind = name.rpartition("/")
    try:
        matrix: Any = group[folder] if folder else {}
        if kind in {"data", "indices"} and "indptr" in matrix:
            # rows of 3, 0 and 2 values have the indptr 0 3 3 5: the values 2:4 are of the rows 0:3
            indptr = np.asarray(matrix["indptr"][:])
            first = int(np.searchsorted(indptr, damage.start, side="right")) - 1
            return Cells(max(0, first), min(int(np.searchsorted(indptr, damage.stop, side="left")), n_obs))
    except (OSError, ValueError, RuntimeError):  # it is damaged, too
        return Cells(0, n_obs)
    if kind == "indptr" or (kind != "categories" and name.split("/", maxsplit=1)[0] in {"X", "layers", "obs", "obsm"}):
        return Cells(damage.start, min(damage.stop, n_obs))
    return Cells(0, n_obs)


def has_checksums(array: Array[Any]) -> bool:
    """Return True if any change of an array is noticed."""
    return SHARD_DIGESTS in array.attrs or (
        (shards := Shards.of(array.async_array)) is not None and shards.has_checksums
    )


def _rows_of_file(array: Array[Any]) -> int:
    return (array.shards or array.chunks)[0]


def _folder(array: Array[Any]) -> Path:
    store: Any = array.store  # a LocalStore
    folder: Path = store.root / array.path
    return folder


@cache
def _opened(folder: str) -> Array[Any]:
    return zarr.open_array(folder, mode="r")
