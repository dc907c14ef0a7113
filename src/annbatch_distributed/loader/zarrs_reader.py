"""Reader for collections on a local disk: calls zarrs directly, in the thread that asks for a load request.

annbatch reads through zarr, which makes an indexer for each run of consecutive rows, iterates over it twice, and passes
each array through its event loop to a thread that calls zarrs. For chunks of 64 rows, this takes half as long as
decoding them. Most of it is Python code, which holds the GIL, so prefetching delays the training. This module
tells zarrs directly which part of which chunk goes where:

1. Consecutive rows are joined to runs. Runs of rows of a CSR matrix become runs of its values.
2. Runs are split at the ends of stored objects: of shards, or of chunks without sharding.
3. zarrs decodes all parts of an array together, without the GIL, one array after the other.

annbatch reads everything else: data in memory or in remote stores, other codecs, datasets of different dtypes, and
chunks of different sizes. It also reads the first load request of sparse datasets, together with their ``indptr``, and
whatever would fail here, so that errors are annbatch's.

The entry point of zarrs is private. Versions that may have changed it are left to annbatch, and
``tests/loader/test_zarrs_reader.py`` fails for them.
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

from annbatch_distributed.core.rows import runs
from annbatch_distributed.core.values import Int64Array
from annbatch_distributed.loader._annbatch import room_for, zarr_dataset_of

if TYPE_CHECKING:
    from annbatch import Loader
    from annbatch.utils import CSRContainer

    from annbatch_distributed.loader._annbatch import ZarrDataset


class _Fork:
    """Record of whether zarrs was in use before a fork, which leaves it without threads in the child."""

    was_at_work = is_cut_off = False

    @classmethod
    def before(cls) -> None:
        """Record in the parent whether zarr was used while zarrs was imported."""
        cls.was_at_work = "zarrs" in sys.modules and "zarr_io" in {thread.name for thread in threading.enumerate()}

    @classmethod
    def in_child(cls) -> None:
        """Apply the record of the parent."""
        cls.is_cut_off |= cls.was_at_work


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_Fork.before, after_in_child=_Fork.in_child)


def check_zarrs_answers(asks: Callable[[], bool]) -> None:
    """Raise a RuntimeError if a read through zarrs would hang, in a forked process."""
    if _Fork.is_cut_off and asks():
        raise RuntimeError(
            "This process was forked while zarrs was in use, and reading would hang, because a fork doesn't copy the "
            "threads of zarrs. Start ranks and workers by spawn (multiprocessing_context='spawn', "
            "strategy='ddp_spawn'), or use zarr's own codecs: before you open the collection, call "
            "zarr.config.set({'codec_pipeline.path': 'zarr.core.codec_pipeline.BatchedCodecPipeline'})."
        )


def read(loader: Loader[Any, Any], rows_of: Mapping[int, Int64Array]) -> CSRContainer | npt.NDArray[Any] | None:
    """Read rows of a loader's datasets; return None, without reading, if only annbatch can read them.

    Parameters
    ----------
    loader
        Loader of the datasets.
    rows_of
        Rows to read by the number of their dataset, in the order of the result.

    Returns
    -------
    CSRContainer | numpy.ndarray | None
        The rows of the first dataset, then the rows of the next, as annbatch's ``Loader._index_datasets`` returns them.
    """
    datasets = [dataset for number in rows_of if _is_for_zarrs(dataset := zarr_dataset_of(loader, number))]
    if len(datasets) < len(rows_of):
        return None
    # (starts, stops) of the runs of each dataset: runs of rows, or of the values of a CSR matrix
    bounds = []
    for dataset, rows in zip(datasets, rows_of.values(), strict=True):
        starts, stops = runs(rows)
        # for indptr 0 3 3 5, the rows 1:3 are the values 3:5
        indptr = dataset.indptr
        bounds.append((starts, stops) if indptr is None else (indptr[starts], indptr[stops]))
    for dataset, (_, stops) in zip(datasets, bounds, strict=True):
        if any(stops.max() > array.shape[0] for array in dataset.arrays):  # zarrs would make up values
            return None
    # one buffer of annbatch for all datasets, of which each dataset fills its part
    buffer, first = room_for(loader, rows_of), 0
    outs = (buffer,) if isinstance(buffer, np.ndarray) else buffer.elems[:2]
    for dataset, (starts, stops) in zip(datasets, bounds, strict=True):
        end = first + int((stops - starts).sum())
        for array, out in zip(dataset.arrays, outs, strict=True):
            _read_array(array, starts.tolist(), stops.tolist(), out[first:end])
        first = end
    if not isinstance(buffer, np.ndarray):
        indptrs = [dataset.indptr for dataset in datasets if dataset.indptr is not None]
        lengths = [indptr[rows + 1] - indptr[rows] for indptr, rows in zip(indptrs, rows_of.values(), strict=True)]
        # rows of 3, 0 and 2 values have the indptr 0 3 3 5
        buffer.elems[2][0] = 0
        np.cumsum(np.concatenate(lengths), out=buffer.elems[2][1:])
    return buffer


def parts_of(starts: list[int], stops: list[int], chunk_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Split runs at the ends of chunks: yield the chunk, start and stop in it, and the offset in the output.

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
    """Read runs along the first axis of an array into ``out``, one after the other."""
    from zarrs._internal import ChunkItem

    chunks = array.shards or array.chunks
    # every chunk has all columns of its rows, as check_layout has checked
    columns = [slice(0, n_columns) for n_columns in out.shape[1:]]
    # keys of chunks, as encoding takes long and several runs may be in one chunk
    keys: dict[int, str] = {}
    items = []
    for number, first, end, before in parts_of(starts, stops, chunks[0]):
        if number not in keys:
            key = array.metadata.encode_chunk_key((number, *(0 for _ in columns)))
            keys[number] = (array.store_path / key).path
        in_chunk, in_out = slice(first, end), slice(before, before + end - first)
        items.append(ChunkItem(keys[number], [in_chunk, *columns], chunks, [in_out, *columns], out.shape))
    _zarrs_of(array).retrieve_chunks_and_apply_index(items, out)


def _is_for_zarrs(dataset: ZarrDataset | None) -> TypeGuard[ZarrDataset]:
    """Return True if zarrs can read rows of a dataset."""
    return dataset is not None and all(
        _zarrs_of(array) is not None
        and getattr(array.config, "read_missing_chunks", True)  # older versions of zarr always do
        and type(array.store_path.store) is LocalStore
        and array.dtype.isnative
        and array.dtype.kind in "biuf"
        and _is_regular(array)  # parts_of splits at multiples of one size
        for array in dataset.arrays
    )


def _zarrs_of(array: AsyncArray[Any]) -> Any:  # noqa: ANN401 a private class of zarrs, which may not be installed
    """Return the reader of zarrs for an array; None if zarrs can't read it, or has an unknown interface."""
    pipeline: Any = array.codec_pipeline
    return pipeline.impl if is_by_zarrs(array) and _zarrs_is_known() else None


def is_by_zarrs(array: AsyncArray[Any]) -> bool:
    """Return True if zarr decodes an array through zarrs."""
    return type(array.codec_pipeline).__module__.partition(".")[0] == "zarrs"


def is_far_by_zarrs(array: AsyncArray[Any]) -> bool:
    """Return True if zarrs reads an array from a store that isn't a local disk."""
    pipeline: Any = array.codec_pipeline
    return is_by_zarrs(array) and pipeline.impl is not None and type(array.store_path.store) is not LocalStore


@cache
def _zarrs_is_known() -> bool:
    """Return True if zarrs has the private interface of 0.2.2 and 0.2.3."""
    from zarrs import _internal

    part = getattr(_internal, "ChunkItem", None)
    arguments = getattr(part, "__text_signature__", None)
    return version("zarrs").startswith("0.2.") and arguments == "(key, chunk_subset, chunk_shape, subset, shape)"


def _is_regular(array: AsyncArray[Any]) -> bool:
    """Return True if all chunks of an array have the same size."""
    try:
        return bool(array.chunks)
    except NotImplementedError:
        return False
