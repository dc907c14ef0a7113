"""What a loader delivers of a pass: what each load request asks for, and what was yielded of it.

Whether all ranks have read what was planned is asked at the end of an epoch, if at all. So rows are counted a load
request at a time, when all its batches were yielded, and as ranges: row by row, that would take a twentieth of the time
in which fast stores read them. Where a batch has other rows than were asked for, those are counted that it has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed.checks import Tally
from annbatch_distributed.passes.requests import bounds_of_slices, rows_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from annbatch.types import LoadRequest

    from annbatch_distributed.passes.run import Pass
    from annbatch_distributed.sharding.rows import Int64Array

__all__ = ["Delivered"]


@dataclass(eq=False)
class Delivered:
    """A pass whose batches a loader yields."""

    record: object = None
    """What the sampler knows it by; None until it is begun."""
    is_ahead: bool = False
    """Whether load requests are taken while batches of others are yielded."""
    n_asked: int = 0
    """How many batches the load request has that was taken last."""
    n_yielded: int = 0
    """How many batches were yielded."""
    _read: Tally = field(default_factory=Tally)
    """Their rows, but for those of load requests that are not yielded in full."""
    _asked: deque[_Asked] = field(default_factory=deque)
    """The load requests of which batches are still to be yielded."""
    _requests: Pass | None = None
    """What yields load requests, if they are taken ahead."""

    def begin(self, requests: Pass) -> None:
        """Note what yields the load requests."""
        self.record = requests.record
        if self.is_ahead:
            # it is as far as its consumer is, who says so; and is kept, since it is under way until then
            self._requests, requests.on_request = requests, None

    def ask(self, request: LoadRequest) -> None:
        """Note a load request that is about to be read."""
        self.n_asked = len(request["splits"])
        if self.n_asked:
            self._asked.append(_Asked(request))

    @property
    def is_at_first(self) -> bool:
        """Whether load requests are taken ahead, and the next batch is the first one of such."""
        return self.is_ahead and not self._asked[0].n_yielded

    def deliver(self, index: npt.NDArray[Any] | None) -> npt.NDArray[np.bool_] | None:
        """Note that the next batch is yielded, with its rows if they are known; return which of them are repeats."""
        asked = self._asked[0]
        repeats = asked.deliver(index)
        self.n_yielded += 1
        if asked.n_yielded == len(asked.splits):
            self._asked.popleft()
            asked.count(self._read)
        return repeats

    @property
    def read(self) -> Tally:
        """The rows of the batches that were yielded."""
        read = self._read + Tally()
        if self._asked:
            self._asked[0].count(read)
        return read

    def close(self) -> None:
        """Give the pass up, if it hasn't come to its end."""
        if self._requests is not None:
            self._requests.close()

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a loader can't go on with a pass
        return vars(self) | {"_read": self.read, "_asked": deque(), "_requests": None}


@dataclass(eq=False)
class _Asked:
    """A load request, and what was yielded of it."""

    request: LoadRequest
    n_yielded: int = 0
    delivered: list[npt.NDArray[Any]] = field(default_factory=list)
    """The rows of the batches that were yielded, if they are known."""

    @property
    def splits(self) -> list[npt.NDArray[Any]]:
        """For each batch, which rows of the load request it has."""
        return self.request["splits"]

    def deliver(self, index: npt.NDArray[Any] | None) -> npt.NDArray[np.bool_] | None:
        """As :meth:`Delivered.deliver`."""
        marks: Any = self.request.get("repeated")
        repeats = None if marks is None else marks[self.splits[self.n_yielded]]
        if index is not None:
            self.delivered.append(index.copy())  # whoever has the batch may change it
        self.n_yielded += 1
        return repeats

    def count(self, read: Tally) -> None:
        """Count the rows of the batches that were yielded."""
        bounds = bounds_of_slices(self.request["requests"])
        if self.n_yielded == len(self.splits) and bounds is not None and self._is_all_of(*bounds):
            read.add_ranges(*bounds, n_batches=self.n_yielded, largest=max(map(len, self.splits)))
            return
        rows = rows_of(self.request["requests"])
        for batch in self.delivered or [rows[split] for split in self.splits[: self.n_yielded]]:
            read.add(batch)

    def _is_all_of(self, starts: Int64Array, stops: Int64Array) -> bool:
        """Whether its batches, and what was delivered, are all rows of its slices, each once."""
        positions, lengths = np.concatenate(self.splits), stops - starts
        if len(positions) != lengths.sum():
            return False
        are_there = np.zeros(len(positions), dtype=np.bool_)
        are_there[positions] = True
        if not self.delivered:
            return bool(are_there.all())
        rows = np.arange(len(positions)) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return bool(are_there.all()) and np.array_equal(np.concatenate(self.delivered), rows[positions])
