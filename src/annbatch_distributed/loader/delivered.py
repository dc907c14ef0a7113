"""What a loader delivers of a pass: the rows of the batches that were yielded.

Whether all ranks have read what was planned is asked at the end of an epoch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from annbatch_distributed.checks import Tally
from annbatch_distributed.requests import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    from annbatch.types import LoadRequest

    from annbatch_distributed.progress import Begun

__all__ = ["Delivered"]


@dataclass(eq=False)
class Delivered:
    """A pass whose batches a loader yields."""

    begun: Begun
    """What the sampler knows it by."""
    read: Tally = field(default_factory=Tally)
    """The rows of the batches that were yielded."""
    _due: deque[tuple[npt.NDArray[Any], Callable[[], npt.NDArray[Any]], Any]] = field(default_factory=deque)
    """For each batch that was asked for: its positions in the load request, the rows of that, and which are repeats."""

    def ask(self, request: LoadRequest) -> LoadRequest:
        """Note a load request that is about to be read, and return it."""
        given: Any = request
        slices: list[slice] = given["requests"]
        rows = cache(lambda: rows_of([part.start for part in slices], [part.stop for part in slices]))
        self._due.extend((split, rows, given.get("repeated")) for split in given["splits"])
        return request

    def deliver(self, index: npt.NDArray[Any] | None) -> npt.NDArray[np.bool_] | None:
        """Note that the next batch is yielded, with its rows if they are known; return which of them are repeats."""
        split, rows, repeated = self._due.popleft()
        self.read.add(rows()[split] if index is None else index)
        return None if repeated is None else repeated[split]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_due": deque()}  # a copy of a loader can't go on with a pass
