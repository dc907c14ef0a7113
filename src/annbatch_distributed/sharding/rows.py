"""Rows: an ordered run of global rows, kept as half-open ranges.

A window, a shard, the rows lost in an epoch: all are rows in some order, and all are a handful of stretches even where
they hold 10^10 rows. What is kept is the stretches, so that every operation costs in their number, never in the rows.

Position ``p`` of ``Rows`` (a *local* row) is its ``p``-th row (a *global* row):

1. ``cyclic`` takes a stretch of positions, going on at the front when the end is reached.
2. ``to_global`` and ``slice_to_global`` turn local rows into global ones.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

type IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Rows:
    """Global rows in the order of their local positions.

    Parameters
    ----------
    ranges
        Ascending, non-empty, half-open ranges of global rows, with step 1, in order. They may go down from one range to
        the next, and a row may be in several of them. Ranges that continue each other are joined.

    Examples
    --------
    >>> window = Rows((range(0, 3), range(10, 14)))
    >>> len(window), list(window)
    (7, [0, 1, 2, 10, 11, 12, 13])
    >>> window.cyclic(5, 4)
    Rows(12:14, 0:2)
    """

    ranges: tuple[range, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", tuple(_joined(self.ranges)))

    def __len__(self) -> int:
        return self._stops[-1] if self.ranges else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges)

    def __repr__(self) -> str:
        return f"Rows({self})"

    def __str__(self) -> str:
        return ", ".join(f"{stretch.start}:{stretch.stop}" for stretch in self.ranges) or "none"

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        """The local row at which each range stops."""
        return tuple(accumulate(map(len, self.ranges)))

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """What takes a local row to its global row, for each range."""
        return tuple(
            stretch.start - (stop - len(stretch)) for stretch, stop in zip(self.ranges, self._stops, strict=True)
        )

    def to_array(self) -> npt.NDArray[np.int64]:
        """Return the global rows as an array, in order; it takes memory for each of them."""
        return self.to_global(np.arange(len(self)))

    def cyclic(self, start: int, length: int) -> Rows:
        """Return a stretch of these rows, which goes on at the front whenever it reaches the end.

        Parameters
        ----------
        start
            The local row to begin with, modulo the number of rows.
        length
            How many rows to take; more than there are means that rows come again.
        """
        ranges: list[range] = []
        while length > 0:
            start %= len(self)
            index = bisect_right(self._stops, start)
            first = start + self._offsets[index]
            stretch = range(first, min(first + length, self.ranges[index].stop))
            ranges.append(stretch)
            start += len(stretch)
            length -= len(stretch)
        return Rows(tuple(ranges))

    def to_global(self, local: IntArray) -> npt.NDArray[np.int64]:
        """Return the global rows of an array of local rows, each within ``[0, len(self))``."""
        positions = local.astype(np.int64)  # what a narrower type holds, it may not hold once moved
        if len(self.ranges) == 1:
            return positions + self._offsets[0]
        index = np.searchsorted(np.array(self._stops, dtype=np.int64), positions, side="right")
        return positions + np.array(self._offsets, dtype=np.int64)[index]

    def slice_to_global(self, local: slice) -> list[slice]:
        """Return the global rows of a half-open slice of local rows within ``[0, len(self))``, in order."""
        start, stop = int(local.start), int(local.stop)
        index = bisect_right(self._stops, start)
        pieces = []
        while start < stop:
            offset, end = self._offsets[index], min(stop, self._stops[index])
            pieces.append(slice(start + offset, end + offset))
            start = end
            index += 1
        return pieces


def _joined(ranges: Iterable[range]) -> Iterator[range]:
    """Join each range to the one before where it continues it."""
    pending = range(0)
    for stretch in ranges:
        if pending and pending.stop == stretch.start:
            pending = range(pending.start, stretch.stop)
            continue
        if pending:
            yield pending
        pending = stretch
    if pending:
        yield pending
