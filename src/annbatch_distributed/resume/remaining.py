"""The rest of an epoch: what is left when some batches of every rank are done.

It is found without reading anything and without asking another rank:

1. The pass of every old rank is run through as far as it was done, and the rows of its batches are noted.
2. They are taken out of the window. Where the ranks share out draws, the draws made are taken off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from annbatch_distributed.passes.requests import bounds_of
from annbatch_distributed.passes.run import Pass
from annbatch_distributed.passes.shard import is_annbatchs_own
from annbatch_distributed.sharding import Rows
from annbatch_distributed.sharding.batches import contains, done

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

    from annbatch_distributed.sharding import EpochPlan
    from annbatch_distributed.sharding.batches import Dealings, Numbers
    from annbatch_distributed.sharding.rows import Int64Array


#: How many ranks can be run through. Each takes some milliseconds, so that this is less than a minute or two.
MOST_REPLAYED = 1 << 14


class Rest(NamedTuple):
    """What is left of an epoch."""

    window: Rows
    """The rows that are left to read, or to draw from."""
    n_samples: int | None
    """How many draws are left, where the ranks share out draws."""


def rest(sampler: Sampler, plan: EpochPlan, *, root: int, passes: int, dealings: Dealings) -> Rest:
    """Return what is left of an epoch, or of what was left of it before.

    Parameters
    ----------
    sampler
        The wrapped sampler.
    plan
        The plan by which the ranks have run.
    root
        What the job's randomness begins from, the same on all of them.
    passes
        How many passes every rank began before, since the epoch was set.
    dealings
        For each number of ``DataLoader`` workers, how many batches every rank has done; fewer, where it had no more.

    Raises
    ------
    ValueError
        If more ranks than :data:`MOST_REPLAYED` would have to be run through.
    """
    done_bounds: list[tuple[Int64Array, Int64Array]] = []
    n_drawn = 0
    ranks = _with_own(plan)
    for n_replayed, rank in enumerate(ranks):
        if n_replayed == MOST_REPLAYED or (len(ranks) > MOST_REPLAYED and not plan.shares_draws):
            msg = (
                f"The state is of {plan.world_size} ranks. To go on with another number, what each of them has done is "
                f"run through, and {MOST_REPLAYED} of them can be. Go on with as many ranks, or begin the next epoch "
                f"with set_epoch({plan.epoch + 1})."
            )
            raise ValueError(msg)
        numbers = done(plan.n_batches(rank), dealings)
        for request, splits in _batches(Pass(sampler, plan, rank, root, passes), numbers):
            n_drawn += sum(map(len, splits))
            if not plan.shares_draws:
                done_bounds.append(bounds_of(request, splits, once=is_annbatchs_own(sampler)))
        if plan.n_samples is not None and n_drawn >= plan.n_samples:
            break  # nothing is left, whatever the other ranks have drawn
    if plan.shares_draws:
        assert plan.n_samples is not None
        return Rest(plan.window, max(0, plan.n_samples - n_drawn))
    none = np.empty(0, dtype=np.int64)
    starts, stops = map(np.concatenate, zip((none, none), *done_bounds, strict=True))
    return Rest(_without(plan.window, *_merged(starts, stops)), None)


def _with_own(plan: EpochPlan) -> range:
    """Return the ranks that may have rows of their own: with more ranks than rows, others repeat those of the last."""
    n_rows = len(plan.window)
    first = plan.world_size - n_rows if not plan.shares_draws and isinstance(plan.dealt, Rows) else 0
    return range(max(0, first), plan.world_size)


def _batches(requests: Pass, numbers: Numbers) -> Iterator[tuple[LoadRequest, list[npt.NDArray[Any]]]]:
    """Run through a pass as far as some of its batches go; yield each load request with those that it has of them."""
    n_before, n_missing = 0, sum(map(len, numbers))
    while n_missing:
        request = next(requests)
        splits = request["splits"]
        found = [split for number, split in enumerate(splits, n_before) if contains(numbers, number)]
        n_before, n_missing = n_before + len(splits), n_missing - len(found)
        if found:
            yield request, found
    requests.close()


def _merged(starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return ascending intervals that don't touch, of intervals in any order that may overlap."""
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    first = np.flatnonzero(starts > np.concatenate([starts[:1] - 1, stops[:-1]]))
    return starts[first], stops[np.append(first[1:], len(stops))[: len(first)] - 1]


def _without(window: Rows, starts: Int64Array, stops: Int64Array) -> Rows:
    """Return the rows of a window that are in none of some ascending intervals, which are in the window.

    What is left begins where the window does or where an interval stops, and stops where one starts or the window does.
    """
    ranges = [(piece.start, piece.stop) for piece in window.pieces if isinstance(piece, range)]
    bounds = np.array(ranges, dtype=np.int64).reshape(-1, 2)
    return Rows.of_bounds(np.sort(np.append(bounds[:, 0], stops)), np.sort(np.append(bounds[:, 1], starts)))
