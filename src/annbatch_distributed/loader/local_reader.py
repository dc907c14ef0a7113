"""Reader for collections on a local disk: reads a load request in the thread that asks for it.

annbatch reads through zarr, which makes an indexer for each run of consecutive rows, iterates over it twice, and passes
each array through its event loop to a thread that decodes. For chunks of 64 rows, this takes half as long as
decoding them. Most of it is Python code, which holds the GIL, so prefetching delays the training. This module
finds directly which part of which stored object goes where:

1. Consecutive rows are joined to runs. Runs of rows of a CSR matrix become runs of its values.
2. Runs are split at the ends of stored objects: of shards, or of chunks without sharding.
3. :mod:`raw_reader` reads the parts of uncompressed arrays, and :mod:`zarrs_reader` the parts of others, one array
   after the other, without the GIL.

annbatch reads everything else: data in memory or in remote stores, codecs that zarrs can't decode, datasets of
different dtypes, and chunks of different sizes. It also reads the first load request of sparse datasets, together with
their ``indptr``, and most that would fail here, so that errors are annbatch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt
from zarr import AsyncArray
from zarr.storage import LocalStore

from annbatch_distributed.core.rows import runs
from annbatch_distributed.core.values import Int64Array
from annbatch_distributed.loader import raw_reader, zarrs_reader
from annbatch_distributed.loader._annbatch import room_for, zarr_dataset_of

if TYPE_CHECKING:
    from annbatch import Loader
    from annbatch.utils import CSRContainer

    from annbatch_distributed.loader._annbatch import ZarrDataset


def read(loader: Loader[Any, Any], rows_of: Mapping[int, Int64Array]) -> CSRContainer | npt.NDArray[Any] | None:
    """Read rows of a loader's datasets; return None if only annbatch can read them.

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
    datasets = [dataset for number in rows_of if _is_local(dataset := zarr_dataset_of(loader, number))]
    if len(datasets) < len(rows_of):
        return None
    # (starts, stops) of the runs of each dataset: runs of rows, or of the values of a CSR matrix
    bounds = []
    for dataset, rows in zip(datasets, rows_of.values(), strict=True):
        starts, stops = runs(rows)
        # for indptr 0 3 3 5, the rows 1:3 are the values 3:5
        indptr = dataset.indptr
        bounds.append((starts, stops) if indptr is None else (indptr[starts], indptr[stops]))
    for dataset, (starts, stops) in zip(datasets, bounds, strict=True):
        # the readers would make up values for runs that are not in the arrays, as of a damaged indptr
        if starts.min() < 0 or (stops < starts).any() or any(stops.max() > array.shape[0] for array in dataset.arrays):
            return None
    # one buffer of annbatch for all datasets, of which each dataset fills its part
    buffer, first = room_for(loader, rows_of), 0
    outs = (buffer,) if isinstance(buffer, np.ndarray) else buffer.elems[:2]
    for dataset, (starts, stops) in zip(datasets, bounds, strict=True):
        end = first + int((stops - starts).sum())
        for array, out in zip(dataset.arrays, outs, strict=True):
            parts = [*parts_of(starts.tolist(), stops.tolist(), (array.shards or array.chunks)[0])]
            if not any(reader.read(array, parts, out[first:end]) for reader in (raw_reader, zarrs_reader)):
                return None
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


def _is_local(dataset: ZarrDataset | None) -> TypeGuard[ZarrDataset]:
    """Return True if a dataset has numbers on a local disk, in chunks of one size."""
    return dataset is not None and all(
        type(array.store_path.store) is LocalStore
        and array.dtype.isnative
        and array.dtype.kind in "biuf"
        and _is_regular(array)  # parts_of splits at multiples of one size
        for array in dataset.arrays
    )


def _is_regular(array: AsyncArray[Any]) -> bool:
    """Return True if all chunks of an array have the same size."""
    try:
        return bool(array.chunks)
    except NotImplementedError:
        return False
