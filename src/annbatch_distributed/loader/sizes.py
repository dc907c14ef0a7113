"""Sizes for annbatch's samplers: load requests that fit into memory and hold whole chunks and whole batches.

1. The memory of a rank limits the rows of a load request.
2. A chunk is the store's chunk, or four of a sparse matrix, doubled for as long as a load request still holds enough
   chunks to shuffle well.
3. A load request has as many chunks as fit and make whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import zarr
from annbatch import DatasetCollection

from annbatch_distributed.core.masks import AnyMask, resolve_mask
from annbatch_distributed.core.request import MAX_GAP, Request
from annbatch_distributed.core.values import FILE_DTYPE, as_bytes, integer, plural
from annbatch_distributed.loader._annbatch import n_rows_of
from annbatch_distributed.loader.collection import AnyCollection, as_collection
from annbatch_distributed.sets import CellSets
from annbatch_distributed.weights import EpochDraws

_ARGUMENTS = "chunk_size", "preload_nchunks", "batch_size"
#: Rows of a store's chunk if no collection is given: annbatch's default.
_STORE_CHUNK = 64
#: A run of rows of a sparse matrix rarely ends where a chunk of values ends: runs of n chunks decode 1 + 1/n times the
#: values that they use.
_SPARSE_CHUNKS = 4
#: Larger chunks are hardly faster to read, and fewer chunks per load request shuffle worse, see annbatch's tutorial.
_MOST_ROWS_OF_CHUNK, _LEAST_CHUNKS = 512, 32
#: Peak memory in load requests: without prefetching, and in addition for each prefetched load request.
_HELD, _HELD_AHEAD = 2.5, 1.5
#: Number of runs of draws whose rows are counted.
_N_MEASURED = 16
#: Largest number of sets in a load request: more don't shuffle better.
_MOST_SETS = 1_024


@dataclass(frozen=True)
class Sizes(Mapping[str, Any]):  # of int; type checkers accept Any for each argument of a sampler
    """Sizes for annbatch's samplers, from :func:`.suggest_sizes`.

    It is a mapping of the arguments ``chunk_size``, ``preload_nchunks`` and ``batch_size``.

    Examples
    --------
    >>> sizes = suggest_sizes(50_000, world_size=2, row_bytes=1_000)
    >>> sizes["chunk_size"], sizes.n_dropped
    (512, 336)
    >>> sampler = RandomSampler(**sizes)
    """

    chunk_size: int
    """Number of consecutive rows that are read together."""
    preload_nchunks: int
    """Number of chunks of a load request."""
    batch_size: int
    """Number of rows of a batch on each rank."""
    n_dropped: int
    """Number of rows that ``remainder="drop"`` drops in an epoch."""
    bytes_in_memory: int
    """Estimated peak memory of the loader of each rank, in bytes, without ``obs``."""

    def __getitem__(self, name: str) -> int:
        if name not in _ARGUMENTS:
            raise KeyError(name)
        return int(getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return iter(_ARGUMENTS)

    def __len__(self) -> int:
        return len(_ARGUMENTS)


def suggest_sizes(
    n_rows: int | AnyCollection,
    world_size: int = 1,
    *,
    mask: AnyMask | None = None,
    row_bytes: float | None = None,
    store_chunk: int | None = None,
    memory: int | str = 1 << 30,
    batch_size: int = 256,
    prefetch: int = 1,
    max_gap: int = MAX_GAP,
) -> Sizes:
    """Suggest sizes for annbatch's samplers that fit into memory.

    Parameters
    ----------
    n_rows
        Collection, or its number of rows together with ``row_bytes``.
    world_size
        Number of ranks (default 1). It limits a load request to the rows of a rank.
    mask
        Rows that the ranks read, as for :class:`DistributedSampler`. None reads all rows (default). Rows in short gaps
        between them are read too and need memory.
    row_bytes
        Average size of a row in memory, in bytes: 4 for each gene of dense float32 values, 8 for each stored value of a
        sparse matrix. None computes it from the collection (default).
    store_chunk
        Number of rows of a zarr chunk. None takes it from the collection, or else 64, annbatch's default (default). Of
        a sparse collection, it takes the rows of four chunks, as runs of rows rarely end where such chunks end.
    memory
        Memory limit of the load requests of each rank: a number of bytes, or a string such as ``"4GB"`` (default 1
        GiB). It doesn't include labels, masks and sets.
    batch_size
        Number of rows of a batch on each rank (default 256).
    prefetch
        Number of load requests that the loader prefetches (default 1).
    max_gap
        Largest gap, in rows, that the sampler reads and discards (default 64).

    Returns
    -------
    ~annbatch_distributed.loader.Sizes
        Sizes for ``RandomSampler(**sizes)``. ``chunk_size`` is a multiple of ``store_chunk``, unless whole chunks and
        whole batches don't fit into memory together. Some zarr chunks are then read more than once.

    Raises
    ------
    TypeError
        If ``n_rows`` is neither a collection nor a number with ``row_bytes``, or the cells are a CSC matrix.
    ValueError
        If a number is too small, the mask selects rows that don't exist, or a single batch doesn't fit into memory.

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
    stored_chunk = _STORE_CHUNK
    if isinstance(n_rows, DatasetCollection | zarr.Group | str | PathLike):
        n_rows, stored_bytes, stored_chunk = stored(as_collection(n_rows))
        row_bytes = stored_bytes if row_bytes is None else row_bytes
    if row_bytes is None:
        raise TypeError(
            f"suggest_sizes needs a collection, or a number of rows and row_bytes, got {n_rows!r} without row_bytes. "
            "Pass the path of a collection, or row_bytes=..., the bytes of a row in memory."
        )
    if not row_bytes > 0:
        raise ValueError(f"row_bytes must be above 0, got {row_bytes!r}.")
    n_rows = integer("n_rows", n_rows, least=1)
    world_size = integer("world_size", world_size, least=1)
    store_chunk = integer("store_chunk", stored_chunk if store_chunk is None else store_chunk, least=1)
    memory = as_bytes(memory)
    batch_size = integer("batch_size", batch_size, least=1)
    prefetch = integer("prefetch", prefetch, least=0)
    max_gap = integer("max_gap", max_gap, least=0)
    if mask is not None:
        rows = resolve_mask(mask).selected(n_rows)
        # for rows 0:4, 5:9 and 90:99, max_gap=2 reads the gap 4:5, but not the gap 9:90
        gaps = rows.starts[1:] - rows.stops[:-1]
        n_rows, row_bytes = len(rows), row_bytes * (1 + int(gaps[gaps <= max_gap].sum()) / len(rows))

    # peak memory for each row of a load request
    bytes_held = row_bytes * (_HELD + _HELD_AHEAD * prefetch)
    most_rows = int(memory / bytes_held)
    if math.lcm(store_chunk, batch_size) > most_rows:
        store_chunk = math.gcd(store_chunk, batch_size)
    # the fewest rows with whole chunks and whole batches: 192 for chunks of 64 and batches of 96
    least_rows = math.lcm(store_chunk, batch_size)
    if least_rows > most_rows:
        _check_batch_size(batch_size, n_rows, "row")
        raise ValueError(
            f"A load request of one batch of {plural(batch_size, 'row')} needs up to {_size(batch_size * bytes_held)}, "
            f"more than the memory of {_size(memory)}. Pass more memory, or a smaller batch_size or prefetch."
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


def _check_batch_size(batch_size: int, n_units: int, noun: str) -> None:
    """Raise if a batch that doesn't fit into memory is larger than all that there is to read."""
    if batch_size > n_units:
        raise ValueError(
            f"batch_size must be at most the number of {noun}s, {n_units:,}, got {batch_size:,}, which doesn't fit "
            "into memory. Pass a smaller batch_size."
        )


def _size(n_bytes: float) -> str:
    """Format a number of bytes: ``1,000 bytes``, ``2.50 MB``."""
    return f"{n_bytes / 1e6:,.2f} MB" if n_bytes >= 10**5 else f"{n_bytes:,.0f} bytes"


def sizes_of_sets(
    sets: CellSets, seed: int, *, row_bytes: float, memory: int, batch_size: int, prefetch: int, max_gap: int
) -> Sizes:
    """Suggest sizes for a sampler of sets, whose load requests read gaps between cells too.

    Each set is a chunk, since consecutive sets are of the same group. A ValueError if the sets of a single batch don't
    fit into memory.
    """
    batch_size = integer("batch_size", batch_size, least=1)
    bytes_held = row_bytes * (_HELD + _HELD_AHEAD * integer("prefetch", prefetch, least=0))
    most_rows = int(memory / bytes_held)
    in_epoch = sets.in_epoch(sets.n_obs, 0, seed)
    order = np.random.default_rng(0).permutation(len(sets))[: max(batch_size, _MOST_SETS)]
    n_batches = max(1, min(len(order), most_rows // sets.most_cells) // batch_size)
    while True:
        # the number of rows that sets read depends on the gaps between their cells, so it is measured for random sets
        numbers = order[: n_batches * batch_size]
        request = Request(numbers, numbers + 1, [np.arange(len(numbers))])
        n_rows = in_epoch.to_rows(request, max_gap=max_gap).n_rows
        if n_rows <= most_rows:
            n_bytes = int(n_rows * bytes_held)
            return Sizes(1, n_batches * batch_size, batch_size, len(sets) % batch_size, n_bytes)
        if n_batches == 1:
            _check_batch_size(batch_size, len(sets), "set")
            raise ValueError(
                f"The sets of one batch read {plural(n_rows, 'row')}, including gaps between their cells, and need up "
                f"to {_size(n_rows * bytes_held)}, more than the memory of {_size(memory)}. Sort the cells by "
                "group (annbatch-distributed collect --group-by), or pass more memory, a smaller batch_size or "
                "max_gap=0."
            )
        n_batches = max(1, min(n_batches - 1, n_batches * most_rows // n_rows))


def sizes_of_draws(
    draws: EpochDraws, *, row_bytes: float, store_chunk: int, memory: int, batch_size: int, prefetch: int, max_gap: int
) -> Sizes:
    """Suggest sizes for a sampler of draws, whose load requests read gaps between cells too.

    Runs of 512 draws decode 1.1 rows for each draw if there are as many draws as rows, and runs of 64 draws 2.0.
    """
    run = max(store_chunk, _MOST_ROWS_OF_CHUNK)
    # the number of rows that draws read depends on the weights, so it is measured for random runs
    starts = np.random.default_rng(0).integers(max(1, len(draws) - run), size=_N_MEASURED)
    n_read = 0.0
    for start in starts:
        numbers = np.arange(start, min(start + run, len(draws)))
        request = Request(numbers[:1], numbers[-1:] + 1, [np.arange(len(numbers))])
        n_read += draws.to_rows(request, max_gap=max_gap).n_rows / len(numbers)
    return suggest_sizes(
        len(draws),
        row_bytes=row_bytes * max(1, n_read / _N_MEASURED),
        store_chunk=run,
        memory=memory,
        batch_size=batch_size,
        prefetch=prefetch,
        max_gap=max_gap,
    )


#: Bytes of a row without values: of its entry in ``indptr``.
_POINTER = 8


def stored(collection: DatasetCollection) -> tuple[int, float, int]:
    """Return the number of rows, their average bytes in memory, and the fewest rows to read together, from metadata.

    These are the rows of a chunk. Sparse cells have chunks of values, whose rows are an average, and four are read
    together. The first dataset represents all.
    """
    n_rows = n_bytes = chunk = 0
    for group in collection:
        cells: Any = group["X"]
        rows = n_rows_of(cells, cells.path)
        if isinstance(cells, zarr.Array):
            n_bytes += cells.size * _loaded_itemsize(cells, cells.dtype)
            chunk = chunk or cells.chunks[0]
        else:
            data, indices = cells["data"], cells["indices"]
            # indices need at least 4 bytes in memory, and may need fewer on disk
            n_bytes += data.shape[0] * (_loaded_itemsize(cells, data.dtype) + max(4, indices.dtype.itemsize))
            chunk = chunk or max(1, round(_SPARSE_CHUNKS * data.chunks[0] * rows / max(1, data.shape[0])))
        n_rows += rows
    if not n_rows:
        raise ValueError("The collection must have rows, got none. Add cells with add_adatas.")
    return n_rows, n_bytes / n_rows or _POINTER, chunk


def _loaded_itemsize(cells: zarr.Array[Any] | zarr.Group, stored: np.dtype[Any]) -> int:
    """Return the bytes of a value in memory, which a loader may convert to the dtype of the files."""
    return max(stored.itemsize, np.dtype(str(cells.attrs.get(FILE_DTYPE, stored))).itemsize)
