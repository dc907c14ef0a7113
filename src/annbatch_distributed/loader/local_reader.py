"""Reader for collections on a local disk, or in a cache on it: reads a load request in the thread that asks for it.

annbatch reads through zarr, which makes an indexer for each run of consecutive rows, iterates over it twice, and passes
each array through its event loop to a thread that decodes. For chunks of 64 rows, this takes half as long as
decoding them. Most of it is Python code, which holds the GIL, so prefetching delays the training. Here, consecutive
rows are joined to runs, runs of rows of a CSR matrix become runs of its values, and :mod:`chunk_reader` reads them.

annbatch reads everything else: data in memory or in remote stores without a cache, arrays that :mod:`shards` doesn't
know, and datasets of different dtypes. If it must read one dataset of a loader, it reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from annbatch.utils import CSRContainer

from annbatch_distributed.core.values import Int64Array
from annbatch_distributed.loader import chunk_reader
from annbatch_distributed.loader._annbatch import data_in, have_one_dtype, room_for, stored_arrays
from annbatch_distributed.loader.columns import Chunking, Column, bounds_of
from annbatch_distributed.loader.files import Reading, together
from annbatch_distributed.loader.shards import DamagedChunkError, Shards, prepare

if TYPE_CHECKING:
    from annbatch import Loader
    from zarr import Array

#: Where the values of some rows begin and end.
type _Bounds = tuple[Int64Array, Int64Array]


@dataclass(frozen=True)
class _Cells:
    """Cells of a dataset."""

    number: int
    """Number of the dataset."""
    arrays: tuple[Shards, ...]
    """One array of rows; or ``data`` and ``indices`` of a CSR matrix."""
    indptr: Shards | None
    """``indptr`` of a CSR matrix; None for an array of rows."""

    def readings(
        self, rows: Int64Array, bounds: _Bounds | None, outs: tuple[npt.NDArray[Any], ...]
    ) -> Iterator[Reading[None]]:
        """Yield readings of rows into ``outs``, which raise an OSError if these are damaged."""
        # (rows,): the first value of each row, and the first of the next one
        starts, stops = (rows, rows + 1) if bounds is None else bounds
        # consecutive rows are one run of values, also if some have none
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        run_starts, run_stops = starts[np.append(0, breaks)], stops[np.append(breaks, len(rows)) - 1]

        def explained(reading: Reading[None]) -> Reading[None]:
            try:
                yield from reading
            except DamagedChunkError as error:
                raise error.of_cells(self.number, rows[(starts < error.stop) & (stops > error.start)]) from error

        for array, out in zip(self.arrays, outs, strict=True):
            yield explained(chunk_reader.reading(array, run_starts, run_stops, out))

    def check(self, bounds: _Bounds) -> None:
        """Raise a ValueError if ``indptr`` is damaged."""
        starts, stops = bounds
        n_values = min(array.n_rows for array in self.arrays)
        if starts.min() < 0 or (stops < starts).any() or stops.max() > n_values:
            raise ValueError(
                f"indptr of dataset {self.number} is damaged: it has rows up to the value {int(stops.max()):,} of "
                f"{n_values:,}. Write the collection again."
            )


class _Pointers:
    """``indptr`` of all datasets: read with the rows where its chunks are small, or else in memory."""

    def __init__(self, parts: Sequence[Shards]) -> None:
        self._parts = parts
        self._column = Column.of(parts, n_more=1)
        if self._column is not None:
            self._chunking = Chunking(self._column.chunk_size, [part.n_rows for part in parts])
        # by dataset, if in memory
        self._held: dict[int, npt.NDArray[Any]] = {}

    def bounds(self, rows_of: Mapping[int, Int64Array]) -> dict[int, _Bounds]:
        """Return where the values of rows of each dataset begin and end."""
        if self._column is None:
            held = {number: self._indptr(number) for number in rows_of}
            return {number: (held[number][rows], held[number][rows + 1]) for number, rows in rows_of.items()}
        # the entries of rows, then of the rows after them
        entries = {number: np.concatenate([rows, rows + 1]) for number, rows in rows_of.items()}
        values = self._column.read(self._chunking.places(entries)).astype(np.int64, copy=False)
        ends = np.cumsum([len(own) for own in entries.values()])
        parts = (own.reshape(2, -1) for own in np.split(values, ends[:-1]))
        return {number: (starts, stops) for number, (starts, stops) in zip(rows_of, parts, strict=True)}

    def _indptr(self, number: int) -> npt.NDArray[Any]:
        """Return ``indptr`` of a dataset, in memory; an OSError if it is damaged."""
        if (known := self._held.get(number)) is None:
            part = self._parts[number]
            known = np.empty(part.n_rows, np.int64)
            try:
                chunk_reader.read(part, np.array([0]), np.array([part.n_rows]), known)
            except DamagedChunkError as error:
                raise error.of_cells(number, np.arange(error.start, min(error.stop, part.n_rows - 1))) from error
            self._held[number] = known
        return known


class LocalReader:
    """Reader of the datasets of a loader."""

    def __init__(self) -> None:
        # the number of datasets; the datasets, or None if only annbatch can read them; and indptr of sparse ones
        self._opened: tuple[int, list[_Cells] | None, _Pointers | None] = (0, None, None)

    def read(
        self, loader: Loader[Any, Any], rows_of: Mapping[int, Int64Array]
    ) -> CSRContainer | npt.NDArray[Any] | None:
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
            The rows of the first dataset, then the rows of the next. Values have the dtype in which they are stored,
            and indices the dtype of SciPy.
        """
        if not have_one_dtype(loader):
            return None
        if self._opened[0] != (n_datasets := len(data_in(loader))):
            self._opened = n_datasets, *_opened([stored_arrays(loader, number) for number in range(n_datasets)])
        _, datasets, pointers = self._opened
        if datasets is None:
            return None
        bounds = {} if pointers is None else pointers.bounds(rows_of)
        for number, own in bounds.items():
            datasets[number].check(own)
        lengths = [stops - starts for starts, stops in bounds.values()]
        n_each = [len(rows) for rows in rows_of.values()] if pointers is None else [int(own.sum()) for own in lengths]
        # one array for all datasets, of which each dataset fills its part
        values = datasets[0].arrays[0]
        data = room_for(loader, (sum(n_each), *values.row_shape), values.dtype.newbyteorder("="))
        indices = None if pointers is None else room_for(loader, (sum(n_each),), np.dtype(np.int32))
        readings = list[Reading[None]]()
        for (number, rows), (first, end) in zip(rows_of.items(), bounds_of(n_each), strict=True):
            outs = (data[first:end],) if indices is None else (data[first:end], indices[first:end])
            readings += datasets[number].readings(rows, bounds.get(number), outs)
        together(readings)
        if indices is None:
            return data
        # rows of 3, 0 and 2 values have the indptr 0 3 3 5
        indptr = np.concatenate([[0], *lengths]).cumsum()
        return CSRContainer((data, indices, indptr), (len(indptr) - 1, loader.n_var), data.dtype)


def _opened(datasets: Sequence[Sequence[Array[Any]]]) -> tuple[list[_Cells] | None, _Pointers | None]:
    """Return datasets of some arrays, and ``indptr`` of sparse ones; None if only annbatch can read them."""
    cells, opened = list[_Cells](), [[Shards.of(array.async_array) for array in arrays] for arrays in datasets]
    known_of = [[shards for shards in arrays if shards is not None] for arrays in opened]
    if known_of != opened or not all(opened):
        return None, None
    prepare([shards for known in known_of for shards in known])
    for number, known in enumerate(known_of):
        *values, last = known
        cells.append(_Cells(number, tuple(values), last) if values else _Cells(number, (last,), None))
    indptr = [own.indptr for own in cells if own.indptr is not None]
    return cells, _Pointers(indptr) if indptr else None
