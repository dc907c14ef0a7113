"""Tallies distinguish sets of rows, whatever their order and batches. Expected values are counted row by row."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import Rows
from annbatch_distributed.checks import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

rows = st.lists(st.integers(0, 40) | st.integers(0, 2**63 - 1), max_size=40)


def of(*batches: list[int]) -> Tally:
    """Count the rows of some batches."""
    tally = Tally()
    for batch in batches:
        tally.add(np.array(batch, dtype=np.int64))
    return tally


@given(rows, rows, st.randoms())
def test_tallies_are_equal_for_equal_row_counts(one: list[int], other: list[int], random: np.random.Generator) -> None:
    """Tallies are equal if and only if each row was counted equally often."""
    assert (of(one) == of(other)) == (Counter(one) == Counter(other))
    again = list(one)
    random.shuffle(again)
    assert of(again[:7], again[7:]) == of(one)


@given(rows, rows)
def test_tallies_add_up(one: list[int], other: list[int]) -> None:
    """The sum of two tallies is the tally of all their rows."""
    total = of(one) + of(other)
    assert total == of(one + other)
    assert (total.n_rows, total.n_batches) == (len(one) + len(other), 2)


def test_ranges_have_the_checksum_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum of ranges equals the checksum of their rows."""
    monkeypatch.setattr("annbatch_distributed.core.rows._AT_ONCE", 10)
    pieces = Rows((range(5, 98), range(2**40, 2**40 + 3), range(7, 9)))
    assert pieces.hash_sum() == of(list(pieces)).value != of(list(pieces)[1:]).value


@pytest.mark.parametrize("at_once", [1, 10, 1 << 14])
def test_tally_is_independent_of_the_buffer_size(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tally doesn't depend on the number of rows that are processed at once."""
    monkeypatch.setattr("annbatch_distributed.checks.agreement._AT_ONCE", at_once)
    tally, buffer = Tally(), np.zeros(4, dtype=np.int64)
    for first in range(0, 40, 4):
        buffer[:] = np.arange(first, first + 4)
        tally.add(buffer)  # the caller then overwrites the batch
    tally.add([])
    assert tally.to_dict() == {"n_batches": 11, "n_rows": 40, "value": Rows((range(40),)).hash_sum()}


def test_tally_distinguishes_rows_of_equal_sum() -> None:
    """Different rows have different tallies, even if their numbers have the same sum."""
    assert of([0, 3]) != of([1, 2])


@pytest.mark.parametrize(
    "copied", [copy.copy, lambda tally: pickle.loads(pickle.dumps(tally)), lambda tally: Tally(**tally.to_dict())]
)
def test_copy_of_a_tally_is_independent(copied: Callable[[Tally], Tally]) -> None:
    """Adding rows to a copy doesn't change the original tally."""
    tally = of([1, 2], [3])
    duplicate = copied(tally)
    duplicate.add([4])
    assert duplicate.to_dict() == of([1, 2], [3], [4]).to_dict()
    assert tally.to_dict() == of([1, 2], [3]).to_dict()


NOT_ROWS: dict[str, tuple[Any, type[Exception], str]] = {
    "fractions": ([0.5], TypeError, "Rows must be integers, got float64"),
    # the index of a batch of a loader without return_index=True
    "None": (None, TypeError, r"Rows must be integers, got None.*return_index=True"),
    "a mask": (np.array([True, False]), TypeError, "Rows must be integers, got bool"),
    "a table": (np.zeros((2, 2), dtype=int), ValueError, r"Rows must have one dimension, got shape \(2, 2\)"),
    "a negative row": ([3, -1], ValueError, "Rows must be at least 0, got -1"),
    "a row beyond 64 bits": (np.array([2**63], dtype=np.uint64), ValueError, "Rows must be below 2"),
}


@pytest.mark.parametrize("name", NOT_ROWS)
def test_invalid_rows_leave_the_tally_unchanged(name: str) -> None:
    """Adding values that aren't rows raises, and the tally stays unchanged."""
    rows, error, message = NOT_ROWS[name]
    tally = of([1, 2], [3])
    with pytest.raises(error, match=message):
        tally.add(rows)
    assert tally.to_dict() == of([1, 2], [3]).to_dict()


@pytest.mark.parametrize(
    "rows", [[5, 3], np.array([5, 3], dtype=">i4"), pd.Series([5, 3], index=[9, 8]), torch.tensor([5, 3])]
)
def test_rows_of_any_container_are_counted(rows: Any) -> None:
    """Rows may be a list, an array of any byte order, a Series or a tensor."""
    tally = Tally()
    tally.add(rows)
    assert tally.to_dict() == of([3, 5]).to_dict()
