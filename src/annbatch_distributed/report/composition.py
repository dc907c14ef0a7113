"""Composition: how many rows of each label every rank has, and how far that is from the window's mix."""

from __future__ import annotations

from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd

    from annbatch_distributed.plan import EpochPlan
    from annbatch_distributed.rows import Int64Array, Rows

__all__ = ["Composition", "composition"]


class Composition(NamedTuple):
    """What ranks have of each label."""

    counts: Int64Array
    """For each rank and each label, how many rows of it the rank has; of shape (ranks, labels)."""
    distances: npt.NDArray[np.float64]
    """For each rank, the total variation distance of its labels to the window's: from 0, the same mix, to 1."""


def composition(plan: EpochPlan, labels: object) -> tuple[Composition, list[Any]]:
    """Count the labels of every rank's rows, and return the labels: ascending, and NaN last if some are missing.

    ``labels`` has a value for each row of the collection.
    """
    categorical = _categorical(labels, plan.n_obs)
    codes, names = categorical.codes, [*categorical.categories]
    if codes.min() < 0:
        names.append(np.nan)

    def count(rows: Rows) -> Int64Array:
        counts = np.zeros(len(categorical.categories) + 1, dtype=np.int64)
        for part in rows.arrays():
            counts += np.bincount(codes[part].astype(np.int64) + 1, minlength=len(counts))
        return np.roll(counts, -1)[: len(names)]  # the code of missing labels is -1

    window = count(plan.window)
    if plan.n_draws is not None:
        counts = np.tile(window, (plan.world_size, 1))
    else:
        counts = np.stack([count(plan.shard(rank).rows) for rank in range(plan.world_size)])
    # a rank without rows has no share of any label
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return Composition(counts, np.abs(shares - window / window.sum()).sum(axis=1) / 2), names


def _categorical(labels: object, n_obs: int) -> pd.Categorical:
    import pandas as pd

    expected = f"labels must have a value for each of the {n_obs} rows, got"
    values: Any = getattr(labels, "array", labels) if isinstance(labels, pd.Series | pd.Index) else labels
    if not hasattr(values, "__len__") or isinstance(values, str | bytes) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"{expected} {shortened(labels)} in {getattr(values, 'ndim', 'no')} dimensions.")
    if len(values) != n_obs:
        raise ValueError(f"{expected} {len(values)}.")
    return values if isinstance(values, pd.Categorical) else pd.Categorical(values)
