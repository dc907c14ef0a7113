"""The workers of a DataLoader, in this thread."""

from __future__ import annotations

import copy
import multiprocessing
from collections import deque
from typing import TYPE_CHECKING, Any

from annbatch_distributed.loader.workers import WorkerDataLoader
from tests.workers import as_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Batches that each worker prepares ahead, PyTorch's prefetch_factor.
_N_AHEAD = 2


class InThread(WorkerDataLoader):
    """A DataLoader whose workers are copies of its loader, from which it collects as PyTorch does."""

    def _make_workers(self) -> Any:
        return _Workers(self._part, self.num_workers)


class _Workers:
    multiprocessing_context = multiprocessing.get_context("fork")
    _iterator = None

    def __init__(self, part: Any, n_workers: int) -> None:
        self.part, self.n_workers = part, n_workers
        self.copies: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        if not self.copies:  # persistent ones: they are copied when they start, and see no later change
            for _ in range(self.n_workers):
                own = copy.copy(self.part)  # the memory with the position is shared
                own._loader = copy.deepcopy(self.part._loader)
                self.copies.append(own)
        streams = [self.batches(number) for number in range(self.n_workers)]
        ready = [deque[Any]() for _ in streams]
        order = list(range(self.n_workers))
        while order:
            for number in list(order):
                while len(ready[number]) < _N_AHEAD and (batch := next(streams[number], None)) is not None:
                    ready[number].append(batch)
                if ready[number]:
                    yield ready[number].popleft()
                else:
                    order.remove(number)

    def batches(self, number: int) -> Iterator[Any]:
        """Yield the batches of a worker, as which this process reads each of them."""
        with as_worker(number, self.n_workers):
            batches = iter(self.copies[number])
        while True:
            with as_worker(number, self.n_workers):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
