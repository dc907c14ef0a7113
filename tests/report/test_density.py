"""The density of rows along a collection, against each row counted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from annbatch_distributed import Rows, Shuffled
from annbatch_distributed.report.density import density


def counted(rows: Rows, n_obs: int, n_bins: int) -> list[float]:
    """Which part of each bin is there, row by row."""
    listed, edges = list(rows), [number * n_obs // n_bins for number in range(n_bins + 1)]
    return [min(1.0, sum(start <= row < stop for row in listed) / (stop - start)) for start, stop in pairwise(edges)]


@st.composite
def some_rows(draw: Any) -> tuple[Rows, int, int]:
    n_obs = draw(st.integers(1, 60))
    bounds = st.tuples(st.integers(0, n_obs), st.integers(0, n_obs)).map(lambda both: range(min(both), max(both)))
    return Rows(tuple(draw(st.lists(bounds, max_size=4)))), n_obs, draw(st.integers(1, n_obs))


@given(some_rows())
def test_stretches_count_exactly_and_no_bin_is_more_than_full(drawn: tuple[Rows, int, int]) -> None:
    np.testing.assert_allclose(density(*drawn), counted(*drawn), atol=1e-9)


@given(st.integers(1, 7), st.integers(0, 3), st.integers(1, 70))
@example(1, 0, 47)  # bins of one row and of two
def test_blocks_and_selected_cells_count_row_by_row(block_size: int, epoch: int, n_bins: int) -> None:
    flags = np.random.default_rng(0).random(70) < 0.6
    for rows in (Rows.where(flags), Shuffled(block_size)(Rows((range(70),)), epoch=epoch, seed=0)):
        half = rows.cyclic(0, len(rows) // 2)
        np.testing.assert_allclose(density(half, 70, n_bins), counted(half, 70, n_bins), atol=1e-9)
        whole = rows + Rows.of(np.setdiff1d(np.arange(70), rows.to_array()))
        assert (density(whole, 70, n_bins) == 1).all()


def test_rows_beyond_what_32_bits_and_sums_of_64_hold_are_where_they_are() -> None:
    half = Rows((range(5 * 10**16),))
    np.testing.assert_allclose(density(half, 10**17, 1000), np.repeat([1.0, 0.0], 500))
