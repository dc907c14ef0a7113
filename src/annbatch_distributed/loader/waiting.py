"""Waiting: how long the consumer of a loader waits for batches, which shows a slow rank."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from time import perf_counter
from typing import Any, NamedTuple

from annbatch_distributed.core.values import plural

_END = object()


class Waited(NamedTuple):
    """Time that the consumer of a loader has waited for batches in its last iteration, on this rank."""

    seconds: float = 0.0
    """Seconds from asking for each batch to getting it."""
    n_batches: int = 0
    """Number of batches that it got."""

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s for {plural(self.n_batches, 'batch')}"


class Waits:
    """Part of a loader that measures how long its consumer waits."""

    _waited = Waited()

    @property
    def waited(self) -> Waited:
        """Time that the last iteration's consumer has waited for batches, and their number, on this rank.

        If one rank waits longer than others, its reading is slower; if no rank waits, faster reading gains nothing.
        Without prefetching, all reading is waiting.

        Examples
        --------
        >>> for batch in loader:
        ...     pass
        >>> loader.waited.n_batches, loader.waited.seconds > 0
        (6, True)
        """
        return self._waited

    @property
    def _waited_about(self) -> dict[str, str]:
        """Line of the ``repr``; none before the first batch."""
        return {"waited": str(self._waited)} if self._waited.n_batches else {}

    def _timed(self, batches: Generator[Any]) -> Generator[Any]:
        """Yield the batches of an iteration, and measure it."""
        self._waited = Waited()
        with closing(batches):
            while True:
                began = perf_counter()
                batch = next(batches, _END)
                seconds = self._waited.seconds + perf_counter() - began
                if batch is _END:
                    self._waited = Waited(seconds, self._waited.n_batches)
                    return
                self._waited = Waited(seconds, self._waited.n_batches + 1)
                yield batch
                del batch  # else it would stay in memory until the next one is read
