"""Reading: how many rows a loader holds while it reads a plan's, and reads for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from annbatch_distributed.sharding.rows import Rows

__all__ = ["Reading", "reads_per_row"]

#: As many parts of the rows are told apart, and in each as many stretches of as many rows are looked at.
_N_PARTS, _N_STRETCHES, _N_ROWS = 8, 8, 64


class Reading(NamedTuple):
    """How the rows of a plan are read."""

    rows_per_request: int
    """Rows of a load request of the wrapped sampler at most."""
    longest_hole: int = 0
    """How many rows between selected ones are read through."""
    n_requests: int = 1
    """How many load requests a loader holds at a time: one, and those that it reads ahead."""


def reads_per_row(rows: Rows, longest_hole: int) -> float:
    """Return how many rows are read for each of some rows in order, where those are most.

    Where there are holes between them that are read through, it is an estimate from some stretches of the rows, so that
    it takes no more time for more rows.

    >>> from annbatch_distributed.sharding import Rows
    >>> every_fifth = Rows.of(range(0, 10_000, 5))
    >>> (
    ...     reads_per_row(every_fifth, longest_hole=64),
    ...     reads_per_row(every_fifth, longest_hole=3),
    ... )
    (5.0, 1.0)
    """
    length = min(len(rows), _N_ROWS)
    if not longest_hole or length < 2:
        return 1.0
    n_looks = _N_PARTS * _N_STRETCHES
    starts = np.arange(n_looks) * (len(rows) - length) // (n_looks - 1)
    seen = rows.to_global((starts[:, np.newaxis] + np.arange(length)).ravel()).reshape(-1, length)
    holes = np.diff(seen) - 1
    holes[(holes < 0) | (holes > longest_hole)] = 0
    return 1.0 + float(holes.reshape(_N_PARTS, -1).mean(axis=1).max())
