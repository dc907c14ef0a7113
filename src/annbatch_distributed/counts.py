"""Counts: how many batches the wrapped sampler gives for every rank's shard, or why it can't.

Every rank asks for all ranks, in the same order. What is wrong for one of them therefore raises the same error on every
one, before any has read a row.

1. The window must have rows enough for the policy.
2. The wrapped sampler must accept the shards: one of each length if it runs on local rows, every one of them if it is
   tied to absolute rows.
3. Where the policy promises equal counts, the sampler's own must be equal, or, under ``exact``, such that a short rank
   can make up for a batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from annbatch.samplers import ClassSampler, RandomSampler

from annbatch_distributed.localize import is_tied, localize
from annbatch_distributed.passes import follow_epoch
from annbatch_distributed.private_copy import private_copy
from annbatch_distributed.sharding.remainder import check

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.sharding import EpochPlan
    from annbatch_distributed.sharding.remainder import Movement


class Counts(NamedTuple):
    """What asking the wrapped sampler about every rank's shard has told."""

    natural_batches: tuple[int, ...]
    """For each rank, the batches that the sampler gives for its shard by itself."""
    movement: Movement
    """How the rows that ``drop`` loses can move from epoch to epoch."""


def count(sampler: Sampler, plan: EpochPlan) -> Counts:
    """Ask a sampler about every rank's shard.

    Parameters
    ----------
    sampler
        The wrapped sampler. It is left as it is.
    plan
        The plan of the epoch with the rows of epoch 0, as yet without counts.

    Raises
    ------
    ValueError
        If any rank could not run, or could not have the number of batches that the policy promises.
    """
    check(plan.remainder, n_rows=len(plan.window), world_size=plan.world_size, batch_size=plan.batch_size)
    counts = _count_all(sampler, plan)
    _check_equal(sampler, counts, plan)
    if not is_tied(sampler):
        return Counts(counts, "rotate")
    return Counts(counts, "alternate" if _runs_on_odd_layout(sampler, plan, counts) else "stay")


def _count_all(sampler: Sampler, plan: EpochPlan) -> tuple[int, ...]:
    if is_tied(sampler):
        return tuple(_count(sampler, plan, rank) for rank in range(plan.world_size))
    first = _count(sampler, plan, 0)
    last_rank = plan.world_size - 1
    if len(plan.shard(0)) == len(plan.shard(last_rank)):
        return (first,) * plan.world_size
    n_longer = len(plan.window) % plan.world_size
    return (first,) * (plan.world_size - n_longer) + (_count(sampler, plan, last_rank),) * n_longer


def _count(sampler: Sampler, plan: EpochPlan, rank: int) -> int:
    name = type(sampler).__name__
    shard = plan.shard(rank)
    try:
        local = localize(private_copy(sampler), shard.rows, plan.n_obs)
        follow_epoch(local, plan.epoch)
        local.validate(len(shard))
        _refuse_short_draws(local, len(shard))
        n_batches = local.n_batches(len(shard))
        if plan.remainder == "exact" and _reads_every_row(sampler):
            _refuse_leaving_out(n_batches, len(shard), plan.batch_size)
    except ValueError as error:
        msg = (
            f"{name} can't run on the rows of rank {rank} of {plan.world_size}, which are {shard.rows} of the "
            f"collection's {plan.n_obs} (remainder={plan.remainder!r}). Given them as [0, {len(shard)}), it says: "
            f"{error}"
        )
        raise ValueError(msg) from error
    return n_batches


def _runs_on_odd_layout(sampler: Sampler, plan: EpochPlan, counts: tuple[int, ...]) -> bool:
    """Whether a sampler that can run on the layout of even epochs can do the same on that of odd ones.

    An epoch that fails after hours of training would be worse than to lose the same rows in all of them.
    """
    try:
        return _count_all(sampler, replace(plan, offset=plan.n_lost)) == counts
    except ValueError:
        return False


def _check_equal(sampler: Sampler, counts: tuple[int, ...], plan: EpochPlan) -> None:
    """Raise if the ranks can't have the same number of batches where that is promised."""
    fewest, most = min(counts), max(counts)
    if plan.remainder == "keep" or fewest == most:
        return
    rank = counts.index(fewest)
    n_rows, name = len(plan.shard(rank)), type(sampler).__name__
    # a batch can be cut in two if it has two rows, and it surely has if all batches of the rank are full
    assert plan.batch_size is not None
    full = fewest > 0 and plan.batch_size > 1 and n_rows % (fewest * plan.batch_size) == 0
    if plan.remainder == "exact" and most - fewest == 1 and full:
        return
    msg = (
        f"remainder={plan.remainder!r} promises the same number of batches on each of the {plan.world_size} ranks, but "
        f"{name} makes {fewest} of the {n_rows} rows of rank {rank}, and {most} on rank {counts.index(most)}. "
    )
    if plan.remainder == "exact":
        msg += (
            "A rank that is one batch short can make up for it only if all its batches are full, of two rows or more. "
        )
    msg += "Use another batch_size, mask or number of ranks, or remainder='keep' without a collective in each step."
    raise ValueError(msg)


# What annbatch's samplers are set to is not public. Where their counts alone don't tell, it is looked at here and
# nowhere else; tests/test_counts.py fails when annbatch changes it.


def _reads_every_row(sampler: Sampler) -> bool:
    """Whether a sampler is one that is meant to read all of its rows, rather than to draw some of them.

    One that was told how many rows to draw keeps to that under every policy. A wrapper that is wrapped again reads a
    part of its rows on each rank.
    """
    if isinstance(sampler, RandomSampler):
        return sampler._num_samples is None and not sampler._replacement
    return not (isinstance(sampler, ClassSampler) or hasattr(sampler, "world_size"))


def _refuse_leaving_out(n_batches: int, n_rows: int, batch_size: int | None) -> None:
    """Raise if so many batches can't hold so many rows."""
    assert batch_size is not None
    if n_batches * batch_size < n_rows:
        msg = (
            f"it makes {n_batches} batches of {batch_size} rows at most, and so leaves out some of its {n_rows} rows, "
            "but remainder='exact' promises every row. Use drop_last=False, or remainder='drop'."
        )
        raise ValueError(msg)


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
