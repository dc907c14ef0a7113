"""Load requests: what a loader holds of a plan's rows at a time, with the holes between them that it reads through."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from annbatch_distributed.sharding.rows import Rows

__all__ = ["LoadRequests"]

#: About as many of a rank's rows are looked at, and at least 64 chunks.
_LOOKED_AT = 1 << 14


class LoadRequests(NamedTuple):
    """How a loader reads the rows of a rank."""

    n_rows: int
    """Rows of a load request of the wrapped sampler at most."""
    chunk_size: int
    """How many of them follow each other in the rank's rows; the others may come from anywhere in these."""
    longest_hole: int = 0
    """How many rows between two of a chunk are read through."""
    n_held: int = 1
    """How many load requests a loader holds at a time: one, and those that it reads ahead."""

    def reads_per_row(self, rows: Rows) -> float:
        """Return how many rows are read for each of a rank's rows, in a load request where those are many.

        It is an estimate from some chunks, so that it takes no more time for more rows: the most that is read for one;
        where a load request has more than two, the mean, and three standard deviations of the mean of as many.

        >>> from annbatch_distributed.sharding import Rows
        >>> every_fifth = Rows.of(range(0, 10_000, 5))
        >>> [LoadRequests(512, 64, longest).reads_per_row(every_fifth) for longest in (0, 3, 4)]
        [1.0, 1.0, 4.9375]
        """
        length = min(self.chunk_size, self.n_rows, len(rows))
        if not self.longest_hole or length < 2:
            return 1.0
        n_chunks = len(rows) // length
        n_seen = min(n_chunks, max(64, _LOOKED_AT // length))
        starts = np.arange(n_seen) * n_chunks // n_seen * length
        starts[-1] = len(rows) - length  # what is left over is in some chunk too
        seen = rows.to_global((starts[:, np.newaxis] + np.arange(length)).ravel()).reshape(n_seen, length)
        holes = np.diff(seen) - 1
        holes[(holes < 0) | (holes > self.longest_hole)] = 0
        n_read = length + holes.sum(axis=1)
        largest = n_read.max()
        if self.n_rows > 2 * length:
            largest = min(largest, n_read.mean() + 3 * n_read.std() * math.sqrt(length / self.n_rows))
        return float(largest) / length
