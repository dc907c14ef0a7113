"""The planner: every rank's rows and batches in an epoch, and the lanes in which what is left of it goes on.

Nothing is communicated: every rank works out the same.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from annbatch_distributed.lanes import Lane, each_segment
from annbatch_distributed.passes.counts import Counts, count
from annbatch_distributed.passes.run import batch_sizes
from annbatch_distributed.passes.shard import needs_global_rows
from annbatch_distributed.passes.traits import n_draws, rows_per_request
from annbatch_distributed.plan import EpochPlan
from annbatch_distributed.sharding import Contiguous, Independent, Shuffled, ordered
from annbatch_distributed.state import MOST_SEGMENTS

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.lanes import Segment
    from annbatch_distributed.masks import Mask
    from annbatch_distributed.passes.counts import Classes
    from annbatch_distributed.plan import Remainder
    from annbatch_distributed.rows import Rows
    from annbatch_distributed.sharding import Sharding
    from annbatch_distributed.state import Position

__all__ = ["Planner", "check_segments"]


class Planner:
    """Plans epochs of one configuration; it keeps the last plan, and what the sampler has answered.

    ``sampler`` is the wrapped sampler, of which only private copies are run, and ``root_seed`` the job's root seed.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        mask: Mask,
        remainder: Remainder,
        sharding: Sharding,
        seed: int | None,
        root_seed: int,
        align: int | None,
    ) -> None:
        self._sampler, self._mask, self._remainder, self._align = sampler, mask, remainder, align
        self._sharding, self._seed, self._root_seed = sharding, seed, root_seed
        # where moving lost rows would cut runs of a class, an epoch that fails after hours would be worse
        self._rotates = not needs_global_rows(sampler)
        self._window: tuple[int, Rows] | None = None
        self._counted: tuple[tuple[object, ...], Counts] | None = None
        self._planned: tuple[tuple[int, int, int], EpochPlan] | None = None
        self._cut: tuple[tuple[object, ...], list[Lane]] | None = None

    def plan(self, n_obs: int, epoch: int, n_streams: int) -> EpochPlan:
        """Return the plan of an epoch that begins with so many streams.

        Raises
        ------
        ValueError
            If the window is too small, or the wrapped sampler can't run on some rank's rows: the same error on every
            rank.
        """
        asked = n_obs, epoch, n_streams
        if self._planned is None or self._planned[0] != asked:
            self._planned = asked, self._plan(n_obs, epoch, n_streams)
        return self._planned[1]

    def _plan(self, n_obs: int, epoch: int, n_streams: int) -> EpochPlan:
        if self._window is None or self._window[0] != n_obs:
            self._window = n_obs, self._mask.window(n_obs)
        window, batch_size = self._window[1], self._sampler.batch_size
        plan = EpochPlan.of(
            self._sharding,
            window,
            rotates=self._rotates,
            align=self._align,
            n_obs=n_obs,
            epoch=epoch,
            world_size=n_streams,
            remainder=self._remainder,
            batch_size=None if batch_size is None else int(batch_size),
            seed=self._seed,
            n_samples=n_draws(self._sampler, len(window)) if isinstance(self._sharding, Independent) else None,
            rows_per_request=rows_per_request(self._sampler),
        )
        # a sampler with epochs of its own may have other counts in each of them, and so may rows that are dealt anew
        asked = n_obs, n_streams, epoch if hasattr(self._sampler, "set_epoch") else 0, self._moves(plan) and epoch
        if self._counted is None or self._counted[0] != asked:
            self._counted = asked, count(self._sampler, plan)
        return replace(plan, sampler_batches=self._counted[1].sampler_batches)

    def _moves(self, plan: EpochPlan) -> bool:
        """Whether other epochs may have other rows on a rank, and that makes a difference to the sampler."""
        return not self._rotates and not isinstance(plan.sharding, Contiguous | Independent)

    def lanes(self, n_obs: int, position: Position) -> list[Lane]:
        """Return what each lane reads of the epoch from the beginning of a position's last segment on.

        Raises
        ------
        ValueError
            As for :meth:`plan`; or if the position is none of this collection, or what is left can't be shared out
            among so many: the same error on every rank.
        """
        check_segments(position)
        *before, last = position.segments
        plan = self.plan(n_obs, position.epoch, position.n_streams(last.n_lanes))
        asked = n_obs, position.epoch, position.passes, tuple(before), last.n_lanes
        if self._cut is None or self._cut[0] != asked:
            self._cut = asked, self._lanes(plan, position)
        _check_done(plan, last, self._cut[1])
        return self._cut[1]

    def _lanes(self, plan: EpochPlan, position: Position) -> list[Lane]:
        counts = [plan.n_batches(stream) for stream in range(plan.world_size)]
        last, own = position.segments[-1], list[Lane]()
        begun = each_segment(counts, position.segments, plan.remainder)
        for segment, (own, _) in zip(position.segments, begun, strict=True):
            _check_done(plan, segment, own)
        most = {lane.last.number: lane.last.n_parts for lane in own if lane.last is not None}
        if max(most.values(), default=1) > 1:
            sizes = batch_sizes(self._sampler, plan, list(most), self._root_seed, position.passes)
            if any(sizes[number] < n_parts for number, n_parts in most.items()):
                n_left = sum(len(lane) - 1 for lane in own) + len(most)
                fitting = [number for number in range(1, 2 * last.n_lanes) if n_left % number == 0]
                raise ValueError(
                    f"What is left of epoch {plan.epoch} are {n_left} batches, and {last.n_lanes} ranks can't have "
                    f"equally many of them: {len(most)} would have to be shared out, some of {min(sizes.values())} "
                    f"rows. Go on with {', '.join(map(str, fitting))} ranks, or begin the next epoch with "
                    f"set_epoch({plan.epoch + 1})."
                )
        return own

    @property
    def classes(self) -> tuple[Classes, ...]:
        """What each rank can draw, if the sampler is a class sampler."""
        return () if self._counted is None else self._counted[1].classes

    def is_same_next_epoch(self, plan: EpochPlan) -> bool:
        """Whether every rank has the same rows in the epoch after that of a plan."""
        if plan.n_lost and self._rotates:
            return False
        if isinstance(self._sharding, Contiguous | Independent | Shuffled):
            return not isinstance(self._sharding, Shuffled)
        try:
            return ordered(self._sharding, plan.window, epoch=plan.epoch + 1, seed=self._seed) == plan.order
        except ValueError:  # the sharding can't deal the rows then
            return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # the sampler is never run, and all else is frozen: what differs between copies is what each keeps
        return copy.copy(self)


def _check_done(plan: EpochPlan, segment: Segment, own: list[Lane]) -> None:
    """Raise if no lane has as many batches as a state says are done."""
    longest = max(map(len, own))
    if segment.done > longest:
        raise ValueError(
            f"The state says that {segment.done} batches of epoch {plan.epoch} are done, but for {plan.n_obs} rows and "
            f"{segment.n_lanes} ranks it has {longest}. Load a state of this collection."
        )


def check_segments(position: Position) -> None:
    """Raise if an epoch has gone on with other numbers of ranks and workers too often for a state to hold it."""
    if len(position.segments) > MOST_SEGMENTS:
        raise ValueError(
            f"Epoch {position.epoch} was run by {MOST_SEGMENTS} numbers of ranks and workers after another, the most "
            f"that a state holds. Begin the next one with set_epoch({position.epoch + 1})."
        )
