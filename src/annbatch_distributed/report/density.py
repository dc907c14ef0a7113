"""Density: which part of each stretch of a collection some rows are, for pictures of any number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from annbatch_distributed.rows import Int64Array, Rows

__all__ = ["density"]


def density(rows: Rows, n_obs: int, n_bins: int) -> npt.NDArray[np.float64]:
    """Return which part of each of ``n_bins`` stretches of ``n_obs`` rows is among some rows, from 0 to 1.

    The stretches, at most one for each row, are even but for a row. No part is more than 1, whatever is there twice.

    >>> from annbatch_distributed import Rows
    >>> density(Rows((range(0, 5), range(8, 10))), 10, 5)
    array([1. , 1. , 0.5, 0. , 1. ])
    """
    edges = np.array([number * n_obs // n_bins for number in range(n_bins + 1)])  # between rows
    found = np.diff(_before(edges, rows.starts) - _before(edges, rows.stops))
    parts: npt.NDArray[np.float64] = np.minimum(found / np.diff(edges), 1.0)
    return parts


def _before(edges: Int64Array, starts: Int64Array) -> npt.NDArray[np.float64]:
    """For each edge, how many rows lie before it, over half-lines of rows from each start on."""
    which = np.searchsorted(edges, starts, side="right")  # the edges from there on have it before them
    begun, total = (np.cumsum(np.bincount(which, weights, len(edges) + 1))[:-1] for weights in (None, starts))
    # floats, since a sum of rows may be beyond 64 bits
    before: npt.NDArray[np.float64] = begun * edges.astype(np.float64) - total
    return before
