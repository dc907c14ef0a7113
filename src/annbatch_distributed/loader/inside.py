"""What annbatch's Loader keeps inside: its data sets, where it reads them to, and how it hands batches out.

annbatch has no public way to them. tests/loader/test_inside.py notices if they are kept elsewhere.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zarr import Array

from annbatch_distributed.resume.state import brief

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    import numpy.typing as npt
    from annbatch import Loader
    from annbatch.utils import CSRContainer
    from zarr import AsyncArray

    from annbatch_distributed.sharding.rows import Int64Array

__all__ = [
    "Stored",
    "data_sets_of",
    "iterated",
    "options_of",
    "preloads_to_gpu",
    "room_for",
    "shapes_of",
    "stored_of",
    "take_data_of",
]

_OPTIONS = "return_index", "preload_to_gpu", "to"
_DATA = (
    "_collection_added",
    "_dtypes_homogeneous",
    "_obs",
    "_shapes",
    "_sparse_dataset_elem_cache",
    "_train_datasets",
    "_var",
)


def shapes_of(loader: Loader[Any, Any]) -> list[tuple[int, int]]:
    """Return the rows and columns of each data set of a loader, in order."""
    return [(int(n_rows), int(n_var)) for n_rows, n_var in loader._shapes]


def data_sets_of(loader: Loader[Any, Any]) -> str | None:
    """Return a text that tells the data sets of a loader apart by their shapes and order; None if it has none yet."""
    shapes = [f"{n_rows}x{n_var}" for n_rows, n_var in shapes_of(loader)]
    return brief(", ".join(shapes)) if shapes else None


def preloads_to_gpu(loader: Loader[Any, Any]) -> bool:
    """Return whether a loader moves what it reads to a GPU, which annbatch decides if it isn't told."""
    return bool(loader._preload_to_gpu)


def options_of(loader: Loader[Any, Any]) -> dict[str, Any]:
    """Return the arguments of a loader that say how it hands batches out."""
    return {name: getattr(loader, f"_{name}") for name in _OPTIONS}


def take_data_of(loader: Loader[Any, Any], *, into: Loader[Any, Any]) -> None:
    """Give a loader without data those of another one, which nothing is read for, and that stays as it is."""
    for name in _DATA:
        # what is added to one of them later on isn't added to the other
        setattr(into, name, copy.copy(getattr(loader, name)))


@dataclass(frozen=True)
class Stored:
    """A data set that lies in arrays of zarr."""

    arrays: tuple[AsyncArray[Any], ...]
    """The rows; or the values of one row after the other, and the columns of these values."""
    indptr: npt.NDArray[Any] | None
    """Where the values of each row begin, and at the end how many there are; None if an array has the rows."""


def stored_of(loader: Loader[Any, Any], number: int) -> Stored | None:
    """Return a data set of a loader, by its number; None if annbatch must be asked for it.

    That is so if it is in memory; if data sets have several types, which are made one; and before annbatch has read
    anything, if it is sparse.
    """
    data_set, sparse = loader._train_datasets[number], loader._sparse_dataset_elem_cache.get(number)
    if not loader._dtypes_homogeneous:
        return None
    if isinstance(data_set, Array):
        return Stored((data_set.async_array,), None)
    return None if sparse is None else Stored((sparse.data, sparse.indices), sparse.indptr)


def room_for(loader: Loader[Any, Any], rows_of: Mapping[int, Int64Array]) -> CSRContainer | npt.NDArray[Any]:
    """Return arrays for rows of data sets, by their numbers, as annbatch makes them before it reads."""
    return loader._allocate_out(OrderedDict(rows_of))


@contextmanager
def iterated(loader: Loader[Any, Any]) -> Generator[None]:
    """Say that a loader is iterated over, so that annbatch lets nobody add data sets to it."""
    loader._num_open_iters += 1
    try:
        yield
    finally:
        loader._num_open_iters -= 1
