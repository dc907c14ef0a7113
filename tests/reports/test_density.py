"""Density of rows along a collection, compared with counting each row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from annbatch_distributed import Rows, Shuffled
from annbatch_distributed.reports.picture import density


def counted(rows: Rows, n_obs: int, n_bins: int) -> list[float]:
    """The filled fraction of each bin, counted row by row."""
    listed, edges = list(rows), [number * n_obs // n_bins for number in range(n_bins + 1)]
    return [min(1.0, sum(start <= row < stop for row in listed) / (stop - start)) for start, stop in pairwise(edges)]


@st.composite
def some_rows(draw: Any) -> tuple[Rows, int, int]:
    n_obs = draw(st.integers(1, 60))
    bounds = st.tuples(st.integers(0, n_obs), st.integers(0, n_obs)).map(lambda both: range(min(both), max(both)))
    return Rows(tuple(draw(st.lists(bounds, max_size=4)))), n_obs, draw(st.integers(1, n_obs))


@given(some_rows())
@example((Rows((range(5), range(3, 8))), 10, 3))  # repeated rows
def test_density_of_ranges_is_exact(drawn: tuple[Rows, int, int]) -> None:
    """The density of each bin is exact, and at most 1 even if rows are repeated."""
    np.testing.assert_allclose(density(*drawn), counted(*drawn), atol=1e-9)


def test_density_of_many_ranges_is_exact() -> None:
    """The density of shuffled blocks and of scattered rows is the same as if each row were counted."""
    flags = np.random.default_rng(0).random(70) < 0.6
    for rows in (Rows.from_mask(flags), Shuffled(3)(Rows((range(70),)), epoch=1, seed=0)):
        for n_bins in (1, 47, 70):
            np.testing.assert_allclose(density(rows, 70, n_bins), counted(rows, 70, n_bins), atol=1e-9)


def test_density_does_not_overflow() -> None:
    """The density is exact for 10**17 rows, where 32-bit numbers and 64-bit sums would overflow."""
    half = Rows((range(5 * 10**16),))
    np.testing.assert_allclose(density(half, 10**17, 1000), np.repeat([1.0, 0.0], 500))
