"""Reader for collections on a local disk: reads a load request in the thread that asks for it.

annbatch reads through zarr, which makes an indexer for each run of consecutive rows, iterates over it twice, and passes
each array through its event loop to a thread that decodes. For chunks of 64 rows, this takes half as long as
decoding them. Most of it is Python code, which holds the GIL, so prefetching delays the training. Here, consecutive
rows are joined to runs, runs of rows of a CSR matrix become runs of its values, and :mod:`chunk_reader` reads them.

annbatch reads everything else: data in memory or in remote stores, arrays that :mod:`shards` doesn't know, and datasets
of different dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from annbatch.utils import CSRContainer

from annbatch_distributed.core.rows import runs
from annbatch_distributed.core.values import Int64Array, few
from annbatch_distributed.loader import chunk_reader
from annbatch_distributed.loader._annbatch import have_one_dtype, room_for, stored_arrays
from annbatch_distributed.loader.shards import DamagedChunkError, Shards

if TYPE_CHECKING:
    from annbatch import Loader
    from zarr import Array


@dataclass(frozen=True)
class _Cells:
    """Cells of a dataset on a local disk."""

    number: int
    """Number of the dataset."""
    arrays: tuple[Shards, ...]
    """One array of rows; or ``data`` and ``indices`` of a CSR matrix."""
    indptr: npt.NDArray[Any] | None
    """``indptr`` of a CSR matrix, in memory; None for an array of rows."""

    def runs(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the starts and stops of runs of rows, or of their values; a ValueError if ``indptr`` is damaged."""
        starts, stops = runs(rows)
        if self.indptr is None:
            return starts, stops
        # for indptr 0 3 3 5, the rows 1:3 are the values 3:5
        starts, stops = (self.indptr[bounds].astype(np.int64) for bounds in (starts, stops))
        n_values = min(array.n_rows for array in self.arrays)
        if starts.min() < 0 or (stops < starts).any() or stops.max() > n_values:
            raise ValueError(
                f"indptr of dataset {self.number} is damaged: it has rows up to the value {int(stops.max()):,} of "
                f"{n_values:,}. Write the collection again."
            )
        return starts, stops

    def read(self, rows: Int64Array, runs: tuple[Int64Array, Int64Array], outs: tuple[npt.NDArray[Any], ...]) -> None:
        """Read rows into ``outs``; an OSError if they are damaged."""
        try:
            for array, out in zip(self.arrays, outs, strict=True):
                chunk_reader.read(array, *runs, out)
        except DamagedChunkError as error:
            # (rows,): the first value of each row, and the first of the next one
            starts, stops = (rows, rows + 1) if self.indptr is None else (self.indptr[rows], self.indptr[rows + 1])
            raise _explained(error, self.number, rows[(starts < error.stop) & (stops > error.start)]) from error


class LocalReader:
    """Reader of the datasets of a loader that are on a local disk."""

    def __init__(self) -> None:
        # by the number of a dataset; None if only annbatch can read it
        self._cells: dict[int, _Cells | None] = {}

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
        datasets = [cells for number in rows_of if (cells := self._cells_of(loader, number)) is not None]
        if len(datasets) < len(rows_of):
            return None
        runs = [cells.runs(rows) for cells, rows in zip(datasets, rows_of.values(), strict=True)]
        # one array for all datasets, of which each dataset fills its part
        bounds = np.cumsum([0, *(int((stops - starts).sum()) for starts, stops in runs)]).tolist()
        values = datasets[0].arrays[0]
        data = room_for(loader, (bounds[-1], *values.row_shape), values.dtype.newbyteorder("="))
        is_sparse = datasets[0].indptr is not None
        indices = room_for(loader, (bounds[-1],), np.dtype(np.int32)) if is_sparse else None
        for cells, rows, own, part in zip(
            datasets, rows_of.values(), runs, map(slice, bounds, bounds[1:]), strict=True
        ):
            cells.read(rows, own, (data[part],) if indices is None else (data[part], indices[part]))
        if indices is None:
            return data
        lengths = [
            cells.indptr[rows + 1].astype(np.int64) - cells.indptr[rows].astype(np.int64)
            for cells, rows in zip(datasets, rows_of.values(), strict=True)
            if cells.indptr is not None
        ]
        # rows of 3, 0 and 2 values have the indptr 0 3 3 5
        indptr = np.concatenate([[0], *lengths]).cumsum()
        return CSRContainer((data, indices, indptr), (len(indptr) - 1, loader.n_var), data.dtype)

    def _cells_of(self, loader: Loader[Any, Any], number: int) -> _Cells | None:
        """Return a dataset of a loader; None if only annbatch can read it."""
        if number not in self._cells:
            self._cells[number] = _opened(stored_arrays(loader, number), number)
        return self._cells[number]


def _opened(arrays: Sequence[Array[Any]], number: int) -> _Cells | None:
    """Return a dataset of some arrays; None if only annbatch can read it."""
    known = [shards for array in arrays if (shards := Shards.of(array.async_array)) is not None]
    if not arrays or len(known) < len(arrays):
        return None
    *values, last = known
    if not values:
        return _Cells(number, (last,), None)
    indptr, all_rows = np.empty(last.n_rows, last.dtype.newbyteorder("=")), (np.array([0]), np.array([last.n_rows]))
    try:
        chunk_reader.read(last, *all_rows, indptr)
    except DamagedChunkError as error:
        raise _explained(error, number, np.arange(error.start, min(error.stop, last.n_rows - 1))) from error
    return _Cells(number, tuple(values), indptr)


def _explained(error: DamagedChunkError, number: int, rows: Int64Array) -> OSError:
    """Return an error about a damaged chunk that has values of some rows of a dataset."""
    return OSError(
        f"{error} It has values of the cells {few(list(map(str, rows[:9])), 8)} of dataset {number}, which are not "
        "read. Copy the file again from where it is intact, or write the collection again."
    )
