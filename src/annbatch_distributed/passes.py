"""A pass: the load requests of one rank, over its lane or over the lanes of its virtual ranks.

A pass is given everything that it depends on when it begins, and keeps it: setting another mask or epoch on the sampler
that began it changes nothing, and any number of passes can be open at once. In a worker of a ``DataLoader``, the
wrapped sampler runs as if there were no workers.

Lanes that a rank reads side by side are joined: batch k of the rank is batch k of each lane, one after the other, and a
load request of the rank holds one of each lane, which annbatch then reads at once.

A pass in the middle can be pickled and copied, although a sampler's own generator can't: what it depends on is kept,
together with how many load requests were taken, and the copy runs through that many again before it goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from annbatch.types import LoadRequest

from annbatch_distributed.ranks.worker import current_worker, worker_info_hidden
from annbatch_distributed.requests import concatenated
from annbatch_distributed.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from annbatch.abc import Sampler

    from annbatch_distributed.lanes import Lane, Numbers, SharedStep
    from annbatch_distributed.plan import EpochPlan
    from annbatch_distributed.requests import Request
    from annbatch_distributed.rows import Int64Array

__all__ = ["Pass"]


@dataclass(eq=False)
class Pass(Iterator[LoadRequest]):
    """The load requests of one rank for one pass."""

    sampler: Sampler
    """The wrapped sampler; it is never run, only private copies of it are."""
    plan: EpochPlan
    """Every stream's rows and batches in this epoch."""
    lanes: Sequence[Lane]
    """What is read, side by side: the lane of a rank, or those of its virtual ranks."""
    root_seed: int
    """What the job's randomness begins from."""
    passes: int
    """How many passes were begun before, since the epoch was set."""
    longest_hole: int = 0
    """How many rows a hole has at most that is read through."""
    n_taken: int = 0
    """How many load requests have been taken from this pass."""
    is_closed: bool = False
    """Whether the pass was closed, and gives no more load requests."""
    on_end: Callable[[], None] | None = field(default=None, repr=False)
    """Called when no load request is left; not by copies."""
    _requests: Iterator[Request] | None = field(default=None, repr=False)

    def __next__(self) -> LoadRequest:
        worker = current_worker()
        try:
            with worker_info_hidden(worker):
                if self._requests is None:
                    self._requests = iter(()) if self.is_closed else islice(self._all_requests(), self.n_taken, None)
                request = next(self._requests)
        except StopIteration:
            if self.on_end is not None and not self.is_closed:
                self.on_end()
            raise
        self.n_taken += 1
        return request.to_annbatch()

    def close(self) -> None:
        """End the pass."""
        self.is_closed, self._requests = True, None

    @property
    def n_batches(self) -> int:
        """How many batches there are in all."""
        return max(map(len, self.lanes))

    def batches(self) -> Iterator[Int64Array]:
        """Yield the rows of each batch, and read nothing."""
        for request in self._all_requests():
            rows = request.rows()
            yield from (rows[split] for split in request.splits)

    def _all_requests(self) -> Iterator[Request]:
        """Yield all load requests; what is left out of their batches is read all the same."""
        if not len(self.plan.left_out):
            yield from self._joined()
            return
        for request in self._joined():
            is_in = ~self.plan.left_out.contains(request.rows())
            yield request._replace(splits=[split[is_in[split]] for split in request.splits])

    def _joined(self) -> Iterator[Request]:
        """Yield the load requests of all lanes together; a lane that has fewer batches is missing in the last ones."""
        lanes = [self._of_lane(lane) for lane in self.lanes]
        if len(lanes) == 1:
            yield from lanes[0]
            return
        pending: list[Request | None] = [None] * len(lanes)
        while True:
            pending = [
                next(lane, None) if request is None else request for lane, request in zip(lanes, pending, strict=True)
            ]
            n_batches = min((len(request.splits) for request in pending if request is not None), default=0)
            if not n_batches:
                return
            taken = []
            for lane, request in enumerate(pending):
                pending[lane] = None
                if request is not None and len(request.splits) > n_batches:  # the rest is for the next one
                    pending[lane] = self._part(request, request.splits[n_batches:])
                    request = self._part(request, request.splits[:n_batches])  # noqa: PLW2901 a part of it
                if request is not None:
                    taken.append(request)
            yield concatenated(taken)

    def _part(self, request: Request, splits: Sequence[Any]) -> Request:
        """Return a load request for some batches of another one, of global rows."""
        part = request.narrowed(splits)
        gaps = part.starts[1:] - part.stops[:-1]
        return part.read_through((gaps > 0) & (gaps <= self.longest_hole))

    def _of_lane(self, lane: Lane) -> Iterator[Request]:
        for stream, numbers in self._by_stream(lane.numbers):
            yield from self._of_stream(stream, numbers)
        if lane.last is not None:
            ((stream, numbers),) = self._by_stream((range(lane.last.number, lane.last.number + 1),))
            yield from self._of_stream(stream, numbers, lane.last)

    def _of_stream(self, number: int, numbers: Numbers, step: SharedStep | None = None) -> Iterator[Request]:
        stream = Stream(self.sampler, self.plan, number, self.root_seed, self.passes)
        return stream.requests(numbers, step=step, longest_hole=self.longest_hole)

    def _by_stream(self, numbers: Numbers) -> list[tuple[int, Numbers]]:
        """Return the streams that some numbers are of, and the numbers of each as it counts them, ascending."""
        streams: list[tuple[int, list[range]]] = []
        for part in numbers:
            while part:
                stream = self.plan.stream_of(part[0])
                first, stop = self.plan.first_number(stream), self.plan.first_number(stream + 1)
                n_here = len(range(part[0], min(part[-1] + 1, stop), part.step))
                own, part = part[:n_here], part[n_here:]  # noqa: PLW2901 the numbers of other streams
                local = range(own.start - first, own[-1] + 1 - first, own.step)
                if streams and streams[-1][0] == stream and streams[-1][1][-1][-1] < local[0]:
                    streams[-1][1].append(local)
                else:
                    streams.append((stream, [local]))
        return [(stream, tuple(parts)) for stream, parts in streams]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_requests": None, "on_end": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # nothing but the iterator, which a copy leaves out, ever changes in place
        return copy.copy(self)
