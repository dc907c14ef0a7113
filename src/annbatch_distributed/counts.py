"""Counts: how many batches the wrapped sampler gives for every rank's shard, or why it can't.

Every rank asks for all ranks, in the same order. What is wrong for one of them therefore raises the same error on every
one, before any has read a row.

1. The window must have rows enough for the policy.
2. The wrapped sampler must accept the shards: one of each length if it runs on local rows, every one of them if it is
   tied to absolute rows.
3. Under ``exact``, it must be possible to make the counts equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from annbatch.samplers import RandomSampler

from annbatch_distributed.localize import is_tied, localize
from annbatch_distributed.sharding.remainder import check

if TYPE_CHECKING:
    from collections.abc import Iterable

    from annbatch.abc import Sampler

    from annbatch_distributed.sharding import EpochPlan, Shard
    from annbatch_distributed.sharding.remainder import Movement


class Counts(NamedTuple):
    """What asking the wrapped sampler about every rank's shard has told."""

    natural_batches: dict[int, int]
    """From a shard's length to the batches that the sampler gives for it by itself."""
    movement: Movement
    """How the rows that ``drop`` loses can move from epoch to epoch."""


def count(sampler: Sampler, plan: EpochPlan) -> Counts:
    """Ask a sampler about every rank's shard.

    Parameters
    ----------
    sampler
        The wrapped sampler.
    plan
        The plan of epoch 0, as yet without counts.

    Raises
    ------
    ValueError
        If any rank could not run, or could not have the number of batches that the policy promises.
    """
    check(plan.remainder, n_rows=len(plan.window), world_size=plan.world_size, batch_size=plan.batch_size)
    if is_tied(sampler):
        counts = _count_all(sampler, plan, range(plan.world_size))
        movement = _possible_movement(sampler, plan)
    else:
        # the first and the last rank have all the lengths that there are
        counts, movement = _count_all(sampler, plan, {0, plan.world_size - 1}), "rotate"
    if plan.remainder == "exact":
        _check_exact(counts, plan)
    return Counts(counts, movement)


def _count_all(sampler: Sampler, plan: EpochPlan, ranks: Iterable[int]) -> dict[int, int]:
    return {len(shard := plan.shard(rank)): _count(sampler, rank, shard, plan) for rank in sorted(ranks)}


def _possible_movement(sampler: Sampler, plan: EpochPlan) -> Movement:
    """Whether a sampler that can run on the layout of even epochs can also run on that of odd ones.

    An epoch that fails after hours of training would be worse than to lose the same rows in all of them.
    """
    if not plan.n_lost:
        return "stay"
    try:
        _count_all(sampler, replace(plan, offset=plan.n_lost), range(plan.world_size))
    except ValueError:
        return "stay"
    return "alternate"


def _count(sampler: Sampler, rank: int, shard: Shard, plan: EpochPlan) -> int:
    name = type(sampler).__name__
    n_rows = len(shard)
    try:
        local = localize(sampler, shard.rows, plan.n_obs)
        local.validate(n_rows)
        _refuse_short_draws(local, n_rows)
        count = local.n_batches(n_rows)
        if plan.remainder == "exact":
            _refuse_dropping(local, n_rows, plan.batch_size)
    except ValueError as error:
        msg = (
            f"{name} can't run on the rows of rank {rank} of {plan.world_size}, which are {shard.rows} of the "
            f"collection's {plan.n_obs} (remainder={plan.remainder!r}). Given them as [0, {n_rows}), it says: {error}"
        )
        raise ValueError(msg) from error
    return count


def _refuse_dropping(sampler: Sampler, n_rows: int, batch_size: int | None) -> None:
    """Raise if a sampler leaves out rows that don't fill a batch, which only its counts tell."""
    assert batch_size is not None
    full, rest = divmod(n_rows, batch_size)
    if rest and sampler.n_batches(n_rows) == full and sampler.n_batches((full + 1) * batch_size) == full + 1:
        msg = (
            f"it leaves out the {rest} rows after the last full batch, but remainder='exact' promises every row. "
            "Use drop_last=False, or remainder='drop'."
        )
        raise ValueError(msg)


def _refuse_short_draws(sampler: Sampler, n_rows: int) -> None:
    """Raise where annbatch's RandomSampler yields fewer batches than its ``n_batches`` says.

    With ``replacement`` and ``drop_last`` it draws whole chunks only, and counts as if it drew the rest as well. None
    of this is public; tests/test_counts.py fails when annbatch changes it.
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


def _check_exact(counts: dict[int, int], plan: EpochPlan) -> None:
    """Raise if the ranks that are a batch short can't make up for it."""
    fewest, most = min(counts.values()), max(counts.values())
    n_rows = min(counts)
    if fewest == most:
        return
    if most - fewest > 1 or n_rows < most:
        msg = (
            f"remainder='exact' can't give every rank {most} batches: some of the {plan.world_size} ranks have "
            f"{n_rows} rows of the window's {len(plan.window)}, which the sampler cuts to {fewest} batches. "
            "A rank needs a row for each batch, and can cut one batch more than the sampler does. "
            "Use another batch_size or number of ranks, or remainder='pad' or 'drop'."
        )
        raise ValueError(msg)
