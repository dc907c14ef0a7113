"""Dealing: which of a rank's batches each worker of a torch ``DataLoader`` has.

The batches of a rank have numbers, in the order of its pass. torch collects them from its workers in turn, so that the
batches that are collected as w-th, (w + K)-th, ... are those of worker w of K. Which ones these are is a *dealing*:

- A sampler that keeps an order has its batches dealt out one by one: they are collected in that order.
- One that shuffles has them dealt in stretches, of as many batches as each worker is asked for: the batches of a load
  request then belong to one worker, or at the ends of stretches to two, so that hardly anything is read twice.

Either way a rank's batches are what they would be without workers, and as many. How many were collected says for every
worker which it still has; if the number of workers changes, what is left is dealt anew.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import batched, chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Ascending numbers of batches.
type Numbers = tuple[range, ...]

#: For each number of workers that a pass has had, how many batches were collected. Without workers, one has them all.
type Dealings = tuple[tuple[int, int], ...]


class Hand(NamedTuple):
    """What one worker has still to do."""

    left: Numbers
    """The batches that any worker has left."""
    own: Numbers
    """Those of this worker."""


def cut(numbers: Numbers, bounds: Iterable[int]) -> Numbers:
    """Return the numbers at some places: from the first bound to the second, from the third to the fourth, ascending.

    Examples
    --------
    >>> cut((range(0, 3), range(7, 9)), [0, 1, 2, 4])
    (range(0, 1), range(2, 3), range(7, 8))
    """
    found = []
    which = n_before = 0
    for start, stop in batched(bounds, 2):
        place = start
        while place < stop and which < len(numbers):
            piece = numbers[which][place - n_before : stop - n_before]
            if piece:
                found.append(piece)
                place += len(piece)
            else:
                n_before += len(numbers[which])
                which += 1
    return tuple(found)


def left(n_batches: int, dealings: Dealings) -> Numbers:
    """Return the batches that are left of a pass.

    Parameters
    ----------
    n_batches
        How many batches the pass has.
    dealings
        For each number of workers that it has had, that number and how many batches were collected.

    Examples
    --------
    Two workers have batches 0 to 4 and 5 to 9. Three are collected: 0, 5 and 1.

    >>> left(10, ((2, 3),))
    (range(2, 5), range(6, 10))
    """
    numbers: Numbers = (range(n_batches),)
    for n_workers, done in dealings:
        numbers = _without_collected(numbers, n_workers, done)
    return numbers


def done(n_batches: int, dealings: Dealings) -> Numbers:
    """Return the batches that are not left of a pass.

    Examples
    --------
    >>> done(10, ((2, 3),))
    (range(0, 2), range(5, 6))
    """
    bounds = chain.from_iterable((part.start, part.stop) for part in left(n_batches, dealings))
    return cut((range(n_batches),), [0, *bounds, n_batches])


def hand(n_batches: int, dealings: Dealings, *, worker: int, n_workers: int, keeps_order: bool) -> Hand:
    """Return what a worker has still to do.

    Parameters
    ----------
    n_batches, dealings
        As for :func:`left`; the last dealing is to this number of workers, unless an order is kept, and then to 1.
    worker
        Whose batches are collected as those with the numbers ``worker``, ``worker + n_workers``, ... of that dealing.
    n_workers
        How many workers there are.
    keeps_order
        Whether batches are to be collected in their order.

    Examples
    --------
    >>> hand(10, ((2, 3),), worker=1, n_workers=2, keeps_order=False).own
    (range(6, 10),)
    >>> [*hand(10, ((1, 3),), worker=1, n_workers=2, keeps_order=True).own[0]]
    [3, 5, 7, 9]
    """
    *before, (_, collected) = dealings
    all_left = left(n_batches, dealings)
    if n_workers == 1:
        return Hand(all_left, all_left)
    numbers = left(n_batches, tuple(before))
    if keeps_order:
        dealt = _every(numbers, worker, n_workers)
    else:
        dealt = cut(numbers, _stretch(sum(map(len, numbers)), n_workers, worker))
    return Hand(all_left, cut(dealt, [len(range(worker, collected, n_workers)), n_batches]))


def contains(numbers: Numbers, number: int) -> bool:
    """Return whether a number is among them."""
    which = bisect_right(numbers, number, key=attrgetter("stop"))
    return which < len(numbers) and number in numbers[which]


def _every(numbers: Numbers, worker: int, n_workers: int) -> Numbers:
    """Every so many-th number, from the one that this worker is asked for first."""
    found = []
    for part in numbers:
        found.append(part[worker % n_workers :: n_workers])
        worker -= len(part)
    return tuple(piece for piece in found if piece)


def _stretch(n_numbers: int, n_workers: int, worker: int) -> tuple[int, int]:
    """Where a worker's stretch begins and ends: as many numbers as it is asked for, if all are asked in turn."""
    size, n_longer = divmod(n_numbers, n_workers)
    start = worker * size + min(worker, n_longer)
    return start, start + size + (worker < n_longer)


def _without_collected(numbers: Numbers, n_workers: int, done: int) -> Numbers:
    """Return what is left of numbers that are dealt in stretches, of which so many were collected in turn.

    It takes as long as there are workers of which any was collected, however many others there are.
    """
    n_numbers = sum(map(len, numbers))
    bounds = []
    for worker in range(min(n_workers, n_numbers, done)):
        start, stop = _stretch(n_numbers, n_workers, worker)
        bounds += [start, min(stop, start + len(range(worker, done, n_workers)))]
    return cut(numbers, [0, *bounds, n_numbers])
