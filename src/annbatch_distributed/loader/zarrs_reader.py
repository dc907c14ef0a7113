"""Load requests of collections on a local disk, which zarrs reads in the thread that asks for them.

annbatch has zarr read a load request: zarr makes an indexer for each run of consecutive rows, goes through it twice,
and hands each array by way of its event loop to a thread that calls zarrs. For chunks of 64 rows, that takes half the
time in which zarrs decodes them. Most of it is Python, so that no other thread runs, and the training is one of them
where the next load request is read ahead of it. Here, zarrs is told which part of which chunk goes where:

1. Rows are put together to runs of consecutive ones, and those of sparse cells are turned into runs of their values.
2. Runs are cut where what is stored under one key ends: a shard, or a chunk where there are no shards.
3. zarrs decodes all parts of an array together, while other threads run, and one array after the other.

annbatch reads everything else: what is in memory or far away, by other codecs, of data sets that differ in their types,
or in chunks of several sizes. It also reads the first load request of sparse cells, and with it where their
rows begin; and what can't be read as it should be, so that errors are annbatch's.

zarrs has no public way in. A version in which it is another one is left to annbatch, and
``tests/loader/test_zarrs_reader.py`` notices that.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt
from zarr import AsyncArray
from zarr.storage import LocalStore

from annbatch_distributed.loader._annbatch import room_for, zarr_dataset_of
from annbatch_distributed.rows import Int64Array, runs

if TYPE_CHECKING:
    from annbatch import Loader
    from annbatch.utils import CSRContainer

    from annbatch_distributed.loader._annbatch import ZarrDataset


class _Fork:
    """Whether zarrs may have been at work in the process that this one was forked from, and so has no threads here."""

    was_at_work = is_cut_off = False

    @classmethod
    def before(cls) -> None:
        """Note in the parent whether zarr has read or opened anything, while zarrs was there."""
        cls.was_at_work = "zarrs" in sys.modules and "zarr_io" in {thread.name for thread in threading.enumerate()}

    @classmethod
    def in_child(cls) -> None:
        """Take over what the parent has noted."""
        cls.is_cut_off |= cls.was_at_work


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_Fork.before, after_in_child=_Fork.in_child)


def check_zarrs_answers(asks: Callable[[], bool]) -> None:
    """Raise a RuntimeError if zarrs is asked in a forked process, where it would never answer."""
    if _Fork.is_cut_off and asks():
        raise RuntimeError(
            "This process was forked while zarrs was in use, whose threads aren't copied: to read through it would "
            "wait for ever. Start ranks and workers by 'spawn' (multiprocessing_context='spawn', "
            "strategy='ddp_spawn'), or have zarr's own codecs read, before the collection is opened: "
            "zarr.config.set({'codec_pipeline.path': 'zarr.core.codec_pipeline.BatchedCodecPipeline'})."
        )


def read(loader: Loader[Any, Any], rows_of: Mapping[int, Int64Array]) -> CSRContainer | npt.NDArray[Any] | None:
    """Read rows of a loader's data sets; or read nothing and return None, if that is for annbatch to do.

    Parameters
    ----------
    loader
        Of which the data sets are.
    rows_of
        For each data set that is read, by its number, which of its rows, in the order in which they are read.

    Returns
    -------
    What annbatch's ``Loader._index_datasets`` returns: the rows of the first data set, then those of the next.
    """
    data_sets = [data_set for number in rows_of if _is_for_zarrs(data_set := zarr_dataset_of(loader, number))]
    if len(data_sets) < len(rows_of):
        return None
    # of each dataset, the runs to read: of rows, or of the values of sparse rows
    bounds = []
    for data_set, rows in zip(data_sets, rows_of.values(), strict=True):
        starts, stops = runs(rows)
        # rows 1:3 of sparse cells whose rows begin at 0 3 3 5 are the values 3:5
        indptr = data_set.indptr
        bounds.append((starts, stops) if indptr is None else (indptr[starts], indptr[stops]))
    for data_set, (_, stops) in zip(data_sets, bounds, strict=True):
        if any(stops.max() > array.shape[0] for array in data_set.arrays):  # zarrs would make the rest up
            return None
    # one buffer for all datasets, as annbatch makes it; each one reads into its part
    room, first = room_for(loader, rows_of), 0
    outs = (room,) if isinstance(room, np.ndarray) else room.elems[:2]
    for data_set, (starts, stops) in zip(data_sets, bounds, strict=True):
        end = first + int((stops - starts).sum())
        for array, out in zip(data_set.arrays, outs, strict=True):
            _read_array(array, starts.tolist(), stops.tolist(), out[first:end])
        first = end
    if not isinstance(room, np.ndarray):
        indptrs = [data_set.indptr for data_set in data_sets if data_set.indptr is not None]
        lengths = [indptr[rows + 1] - indptr[rows] for indptr, rows in zip(indptrs, rows_of.values(), strict=True)]
        # rows of 3, 0 and 2 values: 0 3 3 5
        room.elems[2][0] = 0
        np.cumsum(np.concatenate(lengths), out=room.elems[2][1:])
    return room


def parts_of(starts: list[int], stops: list[int], chunk_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut runs where chunks end: yield a chunk's number, a range in it, and how much is read before that range.

    >>> list(parts_of([6, 0], [10, 2], chunk_size=8))
    [(0, 6, 8, 0), (1, 0, 2, 2), (0, 0, 2, 4)]
    """
    before = 0
    for start, stop in zip(starts, stops, strict=True):
        # rows 6:10 in chunks of 8 are 6:8 of chunk 0 and 0:2 of chunk 1
        for number in range(start // chunk_size, -(-stop // chunk_size)):
            offset = number * chunk_size
            first, end = max(start - offset, 0), min(stop - offset, chunk_size)
            if first < end:
                yield number, first, end, before
                before += end - first


def _read_array(array: AsyncArray[Any], starts: list[int], stops: list[int], out: npt.NDArray[Any]) -> None:
    """Read runs along the first axis of an array, one after the other."""
    from zarrs._internal import ChunkItem

    chunks = array.shards or array.chunks
    # every part has all columns of its rows, check_layout has seen to that
    columns = [slice(0, n_columns) for n_columns in out.shape[1:]]
    # a chunk of which several runs are read has one key, which takes long to encode
    keys: dict[int, str] = {}
    items = []
    for number, first, end, before in parts_of(starts, stops, chunks[0]):
        if number not in keys:
            key = array.metadata.encode_chunk_key((number, *(0 for _ in columns)))
            keys[number] = (array.store_path / key).path
        here, there = slice(first, end), slice(before, before + end - first)
        items.append(ChunkItem(keys[number], [here, *columns], chunks, [there, *columns], out.shape))
    _zarrs_of(array).retrieve_chunks_and_apply_index(items, out)


def _is_for_zarrs(data_set: ZarrDataset | None) -> TypeGuard[ZarrDataset]:
    """Whether zarrs can be asked for rows of a data set."""
    return data_set is not None and all(
        _zarrs_of(array) is not None
        and getattr(array.config, "read_missing_chunks", True)  # older versions of zarr have no other way
        and type(array.store_path.store) is LocalStore
        and array.dtype.isnative
        and array.dtype.kind in "biuf"
        and _is_regular(array)  # parts_of cuts at multiples of one size
        for array in data_set.arrays
    )


def _zarrs_of(array: AsyncArray[Any]) -> Any:  # noqa: ANN401 a class of zarrs's inside, not there without it
    """Return what zarrs reads an array with; None if it doesn't, or would have to be asked in another way."""
    pipeline: Any = array.codec_pipeline
    return pipeline.impl if is_by_zarrs(array) and _zarrs_is_known() else None


def is_by_zarrs(array: AsyncArray[Any]) -> bool:
    """Whether zarr has zarrs decode an array."""
    return type(array.codec_pipeline).__module__.partition(".")[0] == "zarrs"


def is_far_by_zarrs(array: AsyncArray[Any]) -> bool:
    """Whether zarrs reads an array from elsewhere than a local disk."""
    pipeline: Any = array.codec_pipeline
    return is_by_zarrs(array) and pipeline.impl is not None and type(array.store_path.store) is not LocalStore


@cache
def _zarrs_is_known() -> bool:
    """Whether zarrs is asked for parts of chunks as in 0.2.2 and 0.2.3, or looks as if it were."""
    from zarrs import _internal

    part = getattr(_internal, "ChunkItem", None)
    arguments = getattr(part, "__text_signature__", None)
    return version("zarrs").startswith("0.2.") and arguments == "(key, chunk_subset, chunk_shape, subset, shape)"


def _is_regular(array: AsyncArray[Any]) -> bool:
    """Whether all chunks of an array have the same size."""
    try:
        return bool(array.chunks)
    except NotImplementedError:
        return False
