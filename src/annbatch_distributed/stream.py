"""Streams and passes: the load requests of a shard, and of one rank's iteration.

A load request holds the rows to read at once, as ranges, and the positions in these rows for each batch (its splits).
annbatch's form is a dict of ``requests`` (slices or an integer array of rows) and ``splits`` (an array of positions per
batch). Between a sampler and the loader it is a :class:`Request`.

A stream is the sequence of batches that the wrapped sampler yields for one shard:

1. A private copy of the sampler runs on local rows ``[0, len(shard))`` with its own generator. It doesn't know the
   global rows. It always runs from the beginning, which reads no data.
2. Load requests of a custom sampler are checked, and get splits if they have none.
3. The number of batches is made equal to the planned number. Under ``"exact"``, a last batch of one row gets one more
   row of the batch before, since batch normalization, for example, can't train on a single row.
4. Batches that aren't needed are removed, together with the rows that only they need.
5. Local rows are converted to global rows. annbatch reads each range of consecutive rows separately, and starting a
   read costs about the same as reading some dozens of rows. Short gaps between rows are therefore read too, but no
   split points to them.
6. If the sampler samples sets, their indices are converted to cells. Each cell is read once per load request.

A pass is one iteration of a rank over its lane, or over the lanes of its virtual ranks, joined batch by batch. It holds
everything that it depends on, so a new mask or epoch of the sampler doesn't change it. In a worker of a ``DataLoader``,
the wrapped sampler runs as if there were no workers. A copied or unpickled pass runs from the beginning and skips the
load requests that were taken, since a running sampler can't be copied.

Randomness is keyed by (root seed, stream, epoch, pass), which are separate words of NumPy's seed sequence. They are not
added, so (seed 0, epoch 1) and (seed 1, epoch 0) differ, and earlier calls have no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from reprlib import repr as shortened
from typing import Any, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler, SequentialSampler
from annbatch.types import LoadRequest

from annbatch_distributed import wrapped
from annbatch_distributed.lanes import Lane, Numbers, SharedStep
from annbatch_distributed.plan import EpochPlan, Shard, prepared
from annbatch_distributed.ranks import Rank
from annbatch_distributed.ranks.worker import hidden_worker
from annbatch_distributed.rows import Int64Array, expand, integer, runs
from annbatch_distributed.sets import EpochSets
from annbatch_distributed.state import Position


def generator(root_seed: int, *, stream: int, epoch: int, passes: int = 0) -> np.random.Generator:
    """Return the generator of a pass over one stream; all arguments are integers of at least 0.

    ``passes`` is the number of earlier passes since the epoch was set.

    In the first pass of epoch 0, it is equal to annbatch 0.3.1's ``default_rng([rank, root_seed])``, since NumPy pads a
    seed sequence with zeros. In later passes, ``passes`` is a spawn key, which NumPy keeps apart. All coordinates of a
    job have different generators. Root seeds of 2^32 or more take two words of the sequence, so they may have the same
    generator as a smaller root seed of a different job in a later epoch.

    >>> generator(7, stream=1, epoch=0).random() == np.random.default_rng([1, 7]).random()
    True
    >>> generator(0, stream=0, epoch=1).random() == generator(1, stream=0, epoch=0).random()
    False
    """
    for name, value in {"root_seed": root_seed, "stream": stream, "epoch": epoch, "passes": passes}.items():
        integer(name, value, least=0)
    key = (passes,) if passes else ()
    return np.random.default_rng(np.random.SeedSequence([stream, root_seed, epoch], spawn_key=key))


type Split = npt.NDArray[np.integer[Any]]
type Flags = npt.NDArray[np.bool_]
type Marks = dict[str, npt.NDArray[Any]]

#: Default for the largest gap between rows that is read as well, in rows: see benchmarks/gaps.py.
LONGEST_GAP = 64


class Request(NamedTuple):
    """Load request of local or of global rows."""

    starts: Int64Array
    """Start of each range of rows, in the order of reading."""
    stops: Int64Array
    """Stop of each range."""
    splits: Sequence[Split]
    """For each batch, positions in the rows of the ranges."""
    are_repeats: Flags | None = None
    """For each row, True if it is a repeat; None if no row is known to be one."""
    is_narrowed: bool = False
    """True if the ranges are rows within chunks, so that short gaps may be read. Gaps between whole chunks are not."""
    of_sets: Sequence[Marks] = ()
    """Arrays about the cells of each batch, by name, if the sampler samples sets."""

    def rows(self) -> Int64Array:
        """Return all rows that are read, in order."""
        return expand(self.starts, self.stops)

    def rows_at(self, positions: Split) -> Int64Array:
        """Return the rows at some positions, such as a split."""
        # ranges 4:6 and 9:12 end at positions 2 and 5: position 3 is in range 1, so its row is 12 - (5 - 3) = 10
        ends = np.cumsum(self.stops - self.starts)
        which = np.searchsorted(ends, positions, side="right")
        rows: Int64Array = positions + (self.stops - ends)[which]
        return rows

    def narrowed(self, splits: Sequence[Split]) -> Request:
        """Return a load request for some batches of this one, or parts of them, with only the rows that they need."""
        # of rows 0:10, splits [1 2] and [7] need positions 1 2 7, which become 0 1 2: splits [0 1] and [2]
        positions = np.unique(np.concatenate(splits))
        starts, stops = runs(self.rows()[positions])
        are_repeats = None if self.are_repeats is None else self.are_repeats[positions]
        return Request(starts, stops, [np.searchsorted(positions, split) for split in splits], are_repeats, True)

    def read_through(self, are_read: Flags) -> Request:
        """Return a load request for the same batches that also reads some gaps.

        ``are_read`` is True for each range, except the first, if the gap before it is read. If any gap is read, ranges
        that continue each other are joined as well.
        """
        if not are_read.any():
            return self
        # Ranges 4:6, 9:12 and 30:31, where the gap before 9 is read: joined ranges 4:12 and 30:31 of lengths 8 and 1.
        starts, stops = self.starts, self.stops
        is_first = np.append(True, ~are_read & (starts[1:] != stops[:-1]))  # 1 0 1
        range_starts, range_stops = starts[is_first], stops[np.append(is_first[1:], True)]
        lengths = range_stops - range_starts
        # the places of the ranges in the rows that are read: 4:6 at 0, 9:12 at 5, 30:31 at 8
        shifts = range_starts - (np.cumsum(lengths) - lengths)
        first = starts - shifts[np.cumsum(is_first) - 1]
        # the places of their rows, which translate the positions of splits: 0 1 5 6 7 8
        places = expand(first, first + (stops - starts))
        are_repeats = self.are_repeats
        if are_repeats is not None:
            are_repeats = np.zeros(lengths.sum(), dtype=np.bool_)
            are_repeats[places] = self.are_repeats
        splits = [places[split] for split in self.splits]
        return Request(range_starts, range_stops, splits, are_repeats, self.is_narrowed, self.of_sets)

    def to_annbatch(self) -> LoadRequest:
        """Return annbatch's form of a load request, with additional keys.

        ``repeated`` is True for each row that is a repeat, if that is known. For sets, ``set``, ``is_control`` and
        ``repeated`` are lists of arrays, one per batch, since several sets of a load request can share a control.
        """
        request: dict[str, Any] = {
            "requests": list(map(slice, self.starts.tolist(), self.stops.tolist())),
            "splits": list(self.splits),
        }
        if self.are_repeats is not None:
            request["repeated"] = self.are_repeats
        for name in self.of_sets[0] if self.of_sets else ():
            request[name] = [marks[name] for marks in self.of_sets]
        return cast("LoadRequest", request)

    def marks(self) -> Sequence[Marks]:
        """Return the additional arrays of each batch, by name, such as ``repeated``."""
        if self.of_sets:
            return self.of_sets
        return [{} if self.are_repeats is None else {"repeated": self.are_repeats[split]} for split in self.splits]


def of_cells(request: Request, sets: EpochSets, *, tells_repeats: bool, longest_gap: int) -> Request:
    """Convert a load request of the indices of sets to a load request of their cells.

    Each cell is read once, in the order of the collection, even if several sets have it. Sets in no batch are removed.
    If ``tells_repeats`` is True, batches mark repeated cells.
    """
    batches = [sets.cells_of(request.rows_at(split)) for split in request.splits]
    # batches of cells 4 5 7 and 9 5 read 4 5 7 9: positions 0 1 2 and 3 1
    rows, positions = np.unique(np.concatenate([cells.rows for cells, _ in batches]), return_inverse=True)
    starts, stops = runs(rows)
    splits = np.split(positions, np.cumsum([len(cells.rows) for cells, _ in batches])[:-1])
    marks = []
    for split, (cells, which) in zip(request.splits, batches, strict=True):
        marks.append({"set": which, "is_control": cells.are_controls})
        if tells_repeats:
            are_repeats = cells.are_repeats
            if request.are_repeats is not None:  # whole sets
                are_repeats = are_repeats | request.are_repeats[split][which]
            marks[-1]["repeated"] = are_repeats
    gaps = starts[1:] - stops[:-1]
    return Request(starts, stops, splits, of_sets=marks).read_through((gaps > 0) & (gaps <= longest_gap))


def concatenated(requests: Sequence[Request]) -> Request:
    """Join load requests batch by batch: batch k has the rows of batch k of each of them."""
    # requests of 3 and 5 rows begin at positions 0 and 3 of the joined one: splits [0 2] and [1] become [0 2 4]
    lengths = [int((request.stops - request.starts).sum()) for request in requests]
    offsets = np.cumsum([0, *lengths]).tolist()
    moved = [[split + offset for split in request.splits] for request, offset in zip(requests, offsets, strict=False)]
    are_repeats = None
    if any(request.are_repeats is not None for request in requests):
        are_repeats = np.concatenate(
            [
                np.zeros(length, dtype=np.bool_) if request.are_repeats is None else request.are_repeats
                for request, length in zip(requests, lengths, strict=True)
            ]
        )
    return Request(
        np.concatenate([request.starts for request in requests]),
        np.concatenate([request.stops for request in requests]),
        [np.concatenate(splits) for splits in zip(*moved, strict=True)],
        are_repeats,
    )


@dataclass(frozen=True)
class Stream:
    """Stream of a pass."""

    sampler: Sampler
    """Wrapped sampler. It is never run, only private copies of it are."""
    plan: EpochPlan
    """Rows and batches of every stream."""
    number: int
    """Index of the stream."""
    root_seed: int
    """Seed of all randomness of the job."""
    passes: int
    """Number of earlier passes since the epoch was set."""

    @property
    def _name(self) -> str:
        return type(self.sampler).__name__

    def requests(self, numbers: Numbers, *, step: SharedStep | None = None, longest_gap: int = 0) -> Iterator[Request]:
        """Yield load requests of global rows for some batches, by their numbers in the stream, ascending.

        ``step`` is given for a batch that lanes share, and names the part to read. Gaps of at most ``longest_gap`` rows
        are read as well.
        """
        shard = self.plan.shard(self.number)
        n_batches = self.plan.n_batches(self.number)
        # nested generators: each changes load requests in one way, in the order of the list in the module's docstring
        requests = _counted(
            self._run(shard), promised=self.plan.sampler_batches[self.number], planned=n_batches, name=self._name
        )
        if self.plan.remainder == "exact" and type(self.sampler) in (RandomSampler, SequentialSampler):
            requests = _without_a_lone_row(requests)
        if numbers != (range(n_batches),):
            requests = _selected(requests, numbers, n_batches)
        for request in requests:
            if step is not None:
                request = request.narrowed([np.array_split(request.splits[0], step.n_parts)[step.part]])  # noqa: PLW2901 a part
            is_repeat = step is not None and step.is_repeat
            yield self._to_global(request, shard, is_repeat=is_repeat, longest_gap=longest_gap)

    def _run(self, shard: Shard) -> Iterator[Request]:
        """Run the sampler, and yield all load requests, of local rows."""
        rng = generator(self.root_seed, stream=self.number, epoch=self.plan.epoch, passes=self.passes)
        sampler = prepared(self.sampler, self.plan, self.number, shard, rng)
        # annbatch's own ``sample`` would add splits that are shuffled with NumPy's global random state
        if type(sampler).sample is not Sampler.sample:
            requests: object = sampler.sample(len(shard))
        else:
            sampler.validate(len(shard))
            requests = sampler._sample(len(shard))
        if not isinstance(requests, Iterable):
            raise TypeError(
                f"{self._name}.sample must return an iterable of load requests, got {shortened(requests)}. Write it "
                "as a generator."
            )
        is_trusted = wrapped.is_annbatchs_own(sampler)
        grid = wrapped.chunk_size(sampler) if type(sampler) is RandomSampler and self.plan.align is not None else None
        for unchecked in requests:
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

    def _to_global(self, request: Request, shard: Shard, *, is_repeat: bool, longest_gap: int) -> Request:
        """Convert local rows to global rows."""
        starts, stops, which = shard.rows.slices_to_global(request.starts, request.stops)
        are_repeats = None
        if self.plan.remainder == "pad":
            # local rows after a rank's own rows are repeats
            are_repeats = (request.rows() >= shard.n_own) | is_repeat
        gaps = starts[1:] - stops[:-1]
        are_read = (gaps > 0) & (gaps <= longest_gap)
        if not request.is_narrowed:
            # A gap within a chunk, where the shard has a gap in global rows, or between chunks that follow each other
            # is read. Any other gap between two chunks isn't, since its rows belong to another chunk. Chunks 0:4, 4:8,
            # 20:24 have follows 1 0 0. If chunk 0 has two pieces, `which` is 0 0 1 2, with three gaps: the first is
            # within chunk 0, the second between chunks 0 and 1, and the third isn't read.
            follows = np.append(request.starts[1:] == request.stops[:-1], False)
            is_within = which[1:] == which[:-1]
            are_read &= is_within | follows[which[:-1]]
        return Request(starts, stops, request.splits, are_repeats, request.is_narrowed).read_through(are_read)


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
    splits = _splits(unchecked["splits"], n_here, expected) if "splits" in unchecked else _cut(sampler, n_here, rng)
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
    slices: list[Any] = list(rows) if isinstance(rows, list | tuple | np.ndarray) and np.ndim(rows) == 1 else [rows]
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


def _cut(sampler: Sampler, n_rows: int, rng: np.random.Generator) -> list[Split]:
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
    """Move a row to a batch of one row at the end, from the batch before it or from the largest batch."""
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
        delayed = [Request(starts, stops, [*first.splits, split + int((first.stops - first.starts).sum())])]
    *others, last = delayed
    yield from others
    splits = list(last.splits)
    lone = next((index for index, split in enumerate(splits) if len(split) == 1), 0)
    # the batch before the lone row if it has three rows, or else the largest batch
    giver = max(
        range(len(splits)), key=lambda index: (index == lone - 1 and len(splits[index]) > 2, len(splits[index]))
    )
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


@dataclass(eq=False)
class Pass(Iterator[LoadRequest]):
    """Iteration of a rank over its lane: load requests, in annbatch's form or as :class:`Request`."""

    sampler: Sampler
    """Wrapped sampler. It is never run, only private copies of it are."""
    plan: EpochPlan
    """Rows and batches of every stream in this epoch."""
    lanes: Sequence[Lane]
    """Batches to read: the lane of a rank, or the lanes of its virtual ranks, joined batch by batch."""
    root_seed: int
    """Seed of all randomness of the job."""
    position: Position
    """Position at which the pass begins."""
    n_batches: int = 0
    """Number of batches of the epoch in the longest lane of the job, including batches before a resume."""
    longest_gap: int = 0
    """Largest gap between rows that is read too, in rows."""
    rank: Rank = Rank(0, 1)  # noqa: RUF009 it never changes
    """Rank that reads it."""
    is_by_workers: bool = False
    """True if the workers of a ``DataLoader`` read it; this object then represents it in the main process."""
    n_taken: int = 0
    """Number of load requests that were taken."""
    is_closed: bool = False
    """True if the pass was closed, and gives no more load requests."""
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
        sets = self.plan.sets
        if sets is None:
            return request
        return of_cells(request, sets, tells_repeats=self._tells_repeats, longest_gap=self.longest_gap)

    def _run(self) -> Iterator[Request]:
        """Yield the load requests; while the wrapped sampler runs, this process doesn't seem to be a worker."""
        requests = self._joined()
        while True:
            with hidden_worker():
                request = next(requests, None)
            if request is None:
                return
            yield request

    @property
    def _tells_repeats(self) -> bool:
        """True if batches mark their repeated rows."""
        sets = self.plan.sets
        return self.plan.remainder == "pad" or (sets is not None and sets.sets.tail == "fill")

    def close(self) -> None:
        """End the pass."""
        self.is_closed, self._requests = True, None

    @property
    def n_due(self) -> int:
        """Number of batches that this process yields in the pass."""
        return max(map(len, self.lanes))

    def done_after(self, n_yielded: int) -> int:
        """Return the number of batches of the epoch that are done after this process has yielded some.

        Under ``"keep"``, a lane may have one batch less than others. When it ends, the others count as ended, too.
        """
        return self.n_batches if n_yielded == self.n_due else self.position.done + n_yielded

    def batches(self) -> Iterator[Int64Array]:
        """Yield the rows of each batch, or the indices of its sets, without reading data."""
        for request in self._run():
            rows = request.rows()
            yield from (rows[split] for split in request.splits)

    def rows(self) -> Iterator[Int64Array]:
        """Yield the rows of each batch, without reading data."""
        sets = self.plan.sets
        return self.batches() if sets is None else (sets.cells_of(numbers)[0].rows for numbers in self.batches())

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
                    pending[lane] = self._part(request, request.splits[n_batches:])
                    request = self._part(request, request.splits[:n_batches])  # noqa: PLW2901 a part of it
                if request is not None:
                    parts.append(request)
            yield concatenated(parts)

    def _part(self, request: Request, splits: Sequence[Any]) -> Request:
        """Return a load request, of global rows, for some batches of a load request."""
        part = request.narrowed(splits)
        gaps = part.starts[1:] - part.stops[:-1]
        return part.read_through((gaps > 0) & (gaps <= self.longest_gap))

    def _of_lane(self, lane: Lane) -> Iterator[Request]:
        for stream, numbers in self._by_stream(lane.numbers):
            yield from self._of_stream(stream, numbers)
        if lane.last is not None:
            ((stream, numbers),) = self._by_stream((range(lane.last.number, lane.last.number + 1),))
            yield from self._of_stream(stream, numbers, lane.last)

    def _of_stream(self, number: int, numbers: Numbers, step: SharedStep | None = None) -> Iterator[Request]:
        stream = Stream(self.sampler, self.plan, number, self.root_seed, self.position.passes)
        return stream.requests(numbers, step=step, longest_gap=self.longest_gap)

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
                if streams and streams[-1][0] == stream and streams[-1][1][-1][-1] < local[0]:
                    streams[-1][1].append(local)
                else:
                    streams.append((stream, [local]))
        return [(stream, tuple(parts)) for stream, parts in streams]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_requests": None, "on_next": None, "on_end": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # only the iterator changes in place, and copies don't have it
        return copy.copy(self)
