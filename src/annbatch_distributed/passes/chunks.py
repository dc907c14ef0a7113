"""Load requests of annbatch's chunk samplers, worked out request by request.

annbatch's ``RandomSampler`` and ``SequentialSampler`` make a slice for every chunk before they yield the first load
request: seconds and gigabytes for 10^9 rows, in every epoch, resume and worker. Here is the same arithmetic on arrays:
for the same generator the same draws, and so bit for bit the same chunks and splits. If that is asked for, the
incomplete chunk has other rows than annbatch's: the last ones, so that all others begin at multiples of their size.

What annbatch does is no promise of its own. Before the first pass of a process, a few small passes are compared with
the sampler's own; if a release of annbatch draws otherwise, its samplers run themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed.passes.annbatch_samplers import chunk_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

    from annbatch_distributed.passes.annbatch_samplers import ChunkSettings
    from annbatch_distributed.sharding.rows import Int64Array

__all__ = ["Chunks", "chunk_requests", "is_as_annbatch", "known_chunks"]


@dataclass(frozen=True)
class ChunkOrder:
    """The chunks of a pass over local rows, in the order in which they are read."""

    places: npt.NDArray[np.int32 | np.int64] | range
    """Of each, the number of the chunk among all, or its first row if chunks are drawn."""
    chunk_size: int
    n_rows: int
    """How many rows they are in all, or how many are drawn."""
    is_drawn: bool
    """Whether chunks begin at any row, with replacement; the last one is shorter then."""
    is_ragged_last: bool = False
    """Whether the incomplete chunk has the last rows; annbatch's is any of them, and those beyond it begin earlier."""

    def __len__(self) -> int:
        return len(self.places)

    def bounds(self, numbers: range) -> tuple[Int64Array, Int64Array]:
        """Return the starts and stops of some consecutive ones."""
        places = np.asarray(self.places[numbers.start : numbers.stop], dtype=np.int64)
        n_last = self.n_rows % self.chunk_size or self.chunk_size
        if self.is_drawn:
            lengths = np.full(len(places), self.chunk_size)
            lengths[len(self) - 1 - numbers.start :] = n_last
            return places, places + lengths
        # the incomplete chunk, wherever its rows are, is read last
        shorter = self.places[-1]
        if not self.is_ragged_last or n_last == self.chunk_size:
            starts = places * self.chunk_size - (self.chunk_size - n_last) * (places > shorter)
        else:
            starts = np.where(places == shorter, len(self) - 1, places - (places > shorter)) * self.chunk_size
        return starts, starts + np.where(places == shorter, n_last, self.chunk_size)

    def n_rows_of(self, numbers: range) -> int:
        """Return how many rows some of them have, which are not none."""
        is_whole = numbers.stop < len(self) or not self.n_rows % self.chunk_size
        return len(numbers) * self.chunk_size - (0 if is_whole else self.chunk_size - self.n_rows % self.chunk_size)


class Chunks(NamedTuple):
    """The rows of a load request that are some consecutive chunks of a pass."""

    order: ChunkOrder
    numbers: range

    def bounds(self) -> tuple[Int64Array, Int64Array]:
        """Return the starts and stops of the chunks, in local rows."""
        return self.order.bounds(self.numbers)


def chunk_requests(
    settings: ChunkSettings, n_rows: int, rng: np.random.Generator, *, copy: bool = True, is_ragged_last: bool = False
) -> Iterator[LoadRequest]:
    """Return the load requests of a chunk sampler for local rows ``[0, n_rows)``, with :class:`Chunks` for slices.

    Parameters
    ----------
    settings
        What the sampler is set to, valid for this number of rows.
    n_rows
        How many rows it runs on.
    rng
        Its generator.
    copy
        Whether splits stay as they are. False uses their memory again for the next load request.
    is_ragged_last
        Whether the incomplete chunk has the last of the rows, so that all others begin at multiples of their size, and
        not any rows, as annbatch has it.
    """
    order = replace(_order(settings, n_rows, rng), is_ragged_last=is_ragged_last)
    requests = _requests(order, settings, rng, copy=copy)
    if not settings.replacement and settings.num_samples is None:
        return requests
    n_drawn = settings.num_samples or n_rows
    n_batches = n_drawn // settings.batch_size if settings.drop_last else ceil(n_drawn / settings.batch_size)
    return _first_batches(requests, n_batches, settings.preload_size // settings.batch_size)


def known_chunks(sampler: Sampler) -> ChunkSettings | None:
    """Return what a sampler is set to whose load requests are worked out here; None if it has to run itself."""
    settings = chunk_settings(sampler)
    return settings if settings is not None and is_as_annbatch() else None


@cache
def is_as_annbatch() -> bool:
    """Whether annbatch's samplers give the same, so that they need not run themselves."""
    return all(_same(*case) for case in _CASES)


#: The sampler, what it is given beside chunk_size, preload_nchunks and batch_size, and the number of rows.
_CASES: tuple[tuple[Callable[..., RandomSampler | SequentialSampler], dict[str, Any], int], ...] = (
    (SequentialSampler, {}, 31),
    (RandomSampler, {}, 29),
    (RandomSampler, {"drop_last": True}, 24),
    (RandomSampler, {"num_samples": 17}, 40),
    (RandomSampler, {"replacement": True}, 33),
    (RandomSampler, {"replacement": True, "drop_last": True, "num_samples": 37}, 19),
)


def _same(kind: Callable[..., RandomSampler | SequentialSampler], options: dict[str, Any], n_rows: int) -> bool:
    sampler, rng = kind(4, 3, 6, **options), np.random.default_rng(0)
    sampler.rng = np.random.default_rng(0)
    settings = chunk_settings(sampler)
    assert settings is not None
    theirs, ours = sampler._sample(n_rows), chunk_requests(settings, n_rows, rng)
    return [_listed(request, list(request["requests"])) for request in theirs] == [
        _listed(request, list(map(slice, *map(np.ndarray.tolist, cast("Chunks", request["requests"]).bounds()))))
        for request in ours
    ]


def _listed(request: LoadRequest, slices: list[slice]) -> tuple[list[slice], list[list[int]]]:
    return slices, [split.tolist() for split in request["splits"]]


def _order(settings: ChunkSettings, n_rows: int, rng: np.random.Generator) -> ChunkOrder:
    size = settings.chunk_size
    if settings.replacement:
        n_drawn = settings.num_samples or n_rows
        n_whole, rest = divmod(n_drawn, size)
        starts: Int64Array = rng.integers(0, n_rows - size + 1, size=n_whole)
        if settings.drop_last:
            rest = 0
        if rest:
            starts = np.append(starts, rng.integers(0, n_rows - rest + 1))
        return ChunkOrder(starts, size, n_whole * size + rest, is_drawn=True)
    n_chunks = ceil(n_rows / size)
    if not settings.shuffle:
        return ChunkOrder(range(n_chunks), size, n_rows, is_drawn=False)
    # half the memory draws the same
    is_short = n_chunks <= np.iinfo(np.int32).max
    places = np.arange(n_chunks, dtype=np.int32) if is_short else np.arange(n_chunks, dtype=np.int64)
    rng.shuffle(places)
    return ChunkOrder(places, size, n_rows, is_drawn=False)


def _requests(
    order: ChunkOrder, settings: ChunkSettings, rng: np.random.Generator, *, copy: bool
) -> Iterator[LoadRequest]:
    positions = np.arange(settings.preload_size)
    splits = list(positions.reshape(-1, settings.batch_size))
    last = (len(order) - 1) // settings.preload_nchunks * settings.preload_nchunks
    for begin in range(0, last, settings.preload_nchunks):
        if settings.shuffle:
            rng.shuffle(positions)
        yield _request(
            Chunks(order, range(begin, begin + settings.preload_nchunks)),
            list(positions.copy().reshape(-1, settings.batch_size)) if copy and settings.shuffle else list(splits),
        )
    chunks = Chunks(order, range(last, len(order)))
    starts, stops = chunks.bounds()
    n_left = int((stops - starts).sum())
    if settings.drop_last:
        n_left -= n_left % settings.batch_size
    if n_left:
        positions = rng.permutation(n_left) if settings.shuffle else np.arange(n_left)
        size = settings.batch_size
        yield _request(chunks, [positions[start : start + size] for start in range(0, n_left, size)])


def _request(chunks: Chunks, splits: list[npt.NDArray[np.int64]]) -> LoadRequest:
    # chunks are turned into slices before annbatch gets them
    return cast("LoadRequest", {"requests": chunks, "splits": splits})


def _first_batches(requests: Iterator[LoadRequest], n_batches: int, n_per_request: int) -> Iterator[LoadRequest]:
    n_whole, rest = divmod(n_batches, n_per_request)
    yield from islice(requests, n_whole)
    if rest:
        request = next(requests)
        yield {**request, "splits": request["splits"][:rest]}
