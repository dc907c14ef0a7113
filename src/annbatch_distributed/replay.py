"""Replay: which rows the ranks of a job had in some steps of an epoch, as its segments tell.

Steps count through the epoch, from 0. Each belongs to the segment in which it was run, by as many lanes as there were
then; those after what the last segment has done are yet to come.
"""

from __future__ import annotations

from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from annbatch_distributed.integers import integers
from annbatch_distributed.lanes import Lane
from annbatch_distributed.requests import bounds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from annbatch_distributed.lanes import Segment, SharedStep
    from annbatch_distributed.rows import Int64Array

    #: Some steps: one, those of a slice, or several.
    type Steps = int | slice | npt.ArrayLike

__all__ = ["Read", "Steps", "rows_at"]


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
    steps: Steps, segments: Sequence[tuple[Segment, list[Lane]]], run: Callable[[Lane], Iterable[Int64Array]]
) -> Iterator[Read]:
    """Yield what each lane reads in some steps, in order; an IndexError if the epoch has no such step.

    ``segments`` are those of the epoch, with what the lanes have to read when they begin; ``run`` gives the rows of
    each batch of a lane, whose streams are run for it.
    """
    batches = sorted(_batches_at(steps, segments), key=lambda batch: batch[:2])
    numbers = np.unique([what.number for *_, what in batches]).astype(np.int64)
    starts, stops = bounds_of(numbers)
    # all in one go, so that each stream is run once
    rows = dict(zip(numbers.tolist(), run(Lane(tuple(map(range, starts.tolist(), stops.tolist())))), strict=True))
    for step, lane, n_lanes, what in batches:
        yield Read(step, lane, n_lanes, np.array_split(rows[what.number], what.n_parts)[what.part])


def _batches_at(
    steps: Steps, segments: Sequence[tuple[Segment, list[Lane]]]
) -> Iterator[tuple[int, int, int, SharedStep]]:
    """Yield which batch each lane reads in some steps, with the step, the lane and how many lanes there are."""
    lengths, first = [segment.done for segment, _ in segments], 0
    lengths[-1] = max(map(len, segments[-1][1]))
    wanted = _numbers(steps, sum(lengths))
    for (segment, lanes), length in zip(segments, lengths, strict=True):
        places = wanted[(wanted >= first) & (wanted < first + length)] - first
        for number, lane in enumerate(lanes) if len(places) else ():
            read = list(islice(lane.in_turn(segment.n_workers), int(places[-1]) + 1))
            for place in places[places < len(read)].tolist():  # under keep, a lane may have one less
                yield first + place, number, len(lanes), read[place]
        first += length


def _numbers(steps: Steps, n_steps: int) -> Int64Array:
    """Return some steps of so many, ascending, each once."""
    if isinstance(steps, slice):
        return np.sort(np.arange(n_steps)[steps])
    return np.unique(
        integers(f"Steps of an epoch of {n_steps}", [steps] if isinstance(steps, Integral) else steps, below=n_steps)
    )
