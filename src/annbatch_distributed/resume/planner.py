"""The planner: every rank's rows and batches from a position on, whatever was done before it.

1. Each stretch of the epoch that was run with one number of ranks is planned, and what remained after it is the window
   of the next one.
2. The wrapped sampler is asked about every rank's shard; so it is known how the lost rows can move.

Nothing is communicated: every rank works out the same plan.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from annbatch_distributed.passes.counts import Counts, count
from annbatch_distributed.passes.traits import n_draws, rows_per_request
from annbatch_distributed.resume.remaining import remaining
from annbatch_distributed.resume.state import MOST_SEGMENTS
from annbatch_distributed.sharding import Contiguous, Division, EpochPlan, Independent, Rows, window

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.passes.counts import Classes
    from annbatch_distributed.resume.state import Position, Segment
    from annbatch_distributed.sharding import Mask, Remainder, Sharding

__all__ = ["Planner", "check_done", "check_segments"]


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
        self._windowed: tuple[int, Rows] | None = None
        self._counted: tuple[tuple[object, ...], Counts] | None = None
        self._planned: tuple[tuple[object, ...], EpochPlan] | None = None

    def plan(self, n_obs: int, position: Position, world_size: int) -> EpochPlan:
        """Return the plan of the epoch that goes on at a position with a number of ranks.

        Raises
        ------
        ValueError
            If the window is too small, the wrapped sampler can't run on some rank's rows, or the position is none of
            this collection: the same error on every rank.
        """
        check_segments(position)
        # what other numbers of ranks have left of an epoch also depends on the order of their pass
        before = position.before(world_size)
        asked = n_obs, position.epoch, before, position.passes if before else None, world_size
        planned = self._planned
        if planned is None or planned[0] != asked:
            planned = asked, self._plan(n_obs, position, before, world_size)
            self._planned = planned
        return planned[1]

    def _plan(self, n_obs: int, position: Position, before: tuple[Segment, ...], world_size: int) -> EpochPlan:
        if self._windowed is None or self._windowed[0] != n_obs:
            self._windowed = n_obs, window(self._mask, n_obs)
        rows, n_samples = self._windowed[1], None
        stretches = [(size, list(group)) for size, group in groupby(before, attrgetter("world_size"))]
        for number, (size, segments) in enumerate(stretches):
            division = self._division(rows, n_samples, position, size, is_beginning=not number)
            plan = self._plan_segment(n_obs, position, number, division)
            check_done(plan, sum(segment.done for segment in segments))
            collected = tuple((segment.n_workers, segment.done) for segment in segments)
            rows, n_samples = remaining(
                self._sampler, plan, root_seed=self._root_seed, passes=position.passes, collected=collected
            )
        division = self._division(rows, n_samples, position, world_size, is_beginning=not stretches)
        return self._plan_segment(n_obs, position, len(stretches), division)

    def _division(
        self, rows: Rows, n_samples: int | None, position: Position, world_size: int, *, is_beginning: bool
    ) -> Division:
        if n_samples is None and isinstance(self._sharding, Independent):
            n_samples = n_draws(self._sampler, len(rows))
            assert n_samples is not None  # or the sharding had been refused
        division = Division(
            self._sharding, rows, world_size, position.epoch, self._seed, self._remainder, self._batch_size, n_samples
        )
        if is_beginning and self._has_annbatchs_layout(division):
            return division
        return replace(division, align=self._align)

    @property
    def _batch_size(self) -> int | None:
        return None if self._sampler.batch_size is None else int(self._sampler.batch_size)

    def _has_annbatchs_layout(self, division: Division) -> bool:
        """Whether annbatch's own ``DistributedSampler`` gives each rank the same rows, whose order stays the same."""
        is_whole = division.remainder == "drop" or (
            division.remainder == "keep" and len(division.window) % division.world_size == 0
        )
        is_open = self._windowed is not None and division.window == Rows((range(self._windowed[0]),))
        return division.epoch == 0 and is_open and is_whole and isinstance(division.sharding, Contiguous)

    def _plan_segment(self, n_obs: int, position: Position, segment: int, division: Division) -> EpochPlan:
        epoch = position.epoch
        # a sampler with epochs of its own may have other counts in each of them, and so may rows that are dealt anew
        asked = (
            *(n_obs, division.answer, epoch if hasattr(self._sampler, "set_epoch") else 0, segment),
            *(division.world_size, division.window, division.n_samples),
        )
        counted = self._counted
        if counted is None or counted[0] != asked:
            over = segment > 0 and division.is_exhausted
            counts = Counts((0,) * division.world_size) if over else count(self._sampler, division, n_obs)
            counted = self._counted = asked, counts
        counts = counted[1]
        # in what is left of an epoch, lost rows stay where they are
        dealt = division.dealt(0 if segment else -epoch if counts.rotates else 0)
        return EpochPlan(
            *(n_obs, self._batch_size, segment, division, dealt, counts.sampler_batches),
            rows_per_request=rows_per_request(self._sampler),
        )

    def check_resumable(self, n_obs: int, position: Position, world_size: int) -> None:
        """Raise if the epoch of a state can't go on with this collection and number of ranks."""
        try:
            check_done(self.plan(n_obs, position, world_size), position.done(world_size))
        except ValueError as error:
            raise ValueError(
                f"The state can't be gone on with here. {error} To give up what is left of epoch {position.epoch}, "
                f"call set_epoch({position.epoch + 1}) instead."
            ) from error

    @property
    def classes(self) -> tuple[Classes, ...] | None:
        """What each rank can draw, if the sampler is a class sampler; None before the first plan."""
        return None if self._counted is None else self._counted[1].classes

    def is_same_next_epoch(self, plan: EpochPlan) -> bool:
        """Whether every rank has the same rows in the epoch after that of the last plan."""
        assert self._counted is not None
        if plan.n_lost and self._counted[1].rotates:
            return False
        try:
            return replace(plan.division, epoch=plan.epoch + 1).answer == plan.division.answer
        except ValueError:  # the sharding can't deal the rows then
            return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # the sampler is never run, and all else is frozen: what differs between copies is what each keeps
        return copy.copy(self)


def check_segments(position: Position) -> None:
    """Raise if an epoch has gone on with other numbers of ranks and workers too often for a state to hold it."""
    if len(position.segments) > MOST_SEGMENTS:
        raise ValueError(
            f"Epoch {position.epoch} was run by {MOST_SEGMENTS} numbers of ranks and workers after another, the most "
            f"that a state holds. Begin the next one with set_epoch({position.epoch + 1})."
        )


def check_done(plan: EpochPlan, done: int) -> None:
    """Raise if no rank has as many batches as a state says are done."""
    if done > plan.most_batches:
        raise ValueError(
            f"The state says that {done} batches of epoch {plan.epoch} are done, but for {plan.n_obs} rows and "
            f"{plan.world_size} ranks it has {plan.most_batches}. Load a state of this collection."
        )
