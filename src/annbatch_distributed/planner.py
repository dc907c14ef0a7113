"""The planner: every stream's rows and batches in an epoch, and the lanes that read them.

Ranks don't communicate: each computes the same plan. ``rows_at`` returns the rows that ranks read in some steps of an
epoch. Steps are counted from 0 at the start of the epoch. Each belongs to the segment that ran it, with the lanes of
this segment; steps after the last segment are still to be run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from numbers import Integral
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from annbatch_distributed.config import Config
from annbatch_distributed.lanes import Lane, Segment, SharedStep, each_segment
from annbatch_distributed.plan import Classes, Counts, EpochPlan, count
from annbatch_distributed.rows import Int64Array, Rows, integers, runs
from annbatch_distributed.sharding import Contiguous, Independent, Shuffled, ordered
from annbatch_distributed.state import MOST_SEGMENTS, Position
from annbatch_distributed.stream import Pass, Stream
from annbatch_distributed.wrapped import n_draws, needs_global_rows, rows_per_request

#: Selection of steps: an integer, a slice, or several integers.
type StepSelection = int | slice | npt.ArrayLike


class Read(NamedTuple):
    """Rows that a lane reads in a step."""

    step: int
    """Step of the epoch."""
    lane: int
    """Index of the lane."""
    n_lanes: int
    """Number of lanes in this step."""
    rows: Int64Array
    """Rows of the batch, in order."""


def rows_at(
    steps: StepSelection,
    segments: Sequence[tuple[Segment, list[Lane]]],
    run: Callable[[Lane], Iterable[Int64Array]],
    is_wanted: Callable[[int, int], bool],
) -> Iterator[Read]:
    """Yield the rows that some lanes read in some steps, in order; an IndexError if the epoch has no such step.

    ``segments`` are the segments of the epoch, each with its lanes when it begins. ``run`` returns the rows of each
    batch of a lane; it runs the sampler for them. ``is_wanted`` takes a lane and the number of lanes.
    """
    # sorted by step and lane
    batches = sorted(_batches_at(steps, segments, is_wanted), key=lambda batch: batch[:2])
    # a batch may be read in several steps or lanes: numbers 3 4 3 9 become 3 4 9, which are the ranges 3:5 and 9:10
    numbers = np.unique([batch.number for *_, batch in batches]).astype(np.int64)
    starts, stops = runs(numbers)
    # all batches at once, so that each stream runs once
    rows = dict(zip(numbers.tolist(), run(Lane(tuple(map(range, starts.tolist(), stops.tolist())))), strict=True))
    for step, lane, n_lanes, batch in batches:
        yield Read(step, lane, n_lanes, np.array_split(rows[batch.number], batch.n_parts)[batch.part])


def _batches_at(
    steps: StepSelection, segments: Sequence[tuple[Segment, list[Lane]]], is_wanted: Callable[[int, int], bool]
) -> Iterator[tuple[int, int, int, SharedStep]]:
    """Yield the step, the lane, the number of lanes and the batch of each wanted lane in some steps."""
    # a segment has the steps that it has done; the last one also has all remaining steps
    lengths, first = [segment.done for segment, _ in segments], 0
    lengths[-1] = max(map(len, segments[-1][1]))
    wanted = step_numbers(steps, sum(lengths))
    for (segment, lanes), length in zip(segments, lengths, strict=True):
        # steps of this segment, counted from its beginning
        places = wanted[(wanted >= first) & (wanted < first + length)] - first
        for number, lane in enumerate(lanes):
            if not len(places) or not is_wanted(number, len(lanes)):
                continue
            read = list(islice(lane.in_turn(segment.n_workers), int(places[-1]) + 1))
            for place in places[places < len(read)].tolist():  # under keep, a lane may have one step less
                yield first + place, number, len(lanes), read[place]
        first += length


def step_numbers(steps: StepSelection, n_steps: int) -> Int64Array:
    """Return the selected steps of an epoch, ascending, each once."""
    if isinstance(steps, slice):
        return np.sort(np.arange(n_steps)[steps])
    return np.unique(
        integers(f"Steps of an epoch of {n_steps}", [steps] if isinstance(steps, Integral) else steps, below=n_steps)
    )


class Planner:
    """Planner of epochs for a configuration; it caches the last plan and the sampler's answers."""

    def __init__(self, config: Config, *, has_virtual_ranks: bool = False) -> None:
        self._config = config
        self._lane_name = "virtual ranks" if has_virtual_ranks else "ranks"
        # For class samplers, the last rows are dropped in every epoch: if dropped rows moved, they could cut runs of a
        # class, and an epoch could fail after hours.
        self._rotates = not needs_global_rows(config.sampler)
        # each cache holds one entry with its key, since an epoch is requested many times, and then the next one
        self._window: tuple[int, Rows] | None = None
        self._counted: tuple[tuple[object, ...], Counts] | None = None
        self._planned: tuple[tuple[int, int, int], EpochPlan] | None = None
        self._lanes: tuple[tuple[object, ...], list[Lane]] | None = None

    @property
    def n_obs(self) -> int | None:
        """Number of rows of the last plan; None if there is none."""
        return None if self._planned is None else self._planned[0][0]

    def plan(self, n_obs: int, epoch: int, n_streams: int) -> EpochPlan:
        """Return the plan of an epoch that begins with ``n_streams`` streams.

        A ValueError, the same on every rank, if too few rows are selected, or the wrapped sampler can't run on some
        stream's rows.
        """
        key = n_obs, epoch, n_streams
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._plan(n_obs, epoch, n_streams)
        return self._planned[1]

    def _plan(self, n_obs: int, epoch: int, n_streams: int) -> EpochPlan:
        config = self._config
        sampler, sharding = config.sampler, config.sharding
        sets = None if config.sets is None else config.sets.in_epoch(n_obs, epoch, config.seed)
        n_units = n_obs if sets is None else len(sets)
        if self._window is None or self._window[0] != n_units:
            self._window = n_units, config.mask.window(n_units)
        window = self._window[1]
        plan = EpochPlan(
            n_obs=n_units,
            epoch=epoch,
            n_streams=n_streams,
            window=window,
            remainder=config.remainder,
            batch_size=config.batch_size,
            sharding=sharding,
            seed=config.seed,
            n_draws=n_draws(sampler, len(window)) if isinstance(sharding, Independent) else None,
            rows_per_request=rows_per_request(sampler),
            sets=sets,
        ).with_order(rotates=self._rotates, align=config.align)
        # counts may differ between epochs if the sampler has set_epoch, or a sampler that needs global rows gets
        # different ones
        moves = not self._rotates and not isinstance(sharding, Contiguous | Independent)
        # otherwise they are the same in every epoch, so the sampler is asked once
        key = n_obs, n_streams, epoch if moves or hasattr(sampler, "set_epoch") else 0
        if self._counted is None or self._counted[0] != key:
            counts = count(sampler, plan)
            self._check_empty_streams(replace(plan, sampler_batches=counts.sampler_batches))
            self._counted = key, counts
        return replace(plan, sampler_batches=self._counted[1].sampler_batches)

    def _check_empty_streams(self, plan: EpochPlan) -> None:
        """Raise a RuntimeError if the sampler yields batches for a stream for which its ``n_batches`` returns 0."""
        # no pass runs such a stream, so it is checked here
        for number in range(plan.n_streams):
            if not plan.sampler_batches[number]:
                stream = Stream(self._config.sampler, plan, number, self._config.root_seed, passes=0)
                list(stream.requests((range(plan.n_batches(number)),)))

    @property
    def classes(self) -> tuple[Classes, ...]:
        """Classes that each rank can sample from, if the sampler is a class sampler."""
        return () if self._counted is None else self._counted[1].classes

    def lanes(self, n_obs: int, position: Position) -> list[Lane]:
        """Return each lane at the beginning of a position's last segment.

        A ValueError as for :meth:`plan`; or, the same on every rank, if the position belongs to a different
        collection, or the remaining batches can't be divided among this number of lanes.
        """
        check_segments(position)
        if position.finished:  # no batches remain, even if fewer lanes could read batches that "drop" has dropped
            return [Lane(())] * position.segments[-1].n_lanes
        # batches done in the last segment don't change its lanes, so they aren't part of the key
        *before, last = position.segments
        plan = self.plan(n_obs, position.epoch, position.segments[0].n_lanes)
        key = n_obs, position.epoch, position.passes, tuple(before), last.n_lanes
        if self._lanes is None or self._lanes[0] != key:
            self._lanes = key, self._of_position(plan, position)
        _check_done(plan, last, self._lanes[1])
        return self._lanes[1]

    def segments(self, n_obs: int, position: Position) -> list[tuple[Segment, list[Lane]]]:
        """Return each segment of a position, with its lanes when it begins; it raises the errors of :meth:`lanes`."""
        self.lanes(n_obs, position)
        plan = self.plan(n_obs, position.epoch, position.segments[0].n_lanes)
        lanes = each_segment(plan.counts, position.segments, plan.remainder)
        return [(segment, own) for segment, (own, _) in zip(position.segments, lanes, strict=True)]

    def _of_position(self, plan: EpochPlan, position: Position) -> list[Lane]:
        last, lanes = position.segments[-1], list[Lane]()
        starts = each_segment(plan.counts, position.segments, plan.remainder)
        for segment, (lanes, _) in zip(position.segments, starts, strict=True):
            _check_done(plan, segment, lanes)
        # a batch that several lanes share must have a row for each lane; only its stream knows the number of rows
        n_parts = {lane.last.number: lane.last.n_parts for lane in lanes if lane.last is not None}
        if max(n_parts.values(), default=1) > 1:
            sizes = self._batch_sizes(plan, list(n_parts), position.passes)
            if any(sizes[number] < parts for number, parts in n_parts.items()):
                n_left = sum(len(lane) - 1 for lane in lanes) + len(n_parts)
                # numbers of ranks that divide the number of remaining batches
                fitting = ", ".join(str(number) for number in range(1, 2 * last.n_lanes) if n_left % number == 0)
                raise ValueError(
                    f"The {n_left} remaining batches of epoch {plan.epoch} can't be divided evenly among "
                    f"{last.n_lanes} {self._lane_name}: {len(n_parts)} of them would be split, but some have only "
                    f"{min(sizes.values())} rows. Resume on a number of {self._lane_name} that divides them "
                    f"({fitting}), or start the next epoch with set_epoch({plan.epoch + 1})."
                )
        return lanes

    def _batch_sizes(self, plan: EpochPlan, numbers: list[int], passes: int) -> dict[int, int]:
        """Return the number of rows of some batches; their streams run, but no data is read."""
        lane = Lane(tuple(range(number, number + 1) for number in numbers))
        requests = Pass(self._config.sampler, plan, [lane], self._config.root_seed, Position(plan.epoch, passes))
        return dict(zip(numbers, map(len, requests.batches()), strict=True))

    def is_same_next_epoch(self, plan: EpochPlan) -> bool:
        """Return True if every rank has the same rows in the next epoch."""
        sharding = self._config.sharding
        if plan.n_dropped and self._rotates:
            return False
        if isinstance(sharding, Contiguous | Independent | Shuffled):
            return not isinstance(sharding, Shuffled)
        try:
            return ordered(sharding, plan.window, epoch=plan.epoch + 1, seed=plan.seed) == plan.order
        except ValueError:  # the sharding can't order the rows of the next epoch
            return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # the sampler is never run, and everything else is frozen, so copies differ only in their caches
        return copy.copy(self)


def _check_done(plan: EpochPlan, segment: Segment, lanes: list[Lane]) -> None:
    """Raise if more batches of a segment are done than its longest lane has."""
    longest = max(map(len, lanes))
    if segment.done > longest:
        raise ValueError(
            f"In the state, {segment.done} batches of epoch {plan.epoch} are done, but for {plan.n_obs} rows and "
            f"{segment.n_lanes} ranks the epoch has only {longest}. Load a state of this collection."
        )


def check_segments(position: Position) -> None:
    """Raise if the numbers of ranks and workers have changed too often in an epoch for a state."""
    if len(position.segments) > MOST_SEGMENTS:
        raise ValueError(
            f"The number of ranks or workers may change at most {MOST_SEGMENTS - 1} times within an epoch, got more "
            f"changes in epoch {position.epoch}. Start the next epoch with set_epoch({position.epoch + 1})."
        )
