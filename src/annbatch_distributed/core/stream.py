"""Passes: the load requests of one rank's iteration.

A stream is the sequence of batches that the wrapped sampler yields for one shard:

1. A private copy of the sampler runs on local rows ``[0, len(shard))`` with its own generator. It doesn't know the
   global rows. It always runs from the beginning, which reads no data.
2. Load requests of a custom sampler are checked, and get splits if they have none.
3. The number of batches is made equal to the planned number. Under ``"exact"``, a last batch of one row gets one more
   row of the batch before, since batch normalization, for example, can't train on a single row.
4. Batches that aren't needed are removed, together with the rows that only they need.
5. Local rows are converted to global rows, and short gaps between them are read as well.
6. Units that the sampler samples are converted to rows.

A pass is one iteration of a rank over its lane, or over the lanes of its virtual ranks, joined batch by batch. It holds
everything that it depends on, so a new mask or epoch of the sampler doesn't change it. In a worker of a ``DataLoader``,
the wrapped sampler runs as if there were no workers. A copied or unpickled pass runs from the beginning and skips the
load requests that were taken, since a running sampler can't be copied.

Randomness is keyed by (root seed, stream, epoch, pass), which are separate words of NumPy's seed sequence. They are not
added, so (seed 0, epoch 1) and (seed 1, epoch 0) differ, and earlier calls have no effect.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from reprlib import repr as shortened
from typing import Any, Self

import numpy as np
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler, SequentialSampler
from annbatch.types import LoadRequest

from annbatch_distributed.core import wrapped
from annbatch_distributed.core.lanes import Lane, Numbers, SharedStep
from annbatch_distributed.core.plan import Plan, Shard, prepared
from annbatch_distributed.core.rank import Placement
from annbatch_distributed.core.request import Request, Split, concatenated
from annbatch_distributed.core.rows import runs
from annbatch_distributed.core.state import Position
from annbatch_distributed.core.values import Int64Array, integer
from annbatch_distributed.core.worker import hidden_worker


def generator(root_seed: int, *, stream: int, epoch: int) -> np.random.Generator:
    """Return the generator of one stream in an epoch; all arguments are integers of at least 0.

    In epoch 0, it is equal to annbatch 0.3.1's ``default_rng([rank, root_seed])``, since NumPy pads a seed sequence
    with zeros. All streams and epochs of a job have different generators. Root seeds of 2^32 or more take two words of
    the sequence, so they may have the same generator as a smaller root seed of a different job in a later epoch.

    >>> expected = np.random.default_rng([1, 7]).random()
    >>> generator(7, stream=1, epoch=0).random() == expected
    True
    >>> of_other_seed = generator(1, stream=0, epoch=0).random()
    >>> generator(0, stream=0, epoch=1).random() == of_other_seed
    False
    """
    for name, value in {"root_seed": root_seed, "stream": stream, "epoch": epoch}.items():
        integer(name, value, least=0)
    return np.random.default_rng([stream, root_seed, epoch])


@dataclass(eq=False)
class Pass(Iterator[LoadRequest]):
    """Iteration of a rank over its lane: load requests, in annbatch's form or as :class:`Request`."""

    plan: Plan
    """Rows and batches of every stream in this epoch."""
    lanes: Sequence[Lane]
    """Batches to read: the lane of a rank, or the lanes of its virtual ranks, joined batch by batch."""
    position: Position
    """Position at which the pass begins."""
    n_batches: int = 0
    """Number of batches of the epoch in the longest lane of the job, including batches before a resume."""
    max_gap: int = 0
    """Largest gap between rows that is read too, in rows."""
    placement: Placement = Placement(0, 1)  # noqa: RUF009 it never changes
    """Rank that reads it."""
    n_taken: int = 0
    """Number of load requests that were taken."""
    is_closed: bool = False
    """True if the pass was closed, and gives no more load requests."""
    has_ended: bool = False
    """True once the epoch has ended on this rank."""
    on_next: Callable[[], None] | None = field(default=None, repr=False)
    """Function to call before a load request is taken; copies have none."""
    on_end: Callable[[], None] | None = field(default=None, repr=False)
    """Function to call when no load request is left; copies have none."""
    _requests: Iterator[Request] | None = field(default=None, repr=False)

    def __next__(self) -> LoadRequest:
        if self.on_next is not None:
            self.on_next()
        try:
            return self.take().to_annbatch()
        except StopIteration:
            if self.on_end is not None and not self.is_closed:
                self.on_end()
            raise

    def take(self) -> Request:
        """Return the next load request; a StopIteration if none is left."""
        if self._requests is None:
            self._requests = iter(()) if self.is_closed else islice(self._run(), self.n_taken, None)
        request = next(self._requests)
        self.n_taken += 1
        return self.plan.units.to_rows(request, max_gap=self.max_gap)

    def close(self) -> None:
        """End the pass."""
        self.is_closed, self._requests = True, None

    @property
    def n_due(self) -> int:
        """Number of batches that this process yields in the pass."""
        return max(map(len, self.lanes))

    def done_after(self, n_yielded: int) -> int:
        """Return the number of batches of the epoch that are done after this process has yielded some.

        Under ``"keep"``, a lane may have one batch less than others. Its last batch is a step like any other, which the
        others follow with one more. They are done when the consumer of this lane asks for one, too.
        """
        is_over = self.has_ended and n_yielded == self.n_due
        return self.n_batches if is_over else self.position.done + n_yielded

    def is_over_after(self, n_yielded: int) -> bool:
        """Return True if no rank has a batch left after this process has yielded some."""
        return self.position.done + n_yielded == self.n_batches

    def batches(self) -> Iterator[Int64Array]:
        """Yield the units of each batch, without reading data."""
        for request in self._run():
            units = request.rows()
            yield from (units[split] for split in request.splits)

    def _run(self) -> Iterator[Request]:
        """Yield the load requests; while the wrapped sampler runs, this process doesn't seem to be a worker."""
        requests = self._joined()
        while True:
            with hidden_worker():
                request = next(requests, None)
            if request is None:
                return
            yield request

    # Lanes

    def _joined(self) -> Iterator[Request]:
        """Yield the load requests of all lanes, joined batch by batch; lanes with fewer batches end earlier."""
        lanes = [self._of_lane(lane) for lane in self.lanes]
        if len(lanes) == 1:
            yield from lanes[0]
            return
        # for each lane, the batches of its current load request that haven't been joined yet: if two lanes have load
        # requests of 3 and 2 batches, 2 batches are joined, and 1 batch of the first lane is pending
        pending: list[Request | None] = [None] * len(lanes)
        while True:
            pending = [
                next(lane, None) if request is None else request for lane, request in zip(lanes, pending, strict=True)
            ]
            n_batches = min((len(request.splits) for request in pending if request is not None), default=0)
            if not n_batches:
                return
            parts = []
            for lane, request in enumerate(pending):
                pending[lane] = None
                if request is not None and len(request.splits) > n_batches:  # the rest is joined in the next round
                    pending[lane] = request.narrowed(request.splits[n_batches:]).with_gaps(self.max_gap)
                    request = request.narrowed(request.splits[:n_batches]).with_gaps(self.max_gap)  # noqa: PLW2901 a part of it
                if request is not None:
                    parts.append(request)
            yield concatenated(parts)

    def _of_lane(self, lane: Lane) -> Iterator[Request]:
        for stream, numbers in self._by_stream(lane.numbers):
            yield from self.of_stream(stream, numbers)
        if lane.last is not None:
            ((stream, numbers),) = self._by_stream((range(lane.last.number, lane.last.number + 1),))
            yield from self.of_stream(stream, numbers, lane.last)

    def _by_stream(self, numbers: Numbers) -> list[tuple[int, Numbers]]:
        """Split numbers by their streams; return each stream with its own numbers, ascending."""
        streams: list[tuple[int, list[range]]] = []
        for part in numbers:
            while part:
                stream = self.plan.stream_of(part[0])
                # the stream has the numbers first:stop; a part that continues beyond them is cut there
                first, stop = self.plan.first_number(stream), self.plan.first_number(stream + 1)
                n_here = len(range(part[0], min(part[-1] + 1, stop), part.step))
                own, part = part[:n_here], part[n_here:]  # noqa: PLW2901 the numbers of other streams
                local = range(own.start - first, own[-1] + 1 - first, own.step)
                # a stream runs once for ascending numbers, and again if they go back
                last, parts = streams[-1] if streams else (-1, [])
                if stream == last and parts[-1][-1] < local[0]:
                    parts.append(local)
                else:
                    streams.append((stream, [local]))
        return [(stream, tuple(parts)) for stream, parts in streams]

    # Streams

    def of_stream(self, stream: int, numbers: Numbers, step: SharedStep | None = None) -> Iterator[Request]:
        """Yield load requests of global rows for some batches, by their numbers in the stream, ascending.

        ``step`` is given for a batch that lanes share, and names the part to read.
        """
        plan, sampler = self.plan, self.plan.config.sampler
        shard, n_batches = plan.shard(stream), plan.n_batches(stream)
        # nested generators: each changes load requests in one way, in the order of the list in the module's docstring
        requests = _counted(
            self._of_sampler(stream, shard),
            promised=plan.sampler_batches[stream],
            planned=n_batches,
            name=type(sampler).__name__,
        )
        if plan.config.remainder == "exact" and type(sampler) in (RandomSampler, SequentialSampler):
            requests = _without_a_lone_row(requests)
        if numbers != (range(n_batches),):
            requests = _selected(requests, numbers, n_batches)
        for request in requests:
            if step is not None:
                request = request.narrowed([np.array_split(request.splits[0], step.n_parts)[step.part]])  # noqa: PLW2901 a part
            yield self._to_global(request, shard, is_repeat=step is not None and step.is_repeat)

    def _of_sampler(self, stream: int, shard: Shard) -> Iterator[Request]:
        """Run the sampler, and yield all load requests, of local rows."""
        plan, config = self.plan, self.plan.config
        rng = generator(config.root_seed, stream=stream, epoch=plan.epoch)
        sampler = prepared(plan, stream, shard, rng)
        # annbatch's own ``sample`` would add splits that are shuffled with NumPy's global random state
        if type(sampler).sample is not Sampler.sample:
            requests: object = sampler.sample(len(shard))
        else:
            sampler.validate(len(shard))
            requests = sampler._sample(len(shard))
        if not isinstance(requests, Iterable):
            raise TypeError(
                f"{type(sampler).__name__}.sample must return an iterable of load requests, got {shortened(requests)}. "
                "Write it as a generator."
            )
        is_trusted = wrapped.is_annbatchs_own(sampler)
        grid = wrapped.chunk_size(sampler) if type(sampler) is RandomSampler and plan.align is not None else None
        for unchecked in _begun(requests) if is_trusted else requests:
            if not is_trusted:
                request = _checked(unchecked, sampler, len(shard), rng)
                if request is not None:
                    yield request
                continue
            # annbatch's own samplers yield ascending slices without a step, so they aren't checked
            slices: Sequence[slice] = list(unchecked["requests"])
            starts = np.array([part.start for part in slices], dtype=np.int64)
            stops = np.array([part.stop for part in slices], dtype=np.int64)
            if grid is not None:
                starts, stops = _aligned(starts, stops - starts, grid, len(shard))
            if unchecked["splits"]:
                yield Request(starts, stops, unchecked["splits"])

    def _to_global(self, request: Request, shard: Shard, *, is_repeat: bool) -> Request:
        """Convert local rows to global rows."""
        starts, stops, which = shard.rows.slices_to_global(request.starts, request.stops)
        are_repeats = None
        if self.plan.config.remainder == "pad":
            # local rows after a rank's own rows are repeats
            are_repeats = (request.rows() >= shard.n_own) | is_repeat
        where = None
        if not request.is_narrowed:
            # A gap is read within a chunk, where the shard has a gap in global rows, or between chunks that follow
            # each other. No other gap between two chunks is read, since its rows belong to a different chunk. Local
            # chunks 0:4 4:8 20:24 are in the runs 0 0 1. If chunk 0 has two pieces, the pieces are in the runs 0 0 0 1,
            # and the first two of their three gaps may be read.
            run = np.cumsum(np.append(False, request.starts[1:] != request.stops[:-1]))[which]
            where = run[1:] == run[:-1]
        read = Request(starts, stops, request.splits, are_repeats, request.is_narrowed)
        return read.with_gaps(self.max_gap, where=where)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_requests": None, "on_next": None, "on_end": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # only the iterator changes in place, and copies don't have it
        return copy.copy(self)


def _begun[Item](items: Iterable[Item]) -> Iterator[Item]:
    """Begin an iteration without garbage collections, and return it.

    annbatch's samplers make the slices of the whole epoch before they yield the first ones. Collections would scan all
    slices again and again: of 10^9 rows in chunks of 64, on 8 ranks, they would take 70% of the time.
    """
    iterator, was_enabled = iter(items), gc.isenabled()
    gc.disable()
    try:
        first = list(islice(iterator, 1))
    finally:
        if was_enabled:
            gc.enable()
    return chain(first, iterator)


def _aligned(starts: Int64Array, lengths: Int64Array, size: int, n_rows: int) -> tuple[Int64Array, Int64Array]:
    """Move the ragged chunk of annbatch's ``RandomSampler`` to the end, so that whole chunks begin at multiples.

    annbatch makes any chunk the ragged one, and chunks after it begin earlier. The order of chunks isn't changed.
    """
    # 10 rows in chunks of 4: annbatch may yield 0:4, 4:6, 6:10; whole chunks become 0:4 and 4:8, the ragged one 8:10
    starts = np.where(lengths < size, n_rows - n_rows % size, starts // size * size)
    return starts, starts + lengths


def _checked(unchecked: object, sampler: Sampler, n_rows: int, rng: np.random.Generator) -> Request | None:
    """Return a load request of a custom sampler, with splits; None if it has no batches.

    A TypeError or a RuntimeError if annbatch's ``Loader`` can't read it, or would read different rows.
    """
    name = type(sampler).__name__
    expected = (
        f"{name} must yield load requests: dicts with 'requests', slices with integer bounds and no step or an integer "
        "array of rows, and 'splits', a list with an integer array for each batch, of positions in these rows; got "
    )
    if not isinstance(unchecked, Mapping) or "requests" not in unchecked:
        raise TypeError(f"{expected}{shortened(unchecked)}.")
    rows = unchecked["requests"]
    starts, stops = _bounds(rows, expected)
    if len(starts) and not 0 <= starts.min() <= stops.max() <= n_rows:
        raise RuntimeError(
            f"{name} must yield rows within [0, {n_rows}), the n_obs of sample(n_obs), got rows of [{starts.min()}, "
            f"{stops.max()}). If it holds a value for each row of the collection, give it a method "
            "localize(rows, n_obs) that selects the values of a shard."
        )
    n_here = int((stops - starts).sum())
    splits = (
        _splits(unchecked["splits"], n_here, expected) if "splits" in unchecked else _own_splits(sampler, n_here, rng)
    )
    if not splits:
        return None
    order = np.argsort(starts, kind="stable") if isinstance(rows, np.ndarray) and rows.dtype != object else None
    if order is None:
        return Request(starts, stops, splits, None, True)
    # an array of rows is read in ascending order: rows 9 4 5 are read as 4 5 9, at places 2 0 1
    places = np.empty(n_here, dtype=np.intp)
    places[order] = np.arange(n_here)
    return Request(*runs(starts[order]), [places[split] for split in splits], None, True)


def _bounds(rows: object, expected: str) -> tuple[Int64Array, Int64Array]:
    """Return the starts and stops of the rows of a custom load request; a range of one row for each row of an array."""
    if isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and rows.ndim == 1:
        starts = rows.astype(np.int64)
        return starts, starts + 1
    is_list = isinstance(rows, list | tuple | np.ndarray) and np.ndim(rows) == 1
    slices: list[Any] = list(rows) if is_list else [rows]  # type: ignore[call-overload]  # a list, as checked
    if all(isinstance(part, slice) and part.step in (None, 1) for part in slices):
        starts, stops = np.array([part.start for part in slices]), np.array([part.stop for part in slices])
        if not slices or (starts.dtype.kind in "iu" and stops.dtype.kind in "iu" and (starts <= stops).all()):
            return starts.astype(np.int64), stops.astype(np.int64)
    raise TypeError(f"{expected}requests {shortened(rows)}.")


def _splits(unchecked: object, n_rows: int, expected: str) -> list[Split]:
    """Return the splits of a custom load request as arrays."""
    if not isinstance(unchecked, list | tuple | np.ndarray):
        raise TypeError(f"{expected}splits {shortened(unchecked)}.")
    splits: list[Split] = []
    for split in unchecked:
        try:
            positions = np.asarray(split)
        except ValueError:  # lists of different lengths
            positions = np.empty(0)
        if positions.ndim != 1 or positions.dtype.kind not in "iu" or not len(positions):
            raise TypeError(f"{expected}a batch of {shortened(split)}.")
        if not 0 <= positions.min() <= positions.max() < n_rows:
            raise RuntimeError(
                f"{expected}positions from {positions.min()} to {positions.max()} of {n_rows} rows. Count positions "
                "from 0, in the order of the request."
            )
        splits.append(positions.astype(np.intp, copy=False))
    return splits


def _own_splits(sampler: Sampler, n_rows: int, rng: np.random.Generator) -> list[Split]:
    """Return the batches of a load request without splits: all rows, shuffled if the sampler shuffles."""
    size, shuffle = sampler.batch_size, sampler.shuffle
    if size is None or shuffle is None:
        raise ValueError(
            f"{type(sampler).__name__} must have a batch_size and a shuffle that is True or False, since it yields "
            f"load requests without splits, got batch_size={size} and shuffle={shuffle}."
        )
    positions = rng.permutation(n_rows) if shuffle else np.arange(n_rows)
    return [positions[start : start + int(size)] for start in range(0, n_rows, int(size))]


def _counted(requests: Iterable[Request], *, promised: int, planned: int, name: str) -> Iterator[Request]:
    """Raise a RuntimeError unless the sampler yields the promised number of batches; add one more if it is planned.

    The additional batch is half of the largest batch in the last load request. Every batch is therefore part of a batch
    of the sampler; no batch is empty, and none grows.
    """
    n_batches = 0
    for request in requests:
        n_batches += len(request.splits)
        if n_batches > promised:
            break
        is_short = planned > promised == n_batches
        yield request._replace(splits=_halved(request.splits, name)) if is_short else request
    if n_batches != promised:
        yielded = f"only {n_batches}" if n_batches < promised else f"{n_batches} or more"
        raise RuntimeError(
            f"{name} yielded {yielded} batches, but its n_batches(n_obs) returned {promised}. Fix n_batches: ranks "
            "with different numbers of batches would wait for each other forever."
        )


def _halved(splits: Sequence[Split], name: str) -> list[Split]:
    # the last of the largest batches, so that batches before it keep their places
    index = max(range(len(splits)), key=lambda i: (len(splits[i]), i))
    if len(splits[index]) < 2:
        raise RuntimeError(
            f"{name} must yield full batches, got a last load request with batches of one row, which can't be split "
            "into one batch more. Fix its n_batches, which doesn't match its batches."
        )
    return [*splits[:index], *np.array_split(splits[index], 2), *splits[index + 1 :]]


def _without_a_lone_row(requests: Iterable[Request]) -> Iterator[Request]:
    """Move a row to a batch of one row in the last load request, from the batch before it or from the largest batch."""
    # the last two load requests are delayed, since the batch before may be in the load request before
    delayed: list[Request] = []
    for request in requests:
        delayed.append(request)
        if len(delayed) > 2:
            yield delayed.pop(0)
    if not delayed:  # the sampler has no batches
        return
    if len(delayed) == 2 and [len(split) for split in delayed[1].splits] == [1]:
        first, last = delayed  # the batch before is in the load request before
        (split,) = last.splits
        starts, stops = np.append(first.starts, last.starts), np.append(first.stops, last.stops)
        delayed = [Request(starts, stops, [*first.splits, split + first.n_rows])]
    *others, last = delayed
    yield from others
    splits = list(last.splits)
    lone = next((index for index, split in enumerate(splits) if len(split) == 1), 0)

    def preference(index: int) -> tuple[bool, int]:
        # the batch before the lone row if it has three rows, or else the largest batch
        n_rows = len(splits[index])
        return index == lone - 1 and n_rows > 2, n_rows

    giver = max(range(len(splits)), key=preference)
    if len(splits[lone]) == 1 and len(splits[giver]) > 2:
        splits[giver], row = splits[giver][:-1], splits[giver][-1:]
        splits[lone] = np.append(row, splits[lone])
    yield last._replace(splits=splits)


def _selected(requests: Iterable[Request], numbers: Numbers, n_batches: int) -> Iterator[Request]:
    """Select the batches with some ascending numbers of ``n_batches``, and the rows that they need."""
    pending = iter(numbers)
    # `part` is the rest of the current range of numbers, and `n_before` the number of the request's first batch
    part, n_before = next(pending), 0
    for request in requests:
        n_here = len(request.splits)
        kept: list[int] = []
        while part and part.start < n_before + n_here:
            here = range(part.start, min(part.stop, n_before + n_here), part.step)
            kept += range(here.start - n_before, here.stop - n_before, here.step)
            part = part[len(here) :] or next(pending, range(0))
        if len(kept) == n_here:
            yield request
        elif kept:
            yield request.narrowed([request.splits[index] for index in kept])
        n_before += n_here
        # the last batch isn't skipped, so that its reader checks the number of batches of the sampler
        if not part and numbers[-1][-1] < n_batches - 1:
            return
