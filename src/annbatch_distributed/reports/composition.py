"""Composition: how many rows of each label every rank has."""

from __future__ import annotations

from reprlib import repr as shortened
from typing import Any

import numpy as np
import pandas as pd

from annbatch_distributed.core.plan import Plan
from annbatch_distributed.core.rows import Rows
from annbatch_distributed.core.values import Int64Array, plural
from annbatch_distributed.reports.words import words_of


def composition(plan: Plan, labels: object) -> pd.DataFrame:
    """Count the labels of every rank's rows: see :meth:`.EpochPlan.composition`.

    The labels are ascending, with NaN last if some are missing.
    """
    words = words_of(plan.units)
    categorical = _categorical(labels, words.n_labels, words.label_noun)
    codes, names = words.of_labels(categorical.codes), [*categorical.categories]
    if codes.min() < 0:
        names.append(np.nan)

    def count(rows: Rows) -> Int64Array:
        # codes 0 1 1 -1 of 3 labels, where -1 is missing, are counted as 1 2 2 0: [1 1 2 0], rolled to [1 2 0 1]
        counts = np.zeros(len(categorical.categories) + 1, dtype=np.int64)
        for part in rows.arrays():
            counts += np.bincount(codes[part].astype(np.int64) + 1, minlength=len(counts))
        return np.roll(counts, -1)[: len(names)]

    # (labels,) of all selected rows, and (ranks, labels): each rank samples from all selected rows, or has its shard
    selected = count(plan.selected)
    if plan.n_samples is not None:
        counts = np.tile(selected, (plan.n_streams, 1))
    else:
        counts = np.stack([count(plan.shard(rank).rows) for rank in range(plan.n_streams)])
    # (ranks, labels): the fraction of each label in a rank's rows; a rank without rows has zeros
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    distances = np.abs(shares - selected / selected.sum()).sum(axis=1) / 2
    table = pd.DataFrame(counts, columns=pd.MultiIndex.from_product([[f"{plan.units.noun}s"], names]))
    table["distance", ""] = distances
    return table


def _categorical(labels: object, n_units: int, noun: str) -> pd.Categorical:
    expected = f"labels must have one value for each of the {plural(n_units, noun)}, got"
    values: Any = getattr(labels, "array", labels) if isinstance(labels, pd.Series | pd.Index) else labels
    if not hasattr(values, "__len__") or isinstance(values, str | bytes) or getattr(values, "ndim", 1) != 1:
        raise ValueError(
            f"{expected} {shortened(labels)} in {getattr(values, 'ndim', 'no')} dimensions. Pass an array or a Series "
            "of one dimension."
        )
    if len(values) != n_units:
        raise ValueError(f"{expected} {len(values):,}. Take them from the obs of the whole collection.")
    return values if isinstance(values, pd.Categorical) else pd.Categorical(values)
