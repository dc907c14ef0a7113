"""annbatch's Loader inside: its datasets, where it reads them to, how it hands out batches, what it can read.

annbatch has no public way to most of them. tests/loader/test_annbatch.py fails if they are kept elsewhere.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import zarr
from annbatch import Loader
from annbatch.utils import CSRContainer
from zarr import Array, AsyncArray

from annbatch_distributed.rows import Int64Array
from annbatch_distributed.state import digest_of, listed

if TYPE_CHECKING:
    import pandas as pd


#: Number of names of each dataset that its digest is made of.
_NAMES = 300
_OPTIONS = "return_index", "preload_to_gpu", "to"
#: What a loader holds beside its data sets, or what will hold them in later versions.
_ITS_OWN = {"_batch_sampler", "_num_open_iters", *(f"_{name}" for name in _OPTIONS)}


def shapes_of(loader: Loader[Any, Any]) -> list[tuple[int, ...]]:
    """Return the shape of each data set of a loader, in order: rows, columns, and what else an array has."""
    return [tuple(map(int, shape)) for shape in loader._shapes]


def obs_of(loader: Loader[Any, Any]) -> list[pd.DataFrame]:
    """Return the annotations of each data set of a loader; none if its data sets have none."""
    return loader._obs or []


def collection_of(loader: Loader[Any, Any], names: Sequence[pd.Index[Any]] | None) -> dict[str, Any]:
    """Return what tells the cells of a loader from others, as JSON: shapes of datasets, and names of cells.

    ``names`` are the names of the cells of each dataset. Of them come the first one, for people to see, and a digest of
    some at even distances. Values are None if there are no datasets yet, or names aren't known.
    """
    # [[rows, columns], ...], in the order in which datasets were added
    shapes = [list(shape) for shape in shapes_of(loader)]
    cells = None
    if shapes and names is not None:
        # the first and the last name of each dataset, and some hundreds between
        places = [np.unique(np.linspace(0, len(own) - 1, _NAMES, dtype=np.int64)) for own in names if len(own)]
        some = [[str(name) for name in own[at]] for own, at in zip(filter(len, names), places, strict=True)]
        cells = {"first": some[0][0] if some else None, "digest": digest_of(json.dumps(some))}
    return {"datasets": listed(shapes) if shapes else None, "cells": cells}


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
    # a dict, so that each store is named once, in the order of the datasets
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
class ZarrDataset:
    """A data set that lies in arrays of zarr."""

    arrays: tuple[AsyncArray[Any], ...]
    """The rows; or the values of one row after the other, and the columns of these values."""
    indptr: npt.NDArray[Any] | None
    """Where the values of each row begin, and at the end how many there are; None if an array has the rows."""


def zarr_dataset_of(loader: Loader[Any, Any], number: int) -> ZarrDataset | None:
    """Return a data set of a loader, by its number; None if annbatch must be asked for it.

    That is so if it is in memory; if data sets have several types, which are made one; and before annbatch has read
    anything, if it is sparse.
    """
    data_set, sparse = loader._train_datasets[number], loader._sparse_dataset_elem_cache.get(number)
    if not loader._dtypes_homogeneous:
        return None
    if isinstance(data_set, Array):
        return ZarrDataset((data_set.async_array,), None)
    return None if sparse is None else ZarrDataset((sparse.data, sparse.indices), sparse.indptr)


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
    if not isinstance(cells, zarr.Array):
        return
    shape = tuple(cells.shape)
    # what is stored under the first key: a shard, or a chunk where there are no shards
    chunks: Sequence[int]
    try:
        chunks = cells.shards or cells.chunks
    except NotImplementedError:  # where chunks differ in their sizes
        chunks = [sizes[0] if sizes else 0 for sizes in cells.write_chunk_sizes]
    # (100, 20) in chunks of (64, 20) has whole rows, and in chunks of (64, 10) it hasn't
    if any(size < n_columns for size, n_columns in zip(chunks[1:], shape[1:], strict=True)):
        raise ValueError(
            f"{name} has the shape {shape} and lies in chunks (or shards) of {chunks}, which don't have all columns of "
            "their rows, and annbatch reads such rows wrongly. Write it with DatasetCollection.add_adatas, or in "
            f"chunks of ({chunks[0]}, {', '.join(map(str, shape[1:]))})."
        )


def n_rows_of(cells: Any, name: str) -> int:  # noqa: ANN401 an array or a group of zarr's
    """Return how many rows stored cells have; a TypeError or a ValueError as :func:`check_layout` raises it."""
    check_layout(cells, name)
    return int(cells.shape[0] if isinstance(cells, zarr.Array) else cells["indptr"].shape[0] - 1)
