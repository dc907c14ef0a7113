"""Reader of runs of rows from shards: reads, verifies and decodes each chunk that has wanted rows once.

1. Runs are split at the ends of chunks.
2. Chunks that follow each other in a shard are one positional read. All reads are announced to the kernel before the
   first one, which may then read a cold disk in parallel.
3. Each chunk is verified and decoded, and its wanted rows are copied to their places, in the dtype of the output. Parts
   of runs of an array without codecs are read straight to their places instead.

Reading and decoding don't hold the GIL, so several threads decode large chunks at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import cache
from itertools import batched, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zarr

from annbatch_distributed.core.values import Int64Array, n_cores
from annbatch_distributed.core.worker import current_worker
from annbatch_distributed.loader.files import Reading, StoredFile, together
from annbatch_distributed.loader.shards import Shards, twice, verifies

#: Number of files that are open at the same time, far below the limit of a process.
_MOST_FILES = 64
#: Bytes of chunks that are read at a time.
_AT_A_TIME = 1 << 22
#: Bytes of a chunk that is worth another thread.
_WORTH_A_THREAD = 1 << 16
#: Number of threads by default: more are hardly faster, as the work between two reads holds the GIL.
_MOST_THREADS = 8


class _Pieces(NamedTuple):
    """Parts of runs that are within one chunk each, ordered by chunk, as arrays of one length."""

    chunks: Int64Array
    """Number of the chunk."""
    starts: Int64Array
    """First row in the chunk."""
    stops: Int64Array
    places: Int64Array
    """Place of the first row in the output."""


class _Chunks(NamedTuple):
    """Where the chunks of pieces are, as arrays of one length."""

    files: Int64Array
    """Place of the file in the list of open files."""
    offsets: Int64Array
    """First byte in the file."""
    sizes: Int64Array
    """Number of bytes; 0 if the chunk isn't stored."""


class _Read(NamedTuple):
    """Bytes of a file that are read at a time, and the pieces in them."""

    file: StoredFile
    offset: int
    n_bytes: int
    pieces: slice


def read(shards: Shards, starts: Int64Array, stops: Int64Array, out: npt.NDArray[Any]) -> None:
    """Read runs of rows into ``out``, in order.

    Raises
    ------
    DamagedChunkError
        If a chunk isn't stored as it was written, or isn't stored though all must be.
    """
    together([reading(shards, starts, stops, out)])


def whole(array: zarr.Array[Any]) -> npt.NDArray[Any]:
    """Return the values of an array; an OSError if they aren't as they were written, as far as it has checksums."""
    shards = Shards.of(array.async_array)
    if shards is None:
        return np.asarray(array[:])
    values = np.empty(array.shape, array.dtype)
    read(shards, np.array([0]), np.array([shards.n_rows]), values)
    return values


def reading(shards: Shards, starts: Int64Array, stops: Int64Array, out: npt.NDArray[Any]) -> Reading[None]:
    """Read runs of rows as :func:`read` does, but yield after each announcement to a remote store."""
    pieces = _pieces_of(starts, stops, shards.chunk_size)
    by_shard = [*_by_shard(pieces.chunks // shards.n_chunks)]
    for some in batched(by_shard, max(_MOST_FILES, len(by_shard) * shards.files.is_remote)):
        with ExitStack() as opened:
            of_shard = dict[int, StoredFile]()
            for number, *_ in some:
                if (file := shards.open(number)) is not None:
                    opened.callback(file.close)
                    shards.announce_index(number, file)
                    of_shard[number] = file
            if shards.files.is_remote:
                yield
            files = [*of_shard.values()]
            # (pieces, 3): file, first byte and number of bytes of the chunk of each piece
            entries = np.zeros((some[-1][2] - some[0][1], 3), np.int64)
            for place, (number, begin, end) in enumerate(one for one in some if one[0] in of_shard):
                here = entries[begin - some[0][1] : end - some[0][1]]
                here[:, 0] = place
                here[:, 1:] = shards.index(number, files[place])[pieces.chunks[begin:end] - number * shards.n_chunks]
            own = _Pieces(*(part[some[0][1] : some[-1][2]] for part in pieces))
            is_stored = entries[:, 2] > 0
            if not is_stored.all():
                _fill_missing(shards, _Pieces(*(part[~is_stored] for part in own)), out)
                own, entries = _Pieces(*(part[is_stored] for part in own)), entries[is_stored]
            if len(entries):
                yield from _read_stored(shards, own, _Chunks(*entries.T), files, out)


def _fill_missing(shards: Shards, pieces: _Pieces, out: npt.NDArray[Any]) -> None:
    """Fill the places of pieces whose chunks aren't stored; a DamagedChunkError if all must be."""
    if shards.fill_value is None:
        raise shards.missing(int(pieces.chunks[0]))
    for _, start, stop, place in zip(*(part.tolist() for part in pieces), strict=True):
        out[place : place + stop - start] = shards.fill_value


def _read_stored(
    shards: Shards, pieces: _Pieces, chunks: _Chunks, files: Sequence[StoredFile], out: npt.NDArray[Any]
) -> Reading[None]:
    """Read pieces whose chunks are stored."""
    is_plain = shards.decode is None and not shards.has_checksums and out.dtype == shards.dtype
    fill: Callable[[_Read], None]
    if is_plain:
        # the pieces themselves, in bytes
        to, row_bytes = out.reshape(-1).view(np.uint8), shards.row_bytes
        places = pieces.places * row_bytes
        sizes = (pieces.stops - pieces.starts) * row_bytes
        chunks = _Chunks(chunks.files, chunks.offsets + pieces.starts * row_bytes, sizes)
        continues = _follow(chunks) & (places[1:] == places[:-1] + sizes[:-1])

        def fill(one: _Read) -> None:
            place = int(places[one.pieces.start])
            one.file.read(one.offset, to[place : place + one.n_bytes])
    else:
        # pieces of the same chunk, and chunks that follow each other
        continues = _follow(chunks) | (np.diff(pieces.chunks) == 0)
        continues &= np.diff(np.cumsum(chunks.sizes) // _AT_A_TIME) == 0
        is_verified = verifies()
        lines = [*zip(*(part.tolist() for part in (*pieces, chunks.offsets, chunks.sizes)), strict=True)]

        def fill(one: _Read) -> None:
            twice(one.file, one.offset, one.n_bytes, lambda: fill_once(one))

        def fill_once(one: _Read) -> None:
            content, decoded = np.empty(one.n_bytes, np.uint8), None
            one.file.read(one.offset, content)
            for chunk, start, stop, place, offset, size in lines[one.pieces]:
                if chunk != decoded:
                    first = offset - one.offset
                    encoded, decoded = content[first : first + size], chunk
                    rows = shards.decoded(chunk, encoded, one.file.path, verifies=is_verified)
                out[place : place + stop - start] = rows[start:stop]

    reads = [*_reads_of(chunks, files, continues)]
    for one in reads:
        one.file.announce(one.offset, one.n_bytes)
    if shards.files.is_remote:
        yield
    # smaller chunks are decoded faster than threads can take turns
    _run(fill, reads, _n_threads() if shards.chunk_bytes >= _WORTH_A_THREAD else 1)


def _follow(chunks: _Chunks) -> npt.NDArray[np.bool_]:
    """Return True for each chunk but the first that follows the chunk before in its file."""
    is_next: npt.NDArray[np.bool_] = chunks.offsets[1:] == chunks.offsets[:-1] + chunks.sizes[:-1]
    is_next &= chunks.files[1:] == chunks.files[:-1]
    return is_next


def _reads_of(chunks: _Chunks, files: Sequence[StoredFile], continues: npt.NDArray[np.bool_]) -> Iterator[_Read]:
    """Yield reads, of pieces that continue the piece before."""
    bounds = np.flatnonzero(np.concatenate([[True], ~continues, [True]]))
    firsts, lasts = bounds[:-1], bounds[1:] - 1
    n_bytes = chunks.offsets[lasts] + chunks.sizes[lasts] - chunks.offsets[firsts]
    parts = (part.tolist() for part in (chunks.files[firsts], chunks.offsets[firsts], n_bytes, firsts, lasts + 1))
    for file, offset, size, first, end in zip(*parts, strict=True):
        yield _Read(files[file], offset, size, slice(first, end))


def _run(fill: Callable[[_Read], None], reads: Sequence[_Read], n_threads: int) -> None:
    """Run a function for each read, in up to some threads."""
    n_threads = min(n_threads, len(reads))

    def run(some: Sequence[_Read]) -> None:
        for one in some:
            fill(one)

    if n_threads < 2:
        run(reads)
        return
    # about as many bytes for each thread
    ends = np.cumsum([one.n_bytes for one in reads])
    bounds = np.searchsorted(ends, np.arange(1, n_threads) * ends[-1] / n_threads)
    first, *others = [reads[a:b] for a, b in pairwise([0, *bounds.tolist(), len(reads)])]
    futures = [_executor(os.getpid(), _n_threads()).submit(run, some) for some in others]
    try:
        run(first)
    finally:
        wait(futures)  # files stay open, and out in use
    for future in futures:
        future.result()


def _n_threads() -> int:
    """Return the largest number of decoding threads: the limit of zarr, or 1 in a worker of a DataLoader."""
    most: int | None = zarr.config.get("threading.max_workers")
    return most or (1 if current_worker() else min(_MOST_THREADS, n_cores()))


@cache
def _executor(process: int, n_threads: int) -> ThreadPoolExecutor:  # noqa: ARG001 a fork doesn't copy threads
    """Return the threads of a process."""
    return ThreadPoolExecutor(n_threads, "annbatch_distributed")


def _by_shard(numbers: Int64Array) -> Iterator[tuple[int, int, int]]:
    """Yield each shard, with the first and end of its pieces, which follow each other.

    >>> list(_by_shard(np.array([0, 0, 3])))
    [(0, 0, 2), (3, 2, 3)]
    """
    bounds = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
    for begin, end in pairwise(bounds):
        yield int(numbers[begin]), begin, end


def _pieces_of(starts: Int64Array, stops: Int64Array, chunk_size: int) -> _Pieces:
    """Split runs of rows at the ends of chunks.

    >>> pieces = _pieces_of(np.array([6, 0]), np.array([10, 2]), chunk_size=8)
    >>> [part.tolist() for part in pieces]
    [[0, 0, 1], [6, 0, 0], [8, 2, 2], [0, 4, 2]]
    """
    is_filled = starts < stops
    starts, stops = starts[is_filled], stops[is_filled]
    lowest = starts // chunk_size
    n_each = -(-stops // chunk_size) - lowest
    # runs in 2 chunks and in 1 have the pieces 0 0 1, which are the numbers 0 1 0 of their runs
    run = np.repeat(np.arange(len(starts)), n_each)
    chunks = lowest[run] + np.arange(len(run)) - (np.cumsum(n_each) - n_each)[run]
    first = np.maximum(starts[run] - chunks * chunk_size, 0)
    end = np.minimum(stops[run] - chunks * chunk_size, chunk_size)
    places = np.cumsum(end - first) - (end - first)
    order = np.argsort(chunks, kind="stable")
    return _Pieces(chunks[order], first[order], end[order], places[order])
