"""What a loader delivers of a pass: what each load request asks for, and what was yielded of it.

Whether all ranks have read what was planned is asked at the end of an epoch, if at all. So rows are counted some load
requests at a time, when all their batches were yielded, and as ranges: row by row, that would take a twentieth of the
time in which fast stores read them. Where a batch has other rows than were asked for, those are counted that it has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from annbatch_distributed.checks import Tally
from annbatch_distributed.requests import rows_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from annbatch.types import LoadRequest

    from annbatch_distributed.progress import Begun
    from annbatch_distributed.rows import Int64Array

__all__ = ["Delivered"]


@dataclass(eq=False)
class Delivered:
    """A pass whose batches a loader yields."""

    begun: Begun
    """What the sampler knows it by."""
    n_yielded: int = 0
    """How many batches were yielded."""
    _read: Tally = field(default_factory=Tally)
    """Their rows, but for those of load requests that are not yielded in full."""
    _done: list[_Asked] = field(default_factory=list)
    """Load requests that are yielded in full, and not counted."""
    _n_rows_done: int = 0
    _asked: deque[_Asked] = field(default_factory=deque)
    """The load requests of which batches are still to be yielded."""

    def ask(self, request: LoadRequest) -> None:
        """Note a load request that is about to be read."""
        asked = _Asked(request)
        if asked.n_batches:
            self._asked.append(asked)

    def deliver(self, index: npt.NDArray[Any] | None) -> npt.NDArray[np.bool_] | None:
        """Note that the next batch is yielded, with its rows if they are known; return which of them are repeats."""
        asked = self._asked[0]
        repeats = asked.deliver(index)
        self.n_yielded += 1
        if asked.n_yielded == asked.n_batches:
            self._done.append(self._asked.popleft())
            self._n_rows_done += asked.n_positions
            if self._n_rows_done >= _AT_ONCE:
                self._count_done()
        return repeats

    def _count_done(self) -> None:
        _count(self._done, self._read)
        self._done, self._n_rows_done = [], 0

    @property
    def read(self) -> Tally:
        """The rows of the batches that were yielded."""
        self._count_done()
        read = self._read + Tally()
        _count(list(islice(self._asked, 1)), read)
        return read

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a loader can't go on with a pass
        return vars(self) | {"_read": self.read, "_done": [], "_asked": deque()}


class _Asked:
    """A load request, and what was yielded of it."""

    __slots__ = ("_marks", "delivered", "n_batches", "n_positions", "n_yielded", "requests", "splits")

    def __init__(self, request: LoadRequest) -> None:
        given = cast("dict[str, Any]", request)  # which has its splits by now
        self.requests = given["requests"]
        # for each batch, which rows of the load request it has; how many they are; and of all rows, which are repeats
        self.splits: list[npt.NDArray[Any]] = given["splits"]
        self.n_positions, self._marks = sum(map(len, self.splits)), given.get("repeated")
        # how many batches there are, how many were yielded, and if they are known, which rows those had
        self.n_batches, self.n_yielded = len(self.splits), 0
        self.delivered: list[npt.NDArray[Any]] = []

    def deliver(self, index: npt.NDArray[Any] | None) -> npt.NDArray[np.bool_] | None:
        """As :meth:`Delivered.deliver`."""
        repeats = None if self._marks is None else self._marks[self.splits[self.n_yielded]]
        if index is not None:
            self.delivered.append(index.copy())  # whoever has the batch may change it
        self.n_yielded += 1
        return repeats

    @property
    def may_be_ranges(self) -> bool:
        """Whether all batches were yielded, and have as many rows as its slices."""
        n_rows = sum(part.stop - part.start for part in self.requests)
        return self.n_yielded == self.n_batches and n_rows == self.n_positions


def _count(asked: list[_Asked], read: Tally) -> None:
    """Count the rows of the batches that were yielded of load requests."""
    ranges = [one for one in asked if one.may_be_ranges]
    if ranges and (bounds := _bounds_of(ranges)) is not None:
        splits = [split for one in ranges for split in one.splits]
        read.add_ranges(*bounds, n_batches=len(splits), largest=max(map(len, splits)))
        asked = [one for one in asked if not one.may_be_ranges]
    for one in asked:
        rows = rows_of(*_bounds(one.requests))
        for batch in one.delivered or [rows[split] for split in one.splits[: one.n_yielded]]:
            read.add(batch)


def _bounds_of(asked: list[_Asked]) -> tuple[Int64Array, Int64Array] | None:
    """Return the bounds of the slices of load requests, if their batches have all rows of them, each once; or None."""
    starts, stops = map(np.concatenate, zip(*(_bounds(one.requests) for one in asked), strict=True))
    n_rows = [one.n_positions for one in asked]
    # one load request after the other
    positions = np.concatenate([split for one in asked for split in one.splits], dtype=np.intp)
    positions += np.repeat(np.cumsum(n_rows) - n_rows, n_rows)
    are_there = np.zeros(len(positions), dtype=np.bool_)
    are_there[positions] = True
    if np.count_nonzero(are_there) < len(positions):
        return None
    delivered = [rows for one in asked for rows in one.delivered]
    if delivered:
        lengths = stops - starts
        rows = np.arange(len(positions)) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        if not np.array_equal(np.concatenate(delivered), rows[positions]):
            return None
    return starts, stops


def _bounds(slices: list[slice]) -> tuple[Int64Array, Int64Array]:
    return np.array([part.start for part in slices]), np.array([part.stop for part in slices])


#: Of how many rows load requests are counted together: those of 1,024 take mostly as long as one by itself.
_AT_ONCE = 1 << 14
