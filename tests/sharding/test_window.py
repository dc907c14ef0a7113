"""The window that a mask leaves, and every way in which a mask can be wrong."""

from __future__ import annotations

import re
from reprlib import repr as shortened
from typing import Any

import numpy as np
import pytest

from annbatch_distributed.sharding import resolve_mask, window


@pytest.mark.parametrize(
    ("mask", "resolved", "rows"),
    [
        (slice(None), slice(0, None), "0:100"),
        (slice(0, None), slice(0, None), "0:100"),
        (slice(30), slice(0, 30), "0:30"),
        (slice(30, 100, 1), slice(30, 100), "30:100"),
        (slice(np.int32(3), np.int64(9)), slice(3, 9), "3:9"),
        ([slice(50, None), slice(0, 10)], (slice(0, 10), slice(50, None)), "0:10, 50:100"),
        ((slice(0, 10), slice(10, 20)), (slice(0, 10), slice(10, 20)), "0:20"),
        ([slice(5, 7)], (slice(5, 7),), "5:7"),
    ],
)
def test_a_mask_selects_rows(mask: Any, resolved: Any, rows: str) -> None:
    assert resolve_mask(mask) == resolved
    assert str(window(resolve_mask(mask), 100)) == rows


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (slice(-5, None), "must be >= 0, got slice(-5, None, None)"),
        (slice(0, -5), "must be >= 0, got slice(0, -5, None)"),
        (slice(9, 3), "start < stop"),
        (slice(5, 5), "holds no rows"),
        (slice(0, 0), "holds no rows"),
        (slice(0, 10, 2), "must not have a step"),
        (slice(10, 0, -1), "must not have a step"),
        ([slice(0, 10), slice(9, 20)], "must not overlap, got [0, 10) and [9, 20)"),
        ([slice(5, None), slice(90, 95)], "must not overlap, got [5, end) and [90, 95)"),
        ([slice(0, 5), slice(0, 5)], "must not overlap"),
        ([], "at least one slice"),
        ([slice(0, 5), slice(7, 6)], "start < stop"),
    ],
)
def test_a_mask_that_selects_nothing_or_a_row_twice_is_a_value_error(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_mask(mask)


@pytest.mark.parametrize("mask", [slice(0.0, 5), slice("a", None), [slice(0, 5), 7], range(5), 5, "train", np.ones(3)])
def test_anything_but_slices_of_integers_is_a_type_error_that_shows_it(mask: Any) -> None:
    with pytest.raises(TypeError, match="mask") as raised:
        resolve_mask(mask)
    assert shortened(mask[1] if isinstance(mask, list) else mask) in str(raised.value)


@pytest.mark.parametrize("mask", [slice(0, 101), slice(100, None), slice(100, 120), [slice(0, 10), slice(90, 101)]])
def test_a_mask_beyond_the_collection_is_a_value_error_that_says_how_many_rows_there_are(mask: Any) -> None:
    with pytest.raises(ValueError, match=r"must lie within the collection's rows \[0, 100\)"):
        window(resolve_mask(mask), 100)


def test_slices_that_begin_at_the_same_row_overlap_wherever_they_end() -> None:
    mask: list[Any] = [slice(5, 10), slice(5, None)]
    for slices in (mask, mask[::-1]):
        with pytest.raises(ValueError, match=r"must not overlap, got \[5, "):
            resolve_mask(slices)
