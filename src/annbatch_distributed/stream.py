"""From the wrapped sampler to the loader: the load requests of a stream, and of one rank's pass.

A load request says which rows are read at once, as ranges, and which of them each batch has (its splits). annbatch's
own form is a dict of ``requests`` (slices or an integer array of rows) and ``splits`` (for each batch, positions in the
rows of the requests). Between a sampler and the loader it is a :class:`Request`.

A stream is the numbered batches that the wrapped sampler makes of one shard:

1. A private copy of the sampler runs on local rows ``[0, len(shard))`` with a generator of its own; it never learns
   which rows of the collection they are. It is run from its beginning, which reads nothing.
2. Load requests of a user's sampler are checked, and get splits if they have none.
3. The number of batches is made the planned one. Under ``"exact"``, a last batch of one row gets one of the batch
   before it, since batch norm, for one, can't train on a single row.
4. Batches that aren't due are left out, and with them the rows that only they need.
5. Local rows become global ones. annbatch reads each run of consecutive rows by itself, and to begin one costs about as
   much as some dozens of rows: short gaps between rows are read too, and no split points to them.
6. If the sampler samples sets, their numbers become cells. Each is read once for a load request.

A pass is what one rank reads: its lane, or the lanes of its virtual ranks, joined batch by batch. It holds all that it
depends on, so setting another mask or epoch on the sampler changes nothing in it. In a worker of a ``DataLoader``, the
wrapped sampler runs as if there were no workers. A copied or unpickled pass runs again through the load requests that
were taken, as a sampler's own generator can't be copied.

Randomness is keyed by (root seed, stream, epoch, pass), which stand next to each other in numpy's seed sequence.
Nothing is added up, so (seed 0, epoch 1) and (seed 1, epoch 0) differ, and nothing depends on earlier calls.
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
from annbatch_distributed.ranks.worker import current_worker, worker_info_hidden
from annbatch_distributed.rows import Int64Array, expand, integer, runs
from annbatch_distributed.sets import EpochSets
from annbatch_distributed.state import Position


def generator(root_seed: int, *, stream: int, epoch: int, passes: int = 0) -> np.random.Generator:
    """Return the generator of a pass over one stream; all arguments are integers of at least 0.

    ``passes`` is the number of passes that were begun since the epoch was set.

    In the first pass of epoch 0 it is, bit for bit, annbatch 0.3.1's ``default_rng([rank, root_seed])``: numpy pads a
    seed sequence with zeros. Later passes go in as a spawn key, which numpy keeps apart from the rest. Within a job all
    coordinates give different generators. Root seeds of 2^32 and more take two words of the sequence, so that such a
    root seed may share a generator with another job's smaller one in a later epoch.

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

#: How many rows a hole has at most that is read through, if users don't say otherwise: see benchmarks/holes.py.
LONGEST_GAP = 64


class Request(NamedTuple):
    """A load request of local or of global rows."""

    starts: Int64Array
    """Where each range of rows starts, in the order in which they are read."""
    stops: Int64Array
    """Where each stops."""
    splits: Sequence[Split]
    """For each batch, positions in the rows of the ranges."""
    are_repeats: Flags | None = None
    """For each row, whether it is a repeat; None if none is known to be one."""
    is_narrowed: bool = False
    """Whether no other load request of the sampler reads what lies between the ranges."""
    of_sets: Sequence[Marks] = ()
    """Arrays about the cells of each batch, by name, if they are cells of sets."""

    def rows(self) -> Int64Array:
        """Return every row that is read, in order."""
        return expand(self.starts, self.stops)

    def rows_at(self, positions: Split) -> Int64Array:
        """Return the rows at some positions, such as a split."""
        # ranges 4:6, 9:12 end at 2, 5 in the order of reading: position 3 is in range 1, and 12 - (5 - 3) = 10
        ends = np.cumsum(self.stops - self.starts)
        which = np.searchsorted(ends, positions, side="right")
        rows: Int64Array = positions + (self.stops - ends)[which]
        return rows

    def narrowed(self, splits: Sequence[Split]) -> Request:
        """Return a load request with some batches of this one, or parts of them, that reads only the rows they need."""
        # positions of the rows that are needed: of 0:10, splits [1 2] and [7] need 1 2 7, which become positions 0 1 2
        positions = np.unique(np.concatenate(splits))
        starts, stops = runs(self.rows()[positions])
        are_repeats = None if self.are_repeats is None else self.are_repeats[positions]
        return Request(starts, stops, [np.searchsorted(positions, split) for split in splits], are_repeats, True)

    def read_through(self, are_read: Flags) -> Request:
        """Return a load request for the same batches that reads some holes as well.

        ``are_read`` says, for each range but the first, whether the hole before it is read; ranges that continue each
        other are joined then.
        """
        if not are_read.any():
            return self
        # Ranges 4:6, 9:12 and 30:31, of which the gap before 9 is read: stretches 4:12 and 30:31 of lengths 8 and 1.
        starts, stops = self.starts, self.stops
        is_first = np.append(True, ~are_read & (starts[1:] != stops[:-1]))  # 1 0 1
        stretch_starts, stretch_stops = starts[is_first], stops[np.append(is_first[1:], True)]
        lengths = stretch_stops - stretch_starts
        # the places of the ranges in what is read: 4:6 at 0, 9:12 at 5, 30:31 at 8
        shifts = stretch_starts - (np.cumsum(lengths) - lengths)
        first = starts - shifts[np.cumsum(is_first) - 1]
        # and of each of their rows, by which splits are translated: 0 1 5 6 7 8
        places = expand(first, first + (stops - starts))
        are_repeats = self.are_repeats
        if are_repeats is not None:
            are_repeats = np.zeros(lengths.sum(), dtype=np.bool_)
            are_repeats[places] = self.are_repeats
        splits = [places[split] for split in self.splits]
        return Request(stretch_starts, stretch_stops, splits, are_repeats, self.is_narrowed, self.of_sets)

    def to_annbatch(self) -> LoadRequest:
        """Return it as annbatch's ``Loader`` takes it, with further keys.

        ``repeated`` says for each row whether it is a repeat, where that is known. Of sets, ``set``, ``is_control`` and
        ``repeated`` are lists of arrays as ``splits`` is, since several sets of a load request can share a control.
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
        """Return the arrays about the rows of each batch, by name, that batches have in addition to what is read."""
        if self.of_sets:
            return self.of_sets
        return [{} if self.are_repeats is None else {"repeated": self.are_repeats[split]} for split in self.splits]


def of_cells(request: Request, sets: EpochSets, *, tells_repeats: bool, longest_gap: int) -> Request:
    """Return a load request of the cells of sets, for one of their numbers.

    Each cell is read once, in the order of the collection, however many of the sets have it. Numbers in no batch are
    left out. ``tells_repeats`` says whether batches tell which of their cells are repeats.
    """
    batches = [sets.cells_of(request.rows_at(split)) for split in request.splits]
    # sets of cells 4 5 7 and 9 5 are read as 4 5 7 9: positions 0 1 2 and 3 1
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
    """Return a load request that has batch k of each of some others, one after the other, as its batch k."""
    # rows of each request; requests of 3 and 5 rows begin at positions 0 and 3 of the joined one
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
    """One stream of a pass."""

    sampler: Sampler
    """The wrapped sampler, which is never run: only private copies of it are."""
    plan: EpochPlan
    """Every stream's rows and batches."""
    number: int
    """Which stream it is."""
    root_seed: int
    """What the job's randomness begins from."""
    passes: int
    """How many passes were begun before, since the epoch was set."""

    @property
    def _name(self) -> str:
        return type(self.sampler).__name__

    def requests(self, numbers: Numbers, *, step: SharedStep | None = None, longest_gap: int = 0) -> Iterator[Request]:
        """Yield load requests of global rows for some of its batches, by their numbers in the stream, ascending.

        ``step`` says which part of the batch is read, if there is one that lanes share. Holes of at most
        ``longest_gap`` rows are read through.
        """
        shard = self.plan.shard(self.number)
        n_batches = self.plan.n_batches(self.number)
        # generators around each other: each changes one thing about load requests, in the order of the module's list
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
        # the splits that annbatch's own ``sample`` adds are shuffled with numpy's global random state
        if type(sampler).sample is not Sampler.sample:
            requests: object = sampler.sample(len(shard))
        else:
            sampler.validate(len(shard))
            requests = sampler._sample(len(shard))
        if not isinstance(requests, Iterable):
            raise TypeError(f"{self._name} must yield load requests for its rows, got {shortened(requests)} instead.")
        is_trusted = wrapped.is_annbatchs_own(sampler)
        grid = wrapped.chunk_size(sampler) if type(sampler) is RandomSampler and self.plan.align is not None else None
        for given in requests:
            if not is_trusted:
                request = _checked(given, sampler, len(shard), rng)
                if request is not None:
                    yield request
                continue
            # annbatch's own samplers yield ascending slices without a step, which needn't be checked
            slices: Sequence[slice] = list(given["requests"])
            starts = np.array([part.start for part in slices], dtype=np.int64)
            stops = np.array([part.stop for part in slices], dtype=np.int64)
            if grid is not None:
                starts, stops = _aligned(starts, stops - starts, grid, len(shard))
            if given["splits"]:
                yield Request(starts, stops, given["splits"])

    def _to_global(self, request: Request, shard: Shard, *, is_repeat: bool, longest_gap: int) -> Request:
        """Turn local rows into global ones."""
        starts, stops, which = shard.rows.slices_to_global(request.starts, request.stops)
        are_repeats = None
        if self.plan.remainder == "pad":
            # local rows behind a rank's own ones are repeats
            are_repeats = (request.rows() >= shard.n_own) | is_repeat
        gaps = starts[1:] - stops[:-1]
        are_read = (gaps > 0) & (gaps <= longest_gap)
        if not request.is_narrowed:
            # A gap between two chunks of the sampler is rows that another chunk reads: it stays out. A gap within a
            # chunk (of global rows, where the shard has one), or between chunks that follow each other, is read.
            # Chunks 0:4, 4:8, 20:24 follow each other as 1 0 -; pieces of chunks 0 0 1 2 have three gaps between
            # them, of which the first is within chunk 0, the second between 0 and 1, and the third stays out.
            follows = np.append(request.starts[1:] == request.stops[:-1], False)
            is_within = which[1:] == which[:-1]
            are_read &= is_within | follows[which[:-1]]
        return Request(starts, stops, request.splits, are_repeats, request.is_narrowed).read_through(are_read)


def _aligned(starts: Int64Array, lengths: Int64Array, size: int, n_rows: int) -> tuple[Int64Array, Int64Array]:
    """Have whole chunks of annbatch's ``RandomSampler`` begin at multiples of their size, and the last one be ragged.

    It makes any of the chunks the ragged one, and those beyond it begin earlier. Which chunk is read when stays.
    """
    # 10 rows in chunks of 4: annbatch may yield 0:4, 4:6, 6:10; whole chunks become 0:4 and 4:8, the ragged one 8:10
    starts = np.where(lengths < size, n_rows - n_rows % size, starts // size * size)
    return starts, starts + lengths


def _checked(given: object, sampler: Sampler, n_rows: int, rng: np.random.Generator) -> Request | None:
    """Return a load request of a user's sampler with splits; None if it has no batches.

    A TypeError or a RuntimeError if annbatch's ``Loader`` can't read it, or would read something else.
    """
    name = type(sampler).__name__
    expected = (
        f"{name} must yield load requests: dicts with 'requests', slices with integer bounds and no step or an integer "
        "array of rows, and 'splits', a list with an integer array for each batch, of positions in these rows; got "
    )
    if not isinstance(given, Mapping) or "requests" not in given:
        raise TypeError(f"{expected}{shortened(given)}.")
    rows = given["requests"]
    starts, stops = _bounds(rows, expected)
    if len(starts) and not 0 <= starts.min() <= stops.max() <= n_rows:
        raise RuntimeError(
            f"{name} was given the rows [0, {n_rows}) and asked for rows from [{starts.min()}, {stops.max()}). A "
            "sampler must stay within the n_obs that sample(n_obs) gets. If it holds something for each row of the "
            "collection, give it a method localize(rows, n_obs) that narrows that down to a shard."
        )
    n_here = int((stops - starts).sum())
    splits = _splits(given["splits"], n_here, expected) if "splits" in given else _cut(sampler, n_here, rng)
    if not splits:
        return None
    order = np.argsort(starts, kind="stable") if isinstance(rows, np.ndarray) and rows.dtype != object else None
    if order is None:
        return Request(starts, stops, splits, None, True)
    # rows in any order are read in theirs
    # rows 9 4 5 are read as 4 5 9: the place of row 9 is 2, of row 4 it is 0
    places = np.empty(n_here, dtype=np.intp)
    places[order] = np.arange(n_here)
    return Request(*runs(starts[order]), [places[split] for split in splits], None, True)


def _bounds(rows: object, expected: str) -> tuple[Int64Array, Int64Array]:
    """Return the starts and stops of the rows of a user's load request, those of an array one by one."""
    if isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and rows.ndim == 1:
        starts = rows.astype(np.int64)
        return starts, starts + 1
    slices: list[Any] = list(rows) if isinstance(rows, list | tuple | np.ndarray) and np.ndim(rows) == 1 else [rows]
    if all(isinstance(part, slice) and part.step in (None, 1) for part in slices):
        starts, stops = np.array([part.start for part in slices]), np.array([part.stop for part in slices])
        if not slices or (starts.dtype.kind in "iu" and stops.dtype.kind in "iu" and (starts <= stops).all()):
            return starts.astype(np.int64), stops.astype(np.int64)
    raise TypeError(f"{expected}requests {shortened(rows)}.")


def _splits(given: object, n_rows: int, expected: str) -> list[Split]:
    """Return the splits of a user's load request of some rows as arrays."""
    if not isinstance(given, list | tuple | np.ndarray):
        raise TypeError(f"{expected}splits {shortened(given)}.")
    splits: list[Split] = []
    for split in given:
        try:
            positions = np.asarray(split)
        except ValueError:  # lists of different lengths
            positions = np.empty(0)
        if positions.ndim != 1 or positions.dtype.kind not in "iu" or not len(positions):
            raise TypeError(f"{expected}a batch of {shortened(split)}.")
        if not 0 <= positions.min() <= positions.max() < n_rows:
            raise RuntimeError(
                f"{expected}positions from {positions.min()} to {positions.max()} of {n_rows} rows. Positions count "
                "from 0, in the order of the request."
            )
        splits.append(positions.astype(np.intp, copy=False))
    return splits


def _cut(sampler: Sampler, n_rows: int, rng: np.random.Generator) -> list[Split]:
    """Return the batches of a load request without splits: all rows, shuffled if the sampler says so."""
    size, shuffle = sampler.batch_size, sampler.shuffle
    if size is None or shuffle is None:
        raise ValueError(
            f"{type(sampler).__name__} yields load requests without splits, so it must have a batch_size, and True or "
            f"False for shuffle; it has batch_size {size} and shuffle {shuffle}."
        )
    positions = rng.permutation(n_rows) if shuffle else np.arange(n_rows)
    return [positions[start : start + int(size)] for start in range(0, n_rows, int(size))]


def _counted(requests: Iterable[Request], *, promised: int, planned: int, name: str) -> Iterator[Request]:
    """Raise a RuntimeError unless there are as many batches as the sampler promised; add one more if it is planned.

    That one comes from halving the largest batch of the request that holds the last one: every batch stays part of one
    of the sampler's own, none is empty and none grows.
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
            f"{name} promised {promised} batches (n_batches) and yielded {yielded}. Ranks that yield different numbers "
            "of batches wait for each other for ever, so its n_batches(n_obs) must be what it yields for n_obs rows."
        )


def _halved(splits: Sequence[Split], name: str) -> list[Split]:
    # the last of the largest, so that the batches before it stay in their places
    index = max(range(len(splits)), key=lambda i: (len(splits[i]), i))
    if len(splits[index]) < 2:
        raise RuntimeError(
            f"{name} ended on batches of a single row, although all of its batches must be full for its number of rows "
            "and batches (n_batches) to fit together. They can't be cut to make one batch more."
        )
    return [*splits[:index], *np.array_split(splits[index], 2), *splits[index + 1 :]]


def _without_a_lone_row(requests: Iterable[Request]) -> Iterator[Request]:
    """Give a batch of one row, of the last ones, a row of the batch before it, or of the largest, that has three."""
    # the last two load requests are kept back, since the row for a lone one may be in the one before
    held: list[Request] = []
    for request in requests:
        held.append(request)
        if len(held) > 2:
            yield held.pop(0)
    if len(held) == 2 and [len(split) for split in held[1].splits] == [1]:
        first, last = held  # the batch before it is in another load request
        (split,) = last.splits
        starts, stops = np.append(first.starts, last.starts), np.append(first.stops, last.stops)
        held = [Request(starts, stops, [*first.splits, split + int((first.stops - first.starts).sum())])]
    *others, last = held
    yield from others
    splits = list(last.splits)
    lone = next((index for index, split in enumerate(splits) if len(split) == 1), 0)
    # the batch before the lone one, if it has three rows, or else the largest
    giver = max(
        range(len(splits)), key=lambda index: (index == lone - 1 and len(splits[index]) > 2, len(splits[index]))
    )
    if len(splits[lone]) == 1 and len(splits[giver]) > 2:
        splits[giver], given = splits[giver][:-1], splits[giver][-1:]
        splits[lone] = np.append(given, splits[lone])
    yield last._replace(splits=splits)


def _selected(requests: Iterable[Request], numbers: Numbers, n_batches: int) -> Iterator[Request]:
    """Keep the batches of some numbers, which ascend, of ``n_batches``, and the rows that they need."""
    pending = iter(numbers)
    # `part` is what is left of the current range of numbers, and `n_before` the number of the request's first batch
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
        # whoever has the last batch sees whether the sampler keeps its promise
        if not part and numbers[-1][-1] < n_batches - 1:
            return


@dataclass(eq=False)
class Pass(Iterator[LoadRequest]):
    """One iteration of a rank over its lane: load requests, in annbatch's form or as :class:`Request`."""

    sampler: Sampler
    """The wrapped sampler; it is never run, only private copies of it are."""
    plan: EpochPlan
    """Every stream's rows and batches in this epoch."""
    lanes: Sequence[Lane]
    """Batches that are read: the lane of a rank, or the lanes of its virtual ranks, joined batch by batch."""
    root_seed: int
    """Seed of all randomness of the job."""
    position: Position
    """Where the pass begins."""
    n_batches: int = 0
    """Number of batches that the epoch has in the longest lane of the job, those done before included."""
    longest_gap: int = 0
    """Largest gap between rows that is read too, in rows."""
    rank: Rank | None = None
    """Rank that reads it; None if nobody does."""
    is_by_workers: bool = False
    """True if the workers of a ``DataLoader`` read it, and this is what their process knows of it."""
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
        with worker_info_hidden(current_worker()):
            if self._requests is None:
                self._requests = iter(()) if self.is_closed else islice(self._joined(), self.n_taken, None)
            request = next(self._requests)
            if self.plan.sets is not None:
                request = of_cells(
                    request, self.plan.sets, tells_repeats=self._tells_repeats, longest_gap=self.longest_gap
                )
        self.n_taken += 1
        return request

    @property
    def _tells_repeats(self) -> bool:
        """Whether batches tell which of their rows are repeats."""
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
        """Return the number of batches of the epoch that are done once this process has yielded some.

        Under ``"keep"`` a lane may have one batch less than others: when it has come to its end, so have the others.
        """
        return self.n_batches if n_yielded == self.n_due else self.position.done + n_yielded

    def batches(self) -> Iterator[Int64Array]:
        """Yield the rows of each batch, or the numbers of its sets, and read nothing."""
        for request in self._joined():
            rows = request.rows()
            yield from (rows[split] for split in request.splits)

    def rows(self) -> Iterator[Int64Array]:
        """Yield the rows of each batch, and read nothing."""
        sets = self.plan.sets
        return self.batches() if sets is None else (sets.cells_of(numbers)[0].rows for numbers in self.batches())

    def _joined(self) -> Iterator[Request]:
        """Yield the load requests of all lanes together; a lane that has fewer batches is missing in the last ones."""
        lanes = [self._of_lane(lane) for lane in self.lanes]
        if len(lanes) == 1:
            yield from lanes[0]
            return
        # of each lane, what is left of its current load request: batches that other lanes had no counterpart for
        pending: list[Request | None] = [None] * len(lanes)
        while True:
            pending = [
                next(lane, None) if request is None else request for lane, request in zip(lanes, pending, strict=True)
            ]
            # only as many steps as all lanes have batches for
            n_batches = min((len(request.splits) for request in pending if request is not None), default=0)
            if not n_batches:
                return
            taken = []
            for lane, request in enumerate(pending):
                pending[lane] = None
                if request is not None and len(request.splits) > n_batches:  # the rest is for the next one
                    pending[lane] = self._part(request, request.splits[n_batches:])
                    request = self._part(request, request.splits[:n_batches])  # noqa: PLW2901 a part of it
                if request is not None:
                    taken.append(request)
            yield concatenated(taken)

    def _part(self, request: Request, splits: Sequence[Any]) -> Request:
        """Return a load request for some batches of another one, of global rows."""
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
        """Return the streams that some numbers are of, and the numbers of each as it counts them, ascending."""
        streams: list[tuple[int, list[range]]] = []
        for part in numbers:
            while part:
                stream = self.plan.stream_of(part[0])
                # numbers of the stream are first:stop; a part that goes on beyond them is cut there
                first, stop = self.plan.first_number(stream), self.plan.first_number(stream + 1)
                n_here = len(range(part[0], min(part[-1] + 1, stop), part.step))
                own, part = part[:n_here], part[n_here:]  # noqa: PLW2901 the numbers of other streams
                local = range(own.start - first, own[-1] + 1 - first, own.step)
                # a stream is run once for numbers that ascend; where they go back, it is run again
                if streams and streams[-1][0] == stream and streams[-1][1][-1][-1] < local[0]:
                    streams[-1][1].append(local)
                else:
                    streams.append((stream, [local]))
        return [(stream, tuple(parts)) for stream, parts in streams]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_requests": None, "on_next": None, "on_end": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # nothing but the iterator, which a copy leaves out, ever changes in place
        return copy.copy(self)
