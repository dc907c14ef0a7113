"""Composition: how many rows of each label every rank has, and how far that is from the window's mix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from annbatch_distributed.sharding.selection import chunks

if TYPE_CHECKING:
    import numpy.typing as npt

    from annbatch_distributed.sharding.plan import EpochPlan
    from annbatch_distributed.sharding.rows import Int64Array, IntArray, Rows

__all__ = ["Composition", "composition"]


class Composition(NamedTuple):
    """What ranks have of each label."""

    counts: Int64Array
    """For each rank and each label, how many rows of it the rank has; of shape (ranks, labels)."""
    distances: npt.NDArray[np.float64]
    """For each rank, the total variation distance of its labels to the window's: from 0, the same mix, to 1."""


def composition(plan: EpochPlan, codes: IntArray, n_labels: int) -> Composition:
    """Count the labels of every rank's rows, which are gone through in parts of a bounded size.

    ``codes`` has a number below ``n_labels`` for each row of the collection.
    """
    counts = np.stack([_count(plan.shard(rank).rows, codes, n_labels) for rank in range(plan.world_size)])
    if plan.shares_draws or plan.n_repeated:
        window = _count(plan.window, codes, n_labels)
    else:  # which has each row once, on a rank or on none
        window = counts.sum(axis=0) + _count(plan.lost, codes, n_labels)
    differences = _shares(counts) - _shares(window[np.newaxis])
    return Composition(counts, np.abs(differences).sum(axis=1) / 2)


def _count(rows: Rows, codes: IntArray, n_labels: int) -> Int64Array:
    counts = np.zeros(n_labels, dtype=np.int64)
    for positions in chunks(len(rows)):
        counts += np.bincount(codes[rows.to_global(positions)], minlength=n_labels)
    return counts


def _shares(counts: Int64Array) -> npt.NDArray[np.float64]:
    """The part of each label, of each row of counts; of nothing, no part."""
    total: npt.NDArray[Any] = counts.sum(axis=1, keepdims=True)
    shares: npt.NDArray[np.float64] = counts / np.maximum(total, 1)
    return shares
