"""One pass of one rank over its lane, or over the lanes of its virtual ranks: an iterator of load requests.

A pass is given everything that it depends on when it begins, and keeps it: setting another mask or epoch on the sampler
that began it changes nothing, and any number of passes can be open at once. In a worker of a ``DataLoader``, the
wrapped sampler runs as if there were no workers.

A stream is run from its beginning, on local rows and with a generator of its own, and the batches that are not in the
lane are left out: that reads nothing.

A pass in the middle can be pickled and copied, although a sampler's own generator can't: what it depends on is kept,
together with how many load requests were taken, and the copy runs through that many again before it goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler
from annbatch.types import LoadRequest

from annbatch_distributed.lanes import Lane
from annbatch_distributed.passes.annbatch_samplers import is_annbatchs_own, is_restricted, restrict_by_mask
from annbatch_distributed.passes.holes import of_rows
from annbatch_distributed.passes.join import join
from annbatch_distributed.passes.private_copy import private_copy
from annbatch_distributed.passes.randomness import generator
from annbatch_distributed.passes.requests import (
    add_missing_splits,
    aligned,
    check,
    enforce_n_batches,
    is_index_array,
    mark_repeats,
    select,
    share,
    translate,
)
from annbatch_distributed.passes.shard import localized
from annbatch_distributed.passes.traits import chunk_size, set_draws
from annbatch_distributed.ranks.worker import current_worker, worker_info_hidden

if TYPE_CHECKING:
    from collections.abc import Sequence

    from annbatch_distributed.lanes import Numbers
    from annbatch_distributed.plan import EpochPlan, Shard

__all__ = ["Pass", "batch_sizes", "follow_epoch"]


@dataclass(eq=False)
class Pass(Iterator[LoadRequest]):
    """The load requests of one rank for one pass."""

    sampler: Sampler
    """The wrapped sampler; it is never run, only private copies of it are."""
    plan: EpochPlan
    """Every rank's rows and batches in this epoch."""
    lanes: Sequence[Lane]
    """What is read, side by side: the lane of a rank, or those of its virtual ranks."""
    root_seed: int
    """What the job's randomness begins from."""
    passes: int
    """How many passes were begun before, since the epoch was set."""
    longest_hole: int = 0
    """How many rows a hole has at most that is read through, see :mod:`holes`."""
    n_taken: int = 0
    """How many load requests have been taken from this pass."""
    closed: bool = False
    """Whether the pass was closed, and gives no more load requests."""
    on_end: Callable[[], None] | None = field(default=None, repr=False)
    """Called when no load request is left; not by copies."""
    _stream: Iterator[LoadRequest] | None = field(default=None, repr=False)

    def __next__(self) -> LoadRequest:
        worker = current_worker()
        try:
            with worker_info_hidden(worker):
                if self._stream is None:
                    self._stream = iter(()) if self.closed else islice(self._requests(), self.n_taken, None)
                request = next(self._stream)
        except StopIteration:
            if self.on_end is not None and not self.closed:
                self.on_end()
            raise
        self.n_taken += 1
        return request

    def close(self) -> None:
        """End the pass."""
        self.closed = True
        self._stream = None

    @property
    def n_batches(self) -> int:
        """How many batches there are in all."""
        return max(map(len, self.lanes))

    def _requests(self) -> Iterator[LoadRequest]:
        lanes = [self._requests_of(lane) for lane in self.lanes]
        return lanes[0] if len(lanes) == 1 else join(lanes, longest_hole=self.longest_hole)

    def _requests_of(self, lane: Lane) -> Iterator[LoadRequest]:
        for stream, numbers in _by_stream(self.plan, lane.numbers):
            shard = self.plan.shard(stream)
            yield from self._global(shard, self._local(stream, shard, numbers))
        if lane.last is not None:
            number = lane.last.number
            ((stream, numbers),) = _by_stream(self.plan, (range(number, number + 1),))
            shard = self.plan.shard(stream)
            yield from self._global(shard, share(self._local(stream, shard, numbers), lane.last))

    def _local(self, stream: int, shard: Shard, numbers: Numbers) -> Iterator[LoadRequest]:
        """Run a stream on its local rows, and yield the batches of some of its numbers, which ascend."""
        plan = self.plan
        name = type(self.sampler).__name__
        rng = generator(self.root_seed, stream=stream, epoch=plan.epoch, passes=self.passes)
        sampler = private_copy(self.sampler, rng)
        restricted = is_restricted(self.sampler, shard.rows)
        if restricted:
            restrict_by_mask(sampler, shard.rows)
        else:
            sampler = localized(self.sampler, shard.rows, plan.n_obs, rng)
        if plan.shares_draws:
            set_draws(sampler, plan.size(stream))
        # where rng is worked out instead of held, and in a sampler that has just been made for these rows
        if sampler.rng is not None and sampler.rng is not rng:
            sampler.rng = rng
        follow_epoch(sampler, plan.epoch)
        requests = _run(sampler, plan.n_obs if restricted else len(shard))
        if type(sampler) is RandomSampler and plan.grid is not None:
            requests = aligned(requests, chunk_size=chunk_size(sampler) or 1, n_rows=len(shard))
        if not is_annbatchs_own(sampler):
            requests = check(requests, n_rows=len(shard), name=name)
            requests = add_missing_splits(
                requests, batch_size=plan.batch_size, shuffle=sampler.shuffle, rng=rng, name=name
            )
        promised, planned = plan.sampler_batches[stream], plan.n_batches(stream)
        requests = enforce_n_batches(requests, promised=promised, planned=planned, name=name)
        if numbers != (range(planned),):
            requests = select(requests, numbers, planned)
        if plan.remainder == "pad":
            # a shard that is a mask is one range, and its requests are for global rows already
            first = int(shard.rows.starts[0]) if restricted else 0
            requests = mark_repeats(requests, first + shard.n_own)
        return requests

    def _global(self, shard: Shard, requests: Iterator[LoadRequest]) -> Iterator[LoadRequest]:
        """Turn the local rows of a stream into global ones."""
        longest = self.longest_hole
        if is_restricted(self.sampler, shard.rows):
            # slices stay as annbatch's own sampler has them: only parts of a request that was selected have holes
            return (
                of_rows(request, longest) if is_index_array(request["requests"]) else request for request in requests
            )
        ahead = _ROWS_AHEAD // len(self.lanes) if is_annbatchs_own(self.sampler) else 0
        name = type(self.sampler).__name__
        return translate(requests, shard.rows, name=name, rows_ahead=ahead, longest_hole=longest)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stream": None, "on_end": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # nothing but the stream, which a copy leaves out, ever changes in place
        return copy.copy(self)


#: Of how many rows the splits may be held, by all virtual ranks together: they take 8 MiB.
_ROWS_AHEAD = 1 << 20


def _by_stream(plan: EpochPlan, numbers: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yield the streams that some numbers are of, and the numbers of each as it counts them, ascending."""
    found: list[tuple[int, list[range]]] = []
    for part in numbers:
        while part:
            stream = plan.stream_of(part[0])
            first, stop = plan.first_number(stream), plan.first_number(stream + 1)
            n_here = len(range(part[0], min(part[-1] + 1, stop), part.step))
            own, part = part[:n_here], part[n_here:]  # noqa: PLW2901 what is left of it
            local = range(own.start - first, own[-1] + 1 - first, own.step)
            if found and found[-1][0] == stream and found[-1][1][-1][-1] < local[0]:
                found[-1][1].append(local)
            else:
                found.append((stream, [local]))
    return ((stream, tuple(parts)) for stream, parts in found)


def batch_sizes(
    sampler: Sampler, plan: EpochPlan, numbers: Sequence[int], root_seed: int, passes: int
) -> dict[int, int]:
    """Return how many rows some batches have, for which their streams are run and nothing is read."""
    lane = Lane(tuple(range(number, number + 1) for number in numbers))
    requests = Pass(sampler, plan, [lane], root_seed, passes)
    sizes = (len(split) for request in requests for split in request["splits"])
    return dict(zip(numbers, sizes, strict=True))


def follow_epoch(sampler: Sampler, epoch: int) -> None:
    """Tell a sampler that has epochs of its own which one it is."""
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(epoch)


def _run(sampler: Sampler, n_obs: int) -> Iterator[LoadRequest]:
    """Run a sampler on ``n_obs`` rows, without the splits that annbatch's own ``sample`` would add.

    Those it shuffles with numpy's global random state. A sampler that replaces ``sample`` itself is taken at its word.
    """
    if type(sampler).sample is not Sampler.sample:
        requests = sampler.sample(n_obs)
    else:
        sampler.validate(n_obs)
        requests = sampler._sample(n_obs)
    if not isinstance(requests, Iterable):
        raise TypeError(
            f"{type(sampler).__name__} must yield load requests for its rows, got {requests!r} in place of them."
        )
    return iter(requests)
