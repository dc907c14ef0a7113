"""Columns: arrays with a value for each row, read over all datasets of a collection with the rows of a load request.

``collect`` stores such arrays in chunks of a few KB that aren't compressed, so a chunk is found by its number, without
an index in memory. All columns have the same chunks, which are therefore looked up once for all of them. Read by
:mod:`chunk_reader`, one run of rows and one column after the other, they would take three times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from annbatch_distributed.core.values import Int64Array
from annbatch_distributed.loader.files import Reading, StoredFile, together
from annbatch_distributed.loader.shards import DamagedChunkError, Shards, prepare, twice, verifies

#: Largest number of rows of a chunk: of larger ones, most of what is read would not be of the wanted rows.
MOST_ROWS = 4_096


class _Run(NamedTuple):
    """Chunks of a dataset that follow each other."""

    first: int
    """Number of the first chunk in its dataset."""
    place: int
    """Its place among all chunks that are read."""
    n_chunks: int


class Places(NamedTuple):
    """Where the values of some rows are, in any column."""

    runs: list[tuple[int, list[_Run]]]
    """The runs of chunks to read of each dataset, with its number."""
    n_chunks: int
    """Number of all chunks to read."""
    at: Int64Array
    """Place of each row in the rows of these chunks."""


class Chunking:
    """Chunks of the rows of all datasets, the same in all of their columns."""

    def __init__(self, chunk_size: int, lengths: Sequence[int]) -> None:
        self.chunk_size = chunk_size
        # chunks of 4 rows, and datasets of 6 and 3 rows: the chunks 0 1 are of the first dataset, and 2 of the second
        self._firsts = np.cumsum([0, *(-(-length // chunk_size) for length in lengths)])

    def places(self, rows_of: Mapping[int, Int64Array]) -> Places:
        """Return where the values of some rows of each dataset are, in the order of the datasets and rows.

        >>> places = Chunking(4, [6, 3]).places({0: np.array([5, 1]), 1: np.array([2])})
        >>> places.at.tolist()
        [5, 1, 10]
        """
        first = np.repeat(self._firsts[list(rows_of)], [len(rows) for rows in rows_of.values()])
        rows = np.concatenate([*rows_of.values()])
        within = rows // self.chunk_size
        wanted = first + within
        # rows of one chunk mostly follow each other: the chunks 1 1 0 0 1 have the stretches 1 0 1
        begins = np.flatnonzero(np.diff(wanted, prepend=-1))
        chunks, place_of = np.unique(wanted[begins], return_inverse=True)
        place = np.repeat(place_of, np.diff(begins, append=len(rows)))
        datasets = np.searchsorted(self._firsts, chunks, side="right") - 1
        # of the chunks 0 1 2 in the datasets 0 0 1, 2 begins a run though it follows 1
        begins = np.flatnonzero((np.diff(chunks, prepend=-2) != 1) | (np.diff(datasets, prepend=-1) != 0))
        ends = [*begins[1:].tolist(), len(chunks)]
        own = (chunks[begins] - self._firsts[datasets[begins]]).tolist()
        by_dataset: dict[int, list[_Run]] = {}
        for number, first_chunk, begin, end in zip(datasets[begins].tolist(), own, begins.tolist(), ends, strict=True):
            by_dataset.setdefault(number, []).append(_Run(first_chunk, begin, end - begin))
        return Places([*by_dataset.items()], len(chunks), place * self.chunk_size + rows - within * self.chunk_size)


class Column:
    """Array with a value for each row of all datasets."""

    def __init__(self, parts: Sequence[Shards], n_more: int) -> None:
        self._parts = parts
        self._n_more = n_more
        # by dataset: the version of its file whose chunks are known to follow each other
        self._versions: dict[int, Any] = {}

    @classmethod
    def of(cls, parts: Sequence[Shards | None], *, n_more: int = 0) -> Self | None:
        """Return a column of the arrays of all datasets; None if it can't be read as one.

        ``n_more`` is the number of values beyond one for each cell: 1 for ``indptr``. Raises an OSError if a file is
        damaged.
        """
        known = [part for part in parts if part is not None and _is_column(part)]
        if len(known) < len(parts) or len({(part.chunk_size, part.dtype, part.has_checksums) for part in known}) != 1:
            return None
        column = cls(known, n_more)
        prepare(known)
        return column if all(together(map(column._is_in_order, range(len(known))))) else None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_versions": {}}

    @property
    def chunk_size(self) -> int:
        """Number of rows of a chunk."""
        return self._parts[0].chunk_size

    def read(self, places: Places) -> npt.NDArray[Any]:
        """Return the values at some places.

        Raises
        ------
        OSError
            If a chunk isn't stored as it was written, with the cells in it.
        """
        return together([self.reading(places)])[0]

    def reading(self, places: Places) -> Reading[npt.NDArray[Any]]:
        """Read the values at some places as :meth:`read` does, but yield after announcing them to a remote store."""
        any_part = self._parts[0]
        dtype, step = any_part.dtype, any_part.encoded_bytes
        content = np.empty((places.n_chunks, step), np.uint8)
        is_verified = any_part.has_checksums and verifies()
        opened = dict[int, StoredFile]()
        if any_part.files.is_remote:  # a local disk reads a few KB as fast without
            for number, runs in places.runs:
                if (known := (yield from self._opening(number))) is None:
                    continue
                opened[number] = known
                for first, _, n_chunks in runs:
                    known.announce(first * step, n_chunks * step)
            yield
        for number, runs in places.runs:
            file, part = opened.get(number) or (yield from self._opening(number)), self._parts[number]
            try:
                if file is None:
                    raise part.rewritten(0)
                for run in runs:
                    out = content[run.place : run.place + run.n_chunks]
                    fill = partial(part.read_chunks, file, run.first, out, verifies=is_verified)
                    twice(file, run.first * step, out.size, fill)
            except DamagedChunkError as error:
                raise self._explained(error, number) from error
            finally:
                if file is not None:
                    file.close()
        # (chunks, bytes of a chunk and its checksum) to (rows,)
        values = np.ascontiguousarray(content[:, : any_part.chunk_bytes]).reshape(-1).view(dtype)
        return values[places.at].astype(dtype.newbyteorder("="), copy=False)

    def _is_in_order(self, number: int) -> Reading[bool]:
        if (file := (yield from self._opening(number))) is not None:
            file.close()
        return file is not None

    def _opening(self, number: int) -> Reading[StoredFile | None]:
        """Open the file of a dataset; None if its chunks don't follow each other, or if some need not be stored."""
        part, file = self._parts[number], None
        try:
            if (file := part.open(0)) is None:
                if part.fill_value is None:
                    raise part.missing(0)
                return None
            if self._versions.get(number) != file.version:
                part.announce_index(0, file)
                if part.files.is_remote:
                    yield
                if not part.has_all_in_order(file):
                    file.close()
                    return None
                self._versions[number] = file.version
        except DamagedChunkError as error:
            if file is not None:
                file.close()
            raise self._explained(error, number) from error
        return file

    def _explained(self, error: DamagedChunkError, number: int) -> OSError:
        """Return the error for the cells of a chunk of a dataset."""
        n_cells = self._parts[number].n_rows - self._n_more
        return error.of_cells(number, np.arange(min(error.start, n_cells - 1), min(error.stop, n_cells)))


def _is_column(part: Shards) -> bool:
    """Return True if an array has one value for each row, in small chunks that aren't compressed, in one file."""
    is_small = part.chunk_size <= MOST_ROWS and part.n_rows <= part.shard_size
    return is_small and not part.row_shape and part.decode is None


def bounds_of(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the end of the rows of each dataset, over all of them.

    >>> list(bounds_of([6, 3]))
    [(0, 6), (6, 9)]
    """
    yield from pairwise(np.cumsum([0, *lengths]).tolist())
