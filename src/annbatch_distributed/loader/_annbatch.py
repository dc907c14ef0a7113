"""Private attributes of annbatch's Loader: its datasets, buffers, options and limits.

They are private, so tests/loader/test_annbatch.py fails if annbatch renames one.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import zarr
from annbatch import Loader
from annbatch.utils import CSRContainer
from zarr import Array, AsyncArray
from zarr.core.sync import sync  # as annbatch runs what it reads

from annbatch_distributed.core.masks import AnyNames
from annbatch_distributed.core.state import listed
from annbatch_distributed.core.values import FILE_DTYPE, Int64Array, digest

if TYPE_CHECKING:
    import pandas as pd


#: Number of cell names of each dataset in its digest.
_NAMES = 300
_OPTIONS = "return_index", "preload_to_gpu", "to"
#: Attributes of a loader that are not about its datasets.
_ITS_OWN = {"_batch_sampler", "_num_open_iters", *(f"_{name}" for name in _OPTIONS)}


def shapes_of(loader: Loader[Any, Any]) -> list[tuple[int, ...]]:
    """Return the shape of each dataset of a loader, in order."""
    return [tuple(map(int, shape)) for shape in loader._shapes]


def obs_of(loader: Loader[Any, Any]) -> list[pd.DataFrame]:
    """Return ``obs`` of each dataset of a loader; an empty list if datasets have no ``obs``."""
    return loader._obs or []


def collection_of(loader: Loader[Any, Any], names: Sequence[AnyNames] | None) -> dict[str, Any]:
    """Return the identity of the datasets and cells of a loader, as JSON.

    ``names`` are the names of the cells of each dataset. The identity has the shapes of the datasets, the first name,
    for people to read, and a digest of names at even distances. Values are None without datasets, or without names.
    """
    # [[rows, columns], ...], in the order in which datasets were added
    shapes = [list(shape) for shape in shapes_of(loader)]
    cells = None
    if shapes and names is not None:
        # at most _NAMES names of each dataset at even distances, the first and the last included
        of_datasets = [index for index in names if len(index)]
        places = [np.unique(np.linspace(0, len(index) - 1, _NAMES, dtype=np.int64)) for index in of_datasets]
        sample = [[str(name) for name in index[at]] for index, at in zip(of_datasets, places, strict=True)]
        cells = {"first": sample[0][0] if sample else None, "digest": digest(json.dumps(sample))}
    return {"datasets": listed(shapes) if shapes else None, "cells": cells}


def data_in(loader: Loader[Any, Any]) -> list[Any]:
    """Return the datasets of a loader: arrays and sparse matrices, in memory or stored."""
    return loader._train_datasets


def file_dtype_of(loader: Loader[Any, Any]) -> np.dtype[Any] | None:
    """Return the dtype of the files that a collection was made of; None if values are stored in it, or if unknown."""
    names, dtypes = [], []
    for cells in data_in(loader):
        name = getattr(getattr(cells, "group", cells), "attrs", {}).get(FILE_DTYPE)
        names.append(name)
        dtypes.append(np.dtype(name or cells.dtype))
    return np.result_type(*dtypes) if any(names) else None


def arrays_in(loader: Loader[Any, Any]) -> Iterator[AsyncArray[Any]]:
    """Yield the stored arrays of a loader."""
    for cells in data_in(loader):
        stored = [cells] if isinstance(cells, Array) else [cells.group["data"]] if hasattr(cells, "group") else []
        yield from (array.async_array for array in stored)


def stores_of(loader: Loader[Any, Any]) -> str:
    """Return the names of the stores of a loader; empty if all data is in memory."""
    stored = [getattr(cells, "group", cells) for cells in data_in(loader)]
    # a dict, to name each store once, in the order of the datasets
    return ", ".join({str(array.store): None for array in stored if hasattr(array, "store")})


def preloads_to_gpu(loader: Loader[Any, Any]) -> bool:
    """Return True if a loader moves batches to a GPU, by its argument or by annbatch's default."""
    return bool(loader._preload_to_gpu)


def options_of(loader: Loader[Any, Any]) -> dict[str, Any]:
    """Return the arguments of a loader that determine the form of its batches."""
    return {name: getattr(loader, f"_{name}") for name in _OPTIONS}


def take_data_of(loader: Loader[Any, Any], *, into: Loader[Any, Any], without: Collection[str]) -> None:
    """Copy the datasets of a loader into a loader without datasets.

    It copies all attributes, including attributes of later versions of annbatch. Excluded are the arguments for
    the form of batches and the names ``without``. No data is read.
    """
    for name, value in vars(loader).items():
        if name not in _ITS_OWN and name not in without:
            # copies, so that datasets that are added to one loader later aren't added to the other
            setattr(into, name, copy.copy(value))


def has_room_for_pointers(out: CSRContainer | npt.NDArray[Any]) -> CSRContainer | npt.NDArray[Any]:
    """Return a buffer for rows with an ``indptr`` of 64 bits, if it is sparse.

    annbatch takes the dtype of ``indptr`` on disk, which may overflow when it adds up the values of all datasets.
    """
    if isinstance(out, CSRContainer):
        data, indices, indptr = out.elems
        out.elems = data, indices, np.empty(len(indptr), dtype=np.int64)
    return out


def stored_arrays(loader: Loader[Any, Any], number: int) -> tuple[Array[Any], ...]:
    """Return the arrays of a dataset by its number: of rows, or ``data``, ``indices`` and ``indptr`` of a CSR matrix.

    It has none if it is in memory.
    """
    cells: Any = data_in(loader)[number]
    is_sparse = isinstance(cells, ad.abc.CSRDataset)
    arrays = tuple(cells.group[name] for name in ("data", "indices", "indptr")) if is_sparse else (cells,)
    return arrays if all(isinstance(array, Array) for array in arrays) else ()


def have_one_dtype(loader: Loader[Any, Any]) -> bool:
    """Return True if all datasets of a loader have the same dtypes; annbatch converts others."""
    return bool(loader._dtypes_homogeneous)


def room_for(loader: Loader[Any, Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array for values of a load request, where annbatch would have one."""
    room: npt.NDArray[Any] = loader._alloc(shape, dtype, use_pinned=preloads_to_gpu(loader))
    return room


@dataclass(frozen=True)
class Loaded:
    """Rows of a load request, in the order of the datasets, and what annbatch yields with them."""

    rows: CSRContainer | npt.NDArray[Any]
    places: npt.NDArray[np.intp]
    """Place of each row of the request."""
    obs: Callable[[npt.NDArray[np.intp]], pd.DataFrame | None]
    """Function that returns the labels of rows at some places."""
    var: pd.DataFrame | None
    index: npt.NDArray[Any] | None


def obs_at(
    loader: Loader[Any, Any], rows_of: OrderedDict[int, Int64Array], places: npt.NDArray[np.intp]
) -> pd.DataFrame | None:
    """Return the labels of rows of each dataset that are in memory, at some places among these rows."""
    obs = loader._maybe_accumulate_obs(rows_of)
    return None if obs is None else obs.iloc[places]


def loaded(
    loader: Loader[Any, Any],
    rows: Int64Array,
    obs_at: Callable[[OrderedDict[int, Int64Array], npt.NDArray[np.intp]], pd.DataFrame | None],
    read: Callable[[OrderedDict[int, Int64Array]], Coroutine[Any, Any, CSRContainer | npt.NDArray[Any]]],
) -> Loaded:
    """Return the rows of a load request; ``read`` reads the rows of each dataset, by its number.

    ``obs_at`` returns the labels of these rows at some places among them.
    """
    requested: Any = loader._requests_to_dataset_rows(rows)  # annotated without the order
    rows_of, order = requested
    # rows in the order 2 0 1 have the places 1 2 0
    places = np.empty(len(order), dtype=np.intp)
    places[order] = np.arange(len(order))
    index = loader._maybe_accumulate_indices(rows_of)
    return Loaded(sync(read(rows_of)), places, partial(obs_at, rows_of), loader._var, index)


def batches_on_gpu(loader: Loader[Any, Any]) -> Iterator[Any]:
    """Return annbatch's batches, from an iterator that doesn't lock the datasets; see :func:`iterated`."""
    return loader._iter()


@contextmanager
def iterated(loader: Loader[Any, Any]) -> Generator[None]:
    """Lock the datasets of a loader in this context: annbatch then refuses to add more."""
    loader._num_open_iters += 1
    try:
        yield
    finally:
        loader._num_open_iters -= 1


_CSC = (sp.csc_matrix, sp.csc_array, ad.abc.CSCDataset)


def check_layout(cells: object, name: str) -> None:
    """Raise if annbatch can't read rows of an array, or would read them wrongly.

    ``cells`` is an ``X`` in memory, or opened by zarr or anndata, and ``name`` its name in messages. A TypeError if it
    is a CSC matrix, a ValueError if its chunks split columns.
    """
    encoding = cells.attrs.get("encoding-type") if isinstance(cells, zarr.Group) else None
    if isinstance(cells, _CSC) or encoding == "csc_matrix":
        raise TypeError(
            f"{name} must be a CSR matrix, got a CSC matrix. Convert it before you write it to a collection, for "
            "example in load_adata of add_adatas: adata.X = adata.X.tocsr()."
        )
    if not isinstance(cells, zarr.Array):
        return
    shape = tuple(cells.shape)
    # the shape of a stored object: of a shard, or of a chunk without sharding
    chunks: Sequence[int]
    try:
        chunks = cells.shards or cells.chunks
    except NotImplementedError:  # chunks of different sizes
        chunks = [sizes[0] if sizes else 0 for sizes in cells.write_chunk_sizes]
    # chunks of (64, 20) have whole rows of an array of (100, 20); chunks of (64, 10) don't
    if any(size < n_columns for size, n_columns in zip(chunks[1:], shape[1:], strict=True)):
        raise ValueError(
            f"Chunks (or shards) of {name} must have all columns of their rows, got chunks of {chunks} for the shape "
            f"{shape}, which annbatch would read wrongly. Write it with DatasetCollection.add_adatas, or in chunks of "
            f"({chunks[0]}, {', '.join(map(str, shape[1:]))})."
        )


def n_rows_of(cells: Any, name: str) -> int:  # noqa: ANN401 an array or a group of zarr's
    """Return the number of rows of stored cells; raise as :func:`check_layout`."""
    check_layout(cells, name)
    return int(cells.shape[0] if isinstance(cells, zarr.Array) else cells["indptr"].shape[0] - 1)
