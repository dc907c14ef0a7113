"""Counts: how many batches the wrapped sampler gives for every rank's shard, or why it can't.

Every rank asks for all ranks, in the same order. What is wrong for one of them therefore raises the same error on every
one, before any has read a row.

1. There must be rows enough for the policy, or draws, where it is draws that the ranks share out.
2. The wrapped sampler must accept the shards: one of each length if it runs on local rows, every one of them if it is
   tied to absolute rows.
3. Where the policy promises equal counts, the sampler's own must be equal, or, under ``exact``, such that a short rank
   can make up for a batch.
"""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from annbatch.samplers import RandomSampler

from annbatch_distributed.passes.private_copy import private_copy
from annbatch_distributed.passes.promises import promised, reads_every_row, refuse_impossible
from annbatch_distributed.passes.run import follow_epoch
from annbatch_distributed.passes.shard import is_tied, localize
from annbatch_distributed.passes.traits import drawable_classes, is_wrapper, n_draws, n_ranks_within, set_draws
from annbatch_distributed.sharding import Rows
from annbatch_distributed.sharding.integers import BOUND
from annbatch_distributed.sharding.remainder import check, check_sizes

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.sharding import EpochPlan
    from annbatch_distributed.sharding.remainder import Movement

#: A rank, and the classes that it can draw.
type Classes = tuple[int, frozenset[str]]


class Counts(NamedTuple):
    """What asking the wrapped sampler about every rank's shard has told."""

    natural_batches: tuple[int, ...]
    """For each rank, the batches that the sampler gives for its shard by itself."""
    movement: Movement = "stay"
    """How the rows that ``drop`` loses can move from epoch to epoch."""
    n_samples: int | None = None
    """How many samples the sampler draws alone, where ranks share out draws."""
    classes: tuple[Classes, ...] = ()
    """What each rank can draw, in every layout that its rows can have, if the sampler is a class sampler."""


def count(sampler: Sampler, plan: EpochPlan) -> Counts:
    """Ask a sampler about every rank's shard.

    Parameters
    ----------
    sampler
        The wrapped sampler. It is left as it is.
    plan
        The plan of the epoch with lost rows where they are in epoch 0, as yet without counts.

    Raises
    ------
    ValueError
        If any rank could not run, or could not have the number of batches that the policy promises.
    """
    if plan.is_over:
        return Counts((0,) * plan.world_size, n_samples=plan.n_samples)
    if plan.shares_draws:
        # of an epoch that goes on with another number of ranks, it is known
        n_samples = n_draws(sampler, len(plan.window)) if plan.n_samples is None else plan.n_samples
        assert n_samples is not None
        plan = replace(plan, n_samples=n_samples)
        _check_enough(n_samples, f"{type(sampler).__name__} draws {n_samples} samples", plan)
        counts, classes = _count_all(sampler, plan)
        return Counts(counts, n_samples=n_samples, classes=classes)
    _check_enough(len(plan.window), f"The window has {len(plan.window)} rows", plan)
    if not isinstance(plan.dealt, Rows):
        name = type(plan.sharding).__name__
        check_sizes(plan.remainder, sizes=plan.share_sizes, batch_size=plan.rows_per_step, name=name)
    counts, classes = _count_all(sampler, plan)
    if not is_tied(sampler):
        return Counts(counts, "rotate")
    # an epoch that fails after hours of training would be worse than to lose the same rows in all of them
    try:
        odd_counts, odd_classes = _count_all(sampler, replace(plan, turn=1))
    except ValueError:
        return Counts(counts, "stay", classes=classes)
    if odd_counts != counts:
        return Counts(counts, "stay", classes=classes)
    return Counts(counts, "alternate", classes=classes + odd_classes)


def _check_enough(n_rows: int, what: str, plan: EpochPlan) -> None:
    if plan.rows_per_step != plan.batch_size:
        what += f" (and a batch on each of the ranks within a rank takes {plan.rows_per_step})"
    check(plan.remainder, n_rows=n_rows, world_size=plan.world_size, batch_size=plan.rows_per_step, what=what)


def _count_all(sampler: Sampler, plan: EpochPlan) -> tuple[tuple[int, ...], tuple[Classes, ...]]:
    """Ask about every rank, or about one rank for each size of a shard if that is all that makes a difference.

    Returns
    -------
    The batches of each rank, and what each rank that was asked about can draw, if it is a class sampler.
    """
    sizes = plan.sizes
    kinds = range(plan.world_size) if is_tied(sampler) and not plan.shares_draws else sizes
    counts: dict[int, int] = {}
    classes: list[Classes] = []
    for rank, kind in enumerate(kinds):
        if kind not in counts:
            local, counts[kind] = _count(sampler, plan, rank, sizes[rank])
            classes += [(rank, drawable) for drawable in drawable_classes(local)]
    natural_batches = tuple(map(counts.__getitem__, kinds))
    _check_equal(sampler, natural_batches, plan)
    return natural_batches, tuple(classes)


def _count(sampler: Sampler, plan: EpochPlan, rank: int, size: int) -> tuple[Sampler, int]:
    """Ask about one rank, whose shard has so many rows or which draws so many samples."""
    shard = plan.shard(rank)
    try:
        local = localize(private_copy(sampler), shard.rows, plan.n_obs)
        if plan.shares_draws:
            set_draws(local, size)
        follow_epoch(local, plan.epoch)
        local.validate(len(shard))
        _refuse_short_draws(local, len(shard))
        n_batches = _checked_count(sampler, local.n_batches(len(shard)), len(shard))
        what = "samples" if plan.shares_draws else "rows"
        refuse_impossible(n_batches, promised(sampler, plan, size), what)
    except ValueError as error:
        msg = (
            f"{type(sampler).__name__} can't run on the rows of rank {rank} of {plan.world_size}, which are "
            f"{shard.rows} of the collection's {plan.n_obs} (remainder={plan.remainder!r}). Given them as "
            f"[0, {len(shard)}), it says: {error}"
        )
        raise ValueError(msg) from error
    return local, n_batches


def _checked_count(sampler: Sampler, n_batches: object, n_rows: int) -> int:
    """Return a number of batches as an integer; one that ``np.ceil`` gives is a float."""
    expected = (
        f"{type(sampler).__name__}.n_batches({n_rows}) must return how many batches it yields for {n_rows} rows, an "
        "integer of at least 0 and below 2**63, got "
    )
    if isinstance(n_batches, bool) or not isinstance(n_batches, Integral | float | np.floating):
        # not what it is: other ranks are told of this, and a user's own object may show anything
        msg = f"{expected}something of type {type(n_batches).__name__}. Return an int."
        raise TypeError(msg)
    if not 0 <= float(n_batches) < BOUND or not (isinstance(n_batches, Integral) or n_batches.is_integer()):
        advice = "Round a quotient up with math.ceil where the last batch may be short, else down with //."
        msg = f"{expected}{n_batches}. {advice}"
        raise ValueError(msg)
    return int(n_batches)


def _check_equal(sampler: Sampler, counts: tuple[int, ...], plan: EpochPlan) -> None:
    """Raise if the ranks can't have the same number of batches where that is promised."""
    most = max(counts)
    if plan.remainder == "keep" or min(counts) == most:
        return
    sizes, name = plan.sizes, type(sampler).__name__
    short = [rank for rank, count in enumerate(counts) if count < most]
    if plan.remainder == "exact" and all(most - counts[rank] == 1 for rank in short):
        short = [rank for rank in short if not _is_full(sampler, counts[rank], sizes[rank], plan)]
    if not short:
        return
    rank, what = short[0], "samples" if plan.shares_draws else "rows"
    msg = (
        f"remainder={plan.remainder!r} promises the same number of batches on each of the {plan.world_size} ranks, but "
        f"{name} makes {counts[rank]} of the {sizes[rank]} {what} of rank {rank}, and {most} on rank "
        f"{counts.index(most)}. "
    )
    if plan.remainder == "exact":
        msg += (
            "A rank that is one batch short can make up for it only if all its batches are full, of two rows or more. "
        )
    msg += "Use another batch_size, mask or number of ranks, or remainder='keep' without a collective in each step."
    raise ValueError(msg)


def _is_full(sampler: Sampler, count: int, size: int, plan: EpochPlan) -> bool:
    """Whether all batches of a rank are sure to be full, of two rows or more, so that any of them can be cut in two."""
    assert plan.batch_size is not None
    within = n_ranks_within(sampler)
    reads_all = plan.shares_draws or reads_every_row(sampler) or within is not None
    return reads_all and plan.batch_size > 1 and 0 < size == count * plan.batch_size * (within or 1)


def check_can_go_on(sampler: Sampler, old: int, new: int) -> None:
    """Raise if an epoch of a sampler can't go on with another number of ranks."""
    if reads_every_row(sampler):
        return
    name = type(sampler).__name__
    msg = f"The state is of a job of {old} ranks, and this one has {new}. "
    if is_wrapper(sampler):
        msg += (
            f"A {name} in another one can't go on with other numbers. Use one {name}, with the rank in the whole job."
        )
    else:
        msg += (
            f"{name} was told how many rows to draw on each rank, so that what is left depends on how many there are. "
            "With sharding='independent' the job makes the draws that are left, if it draws with replacement; or begin "
            "the next epoch with set_epoch."
        )
    raise ValueError(msg)


# What annbatch's samplers are set to is not public. Where their counts alone don't tell, it is looked at here;
# tests/passes/test_counts.py fails when annbatch changes it.


def _refuse_short_draws(sampler: Sampler, n_rows: int) -> None:
    """Raise where annbatch's RandomSampler yields fewer batches than its ``n_batches`` says.

    With ``replacement`` and ``drop_last`` it draws whole chunks only, and counts as if it drew the rest as well.
    """
    if not (isinstance(sampler, RandomSampler) and sampler._replacement and sampler._drop_last):
        return
    n_samples, chunk_size = sampler._num_samples or n_rows, sampler._chunk_size
    promised, drawn = n_samples // sampler.batch_size, n_samples // chunk_size * chunk_size // sampler.batch_size
    if drawn < promised:
        msg = (
            f"with replacement=True and drop_last=True it draws whole chunks of {chunk_size} rows, which make "
            f"{drawn} batches of the {promised} that {n_samples} samples should be. Use drop_last=False."
        )
        raise ValueError(msg)
