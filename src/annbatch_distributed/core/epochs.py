"""Epochs: the plan, the lanes, the passes and the rows of every epoch of a job, as functions of a position.

:class:`Epochs` holds the configuration and the source of this rank. It doesn't know which epoch is next, and nothing in
it changes but its caches, so ranks don't need to communicate: each computes the same. For a :class:`Position`:

1. ``plan`` has the rows and batches of every stream of its epoch.
2. ``lanes`` are the batches that each rank reads from the beginning of the last segment on, and ``left`` are those that
   remain.
3. ``pass_at`` is the iteration of this rank that begins there.
4. ``rows`` are the rows of all ranks in some steps. Steps are counted from 0 at the start of the epoch. Each belongs to
   the segment that ran it, with the lanes of this segment; steps after the last segment are still to be run.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from annbatch_distributed.core.config import Config
from annbatch_distributed.core.lanes import Lane, Segment, SharedStep, Worker, each_segment
from annbatch_distributed.core.plan import Classes, Counts, Plan, count
from annbatch_distributed.core.rank import MOST_RANKS, HasPlacement, Placement
from annbatch_distributed.core.rows import Rows, runs
from annbatch_distributed.core.sharding import Contiguous, Independent
from annbatch_distributed.core.state import Position
from annbatch_distributed.core.stream import Pass
from annbatch_distributed.core.values import Int64Array, integers, plural
from annbatch_distributed.core.worker import hidden_worker

if TYPE_CHECKING:
    import pandas as pd

#: Selection of steps: an integer, a slice, or several integers.
type StepSelection = int | slice | npt.ArrayLike


class StepRows(NamedTuple):
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
) -> Iterator[StepRows]:
    """Yield the rows that some lanes read in some steps, in order; an IndexError if the epoch has no such step.

    ``segments`` are the segments of the epoch, each with its lanes when it begins. ``run`` returns the rows of each
    batch of a lane; it runs the sampler for them. ``is_wanted`` takes a lane and the number of lanes.
    """
    # sorted by step and lane
    batches = sorted(_batches_at(steps, segments, is_wanted), key=lambda batch: batch[:2])
    # a batch may be read in several steps or lanes: numbers 3 4 3 9 become 3 4 9
    numbers = np.unique([batch.number for *_, batch in batches]).astype(np.int64)
    # the ranges 3:5 and 9:10
    starts, stops = runs(numbers)
    # all batches at once, so that each stream runs once
    lane = Lane(tuple(map(range, starts.tolist(), stops.tolist())))
    rows = dict(zip(numbers.tolist(), run(lane), strict=True))
    for step, lane_number, n_lanes, batch in batches:
        parts = np.array_split(rows[batch.number], batch.n_parts)
        yield StepRows(step, lane_number, n_lanes, parts[batch.part])


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
        own = wanted[(wanted >= first) & (wanted < first + length)] - first
        for number, lane in enumerate(lanes):
            if not len(own) or not is_wanted(number, len(lanes)):
                continue
            read = list(islice(lane.in_turn(segment.n_workers), int(own[-1]) + 1))
            for turn in own[own < len(read)].tolist():  # under keep, a lane may have one step less
                yield first + turn, number, len(lanes), read[turn]
        first += length


def step_numbers(steps: StepSelection, n_steps: int) -> Int64Array:
    """Return the selected steps of an epoch, ascending, each once."""
    if isinstance(steps, slice):
        return np.sort(np.arange(n_steps)[steps])
    numbers = np.unique(integers("Steps", [steps] if isinstance(steps, Integral) else steps))
    if len(missing := numbers[(numbers < 0) | (numbers >= n_steps)]):
        raise IndexError(f"The epoch has no step {missing[0]}: it has {plural(n_steps, 'step')}, counted from 0.")
    return numbers


class Epochs:
    """Every epoch of a job on this rank; it caches the last plan, its lanes, and the sampler's answers."""

    def __init__(
        self, config: Config, rank_source: HasPlacement, *, virtual_ranks: int | None = None, max_gap: int = 0
    ) -> None:
        self.config = config
        self._rank_source = rank_source
        #: Number of virtual ranks; None if they are not used.
        self.virtual_ranks = virtual_ranks
        #: Largest gap between rows that is read too, in rows.
        self.max_gap = max_gap
        # each cache holds one entry with its key, since an epoch is requested many times, and then the next one
        self._selected: tuple[int, Rows] | None = None
        self._counted: tuple[tuple[object, ...], Counts] | None = None
        self._planned: tuple[tuple[int, int, int], Plan] | None = None
        self._lanes: tuple[tuple[object, ...], list[Lane]] | None = None

    def reconfigured(self, config: Config) -> Epochs:
        """Return the epochs of a different configuration."""
        return Epochs(config, self._rank_source, virtual_ranks=self.virtual_ranks, max_gap=self.max_gap)

    def moved(self, rank_source: HasPlacement) -> Self:
        """Return the same epochs on another rank, or with another number of ranks."""
        moved = copy.copy(self)
        moved._rank_source = rank_source
        return moved

    # This rank

    @property
    def placement(self) -> Placement:
        """Rank of this process and how it is known; a deferred source is queried now."""
        return self._rank_source.placement

    @property
    def own_lanes(self) -> range:
        """Lanes that this rank reads."""
        rank, world_size = self.placement.rank, self.placement.world_size
        if self.virtual_ranks is None:
            return range(rank, rank + 1)
        # 4 virtual ranks on 2 ranks: lanes 0:2 and 2:4
        n_own, left = divmod(self.virtual_ranks, world_size)
        if left:
            fitting = [number for number in range(1, self.virtual_ranks + 1) if self.virtual_ranks % number == 0]
            raise ValueError(
                f"virtual_ranks must be a multiple of the world size, {world_size}, got {self.virtual_ranks}. Run the "
                f"job on a number of ranks that divides it: {', '.join(map(str, fitting))}."
            )
        return range(rank * n_own, (rank + 1) * n_own)

    @property
    def n_lanes(self) -> int:
        """Number of lanes of the job: one for each rank, or each virtual rank."""
        return len(self.own_lanes) * self.placement.world_size

    def here(self, position: Position, n_workers: int = 1) -> Position:
        """Return a position with a last segment of this job's lanes, and of some workers."""
        # samplers that keep an order yield the same batches with any number of workers
        return position.with_lanes(self.n_lanes, n_workers if self.config.sampler.shuffle else 1)

    # The plan

    def plan(self, n_obs: int, position: Position) -> Plan:
        """Return the plan of the epoch of a position, which begins with the lanes of its first segment.

        A ValueError, the same on every rank, if too few rows are selected, or the wrapped sampler can't run on some
        stream's rows.
        """
        key = n_obs, position.epoch, position.segments[0].n_lanes
        if self._planned is None or self._planned[0] != key:
            try:
                with hidden_worker():  # samplers, masks and shardings of users must answer the same in every worker
                    self._planned = key, self._plan(*key)
            except ValueError as error:
                if key[2] == self.virtual_ranks:
                    error.add_note(f"These ranks are the {self.virtual_ranks} virtual ranks.")
                raise
        return self._planned[1]

    def _plan(self, n_obs: int, epoch: int, n_streams: int) -> Plan:
        config = self.config
        units = config.units.in_epoch(n_obs, epoch, config.seed, config.mask)
        if self._selected is None or self._selected[0] != len(units):
            self._selected = len(units), config.units.selected(config.mask, len(units))
        plan = Plan.of(config, n_obs, units, epoch, n_streams, self._selected[1])
        # the sampler is asked once if its counts are the same in every epoch
        key = n_obs, n_streams, epoch if self.counts_vary else 0
        if self._counted is None or self._counted[0] != key:
            counts = count(plan)
            self._check_empty_streams(replace(plan, sampler_batches=counts.sampler_batches))
            self._counted = key, counts
        return replace(plan, sampler_batches=self._counted[1].sampler_batches)

    @property
    def counts_vary(self) -> bool:
        """True if the number of batches may differ between epochs.

        It may if the sampler has ``set_epoch``, or if a sampler that needs global rows gets different ones.
        """
        config = self.config
        moves = not config.rotates and not isinstance(config.sharding, Contiguous | Independent)
        return moves or hasattr(config.sampler, "set_epoch")

    def _check_empty_streams(self, plan: Plan) -> None:
        """Raise a RuntimeError if the sampler yields batches for a stream for which its ``n_batches`` returns 0."""
        # no pass runs such a stream, so it is checked here
        for stream in range(plan.n_streams):
            if not plan.sampler_batches[stream]:
                numbers = (range(plan.n_batches(stream)),)
                list(Pass(plan, [], Position(plan.epoch)).of_stream(stream, numbers))

    def classes(self, n_obs: int, position: Position) -> tuple[Classes, ...]:
        """Return the classes that each rank can sample from in the epoch of a position, for a class sampler."""
        self.plan(n_obs, position)
        assert self._counted is not None
        return self._counted[1].classes

    def lanes(self, n_obs: int, position: Position) -> list[Lane]:
        """Return each lane at the beginning of a position's last segment.

        A ValueError as for :meth:`plan`; or, the same on every rank, if the position belongs to a different
        collection, or the remaining batches can't be divided among this number of lanes.
        """
        if position.finished:  # no batches remain, even if fewer lanes could read batches that "drop" has dropped
            return [Lane(())] * position.segments[-1].n_lanes
        # batches done in the last segment don't change its lanes, so they aren't part of the key
        *before, last = position.segments
        plan = self.plan(n_obs, position)
        key = n_obs, position.epoch, tuple(before), last.n_lanes
        if self._lanes is None or self._lanes[0] != key:
            self._lanes = key, self._of_position(plan, position)
        _check_done(plan, last, self._lanes[1])
        return self._lanes[1]

    def _segments(self, n_obs: int, position: Position) -> list[tuple[Segment, list[Lane]]]:
        """Return each segment of a position, with its lanes when it begins; it raises the errors of :meth:`lanes`."""
        self.lanes(n_obs, position)
        plan = self.plan(n_obs, position)
        lanes = each_segment(plan.counts, position.segments, self.config.remainder)
        return [*zip(position.segments, lanes, strict=True)]

    def _of_position(self, plan: Plan, position: Position) -> list[Lane]:
        last, lanes = position.segments[-1], list[Lane]()
        starts = each_segment(plan.counts, position.segments, self.config.remainder)
        for segment, lanes in zip(position.segments, starts, strict=True):
            _check_done(plan, segment, lanes)
        # a batch that several lanes share must have a row for each lane; only its stream knows the number of rows
        n_parts = {lane.last.number: lane.last.n_parts for lane in lanes if lane.last is not None}
        if max(n_parts.values(), default=1) > 1:
            sizes = self._batch_sizes(plan, list(n_parts))
            if any(sizes[number] < parts for number, parts in n_parts.items()):
                n_left = sum(len(lane) - 1 for lane in lanes) + len(n_parts)
                # numbers of ranks that divide the number of remaining batches
                fitting = ", ".join(str(number) for number in range(1, 2 * last.n_lanes) if n_left % number == 0)
                ranks = "ranks" if self.virtual_ranks is None else "virtual ranks"
                raise ValueError(
                    f"The {n_left} remaining batches of epoch {plan.epoch} can't be divided evenly among "
                    f"{last.n_lanes} {ranks}: {len(n_parts)} of them would be split, but some have only "
                    f"{min(sizes.values())} rows. Resume on a number of {ranks} that divides them "
                    f"({fitting})."
                )
        return lanes

    def _batch_sizes(self, plan: Plan, numbers: list[int]) -> dict[int, int]:
        """Return the number of rows of some batches; their streams run, but no data is read."""
        lane = Lane(tuple(range(number, number + 1) for number in numbers))
        batches = self._pass_of(plan, [lane], Position(plan.epoch)).batches()
        return dict(zip(numbers, map(len, batches), strict=True))

    def left(self, n_obs: int, position: Position) -> list[Lane]:
        """Return the remaining batches of each lane of the job at a position."""
        *_, (_, n_workers, done) = position.segments
        return [lane.after(n_workers, done) for lane in self.lanes(n_obs, position)]

    def n_left(self, n_obs: int, position: Position) -> int:
        """Return the number of remaining batches, at a position, of the longest lane of the job."""
        return max(map(len, self.left(n_obs, position)))

    # Passes

    def pass_at(self, n_obs: int, position: Position, worker: Worker | None = None) -> Pass:
        """Return the pass of this rank, or of a worker's part of it, that begins at a position."""
        plan, lanes = self.plan(n_obs, position), self.lanes(n_obs, position)
        *_, (_, n_workers, done) = position.segments
        own = [lanes[lane] for lane in self.own_lanes]
        if worker is None:
            own = [lane.after(n_workers, done) for lane in own]
        else:
            # PyTorch collects from worker 0 first, so worker 0 takes the part whose turn it is: after 5 batches of 3
            # workers, part 5 % 3 = 2. Of the turns 0 1 2 0 1 before, one was of part 2: n_done is 1
            part = Worker((worker.number + done) % worker.n_workers, worker.n_workers)
            n_done = len(range(part.number, done, part.n_workers))
            keeps_order = not self.config.sampler.shuffle
            own = [lane.of_worker(part, keeps_order=keeps_order).after(1, n_done) for lane in own]
        n_batches = position.done if position.finished else position.done_before + max(map(len, lanes))
        return self._pass_of(plan, own, position, n_batches)

    def _pass_of(self, plan: Plan, lanes: list[Lane], position: Position, n_batches: int = 0) -> Pass:
        return Pass(plan, lanes, position, n_batches, self.max_gap, self.placement)

    def rows(
        self, n_obs: int, position: Position, steps: StepSelection, ranks: int | Sequence[int] | None
    ) -> pd.DataFrame:
        """Return the rows that each rank reads in some steps of the epoch of a position, as a table.

        See :meth:`.DistributedSampler.rows_of`.
        """
        import pandas as pd

        wanted = None if ranks is None else integers("ranks", np.atleast_1d(ranks), below=MOST_RANKS)
        n_own = len(self.own_lanes)

        def rank_of(lane: int, n_lanes: int) -> int:
            # 4 virtual ranks on 2 ranks: lanes 0 and 1 are of rank 0, lanes 2 and 3 of rank 1. In segments with another
            # number of lanes, each lane was a rank
            return lane // n_own if n_lanes == self.n_lanes else lane

        def is_wanted(lane: int, n_lanes: int) -> bool:
            return wanted is None or rank_of(lane, n_lanes) in wanted

        def run(lane: Lane) -> Iterator[Int64Array]:
            return self._pass_of(plan, [lane], position).batches()

        plan, segments = self.plan(n_obs, position), self._segments(n_obs, position)
        # (step, rank) and rows of each batch; an empty one, so that there are columns of the right type
        readers, batches = [(0, 0)], [plan.units.rows_of(np.arange(0))]
        n_before = Counter[tuple[int, int]]()
        for read in rows_at(steps, segments, run, is_wanted):
            reader = read.step, rank_of(read.lane, read.n_lanes)
            readers.append(reader)
            # sets are numbered through over the lanes of a rank, as in its joined batch
            batches.append(plan.units.rows_of(read.rows, first=n_before[reader]))
            n_before[reader] += len(read.rows)
        # (batches, 2), repeated to (rows, 2): (step, rank) of each row. Batches of 2 and 1 rows in step 7 of ranks 0
        # and 1 become [[7 0] [7 0] [7 1]]
        of_rows = np.repeat(np.array(readers), [len(batch.rows) for batch in batches], axis=0)
        columns = {"step": of_rows[:, 0], "rank": of_rows[:, 1]}
        columns["row"] = np.concatenate([batch.rows for batch in batches])
        for name in batches[0].marks:
            if name == "repeated":  # a row is repeated by the epoch, not by its batch
                continue
            columns[name] = np.concatenate([batch.marks[name] for batch in batches])
        return pd.DataFrame(columns)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # the sampler is never run, and everything else is frozen, so copies differ only in their caches
        return copy.copy(self)


def _check_done(plan: Plan, segment: Segment, lanes: list[Lane]) -> None:
    """Raise if more batches of a segment are done than its longest lane has."""
    longest = max(map(len, lanes))
    if segment.done > longest:
        raise ValueError(
            f"In the state, {segment.done} batches of epoch {plan.epoch} are done, but for {plan.n_obs} rows and "
            f"{segment.n_lanes} ranks the epoch has only {longest}. Load a state of this collection."
        )
