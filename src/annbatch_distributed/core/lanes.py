"""Lanes: the batches of an epoch that each consumer reads, as ranges of numbers.

The batches of an epoch are numbered consecutively over all streams. A lane is the sequence of numbers that one consumer
reads. At first, lane s is stream s. While the number of lanes stays the same, finished batches are removed from the
front of each lane. When it changes, the remaining batches of all lanes, in order, are cut into an equal number of
batches per lane. If they don't divide evenly, the first few numbers are excess, and ``remainder`` decides:

- ``drop``: they are dropped in this epoch.
- ``keep``: each of the first lanes has one batch more.
- ``pad``: all lanes read them in one last step, some of them as repeats.
- ``exact``: all lanes read parts of them in one last step.

The workers of a ``DataLoader`` divide a lane in the same way. PyTorch collects batches from worker 0, 1, ... in turn.
Each worker has a contiguous part, so that each load request is read by one worker; if the sampler keeps an order, each
of K workers has every K-th number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, get_args

#: Policy for rows, or batches, that don't divide evenly.
type Remainder = Literal["drop", "keep", "exact", "pad"]

POLICIES: tuple[Remainder, ...] = get_args(Remainder.__value__)

#: Numbers of batches, in the order in which they are read.
type Numbers = tuple[range, ...]


class Worker(NamedTuple):
    """Worker of a PyTorch ``DataLoader``, or its part of a lane."""

    number: int
    """Index of the worker. It yields batches ``number``, ``number + n_workers``, ... of the collected order."""
    n_workers: int
    """Number of workers."""


class Segment(NamedTuple):
    """Part of an epoch that was run with one number of lanes and of workers."""

    n_lanes: int
    """Number of lanes."""
    n_workers: int
    """Number of ``DataLoader`` workers of each lane; 1 if there are none, or the order doesn't depend on them."""
    done: int
    """Number of batches that every lane has done."""


class SharedStep(NamedTuple):
    """Last step of a lane: a batch that it shares with other lanes, or that other lanes read as well."""

    number: int
    """Number of the batch."""
    part: int = 0
    """Index of the part of its rows that the lane reads."""
    n_parts: int = 1
    """Number of parts, one for each lane that shares the batch."""
    is_repeat: bool = False
    """True if another lane also reads the batch, and this lane repeats it."""


@dataclass(frozen=True)
class Lane:
    """Batches that one consumer reads."""

    numbers: Numbers
    """Numbers of whole batches."""
    last: SharedStep | None = None
    """Last step after them; None if there is none."""

    def __len__(self) -> int:
        return _n(self.numbers) + (self.last is not None)

    def after(self, n_workers: int, done: int) -> Lane:
        """Return the remaining batches after ``done`` were collected from ``n_workers`` workers in turn.

        >>> Lane((range(10),)).after(2, 3)  # 0, 5 and 1
        Lane(numbers=(range(2, 5), range(6, 10)), last=None)
        """
        if done >= len(self):
            return Lane(())
        # of 10 batches, workers 0 and 1 have 0:5 and 5:10; after 3 collected in turn (0, 5, 1), worker 0 has done 2
        # and worker 1 has done 1: 2:5 and 6:10 remain
        parts = zip(self._ranges(n_workers), range(n_workers), strict=True)
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
            return Lane(self._ranges(n_workers)[number], last)
        # every n_workers-th number over all ranges: `first` is the place of the next number, counted from the start of
        # a range. For worker 1 of 3 in 0:4 and 10:14, it is 1, then 1 - 4 = -3, and -3 mod 3 = 0: numbers 1, 10 and 13
        every, first = [], number
        for part in self.numbers:
            every.append(part[first % n_workers :: n_workers])
            first -= len(part)
        return Lane(tuple(part for part in every if part), last)

    def in_turn(self, n_workers: int) -> Iterator[SharedStep]:
        """Yield the batches in the order in which they are collected from ``n_workers`` workers in turn.

        >>> [step.number for step in Lane((range(7),)).in_turn(3)]
        [0, 3, 5, 1, 4, 6, 2]
        """
        ranges = [chain.from_iterable(numbers) for numbers in self._ranges(n_workers)]
        for place in range(_n(self.numbers)):
            yield SharedStep(next(ranges[place % n_workers]))
        if self.last is not None:
            yield self.last

    def _ranges(self, n_workers: int) -> list[Numbers]:
        """Return the whole batches of each worker, a contiguous part for each; the last step takes one turn as well."""
        n = len(self)
        # 7 batches of 3 workers: worker 0 has the turns 0 3 6, so the sizes are 3 2 2
        sizes = [len(range(worker, n, n_workers)) for worker in range(n_workers)]
        if self.last is not None:
            sizes[(n - 1) % n_workers] -= 1
        return _cut(self.numbers, sizes)[:n_workers]


def each_segment(counts: Sequence[int], segments: Iterable[Segment], policy: Remainder) -> Iterator[list[Lane]]:
    """Yield the lanes of an epoch when each segment begins.

    ``counts`` is the number of batches of each stream.

    >>> resumed = [Segment(2, 1, 1), Segment(3, 1, 0)]
    >>> *_, own = each_segment([4, 4], resumed, "drop")
    >>> [lane.numbers for lane in own]
    [(range(1, 3),), (range(3, 4), range(5, 6)), (range(6, 8),)]
    """
    # streams of 4 and 3 batches begin as the lanes 0:4 and 4:7
    own = [Lane(part) for part in _cut((range(sum(counts)),), counts)[:-1]]
    over: Numbers = ()
    for segment in segments:
        if len(own) != segment.n_lanes:
            # excess numbers are divided again, since they may fit a different number of lanes
            remaining = _joined(chain(chain.from_iterable(lane.numbers for lane in own), over))
            own, over = _recut(remaining, segment.n_lanes, policy)
        yield own
        if segment.done:
            own = [lane.after(segment.n_workers, segment.done) for lane in own]
        # once the last step, which reads the excess numbers, is done, none are left
        if policy in ("exact", "pad") and all(lane.last is None for lane in own):
            over = ()


def _recut(remaining: Numbers, n_lanes: int, policy: Remainder) -> tuple[list[Lane], Numbers]:
    """Divide the remaining numbers evenly among lanes; return the lanes and the excess numbers."""
    # 7 numbers for 3 lanes: 2 for each, and 1 excess number
    size, n_over = divmod(_n(remaining), n_lanes)
    if policy == "keep":
        sizes = [size + (lane < n_over) for lane in range(n_lanes)]
        *parts, _ = _cut(remaining, sizes)
        return list(map(Lane, parts)), ()
    # the first numbers are excess, since the small batches of a stream are its last ones
    over, *parts, _ = _cut(remaining, [n_over, *[size] * n_lanes])
    numbers = list(chain.from_iterable(over))
    steps: list[SharedStep | None] = [None] * n_lanes
    if n_over and policy == "pad":
        # 2 numbers a, b over 5 lanes: a b a b a, where lanes 2 to 4 read repeats
        steps = [SharedStep(numbers[lane % n_over], is_repeat=lane >= n_over) for lane in range(n_lanes)]
    if n_over and policy == "exact":
        # 2 numbers over 5 lanes: firsts is 0 2 5, so lanes 0 and 1 share the first number, and lanes 2 to 4 the second
        firsts = [which * n_lanes // n_over for which in range(n_over + 1)]
        for number, first, stop in zip(numbers, firsts, firsts[1:], strict=False):
            steps[first:stop] = [SharedStep(number, lane - first, stop - first) for lane in range(first, stop)]
    return [Lane(part, step) for part, step in zip(parts, steps, strict=True)], over


def _n(numbers: Numbers) -> int:
    return sum(map(len, numbers))


def _joined(parts: Iterable[range]) -> Numbers:
    """Join ranges that continue each other."""
    joined: list[range] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        elif part:
            joined.append(part)
    return tuple(joined)


def _cut(numbers: Numbers, sizes: Iterable[int]) -> list[Numbers]:
    """Cut numbers into parts of some sizes, and a last part of the remaining numbers.

    >>> _cut((range(0, 3), range(7, 9)), [2, 2])
    [(range(0, 2),), (range(2, 3), range(7, 8)), (range(8, 9),)]
    """
    # `rest` is the remainder of the range that was cut last
    parts, rest = iter(numbers), range(0)

    def take(size: int) -> Iterator[range]:
        nonlocal rest
        while size and (rest := rest or next(parts, range(0))):
            part, rest = rest[:size], rest[size:]
            size -= len(part)
            yield part

    return [*(tuple(take(size)) for size in sizes), tuple(part for part in (rest, *parts) if part)]
