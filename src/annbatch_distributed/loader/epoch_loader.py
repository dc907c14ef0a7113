"""The EpochLoader: reads the passes of a loader with one sampler, whatever it reads.

A pass takes load requests from the sampler, which may be prefetched, and yields their batches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from annbatch_distributed.checks import Tally
from annbatch_distributed.core.request import Marks, Request
from annbatch_distributed.core.state import Position
from annbatch_distributed.core.stream import Pass
from annbatch_distributed.core.worker import current_worker
from annbatch_distributed.loader.accelerate import reported
from annbatch_distributed.loader.base import BaseLoader
from annbatch_distributed.loader.prefetch import prefetched

if TYPE_CHECKING:
    from annbatch_distributed.loader.workers import WorkerDataLoader


class EpochLoader(BaseLoader):
    """Base class of :class:`StatefulLoader` and :class:`AlignedLoader`.

    Parameters
    ----------
    sampler
        Sampler of the rows that this rank reads.
    prefetch
        Number of load requests to prefetch.
    """

    @abstractmethod
    def _read_request(self, request: Request) -> Generator[Any]:
        """Read a load request, and yield its batches."""

    @abstractmethod
    def _finish(self, batch: Any, marks: Marks) -> Any:  # noqa: ANN401 whatever was read
        """Return a batch in the form in which the consumer gets it."""

    @abstractmethod
    def _iterated(self) -> AbstractContextManager[None]:
        """Return a context in which no datasets can be added."""

    def __iter__(self) -> Generator[Any]:
        """Return an iterator over the batches of the epoch.

        After a resume, it yields the remaining batches. A loader has one iterator at a time: taking the first batch of
        a new one ends the previous one.

        Yields
        ------
        dict
            Batch as :class:`annbatch.Loader` yields it. Under ``remainder="pad"`` it has the key ``"repeated"``, a
            boolean array of shape ``(batch_size,)``.

        Raises
        ------
        ValueError
            If the mask has the names of the cells in a different order, or the loaded state is of different datasets.
        RuntimeError
            If a worker of a ``DataLoader`` that :meth:`to_dataloader` hasn't made iterates. While iterating, if a newer
            iterator exists.
        """
        return reported(self._timed(self._iterate()), self._has_yielded_all)

    def _iterate(self, readers: Executor | None = None) -> Generator[Any]:
        """Iterate over a pass; ``readers`` are threads that several loaders share to prefetch."""
        if current_worker() is not None:
            raise RuntimeError(
                "A DataLoader that you make yourself can't iterate over a StatefulLoader in its workers, because the "
                "epoch and the state would be lost. Make the DataLoader with loader.to_dataloader(num_workers=...)."
            )
        self._check_cells()
        return self._batches(readers)

    def _batches_in_worker(self, position: Position) -> Generator[Any]:
        """Return this worker's batches of a pass that begins at a position."""
        self._cursor.go_to(position)
        return self._batches_of(self._cursor.begin(self.n_obs, position))

    def _batches(self, readers: Executor | None) -> Generator[Any]:
        has_rest = True
        while has_rest:  # once more after each reshard()
            steps = self._begin_steps()
            # in this thread, since some frameworks give the rank to one thread only
            current = self._cursor.begin(self.n_obs)
            with self._opened(current), closing(self._batches_of(current, readers)) as batches:
                for batch in batches:
                    steps.count()  # before the yield: a consumer that saves a state has this batch
                    if current.is_over_after(steps.n_yielded):
                        self._end(current)  # a consumer that knows the number doesn't ask for more
                    yield batch
                    del batch  # else it would stay in memory until the next one is read
                    if self._cursor.has_cut(current):
                        break
                else:
                    self._cursor.end(current)
            has_rest = self._cursor.has_left(current)

    def _batches_of(self, current: Pass, readers: Executor | None = None) -> Generator[Any]:
        """Read the batches of a pass, with prefetching if ``prefetch`` is above 0."""
        self._pass, self._read = current, Tally()
        # one function per batch, in the order of requests and splits, in which batches come out of any prefetching
        due: deque[Callable[[Any], Any]] = deque()

        def requests() -> Iterator[Request]:
            """Yield load requests, and append a function to ``due`` for each of their batches."""
            while True:
                self._cursor.check_rank(current.placement)
                try:
                    request = current.take()
                except StopIteration:
                    return
                due.extend(map(partial(partial, self._yielded, request), request.splits, request.marks()))
                yield request

        read = prefetched(requests(), self._read_request, self._prefetch, readers)
        with self._iterated(), closing(current), closing(read) as batches:
            for batch in batches:
                yield due.popleft()(batch)
                del batch
                # after a newer pass has begun, its step counter would count these batches
                self._cursor.check_is_last(current)

    def _yielded(self, request: Request, split: npt.NDArray[Any], marks: Marks, batch: Any) -> Any:  # noqa: ANN401 whatever was read
        """Add the rows of a batch to the rows read, and return the batch as its consumer gets it."""
        index = self._rows_in(batch)
        self._read.add(request.rows_at(split) if index is None else index)
        return self._finish(batch, marks)

    def to_dataloader(self, *, num_workers: int = 0, **options: Any) -> WorkerDataLoader:  # noqa: ANN401 torch's own
        """Return a PyTorch ``DataLoader`` whose worker processes read the batches.

        It has the ``set_epoch``, ``state_dict``, ``load_state_dict``, ``len()`` and ``sampler`` of this loader, which a
        plain ``DataLoader`` would hide from Lightning, Accelerate and your own loop. Its state counts the batches that
        the workers have delivered.

        Parameters
        ----------
        num_workers
            Number of worker processes of this rank (default 0, which reads in this process).
        options
            Other options of PyTorch's ``DataLoader``, except those that select or reorder rows. The defaults are
            ``multiprocessing_context="spawn"``, since threads of zarrs don't survive a fork, and
            ``persistent_workers=True``. Spawned workers import the script, so put its code under
            ``if __name__ == "__main__":``.

        Returns
        -------
        ~annbatch_distributed.loader.workers.WorkerDataLoader
            The ``DataLoader``, to iterate over instead of this loader.

        Raises
        ------
        TypeError
            If an option such as ``batch_size``, ``shuffle`` or ``in_order`` would select or reorder rows.
        ValueError
            If ``num_workers`` is above 0 and the loader has ``preload_to_gpu=True``.

        Examples
        --------
        >>> batches = loader.to_dataloader(num_workers=0)
        >>> batches.set_epoch(1)
        >>> batch = next(iter(batches))
        >>> state = batches.state_dict()
        """
        from annbatch_distributed.loader.workers import WorkerDataLoader  # it needs PyTorch

        return WorkerDataLoader(self, num_workers=num_workers, **options)
