"""What remains of an epoch when some batches of every rank are done.

It is found without reading anything and without asking another rank:

1. The pass of every old rank is run through as far as it was done, and the rows of its batches are noted.
2. They are taken out of the window. Where the ranks share out draws, the draws made are taken off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed.passes.annbatch_samplers import is_annbatchs_own
from annbatch_distributed.passes.requests import bounds_of
from annbatch_distributed.passes.run import Pass
from annbatch_distributed.sharding import Rows
from annbatch_distributed.sharding.batches import batches_done, contains
from annbatch_distributed.sharding.division import Order
from annbatch_distributed.sharding.selection import Selected, Selection

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

    from annbatch_distributed.sharding import EpochPlan
    from annbatch_distributed.sharding.batches import Collected, Numbers
    from annbatch_distributed.sharding.rows import Int64Array

__all__ = ["MOST_REPLAYED", "remaining"]

#: How many ranks can be run through. Each takes some milliseconds, so that this is less than a minute or two.
MOST_REPLAYED = 1 << 14


def remaining(
    sampler: Sampler, plan: EpochPlan, *, root_seed: int, passes: int, collected: Collected
) -> tuple[Rows, int | None]:
    """Return the rows of a plan that remain to be read or drawn from, and, if ranks share out draws, how many remain.

    ``passes`` is how many passes every rank began before, since the epoch was set.
    ``collected`` says for each number of ``DataLoader`` workers how many batches every rank has done; a rank has done
    fewer, where it had no more.

    Raises
    ------
    ValueError
        If more ranks than :data:`MOST_REPLAYED` would have to be run through.
    """
    done_bounds: list[tuple[Int64Array, Int64Array]] = []
    n_drawn = 0
    ranks = _with_own_rows(plan)
    for n_replayed, rank in enumerate(ranks):
        if n_replayed == MOST_REPLAYED or (len(ranks) > MOST_REPLAYED and not plan.shares_draws):
            raise ValueError(
                f"The state is of {plan.world_size} ranks. To go on with another number, what each of them has done is "
                f"run through, and {MOST_REPLAYED} of them can be. Go on with as many ranks, or begin the next epoch "
                f"with set_epoch({plan.epoch + 1})."
            )
        numbers = batches_done(plan.n_batches(rank), collected)
        for request, splits in _batches(Pass(sampler, plan, range(rank, rank + 1), root_seed, passes), numbers):
            n_drawn += sum(map(len, splits))
            if not plan.shares_draws:
                done_bounds.append(bounds_of(request, splits, once=is_annbatchs_own(sampler)))
        if plan.n_samples is not None and n_drawn >= plan.n_samples:
            break  # nothing is left, whatever the other ranks have drawn
    if plan.n_samples is not None:
        return plan.window, max(0, plan.n_samples - n_drawn)
    none = np.empty(0, dtype=np.int64)
    starts, stops = map(np.concatenate, zip((none, none), *done_bounds, strict=True))
    return _without(plan.window, *_merged(starts, stops)), None


def _with_own_rows(plan: EpochPlan) -> range:
    """Return the ranks that may have rows of their own: with more ranks than rows, the first ones only repeat rows."""
    n_repeating = max(0, plan.world_size - len(plan.window)) if isinstance(plan.dealt, Order) else 0
    return range(n_repeating, plan.world_size)


def _batches(requests: Pass, numbers: Numbers) -> Iterator[tuple[LoadRequest, list[npt.NDArray[Any]]]]:
    """Run through a pass to the last of some batches; yield each load request that has some of them, with their splits.

    ``numbers`` counts the batches in the order of the pass.
    """
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
    match window.pieces:
        case (Selected(selection, places),):
            left = selection.at(places).without(Selection.of_bounds(starts, stops))
            return Rows((Selected(left, range(len(left))),))
    window_starts, window_stops = window.bounds()
    return Rows.of_bounds(np.sort(np.append(window_starts, stops)), np.sort(np.append(window_stops, starts)))
