"""Density: which part of each stretch of a collection some rows are, for pictures of rows in any number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from annbatch_distributed.sharding import Rows
    from annbatch_distributed.sharding.rows import Int64Array

__all__ = ["density"]

#: Of more rows, as many are looked at, at even distances.
_MOST = 1 << 18


def density(rows: Rows, n_obs: int, n_bins: int) -> npt.NDArray[np.float64]:
    """Return which part of each of ``n_bins`` stretches of ``n_obs`` rows is among some rows, from 0 to 1.

    The stretches, at most one for each row, are even but for a row. Rows that follow each other count exactly. Of rows
    that are worked out (blocks that were dealt, cells that were selected) some 260,000 are looked at, so that a picture
    of 10^9 of them is made at once. No part is more than 1, whatever is there twice.

    >>> from annbatch_distributed import Rows
    >>> density(Rows((range(0, 5), range(8, 10))), 10, 5)
    array([1. , 1. , 0.5, 0. , 1. ])
    """
    edges = np.array([number * n_obs // n_bins for number in range(n_bins + 1)])  # between rows
    ranges = [(piece.start, piece.stop) for piece in rows.pieces if isinstance(piece, range)]
    starts, stops = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    found = np.diff(_before(edges, starts) - _before(edges, stops))
    for piece in rows.pieces:
        if not isinstance(piece, range):
            n_seen = min(len(piece), _MOST)
            # the middle of each of as many even parts: the whole piece where it is small enough
            seen = piece.to_global((2 * np.arange(n_seen) + 1) * len(piece) // (2 * n_seen))
            found += np.histogram(seen, bins=edges)[0] * (len(piece) / n_seen)
    parts: npt.NDArray[np.float64] = np.minimum(found / np.diff(edges), 1.0)
    return parts


def _before(edges: Int64Array, starts: Int64Array) -> npt.NDArray[np.float64]:
    """For each edge, how many rows lie before it, over half-lines of rows from each start on."""
    starts = np.sort(starts)
    begun = np.searchsorted(starts, edges)
    # floats, since a sum of rows may be beyond 64 bits
    before: npt.NDArray[np.float64] = (
        begun * edges.astype(np.float64) - np.append(0.0, np.cumsum(starts, dtype=float))[begun]
    )
    return before
