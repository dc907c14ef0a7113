"""Composition: how many rows of each label every rank has, and how far that is from the window's mix."""

from __future__ import annotations

from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from annbatch_distributed.plan import EpochPlan
    from annbatch_distributed.rows import Int64Array, IntArray, Rows

__all__ = ["Composition", "composition"]

#: How many labels are looked at at once.
_AT_ONCE = 1 << 20


class Composition(NamedTuple):
    """What ranks have of each label."""

    counts: Int64Array
    """For each rank and each label, how many rows of it the rank has; of shape (ranks, labels)."""
    distances: npt.NDArray[np.float64]
    """For each rank, the total variation distance of its labels to the window's: from 0, the same mix, to 1."""


def composition(plan: EpochPlan, labels: object) -> tuple[Composition, list[Any]]:
    """Count the labels of every rank's rows, and return the labels: ascending, and NaN last if some are missing.

    ``labels`` has a value for each row of the collection. Rows are gone through in parts of a bounded size.
    """
    codes, names = _encoded(labels, plan.n_obs)
    # ranks that draw have the same rows, which are counted once
    counted: list[tuple[Rows, Int64Array]] = []

    def count(rows: Rows) -> Int64Array:
        found = next((its for known, its in counted if known is rows), None)
        if found is None:
            found = _count(rows, codes, len(names))
            if plan.n_draws is not None:
                counted.append((rows, found))
        return found

    counts = np.stack([count(plan.shard(rank).rows) for rank in range(plan.world_size)])
    if plan.n_draws is not None or plan.n_repeated:
        window = count(plan.window)
    else:  # which has each row once, on a rank or on none
        window = counts.sum(axis=0) + _count(plan.lost, codes, len(names))
    differences = _shares(counts) - _shares(window[np.newaxis])
    return Composition(counts, np.abs(differences).sum(axis=1) / 2), names


def _encoded(labels: object, n_obs: int) -> tuple[IntArray, list[Any]]:
    """A number for each row that stands for its label, and what they stand for."""
    import pandas as pd

    expected = f"labels must have a value for each of the {n_obs} rows, got"
    given: Any = getattr(labels, "array", labels) if isinstance(labels, pd.Series | pd.Index) else labels
    if not hasattr(given, "__len__") or isinstance(given, str | bytes) or getattr(given, "ndim", 1) != 1:
        raise ValueError(f"{expected} {shortened(labels)} in {getattr(given, 'ndim', 'no')} dimensions.")
    if len(given) != n_obs:
        raise ValueError(f"{expected} {len(given)}.")
    if isinstance(given, pd.Categorical):
        codes, names = given.codes, [*given.categories]
        is_missing = any(bool((codes[start : start + _AT_ONCE] < 0).any()) for start in range(0, n_obs, _AT_ONCE))
        return (np.where(codes < 0, len(names), codes), [*names, np.nan]) if is_missing else (codes, names)
    known = pd.Index([], dtype=object)
    codes, is_missing = np.zeros(n_obs, dtype=np.int16), False
    for start in range(0, n_obs, _AT_ONCE):
        found, values = pd.factorize(pd.Series(given[start : start + _AT_ONCE]))
        known = known.append(pd.Index(values.astype(object)).difference(known, sort=False))
        if len(known) > np.iinfo(codes.dtype).max:
            codes = codes.astype(np.int64)
        places = np.append(known.get_indexer(values.astype(object)), -1)
        codes[start : start + _AT_ONCE] = places[found]  # of what is missing, the last one
        is_missing |= bool((found < 0).any())
    try:
        order = np.argsort(known.to_numpy(), kind="stable")
    except TypeError:  # of several kinds
        order = np.arange(len(known))
    names = [known[place] for place in order]
    ranks = np.append(np.argsort(order, kind="stable"), len(names)).astype(codes.dtype)
    for start in range(0, n_obs, _AT_ONCE):
        codes[start : start + _AT_ONCE] = ranks[codes[start : start + _AT_ONCE]]
    return codes, [*names, np.nan] if is_missing else names


def _count(rows: Rows, codes: IntArray, n_labels: int) -> Int64Array:
    counts = np.zeros(n_labels, dtype=np.int64)
    for part in rows.arrays():
        counts += np.bincount(codes[part], minlength=n_labels)
    return counts


def _shares(counts: Int64Array) -> npt.NDArray[np.float64]:
    """The part of each label, of each row of counts; of nothing, no part."""
    total: npt.NDArray[Any] = counts.sum(axis=1, keepdims=True)
    shares: npt.NDArray[np.float64] = counts / np.maximum(total, 1)
    return shares
