"""Batches of workers: which of a rank's batches each worker of a torch ``DataLoader`` has.

The batches of a rank have numbers, in the order of its pass. torch collects them from its workers in turn, so that the
batches that are collected as w-th, (w + K)-th, ... are worker w's of K. Which numbers these batches have:

- Of a sampler that keeps an order, they are every K-th: batches are collected in that order.
- Of one that shuffles, they are consecutive, as many as the worker is asked for: the batches of a load request then
  belong to one worker, or at the ends of its stretch to two, so that hardly anything is read twice.

Either way a rank's batches are what they would be without workers, and as many. How many were collected says for every
worker which it still has; if the number of workers changes, the batches that are left are divided anew.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import batched, chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Collected",
    "Numbers",
    "Worker",
    "WorkerBatches",
    "batches_done",
    "batches_left",
    "batches_of_worker",
    "contains",
]

#: Ascending numbers of batches.
type Numbers = tuple[range, ...]

#: For each number of workers that a pass has had, that number (1 without workers), and how many batches were collected.
type Collected = tuple[tuple[int, int], ...]


class Worker(NamedTuple):
    """A worker of a torch ``DataLoader``, or its part of a pass."""

    number: int
    """Which of the workers, from 0. Of a pass, it has the batches that are collected ``number``-th, ``number +
    n_workers``-th, ...."""
    n_workers: int
    """How many workers there are."""


class WorkerBatches(NamedTuple):
    """The batches of a pass that are left for one worker."""

    left: Numbers
    """The batches that are left for all workers."""
    own: Numbers
    """The batches that are left for this worker."""


def _cut(numbers: Numbers, bounds: Iterable[int]) -> Numbers:
    """Return the numbers at some places: from the first bound to the second, from the third to the fourth, ascending.

    Examples
    --------
    >>> _cut((range(0, 3), range(7, 9)), [0, 1, 2, 4])
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


def batches_left(n_batches: int, collected: Collected) -> Numbers:
    """Return the batches that are left of a pass of ``n_batches``.

    Examples
    --------
    Two workers have batches 0 to 4 and 5 to 9. Three are collected, 0, 5 and 1:

    >>> batches_left(10, ((2, 3),))
    (range(2, 5), range(6, 10))
    """
    numbers: Numbers = (range(n_batches),)
    for n_workers, n_collected in collected:
        numbers = _without_collected(numbers, n_workers, n_collected)
    return numbers


def batches_done(n_batches: int, collected: Collected) -> Numbers:
    """Return the batches that are not left of a pass of ``n_batches``."""
    bounds = chain.from_iterable((part.start, part.stop) for part in batches_left(n_batches, collected))
    return _cut((range(n_batches),), [0, *bounds, n_batches])


def batches_of_worker(n_batches: int, collected: Collected, worker: Worker, *, keeps_order: bool) -> WorkerBatches:
    """Return the batches of a pass of ``n_batches`` that are left for a worker.

    What was collected ends with what was collected from as many workers as now; or from 1, if batches are to be
    collected in their order. The worker's number counts from the beginning of that.

    Examples
    --------
    >>> batches_of_worker(10, ((2, 3),), Worker(1, 2), keeps_order=False).own
    (range(6, 10),)
    >>> [*batches_of_worker(10, ((1, 3),), Worker(1, 2), keeps_order=True).own[0]]
    [3, 5, 7, 9]
    """
    *before, (_, n_collected) = collected
    number, n_workers = worker
    all_left = batches_left(n_batches, collected)
    if n_workers == 1:
        return WorkerBatches(all_left, all_left)
    numbers = batches_left(n_batches, tuple(before))
    if keeps_order:
        whole = _every(numbers, number, n_workers)
    else:
        whole = _cut(numbers, _stretch(sum(map(len, numbers)), n_workers, number))
    return WorkerBatches(all_left, _cut(whole, [len(range(number, n_collected, n_workers)), n_batches]))


def contains(numbers: Numbers, number: int) -> bool:
    """Return whether a number is among them."""
    which = bisect_right(numbers, number, key=attrgetter("stop"))
    return which < len(numbers) and number in numbers[which]


def _every(numbers: Numbers, first: int, step: int) -> Numbers:
    """Every ``step``-th number, from the one at the place ``first``."""
    found = []
    for part in numbers:
        found.append(part[first % step :: step])
        first -= len(part)
    return tuple(piece for piece in found if piece)


def _stretch(n_numbers: int, n_workers: int, worker: int) -> tuple[int, int]:
    """Where a worker's stretch begins and ends: as many numbers as it is asked for, if all are asked in turn."""
    size, n_longer = divmod(n_numbers, n_workers)
    start = worker * size + min(worker, n_longer)
    return start, start + size + (worker < n_longer)


def _without_collected(numbers: Numbers, n_workers: int, n_collected: int) -> Numbers:
    """Return what is left of numbers that workers have in stretches, once some were collected from them in turn.

    It takes as long as there are workers of which any was collected, however many others there are.
    """
    n_numbers = sum(map(len, numbers))
    bounds = []
    for worker in range(min(n_workers, n_numbers, n_collected)):
        start, stop = _stretch(n_numbers, n_workers, worker)
        bounds += [start, min(stop, start + len(range(worker, n_collected, n_workers)))]
    return _cut(numbers, [0, *bounds, n_numbers])
