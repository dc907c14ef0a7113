"""Counts: how many batches the wrapped sampler gives for every rank's shard, or why it can't.

Every rank asks for all ranks, in the same order. What is wrong for one of them therefore raises the same error on every
rank, before any has read a row.

1. The wrapped sampler must accept the shards: one of each length, or every shard if it holds something for each row.
2. Where the policy promises every row, its batches must hold them all.
3. Where the policy promises equal counts, the sampler's own must be equal, or, under ``exact``, such that a short rank
   can make up for a batch.
"""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from annbatch.samplers import RandomSampler

from annbatch_distributed.integers import BOUND
from annbatch_distributed.known import drawable_classes, needs_global_rows, reads_every_row
from annbatch_distributed.stream import prepared

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.plan import EpochPlan

__all__ = ["Classes", "Counts", "count"]

#: A rank, and the classes that it can draw.
type Classes = tuple[int, frozenset[str]]


class Counts(NamedTuple):
    """The wrapped sampler's answers about every rank's shard."""

    sampler_batches: tuple[int, ...]
    """For each rank, the batches that the sampler gives for its shard by itself."""
    classes: tuple[Classes, ...]
    """What each rank can draw, if the sampler is a class sampler."""


def count(sampler: Sampler, plan: EpochPlan) -> Counts:
    """Ask a sampler about every rank's shard of a plan. It is left as it is.

    Of ranks whose shards make no difference to the sampler, one is asked about. A ValueError if any rank could not run,
    or could not have the number of batches that the policy promises.
    """
    differs = needs_global_rows(sampler) and plan.n_draws is None
    kinds = range(plan.world_size) if differs else plan.sizes
    counts: dict[int, int] = {}
    classes: list[Classes] = []
    for rank, kind in enumerate(kinds):
        if kind not in counts:
            local, counts[kind] = _count(sampler, plan, rank)
            if (drawable := drawable_classes(local)) is not None:
                classes.append((rank, drawable))
    sampler_batches = tuple(map(counts.__getitem__, kinds))
    _check_equal(sampler, plan, sampler_batches)
    return Counts(sampler_batches, tuple(classes))


def _count(sampler: Sampler, plan: EpochPlan, rank: int) -> tuple[Sampler, int]:
    """Ask about one rank."""
    shard, size = plan.shard(rank), plan.size(rank)
    try:
        local = prepared(sampler, plan, rank, shard)
        local.validate(len(shard))
        _refuse_short_draws(local, len(shard))
        n_batches = _checked_count(sampler, local.n_batches(len(shard)), len(shard))
        if plan.n_draws is not None or (reads_every_row(sampler) and plan.remainder in ("exact", "pad")):
            _refuse_impossible(n_batches, plan, size)
    except ValueError as error:
        hint = ""
        if drawable_classes(sampler) is not None:  # what is cut short is a run of a class
            hint = (
                " With sharding='independent' every rank draws from all rows, and no boundary between ranks cuts a run."
                if plan.n_draws is None
                else " A mask cuts runs too: write rows that are held out to a collection of their own."
            )
        raise ValueError(
            f"{type(sampler).__name__} can't run on the rows of rank {rank} of {plan.world_size}, which are "
            f"{shard.rows} of the collection's {plan.n_obs} (remainder={plan.remainder!r}). Given them as "
            f"[0, {len(shard)}), it says: {error}{hint}"
        ) from error
    return local, n_batches


def _what(plan: EpochPlan) -> str:
    """Return what ranks share out."""
    return "rows" if plan.n_draws is None else "samples"


def _check_equal(sampler: Sampler, plan: EpochPlan, counts: tuple[int, ...]) -> None:
    """Raise if the ranks can't have the same number of batches where that is promised."""
    most, remainder = max(counts), plan.remainder
    if remainder == "keep" or min(counts) == most:
        return
    short = [rank for rank, n_batches in enumerate(counts) if n_batches < most]
    if remainder == "exact" and all(most - counts[rank] == 1 for rank in short):
        short = [rank for rank in short if not _is_full(sampler, plan, counts[rank], plan.size(rank))]
    if not short:
        return
    rank = short[0]
    halved = "A rank that is one batch short can make up for it only if all its batches are full, of two rows or more. "
    raise ValueError(
        f"remainder={remainder!r} promises the same number of batches on each of the {len(counts)} ranks, but "
        f"{type(sampler).__name__} makes {counts[rank]} of the {plan.size(rank)} {_what(plan)} of rank {rank}, and "
        f"{most} on rank {counts.index(most)}. {halved if remainder == 'exact' else ''}Use another batch_size, "
        "mask or number of ranks, or remainder='keep' without a collective in each step."
    )


def _is_full(sampler: Sampler, plan: EpochPlan, n_batches: int, n_rows: int) -> bool:
    """Whether all batches of a rank are sure to be full, of two rows or more, so that any of them can be halved."""
    size = plan.batch_size
    assert size is not None
    return (plan.n_draws is not None or reads_every_row(sampler)) and size > 1 and 0 < n_rows == n_batches * size


def _refuse_impossible(n_batches: int, plan: EpochPlan, n_rows: int) -> None:
    """Raise a ValueError if so many batches can't hold all rows, or samples, of a rank."""
    policy, size, what = plan.remainder, plan.batch_size, _what(plan)
    if size is None:
        return
    if n_batches * size < n_rows:
        raise ValueError(
            f"it makes {n_batches} batches of {size} rows at most, and so leaves out some of its {n_rows} {what}, but "
            f"remainder={policy!r} promises every {what[:-1]}. Use drop_last=False, or remainder='drop'."
        )
    if n_batches > (n_rows // size if policy in ("drop", "pad") else n_rows):
        kind = f"full batches of {size} rows" if policy in ("drop", "pad") else "batches"
        raise ValueError(
            f"it makes {n_batches} batches, and its {n_rows} {what} are too few for that many {kind}, which "
            f"remainder={policy!r} promises. Mend its n_batches, or use remainder='keep'."
        )


def _checked_count(sampler: Sampler, n_batches: object, n_rows: int) -> int:
    """Return a number of batches as an integer; one that ``np.ceil`` gives is a float."""
    expected = (
        f"{type(sampler).__name__}.n_batches({n_rows}) must return how many batches it yields for {n_rows} rows, an "
        "integer of at least 0 and below 2**63, got "
    )
    if isinstance(n_batches, bool) or not isinstance(n_batches, Integral | float | np.floating):
        # not what it is: other ranks see this, and a user's own object may show anything
        raise TypeError(f"{expected}something of type {type(n_batches).__name__}. Return an int.")
    if not 0 <= float(n_batches) < BOUND or not (isinstance(n_batches, Integral) or n_batches.is_integer()):
        advice = "Round a quotient up with math.ceil where the last batch may be short, else down with //."
        raise ValueError(f"{expected}{n_batches}. {advice}")
    return int(n_batches)


def _refuse_short_draws(sampler: Sampler, n_rows: int) -> None:
    """Raise where annbatch's RandomSampler yields fewer batches than its ``n_batches`` says.

    With ``replacement`` and ``drop_last`` it draws whole chunks only, and counts as if it drew the rest as well.
    tests/test_counts.py fails when annbatch changes it.
    """
    if not (isinstance(sampler, RandomSampler) and sampler._replacement and sampler._drop_last):
        return
    n_samples, chunk_size = sampler._num_samples or n_rows, sampler._chunk_size
    promised, drawn = n_samples // sampler.batch_size, n_samples // chunk_size * chunk_size // sampler.batch_size
    if drawn < promised:
        raise ValueError(
            f"with replacement=True and drop_last=True it draws whole chunks of {chunk_size} rows, which make "
            f"{drawn} batches of the {promised} that {n_samples} samples should be. Use drop_last=False."
        )
