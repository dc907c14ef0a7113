"""Sizes for annbatch's samplers: load requests that fit into memory and hold whole chunks and whole batches.

1. The memory of a rank limits the rows of a load request.
2. A chunk is the store's chunk, doubled for as long as a load request still holds enough chunks to shuffle well.
3. A load request has as many chunks as fit and make whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from annbatch import DatasetCollection

from annbatch_distributed.loader._annbatch import n_rows_of
from annbatch_distributed.masks import AnyMask, resolve_mask
from annbatch_distributed.rows import integer, plural
from annbatch_distributed.sets import Sets
from annbatch_distributed.stream import LONGEST_GAP, Request, of_cells

_ARGUMENTS = "chunk_size", "preload_nchunks", "batch_size"
#: Rows of a store's chunk if no collection is given: annbatch's default.
_STORE_CHUNK = 64
#: Larger chunks are not read much faster; fewer chunks in a load request shuffle worse, as in annbatch's own tutorial.
_MOST_ROWS_OF_CHUNK, _LEAST_CHUNKS = 512, 32
#: Load requests in memory at the peak: without prefetching, and in addition for each that is prefetched.
_HELD, _HELD_AHEAD = 2.5, 1.5
#: Sets of a load request at most: more don't shuffle better.
_MOST_SETS = 1_024


@dataclass(frozen=True)
class Sizes(Mapping[str, Any]):  # of int; type checkers accept Any for each argument of a sampler
    """Arguments for annbatch's samplers, from :func:`.suggest_sizes`: ``RandomSampler(**sizes)``."""

    chunk_size: int
    """Consecutive rows that are read together."""
    preload_nchunks: int
    """Chunks of a load request."""
    batch_size: int
    """Rows of a batch on each rank."""
    n_dropped: int
    """Rows that no rank reads in an epoch under ``remainder="drop"``."""
    bytes_in_memory: int
    """Estimated peak memory of a rank's loader, in bytes, without ``obs``."""

    def __getitem__(self, name: str) -> int:
        if name not in _ARGUMENTS:
            raise KeyError(name)
        return int(getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return iter(_ARGUMENTS)

    def __len__(self) -> int:
        return len(_ARGUMENTS)


def suggest_sizes(
    n_rows: int | DatasetCollection,
    world_size: int = 1,
    *,
    mask: AnyMask | None = None,
    row_bytes: float | None = None,
    store_chunk: int | None = None,
    memory: int = 1 << 30,
    batch_size: int = 256,
    read_ahead: int = 1,
    read_through: int = LONGEST_GAP,
) -> Sizes:
    """Suggest sizes for annbatch's samplers that fit into memory.

    Parameters
    ----------
    n_rows
        Collection; or its number of rows, if ``row_bytes`` is given.
    world_size
        Number of ranks (default 1). A load request never needs more rows than a rank has.
    mask
        Rows that the ranks read, as for :class:`DistributedSampler`. Rows in short gaps between them are read too and
        need memory.
    row_bytes
        Average bytes of a cell's values in memory: 4 for each gene of dense float32 values, 8 for each stored value of
        sparse ones. None computes it from the collection.
    store_chunk
        Rows of a chunk on disk. None takes it from the collection, or 64, which annbatch writes.
    memory
        Memory limit of the loader of each rank, in bytes (default 1 GiB).
    batch_size
        Rows of a batch on each rank (default 256).
    read_ahead
        Number of load requests that the loader prefetches (default 1).
    read_through
        Largest gap, in rows, that the sampler reads and discards.

    Returns
    -------
    The sizes, as a mapping that can be passed on: ``RandomSampler(**suggest_sizes(...))``. ``chunk_size`` is a multiple
    of the store's chunks, unless whole chunks and whole batches don't fit into the memory together. Then some chunks of
    the store are read more than once.

    Raises
    ------
    TypeError
        If ``n_rows`` is neither a collection nor a number with ``row_bytes``, or if the cells are column-major, as in a
        CSC matrix.
    ValueError
        If a number is too small, the mask selects rows that don't exist, or a single batch doesn't fit into the memory.

    Examples
    --------
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import suggest_sizes
    >>> sizes = suggest_sizes(100_000_000, 8, row_bytes=16_000, batch_size=1024)
    >>> dict(sizes)
    {'chunk_size': 512, 'preload_nchunks': 32, 'batch_size': 1024}
    >>> sizes.n_dropped, sizes.bytes_in_memory
    (256, 1048576000)
    >>> sampler = RandomSampler(**sizes)
    """
    if isinstance(n_rows, DatasetCollection) or row_bytes is None:
        n_rows, stored_bytes, stored_chunk = stored(n_rows)
    else:
        stored_bytes, stored_chunk = row_bytes, _STORE_CHUNK
    row_bytes = stored_bytes if row_bytes is None else row_bytes
    if not row_bytes > 0:
        raise ValueError(f"row_bytes must be more than 0, got {row_bytes!r}.")
    n_rows = integer("n_rows", n_rows, least=1)
    world_size = integer("world_size", world_size, least=1)
    store_chunk = integer("store_chunk", stored_chunk if store_chunk is None else store_chunk, least=1)
    memory = integer("memory", memory, least=1)
    batch_size = integer("batch_size", batch_size, least=1)
    read_ahead = integer("read_ahead", read_ahead, least=0)
    if mask is not None:
        rows = resolve_mask(mask).window(n_rows)
        # of rows 0:4, 5:9 and 90:99, read_through=2 reads 4:5 as well, and not 9:90
        gaps = rows.starts[1:] - rows.stops[:-1]
        n_rows, row_bytes = len(rows), row_bytes * (1 + int(gaps[gaps <= read_through].sum()) / len(rows))

    # of each row of a load request, at the peak
    bytes_held = row_bytes * (_HELD + _HELD_AHEAD * read_ahead)
    most_rows = int(memory / bytes_held)
    if math.lcm(store_chunk, batch_size) > most_rows:
        store_chunk = math.gcd(store_chunk, batch_size)
    # the fewest rows with whole chunks and whole batches: 192 for chunks of 64 and batches of 96
    least_rows = math.lcm(store_chunk, batch_size)
    if least_rows > most_rows:
        megabytes = batch_size * bytes_held / 1e6
        raise ValueError(
            f"A load request of one batch, {plural(batch_size, 'row')}, takes up to {megabytes:,.2f} MB, more than "
            f"memory={memory / 1e6:,.2f} MB. Pass more memory, a smaller batch_size or a smaller read_ahead."
        )
    # a load request that is larger than a rank's shard doesn't shuffle any better
    most_rows = min(most_rows, max(n_rows // world_size, least_rows))
    chunk_size = store_chunk
    largest_chunk = min(_MOST_ROWS_OF_CHUNK, most_rows // _LEAST_CHUNKS)
    # 64 -> 128 -> 256 -> 512, as long as whole chunks still make whole batches within the memory
    while 2 * chunk_size <= largest_chunk and math.lcm(2 * chunk_size, batch_size) <= most_rows:
        chunk_size *= 2
    step = math.lcm(chunk_size, batch_size)
    n_request = most_rows // step * step
    n_dropped = n_rows % (world_size * batch_size)
    return Sizes(chunk_size, n_request // chunk_size, batch_size, n_dropped, int(n_request * bytes_held))


def sizes_of_sets(
    sets: Sets, seed: int, *, row_bytes: float, memory: int, batch_size: int, read_ahead: int, read_through: int
) -> Sizes:
    """Suggest sizes for a sampler of sets, whose load requests read the gaps between cells too.

    Each set is a chunk, as sets that follow each other are of one group. A ValueError if the sets of a single batch
    don't fit into the memory.
    """
    batch_size = integer("batch_size", batch_size, least=1)
    bytes_held = row_bytes * (_HELD + _HELD_AHEAD * integer("read_ahead", read_ahead, least=0))
    most_rows = int(integer("memory", memory, least=1) / bytes_held)
    in_epoch = sets.in_epoch(sets.n_obs, 0, seed)
    order = np.random.default_rng(0).permutation(len(sets))[: max(batch_size, _MOST_SETS)]
    n_batches = max(1, min(len(order), most_rows // sets.most_cells) // batch_size)
    while True:
        # how many rows some sets read follows from how far apart their cells lie
        numbers = order[: n_batches * batch_size]
        request = Request(numbers, numbers + 1, [np.arange(len(numbers))])
        read = of_cells(request, in_epoch, tells_repeats=False, longest_gap=read_through)
        n_rows = int((read.stops - read.starts).sum())
        if n_rows <= most_rows:
            n_bytes = int(n_rows * bytes_held)
            return Sizes(1, n_batches * batch_size, batch_size, len(sets) % batch_size, n_bytes)
        if n_batches == 1:
            raise ValueError(
                f"The sets of one batch read {plural(n_rows, 'row')}, gaps between their cells included, which take up "
                f"to {n_rows * bytes_held / 1e6:,.2f} MB, more than memory={memory / 1e6:,.2f} MB. Write the cells of "
                "each group together (annbatch-distributed collect --group-by), or pass more memory, a smaller "
                "batch_size or read_through=0."
            )
        n_batches = max(1, min(n_batches - 1, n_batches * most_rows // n_rows))


def stored(collection: object) -> tuple[int, float, int]:
    """Return the rows of a collection, their average bytes in memory, and the rows of a chunk, from its metadata.

    Sparse cells have chunks of values; the rows of a chunk are then an average. The first dataset stands for all.
    """
    if not isinstance(collection, DatasetCollection):
        raise TypeError(
            "Expected a collection, such as DatasetCollection(path, mode='r'), or a number of rows with row_bytes, got "
            f"{collection!r}."
        )
    n_rows = n_bytes = chunk = 0
    for group in collection:
        cells: Any = group["X"]
        rows = n_rows_of(cells, cells.path)
        if isinstance(cells, zarr.Array):
            n_bytes += cells.size * cells.dtype.itemsize
            chunk = chunk or cells.chunks[0]
        else:
            data, indices = cells["data"], cells["indices"]
            # column numbers take at least 4 bytes in memory, and may take fewer on disk
            n_bytes += data.shape[0] * (data.dtype.itemsize + max(4, indices.dtype.itemsize))
            chunk = chunk or max(1, round(data.chunks[0] * rows / max(1, data.shape[0])))
        n_rows += rows
    if not n_rows:
        raise ValueError("The collection has no rows.")
    return n_rows, n_bytes / n_rows, chunk
