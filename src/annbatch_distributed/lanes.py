"""Lanes: which of an epoch's batches each consumer reads, as ranges of their numbers.

The batches of an epoch are numbered, all streams laid end to end. A lane is the numbers that one consumer reads, in
order. At first, lane s is stream s. So long as the number of lanes stays the same, what is done takes each lane's first
numbers away. With another number of lanes, what is left, in lane order, is cut into as many even stretches; the first
numbers are left over where they don't divide evenly, and become, as ``remainder`` says:

- ``drop``: dropped in this epoch.
- ``keep``: one more for the first lanes.
- ``pad``: one last step, for which they are read by as many lanes as there are, by some as repeats.
- ``exact``: one last step, in which all lanes share their rows.

The workers of a ``DataLoader`` cut a lane in the same way. torch collects from worker 0, 1, ... in turn. Each has a
stretch, so that a load request is read by one of them; of a sampler that keeps an order, every K-th number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, get_args

#: What becomes of rows, or batches, that don't divide evenly.
type Remainder = Literal["drop", "keep", "exact", "pad"]

POLICIES: tuple[Remainder, ...] = get_args(Remainder.__value__)

#: Numbers of batches, in the order in which they are read.
type Numbers = tuple[range, ...]


class Worker(NamedTuple):
    """A worker of a torch ``DataLoader``, or its part of a lane."""

    number: int
    """Which of the workers, from 0: the batches are its that are collected ``number``-th, ``number + n_workers``-th."""
    n_workers: int
    """How many workers there are."""


class Segment(NamedTuple):
    """A part of an epoch that was run with one number of lanes and of workers."""

    n_lanes: int
    """How many lanes there were."""
    n_workers: int
    """How many ``DataLoader`` workers shared each lane: 1 if there are none, or it doesn't matter."""
    done: int
    """How many batches every lane has done."""


class SharedStep(NamedTuple):
    """The last step of a lane: a batch that it shares with others, or that others read as well."""

    number: int
    """Which batch."""
    part: int = 0
    """Which part of its rows the lane reads."""
    n_parts: int = 1
    """Among how many lanes they are shared."""
    is_repeat: bool = False
    """Whether another lane reads it too, and this one repeats it."""


@dataclass(frozen=True)
class Lane:
    """What one consumer reads."""

    numbers: Numbers
    """Whole batches."""
    last: SharedStep | None = None
    """What comes after them, if anything does."""

    def __len__(self) -> int:
        return _n(self.numbers) + (self.last is not None)

    def after(self, n_workers: int, done: int) -> Lane:
        """Return what is left once some batches were collected from so many workers in turn.

        >>> Lane((range(10),)).after(2, 3)  # 0, 5 and 1
        Lane(numbers=(range(2, 5), range(6, 10)), last=None)
        """
        if done >= len(self):
            return Lane(())
        # of 10 batches, workers 0 and 1 have 0:5 and 5:10; after 3 collected in turn (0, 5, 1), worker 0 has done two
        # of its own and worker 1 one: 2:5 and 6:10 are left
        parts = zip(self._stretches(n_workers), range(n_workers), strict=True)
        left = [_cut(numbers, [len(range(worker, done, n_workers))])[1] for numbers, worker in parts]
        return Lane(_joined(chain.from_iterable(left)), self.last)

    def of_worker(self, worker: Worker, *, keeps_order: bool) -> Lane:
        """Return the part of a worker.

        >>> Lane((range(10),)).of_worker(Worker(1, 3), keeps_order=False)
        Lane(numbers=(range(4, 7),), last=None)
        >>> Lane((range(10),)).of_worker(Worker(1, 3), keeps_order=True)
        Lane(numbers=(range(1, 10, 3),), last=None)
        """
        number, n_workers = worker
        last = self.last if number == (len(self) - 1) % n_workers else None
        if not keeps_order:
            return Lane(self._stretches(n_workers)[number], last)
        # every n_workers-th number over all ranges: `first` is where the next one lies, counted from the start of a
        # range; of worker 1 of 3 in 0:4 and 10:14, that is 1, then 1 - 4 = -3, and -3 mod 3 = 0: numbers 1, 10 and 13
        every, first = [], number
        for part in self.numbers:
            every.append(part[first % n_workers :: n_workers])
            first -= len(part)
        return Lane(tuple(part for part in every if part), last)

    def in_turn(self, n_workers: int) -> Iterator[SharedStep]:
        """Yield the batches in the order in which they are collected from so many workers in turn.

        >>> [step.number for step in Lane((range(7),)).in_turn(3)]
        [0, 3, 5, 1, 4, 6, 2]
        """
        stretches = [chain.from_iterable(numbers) for numbers in self._stretches(n_workers)]
        for place in range(_n(self.numbers)):
            yield SharedStep(next(stretches[place % n_workers]))
        if self.last is not None:
            yield self.last

    def _stretches(self, n_workers: int) -> list[Numbers]:
        """The whole batches of each worker, as many as it is asked for: the last step belongs to whose turn it is."""
        n = len(self)
        sizes = [len(range(worker, n, n_workers)) for worker in range(n_workers)]
        if self.last is not None:
            sizes[(n - 1) % n_workers] -= 1
        return _cut(self.numbers, sizes)[:n_workers]


def each_segment(
    counts: Sequence[int], segments: Iterable[Segment], policy: Remainder
) -> Iterator[tuple[list[Lane], Numbers]]:
    """Yield the lanes that an epoch has when each segment begins, and the numbers that none of them has.

    ``counts`` is how many batches each stream has.

    >>> *_, (own, _) = each_segment([4, 4], [Segment(2, 1, 1), Segment(3, 1, 0)], "drop")
    >>> [lane.numbers for lane in own]
    [(range(1, 3),), (range(3, 4), range(5, 6)), (range(6, 8),)]
    """
    # streams of 4 and 3 batches begin as the lanes 0:4 and 4:7
    own = [Lane(part) for part in _cut((range(sum(counts)),), counts)[:-1]]
    over: Numbers = ()
    for segment in segments:
        if len(own) != segment.n_lanes:
            # numbers that were left over are cut again: with other lanes they may fit
            left = _joined(chain(chain.from_iterable(lane.numbers for lane in own), over))
            own, over = _recut(left, segment.n_lanes, policy)
        yield own, over
        if segment.done:
            own = [lane.after(segment.n_workers, segment.done) for lane in own]
        # the last step, shared by all lanes, is done: the numbers that were left over are read
        if policy in ("exact", "pad") and all(lane.last is None for lane in own):
            over = ()  # read


def _recut(left: Numbers, n_lanes: int, policy: Remainder) -> tuple[list[Lane], Numbers]:
    """Cut numbers that are left into even lanes; return them and the numbers left over."""
    # 7 numbers for 3 lanes: 2 for each, and 1 left over
    size, n_over = divmod(_n(left), n_lanes)
    if policy == "keep":
        return [Lane(part) for part in _cut(left, [size + (lane < n_over) for lane in range(n_lanes)])[:-1]], ()
    # the first ones, as a stream's last batches are its small ones
    over, *parts, _ = _cut(left, [n_over, *[size] * n_lanes])
    numbers = list(chain.from_iterable(over))
    steps: list[SharedStep | None] = [None] * n_lanes
    if n_over and policy == "pad":
        # 2 numbers a, b over 5 lanes: a b a b a, of which lanes 2 to 4 read repeats
        steps = [SharedStep(numbers[lane % n_over], is_repeat=lane >= n_over) for lane in range(n_lanes)]
    if n_over and policy == "exact":
        # 2 numbers over 5 lanes: the first one is split among lanes 0 and 1, the second one among lanes 2, 3 and 4
        firsts = [which * n_lanes // n_over for which in range(n_over + 1)]
        for number, first, stop in zip(numbers, firsts, firsts[1:], strict=False):
            steps[first:stop] = [SharedStep(number, lane - first, stop - first) for lane in range(first, stop)]
    return [Lane(part, step) for part, step in zip(parts, steps, strict=True)], over


def _n(numbers: Numbers) -> int:
    return sum(map(len, numbers))


def _joined(parts: Iterable[range]) -> Numbers:
    """Join ranges of consecutive numbers that continue each other."""
    joined: list[range] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        elif part:
            joined.append(part)
    return tuple(joined)


def _cut(numbers: Numbers, sizes: Iterable[int]) -> list[Numbers]:
    """Cut numbers into parts of some sizes, and what is left of them.

    >>> _cut((range(0, 3), range(7, 9)), [2, 2])
    [(range(0, 2),), (range(2, 3), range(7, 8)), (range(8, 9),)]
    """
    # `rest` is what is left of the range that the last cut went through
    parts, rest = iter(numbers), range(0)

    def take(size: int) -> Iterator[range]:
        nonlocal rest
        while size and (rest := rest or next(parts, range(0))):
            taken, rest = rest[:size], rest[size:]
            size -= len(taken)
            yield taken

    return [*(tuple(take(size)) for size in sizes), tuple(part for part in (rest, *parts) if part)]
