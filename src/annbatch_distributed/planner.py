"""The planner: every stream's rows and batches in an epoch, and the lanes in which a job goes through them.

Nothing is communicated: every rank computes the same. ``rows_at`` answers which rows the ranks had in some steps of an
epoch. Steps count through the epoch, from 0. Each belongs to the segment in which it was run, by the number of lanes of
that segment; steps after the last segment's are yet to come.
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

#: Some steps: one, those of a slice, or several.
type StepSelection = int | slice | npt.ArrayLike


class Read(NamedTuple):
    """What a lane reads in a step."""

    step: int
    """Which step of the epoch."""
    lane: int
    """Which lane."""
    n_lanes: int
    """How many lanes there are then."""
    rows: Int64Array
    """The rows of its batch, in order."""


def rows_at(
    steps: StepSelection,
    segments: Sequence[tuple[Segment, list[Lane]]],
    run: Callable[[Lane], Iterable[Int64Array]],
    is_wanted: Callable[[int, int], bool],
) -> Iterator[Read]:
    """Yield what some lanes read in some steps, in order; an IndexError if the epoch has no such step.

    ``segments`` are those of the epoch, with what the lanes have to read when they begin; ``run`` gives the rows of
    each batch of a lane, whose streams are run for it. ``is_wanted`` is asked about each lane, and how many there are.
    """
    # by step and lane, as the ranks of the job had them
    batches = sorted(_batches_at(steps, segments, is_wanted), key=lambda batch: batch[:2])
    numbers = np.unique([what.number for *_, what in batches]).astype(np.int64)
    starts, stops = runs(numbers)
    # all in one go, so that each stream is run once
    rows = dict(zip(numbers.tolist(), run(Lane(tuple(map(range, starts.tolist(), stops.tolist())))), strict=True))
    for step, lane, n_lanes, what in batches:
        yield Read(step, lane, n_lanes, np.array_split(rows[what.number], what.n_parts)[what.part])


def _batches_at(
    steps: StepSelection, segments: Sequence[tuple[Segment, list[Lane]]], is_wanted: Callable[[int, int], bool]
) -> Iterator[tuple[int, int, int, SharedStep]]:
    """Yield which batch each lane that is wanted reads in some steps, with the step, the lane and their number."""
    # a segment has the steps that it has done; the last one has all that are left, too
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
            for place in places[places < len(read)].tolist():  # under keep, a lane may have one less
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
    """Plans epochs by a configuration; it keeps the last plan, and what the sampler has answered."""

    def __init__(self, config: Config, *, has_virtual_ranks: bool = False) -> None:
        self._config = config
        self._lane_name = "virtual ranks" if has_virtual_ranks else "ranks"
        # where moving lost rows would cut runs of a class, an epoch that fails after hours would be worse
        self._rotates = not needs_global_rows(config.sampler)
        # each cache holds one entry, with the key that it is for: an epoch is asked about many times, then the next one
        self._window: tuple[int, Rows] | None = None
        self._counted: tuple[tuple[object, ...], Counts] | None = None
        self._planned: tuple[tuple[int, int, int], EpochPlan] | None = None
        self._lanes: tuple[tuple[object, ...], list[Lane]] | None = None

    def plan(self, n_obs: int, epoch: int, n_streams: int) -> EpochPlan:
        """Return the plan of an epoch that begins with so many streams.

        A ValueError if the window is too small, or the wrapped sampler can't run on some stream's rows: the same error
        on every rank.
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
        # a sampler with epochs of its own may have other counts in each of them, and so may rows that are dealt anew
        moves = not self._rotates and not isinstance(sharding, Contiguous | Independent)
        # annbatch's samplers give the same counts in every epoch, so they are asked once
        key = n_obs, n_streams, epoch if moves or hasattr(sampler, "set_epoch") else 0
        if self._counted is None or self._counted[0] != key:
            counts = count(sampler, plan)
            self._check_empty_streams(replace(plan, sampler_batches=counts.sampler_batches))
            self._counted = key, counts
        return replace(plan, sampler_batches=self._counted[1].sampler_batches)

    def _check_empty_streams(self, plan: EpochPlan) -> None:
        """Raise a RuntimeError if the sampler yields batches where it promised none: no pass runs such a stream."""
        for number in range(plan.n_streams):
            if not plan.sampler_batches[number]:
                stream = Stream(self._config.sampler, plan, number, self._config.root_seed, passes=0)
                list(stream.requests((range(plan.n_batches(number)),)))

    @property
    def classes(self) -> tuple[Classes, ...]:
        """What each rank can draw, if the sampler is a class sampler."""
        return () if self._counted is None else self._counted[1].classes

    def lanes(self, n_obs: int, position: Position) -> list[Lane]:
        """Return what each lane reads of the epoch from the beginning of a position's last segment on.

        A ValueError as for :meth:`plan`; or if the position is none of this collection, or the rest of the epoch can't
        be shared out among so many lanes: the same error on every rank.
        """
        check_segments(position)
        if position.finished:  # nothing is left, though fewer lanes could share what "drop" has left over
            return [Lane(())] * position.segments[-1].n_lanes
        # batches done in the last segment don't change its lanes, so they are no part of the key
        *before, last = position.segments
        plan = self.plan(n_obs, position.epoch, position.segments[0].n_lanes)
        key = n_obs, position.epoch, position.passes, tuple(before), last.n_lanes
        if self._lanes is None or self._lanes[0] != key:
            self._lanes = key, self._of_position(plan, position)
        _check_done(plan, last, self._lanes[1])
        return self._lanes[1]

    def segments(self, n_obs: int, position: Position) -> list[tuple[Segment, list[Lane]]]:
        """Return each segment of a position, with what its lanes read from its beginning on; it raises as `lanes`."""
        self.lanes(n_obs, position)
        plan = self.plan(n_obs, position.epoch, position.segments[0].n_lanes)
        lanes = each_segment(plan.counts, position.segments, plan.remainder)
        return [(segment, own) for segment, (own, _) in zip(position.segments, lanes, strict=True)]

    def _of_position(self, plan: EpochPlan, position: Position) -> list[Lane]:
        last, lanes = position.segments[-1], list[Lane]()
        begun = each_segment(plan.counts, position.segments, plan.remainder)
        for segment, (lanes, _) in zip(position.segments, begun, strict=True):
            _check_done(plan, segment, lanes)
        # batches that several lanes share need a row for each of them, which only their streams can tell
        n_parts = {lane.last.number: lane.last.n_parts for lane in lanes if lane.last is not None}
        if max(n_parts.values(), default=1) > 1:
            sizes = self._batch_sizes(plan, list(n_parts), position.passes)
            if any(sizes[number] < parts for number, parts in n_parts.items()):
                n_left = sum(len(lane) - 1 for lane in lanes) + len(n_parts)
                # numbers of ranks among which the batches that are left divide evenly
                fitting = ", ".join(str(number) for number in range(1, 2 * last.n_lanes) if n_left % number == 0)
                raise ValueError(
                    f"Epoch {plan.epoch} has {n_left} batches left, of which {last.n_lanes} {self._lane_name} can't "
                    f"have equally many: {len(n_parts)} would have to be shared out, some of {min(sizes.values())} "
                    f"rows. Resume on a number of {self._lane_name} that fits ({fitting}), or begin the "
                    f"next epoch with set_epoch({plan.epoch + 1})."
                )
        return lanes

    def _batch_sizes(self, plan: EpochPlan, numbers: list[int], passes: int) -> dict[int, int]:
        """Return how many rows some batches have, for which their streams are run and nothing is read."""
        lane = Lane(tuple(range(number, number + 1) for number in numbers))
        requests = Pass(self._config.sampler, plan, [lane], self._config.root_seed, Position(plan.epoch, passes))
        return dict(zip(numbers, map(len, requests.batches()), strict=True))

    def is_same_next_epoch(self, plan: EpochPlan) -> bool:
        """Whether every rank has the same rows in the epoch after that of a plan."""
        sharding = self._config.sharding
        if plan.n_dropped and self._rotates:
            return False
        if isinstance(sharding, Contiguous | Independent | Shuffled):
            return not isinstance(sharding, Shuffled)
        try:
            return ordered(sharding, plan.window, epoch=plan.epoch + 1, seed=plan.seed) == plan.order
        except ValueError:  # the sharding can't deal the rows then
            return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # the sampler is never run, and all else is frozen: what differs between copies is what each keeps
        return copy.copy(self)


def _check_done(plan: EpochPlan, segment: Segment, lanes: list[Lane]) -> None:
    """Raise if no lane has as many batches as a state says are done."""
    longest = max(map(len, lanes))
    if segment.done > longest:
        raise ValueError(
            f"The state says that {segment.done} batches of epoch {plan.epoch} are done, but for {plan.n_obs} rows and "
            f"{segment.n_lanes} ranks it has {longest}. Load a state of this collection."
        )


def check_segments(position: Position) -> None:
    """Raise if an epoch was resumed with other numbers of ranks and workers too often for a state to hold it."""
    if len(position.segments) > MOST_SEGMENTS:
        raise ValueError(
            f"Epoch {position.epoch} was run by {MOST_SEGMENTS} numbers of ranks and workers after another, the most "
            f"that a state holds. Begin the next one with set_epoch({position.epoch + 1})."
        )
