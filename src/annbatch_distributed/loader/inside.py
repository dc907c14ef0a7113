"""What annbatch's Loader keeps inside: its data sets, where it reads them to, and how it hands batches out.

annbatch has no public way to them. tests/loader/test_inside.py notices if they are kept elsewhere.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from annbatch.utils import CSRContainer
from zarr import Array

from annbatch_distributed.state import bounded

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Mapping

    import numpy.typing as npt
    import pandas as pd
    from annbatch import Loader
    from zarr import AsyncArray

    from annbatch_distributed.rows import Int64Array

__all__ = [
    "Stored",
    "arrays_in",
    "batches_of",
    "data_in",
    "data_sets_of",
    "described",
    "has_room_for_pointers",
    "iterated",
    "obs_of",
    "options_of",
    "preloads_to_gpu",
    "room_for",
    "shapes_of",
    "stored_of",
    "stores_of",
    "take_data_of",
]

_OPTIONS = "return_index", "preload_to_gpu", "to"
#: What a loader holds beside its data sets, or what will hold them in later versions.
_ITS_OWN = {"_batch_sampler", "_num_open_iters", *(f"_{name}" for name in _OPTIONS)}


def shapes_of(loader: Loader[Any, Any]) -> list[tuple[int, ...]]:
    """Return the shape of each data set of a loader, in order: rows, columns, and what else an array has."""
    return [tuple(map(int, shape)) for shape in loader._shapes]


def obs_of(loader: Loader[Any, Any]) -> list[pd.DataFrame]:
    """Return the annotations of each data set of a loader; none if its data sets have none."""
    return loader._obs or []


def data_sets_of(loader: Loader[Any, Any]) -> str | None:
    """Return a text that tells the data sets of a loader apart by their shapes and order; None if it has none yet."""
    shapes = ["x".join(map(str, shape)) for shape in shapes_of(loader)]
    return bounded(", ".join(shapes)) if shapes else None


def described(loader: Loader[Any, Any]) -> dict[str, int | str]:
    """Return what must be the same of the data sets of all ranks, by name."""
    shapes = shapes_of(loader)
    rows = bounded(", ".join(str(n_rows) for n_rows, *_ in shapes))
    return {
        "data sets": len(shapes),
        "rows of each data set": rows or "none",
        "n_var": shapes[0][1] if shapes else 0,
    }


def data_in(loader: Loader[Any, Any]) -> list[Any]:
    """Return what a loader reads: arrays and sparse matrices, in memory or stored."""
    return loader._train_datasets


def arrays_in(loader: Loader[Any, Any]) -> Iterator[AsyncArray[Any]]:
    """Yield the stored arrays that a loader reads rows of."""
    for cells in data_in(loader):
        stored = [cells] if isinstance(cells, Array) else [cells.group["data"]] if hasattr(cells, "group") else []
        yield from (array.async_array for array in stored)


def stores_of(loader: Loader[Any, Any]) -> str:
    """Return what a loader reads from; empty if all is in memory."""
    stored = [getattr(cells, "group", cells) for cells in data_in(loader)]
    return ", ".join({str(each.store): None for each in stored if hasattr(each, "store")})


def preloads_to_gpu(loader: Loader[Any, Any]) -> bool:
    """Return whether a loader moves what it reads to a GPU, which annbatch decides if it isn't told."""
    return bool(loader._preload_to_gpu)


def options_of(loader: Loader[Any, Any]) -> dict[str, Any]:
    """Return the arguments of a loader that say how it hands batches out."""
    return {name: getattr(loader, f"_{name}") for name in _OPTIONS}


def take_data_of(loader: Loader[Any, Any], *, into: Loader[Any, Any], without: Collection[str]) -> None:
    """Give a loader without data those of another one, which nothing is read for, and that stays as it is.

    That is all that the other one holds, so that nothing is lost which a later annbatch keeps there; but for how it
    hands batches out, and the names ``without``.
    """
    for name, value in vars(loader).items():
        if name not in _ITS_OWN and name not in without:
            # what is added to one of them later on isn't added to the other
            setattr(into, name, copy.copy(value))


def has_room_for_pointers(out: CSRContainer | npt.NDArray[Any]) -> CSRContainer | npt.NDArray[Any]:
    """Give what rows are read to pointers of 64 bits, if they are sparse.

    annbatch makes these of the type that the first data set has on disk, or of the smallest for each data set, and then
    adds up the values of all of them in it.
    """
    if isinstance(out, CSRContainer):
        data, indices, pointers = out.elems
        out.elems = data, indices, np.empty(len(pointers), dtype=np.int64)
    return out


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


def batches_of(loader: Loader[Any, Any]) -> Iterator[Any]:
    """Return the batches of a pass of annbatch's that isn't counted by those that forbid to add data sets."""
    return loader._iter()


@contextmanager
def iterated(loader: Loader[Any, Any]) -> Generator[None]:
    """Say that a loader is iterated over, so that annbatch lets nobody add data sets to it."""
    loader._num_open_iters += 1
    try:
        yield
    finally:
        loader._num_open_iters -= 1
