"""One pass of one rank over its shard, or over the shards of its virtual ranks: an iterator of load requests.

A pass is given everything that it depends on when it begins, and keeps it: setting another mask or epoch on the sampler
that began it changes nothing, and any number of passes can be open at once. In a worker of a ``DataLoader``, the
wrapped sampler runs as if there were no workers.

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

from annbatch_distributed.passes.annbatch_samplers import is_annbatchs_own, restrict_by_mask
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
    translate,
)
from annbatch_distributed.passes.shard import localized
from annbatch_distributed.passes.traits import chunk_size, set_draws
from annbatch_distributed.ranks.worker import current_worker, worker_info_hidden

if TYPE_CHECKING:
    from annbatch_distributed.sharding import EpochPlan
    from annbatch_distributed.sharding.batches import Worker, WorkerBatches

__all__ = ["Pass", "follow_epoch"]


@dataclass(eq=False)
class Pass(Iterator[LoadRequest]):
    """The load requests of one rank for one pass."""

    sampler: Sampler
    """The wrapped sampler; it is never run, only private copies of it are."""
    plan: EpochPlan
    """Every rank's rows and batches in this epoch."""
    ranks: range
    """Whose pass this is: the rank of the plan, or the virtual ones that run side by side."""
    root_seed: int
    """What the job's randomness begins from."""
    passes: int
    """How many passes were begun before, since the epoch was set."""
    longest_hole: int = 0
    """How many rows a hole has at most that is read through, see :mod:`holes`."""
    batches: tuple[WorkerBatches, ...] | None = None
    """For each of the ranks, which of its batches are yielded; None means all."""
    n_taken: int = 0
    """How many load requests have been taken from this pass."""
    closed: bool = False
    """Whether the pass was closed, and gives no more load requests."""
    record: object = field(default=None, repr=False)
    """What whoever began the pass knows of it, also when it is gone; None if it is only run through."""
    on_request: Callable[[Worker | None, bool], None] | None = field(default=None, repr=False)
    """Called for every load request that is taken, and, with True, at the end; by this worker, and not by copies."""
    _stream: Iterator[LoadRequest] | None = field(default=None, repr=False)

    def __next__(self) -> LoadRequest:
        worker = current_worker()
        try:
            with worker_info_hidden(worker):
                if self._stream is None:
                    self._stream = iter(()) if self.closed else islice(self._requests(), self.n_taken, None)
                request = next(self._stream)
        except StopIteration:
            self._notify(worker, is_end=True)
            raise
        self.n_taken += 1
        self._notify(worker, is_end=False)
        return request

    def _notify(self, worker: Worker | None, *, is_end: bool) -> None:
        if self.on_request is not None and not self.closed:
            self.on_request(worker, is_end)

    def close(self) -> None:
        """End the pass."""
        self.closed = True
        self._stream = None

    @property
    def n_batches(self) -> int:
        """How many batches there are in all."""
        return max(map(self.plan.n_batches, self.ranks))

    def _requests(self) -> Iterator[LoadRequest]:
        if self.plan.is_over:
            return iter(())
        parts = [None] * len(self.ranks) if self.batches is None else self.batches
        streams = [self._requests_of(rank, batches) for rank, batches in zip(self.ranks, parts, strict=True)]
        return streams[0] if len(streams) == 1 else join(streams, longest_hole=self.longest_hole)

    def _requests_of(self, rank: int, batches: WorkerBatches | None) -> Iterator[LoadRequest]:
        plan, shard = self.plan, self.plan.shard(rank)
        name = type(self.sampler).__name__
        rng = generator(self.root_seed, rank=rank, epoch=plan.epoch, passes=self.passes, segment=plan.segment)
        sampler = private_copy(self.sampler, rng)
        restricted = restrict_by_mask(sampler, shard.rows)
        if not restricted:
            sampler = localized(self.sampler, shard.rows, plan.n_obs, rng)
        if plan.shares_draws:
            set_draws(sampler, plan.dealt.size(rank))
        # where rng is worked out instead of held, and in a sampler that has just been made for these rows
        if sampler.rng is not None and sampler.rng is not rng:
            sampler.rng = rng
        follow_epoch(sampler, plan.epoch)
        requests = _run(sampler, plan.n_obs if restricted else len(shard))
        if type(sampler) is RandomSampler and plan.division.align is not None:
            requests = aligned(requests, chunk_size=chunk_size(sampler) or 1, n_rows=len(shard))
        if not is_annbatchs_own(sampler):
            requests = check(requests, n_rows=len(shard), name=name)
            requests = add_missing_splits(
                requests, batch_size=plan.batch_size, shuffle=sampler.shuffle, rng=rng, name=name
            )
        promised_batches, planned_batches = plan.sampler_batches[rank], plan.n_batches(rank)
        requests = enforce_n_batches(requests, promised=promised_batches, planned=planned_batches, name=name)
        if batches is not None:
            requests = select(requests, batches)
        if plan.remainder == "pad":
            # a shard that is a mask is one range, and its requests are for global rows already
            first = next(iter(shard.rows)) if restricted else 0
            requests = mark_repeats(requests, first + shard.n_own)
        longest = self.longest_hole
        if not restricted:
            ahead = _ROWS_AHEAD // len(self.ranks) if is_annbatchs_own(sampler) else 0
            return translate(requests, shard.rows, name=name, rows_ahead=ahead, longest_hole=longest)
        # slices stay as annbatch's own sampler has them: only the parts of a request that was selected have holes
        return (of_rows(request, longest) if is_index_array(request["requests"]) else request for request in requests)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stream": None, "on_request": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # nothing but the stream, which a copy leaves out, ever changes in place
        return copy.copy(self)


#: Of how many rows the splits may be held, by all virtual ranks together: they take 8 MiB.
_ROWS_AHEAD = 1 << 20


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
