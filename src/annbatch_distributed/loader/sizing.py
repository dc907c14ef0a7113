"""Sizes: what a sampler is made with, so that load requests fit, read whole chunks of the store, and few rows are lost.

1. The memory of a rank says how many rows a load request can have.
2. Of the batch sizes near the wished one, that one is taken which is closest to it and loses few rows.
3. A chunk is a multiple of the store's own, as large as leaves enough of them in a load request to be mixed.
4. A load request has as many chunks as fit and make whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import anndata as ad
import pandas as pd
import zarr
from annbatch import DatasetCollection

from annbatch_distributed.loader._annbatch import n_rows_of
from annbatch_distributed.masks import AnyMask, check_names, resolve_mask
from annbatch_distributed.rows import counted, integer, names_of
from annbatch_distributed.stream import LONGEST_HOLE

#: Rows of a store's chunk where they aren't known: what annbatch writes.
_STORE_CHUNK = 64
#: Chunks of more rows are read hardly faster: see the page on choosing sizes.
_MOST_ROWS_OF_CHUNK = 512
#: So many chunks at least are mixed in a load request, where memory allows, as in annbatch's own tutorial.
_LEAST_CHUNKS = 32
#: How many load requests' worth of memory are in use at the peak, without and for each request that is read ahead.
_HELD, _HELD_AHEAD = 2.5, 1.5
#: Of more rows than one in a thousand, a batch size near the wished one is looked for.
_FEW = 1000


@dataclass(frozen=True)
class Sizes:
    """What :func:`.sizes` has found; ``str()`` of it is a table with the reasons."""

    chunk_size: int
    """Consecutive rows that are read at a time."""
    preload_nchunks: int
    """Chunks of a load request."""
    batch_size: int
    """Rows of a batch on each rank."""
    n_lost: int
    """How many rows no rank reads in an epoch under ``remainder="drop"``."""
    bytes_in_memory: int
    """About how many bytes a rank's loader takes at most, without the cells' annotations."""
    bytes_of_request: int
    """About how many bytes the values of a load request are, before they are compressed."""
    n_requests: int
    """How many requests a load request takes to object storage, by zarr 3.4; of a number of rows, for sparse cells."""
    reasons: tuple[str, str, str]
    """Why ``chunk_size``, ``preload_nchunks`` and ``batch_size`` are what they are."""

    @property
    def arguments(self) -> dict[str, int]:
        """The sizes by name: ``RandomSampler(**sizes(...).arguments)``."""
        return {
            "chunk_size": self.chunk_size,
            "preload_nchunks": self.preload_nchunks,
            "batch_size": self.batch_size,
        }

    def __str__(self) -> str:
        lines = [*zip(self.arguments, self.arguments.values(), self.reasons, strict=True)]
        lines.append(("requests", self.n_requests, f"for {_in_words(self.bytes_of_request)}, from object storage"))
        return "\n".join(f"{name:15}  {value:>6}  {reason}" for name, value, reason in lines)


@dataclass(frozen=True)
class _Cells:
    """What the cells of a collection take."""

    n_rows: int
    row_bytes: float
    """Of a selected row, with its part of the rows that are read through."""
    store_chunk: int
    """Rows of a chunk of the store; of sparse cells, which have chunks of values, about as many."""
    n_arrays: int = 2
    """How many arrays have the values: those of sparse cells, and their columns."""
    is_sharded: bool = True
    """Whether shards have chunks within, as annbatch writes them."""

    def n_requests(self, chunk_size: int) -> int:
        """Return how many requests consecutive rows take: a shard's index and a range, or each chunk."""
        return self.n_arrays * (2 if self.is_sharded else -(-chunk_size // self.store_chunk))


def sizes(
    n_rows: int | DatasetCollection,
    world_size: int,
    *,
    mask: AnyMask | None = None,
    row_bytes: float | None = None,
    store_chunk: int | None = None,
    memory: int = 1 << 30,
    batch_size: int = 256,
    read_ahead: int = 1,
) -> Sizes:
    """Return sizes for annbatch's samplers that fit into memory, read whole chunks of the store, and lose few rows.

    Parameters
    ----------
    n_rows
        The number of rows of the collection; or the collection, of which row bytes and chunks are then known too.
    world_size
        The number of ranks.
    mask
        Which rows the ranks share out, as for :class:`DistributedSampler`. Short holes between them are read through,
        with the default ``read_through``, and take memory too.
    row_bytes
        Bytes of a cell's values in memory, on average: 4 for each gene of dense float32 values, 8 for each value that
        is stored of sparse ones. None takes them from the collection.
    store_chunk
        Rows of a chunk on disk. None takes them from the collection, or 64, which annbatch writes.
    memory
        How many bytes the loader of one rank may take.
    batch_size
        The rows of a batch that are wished for. If it loses more than a thousandth of the rows in an epoch, one is
        taken that is within a quarter of it, a multiple of 8 where it is one, and loses less.
    read_ahead
        How many load requests the loader reads ahead.

    Returns
    -------
    The sizes, what they come to, and the reason for each.

    Raises
    ------
    TypeError
        If ``row_bytes`` is not given for a number of rows, if cells lie column by column, as a CSC matrix does; or as
        for the mask of :class:`DistributedSampler`.
    ValueError
        If a number is too small, or the mask is none of these rows, or has their names in another order; if there are
        too few rows for a batch on every rank; or if a load request of one batch and one chunk doesn't fit into the
        memory.

    Examples
    --------
    >>> chosen = sizes(100_000_000, 8, row_bytes=16_000, memory=4 << 30, batch_size=1024)
    >>> print(chosen)
    chunk_size          512  a multiple of the store's 64 rows; larger ones are read hardly faster
    preload_nchunks     130  66,560 rows make 65 batches; with read_ahead=1, up to 4.26 GB are in use
    batch_size         1024  as wished; 256 of 100,000,000 rows are lost in an epoch
    requests            520  for 1.06 GB, from object storage
    >>> from annbatch.samplers import RandomSampler
    >>> sampler = RandomSampler(**chosen.arguments)
    """
    world_size, wished = integer("world_size", world_size, least=1), integer("batch_size", batch_size, least=1)
    read_ahead, memory = integer("read_ahead", read_ahead, least=0), integer("memory", memory, least=1)
    cells = _cells(n_rows, row_bytes, store_chunk)
    if mask is not None:
        if isinstance(n_rows, DatasetCollection):
            _check_names(n_rows, mask)
        cells = _selected(cells, mask)
    shard = cells.n_rows // world_size
    if shard < wished:
        raise ValueError(
            f"{counted(cells.n_rows, 'row')} are too few for a batch of {wished} on each of {world_size} ranks. Use "
            "fewer ranks or a smaller batch_size."
        )
    held = _HELD + _HELD_AHEAD * read_ahead
    fitting = [size for size in _batch_sizes(wished) if world_size * size <= cells.n_rows]
    chosen = _fitting(cells, world_size, wished, fitting, memory, held)
    chunk_size, preload_nchunks, batch_size = chosen
    n_request, n_lost = chunk_size * preload_nchunks, cells.n_rows % (world_size * batch_size)
    used = int(n_request * cells.row_bytes * held)
    n_bytes, n_requests = int(n_request * cells.row_bytes), preload_nchunks * cells.n_requests(chunk_size)
    reasons = _reasons(cells, world_size, chosen, wished, read_ahead, used)
    return Sizes(*chosen, n_lost, used, n_bytes, n_requests, reasons)


def sizes_for_batches(
    collection: DatasetCollection,
    batch_size: int,
    *,
    mask: AnyMask | None,
    memory: int,
    read_ahead: int,
    read_through: int,
) -> tuple[int, int, int]:
    """Return a chunk size and a number of chunks for batches of so many rows, the same on any number of ranks.

    Where whole chunks of the store and whole batches don't fit into memory, chunks are parts of the store's.
    """
    if not isinstance(collection, DatasetCollection):
        raise TypeError(f"Expected a collection, such as DatasetCollection(path, mode='r'), got {collection!r}.")
    batch_size, memory = integer("batch_size", batch_size, least=1), integer("memory", memory, least=1)
    cells = _stored(collection)
    if mask is not None:  # whose names the loader compares with those of its cells
        cells = _selected(cells, mask, read_through)
    held = _HELD + _HELD_AHEAD * read_ahead
    if math.lcm(cells.store_chunk, batch_size) * cells.row_bytes * held > memory:
        cells = replace(cells, store_chunk=math.gcd(cells.store_chunk, batch_size))
    return _fitting(cells, 1, batch_size, [batch_size], memory, held)


def _fitting(
    cells: _Cells, world_size: int, wished: int, batch_sizes: list[int], memory: int, held: float
) -> tuple[int, int, int]:
    """Return a chunk size, a number of chunks and one of some batch sizes, whose load requests fit into memory."""
    most = int(memory / (held * cells.row_bytes))

    def preference(size: int) -> tuple[bool, int, int]:
        n_lost = cells.n_rows % (world_size * size)
        is_much = n_lost * _FEW > cells.n_rows
        return is_much, n_lost if is_much else 0, abs(size - wished)

    fitting = [size for size in batch_sizes if math.lcm(cells.store_chunk, size) <= most]
    if not fitting:
        least = math.lcm(cells.store_chunk, wished)
        raise ValueError(
            f"A load request of {counted(least, 'row')}, with whole chunks of {cells.store_chunk} rows and batches of "
            f"{wished}, takes up to {_in_words(least * cells.row_bytes * held)} of memory, more than "
            f"memory={_in_words(memory)}. Allow more, read less ahead, or choose a batch_size that is smaller, or a "
            "multiple or a divisor of the chunks."
        )
    batch_size = min(fitting, key=preference)
    # a request that is larger than a rank's rows mixes no better
    useful = min(most, max(cells.n_rows // world_size, math.lcm(cells.store_chunk, batch_size)))
    chunk_size = next(size for size in _chunk_sizes(cells.store_chunk, useful) if math.lcm(size, batch_size) <= useful)
    step = math.lcm(chunk_size, batch_size)
    return chunk_size, useful // step * step // chunk_size, batch_size


def _chunk_sizes(store_chunk: int, most: int) -> Iterator[int]:
    """Multiples of the store's chunk, the best one first: large ones of which enough are in a load request."""
    largest = min(_MOST_ROWS_OF_CHUNK, most // _LEAST_CHUNKS)
    size = store_chunk
    while 2 * size <= largest:
        size *= 2
    while size >= store_chunk:
        yield size
        size //= 2


def _batch_sizes(wished: int) -> list[int]:
    """Batch sizes near one; multiples of 8 near one, which GPUs multiply fastest."""
    step = 8 if wished % 8 == 0 else 1
    return [size for size in range(wished - wished // 4, wished + wished // 4 + 1) if size % step == 0]


def _reasons(
    cells: _Cells, world_size: int, chosen: tuple[int, int, int], wished: int, read_ahead: int, used: int
) -> tuple[str, str, str]:
    chunk_size, preload_nchunks, batch_size = chosen
    n_request = chunk_size * preload_nchunks
    n_lost, n_lost_of_wished = (cells.n_rows % (world_size * size) for size in (batch_size, wished))
    many = "larger ones are read hardly faster" if 2 * chunk_size > _MOST_ROWS_OF_CHUNK else "smaller ones mix better"
    if batch_size == wished:
        why = "as wished"
    elif n_lost < n_lost_of_wished:
        why = f"{wished} loses {counted(n_lost_of_wished, 'row')}"
    else:
        why = f"whole chunks that are whole batches of {wished} don't fit"
    batches = f"{counted(n_request, 'row')} make {counted(n_request // batch_size, 'batch')}"
    return (
        f"a multiple of the store's {cells.store_chunk} rows; {many}",
        f"{batches}; with read_ahead={read_ahead}, up to {_in_words(used)} are in use",
        f"{why}; {format(n_lost, ',') if n_lost else 'none'} of {counted(cells.n_rows, 'row')} are lost in an epoch",
    )


def _in_words(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.3g} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.3g} MB"


def _cells(given: int | DatasetCollection, row_bytes: float | None, store_chunk: int | None) -> _Cells:
    if isinstance(given, DatasetCollection):
        known = _stored(given)
    elif row_bytes is None:
        raise TypeError("sizes needs row_bytes, the bytes of a cell's values, for a number of rows; or a collection.")
    else:
        known = _Cells(integer("n_rows", given, least=1), row_bytes, _STORE_CHUNK)
    if row_bytes is not None:
        known = replace(known, row_bytes=row_bytes)
    if store_chunk is not None:
        known = replace(known, store_chunk=integer("store_chunk", store_chunk, least=1))
    if not known.row_bytes > 0:
        raise ValueError(f"row_bytes must be more than 0, got {row_bytes!r}.")
    return known


def _check_names(collection: DatasetCollection, mask: AnyMask) -> None:
    """Raise if a mask was given for cells in another order, by their names."""
    resolved = resolve_mask(mask)
    if resolved.n_obs is not None and (names := names_of("mask", mask)) is not None:
        obs: list[Any] = [group["obs"] for group in collection]
        check_names("mask", names, [pd.Index(ad.io.read_elem(table[table.attrs["_index"]])) for table in obs])


def _selected(cells: _Cells, mask: AnyMask, read_through: int = LONGEST_HOLE) -> _Cells:
    """The cells that a mask selects, each with its part of those between that are read."""
    rows = resolve_mask(mask).window(cells.n_rows)
    holes = rows.starts[1:] - rows.stops[:-1]
    n_read = len(rows) + int(holes[holes <= read_through].sum())
    return replace(cells, n_rows=len(rows), row_bytes=cells.row_bytes * n_read / len(rows))


def _stored(collection: DatasetCollection) -> _Cells:
    """What the cells of a collection take, from its metadata alone; chunks are those of the first data set."""
    n_rows = n_bytes = 0
    first: tuple[int, int, bool] | None = None
    for group in collection:
        cells: Any = group["X"]
        rows = n_rows_of(cells, cells.path)
        if isinstance(cells, zarr.Array):
            n_bytes += cells.size * cells.dtype.itemsize
            first = first or (cells.chunks[0], 1, cells.shards is not None)
        else:
            data, indices = cells["data"], cells["indices"]
            # column numbers take at least 4 bytes in memory, and may take fewer on disk
            n_bytes += data.shape[0] * (data.dtype.itemsize + max(4, indices.dtype.itemsize))
            chunk = max(1, round(data.chunks[0] * rows / max(1, data.shape[0])))
            first = first or (chunk, 2, data.shards is not None)
        n_rows += rows
    if not n_rows or first is None:
        raise ValueError("The collection has no rows.")
    return _Cells(n_rows, n_bytes / n_rows, *first)
