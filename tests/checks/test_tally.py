"""Tallies tell rows apart, whatever the order and the batches. What is expected is counted one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import Shuffled, Tally
from annbatch_distributed.checks.tally import _P, _X
from annbatch_distributed.rows import Rows

rows = st.lists(st.integers(0, 40) | st.integers(0, 2**40), max_size=40)


def of(*batches: list[int]) -> Tally:
    """Count the rows of some batches."""
    tally = Tally()
    for batch in batches:
        tally.add(np.array(batch, dtype=np.int64))
    return tally


@given(rows, rows, st.randoms())
def test_tallies_are_equal_if_and_only_if_each_row_was_counted_as_often(
    one: list[int], other: list[int], random: np.random.Generator
) -> None:
    assert (of(one) == of(other)) == (Counter(one) == Counter(other))
    again = list(one)
    random.shuffle(again)
    assert of(again[:7], again[7:]) == of(one)


@given(rows, rows)
def test_tallies_add_up_to_that_of_all_rows(one: list[int], other: list[int]) -> None:
    total = of(one) + of(other)
    assert total == of(one + other)
    assert (total.n_rows, total.n_batches) == (len(one) + len(other), 2)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 60)), max_size=8))
def test_a_range_counts_as_its_rows_do(ranges: list[tuple[int, int]]) -> None:
    pieces = Rows(tuple(range(start, start + length) for start, length in ranges))
    assert Tally.of_rows(pieces) == of(list(pieces))


@given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 50), st.integers(0, 200))
def test_a_shard_counts_as_its_rows_do(n_rows: int, block_size: int, start: int, length: int) -> None:
    part = Shuffled(block_size)(Rows((range(7, 7 + n_rows),)), epoch=0, seed=0).cyclic(
        start % n_rows, min(length, n_rows)
    )
    assert Tally.of_rows(part) == of(part.to_array().tolist())


def test_more_rows_than_are_looked_at_at_once_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("annbatch_distributed.checks.tally._ROWS_OF_RANGES", 10)
    assert Tally.of_rows(Rows((range(5, 98),))) == of(list(range(5, 98)))


def test_sums_of_many_large_numbers_do_not_overflow() -> None:
    many = np.full(1000, 5)
    assert of(many.tolist()).value == 1000 * pow(_X, 5, _P) % _P


def test_batches_are_counted_together_and_the_rows_of_one_can_change_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("annbatch_distributed.checks.tally._AT_ONCE", 80)
    tally, buffer = Tally(), np.zeros(4, dtype=np.int64)
    for first in range(0, 40, 4):
        buffer[:] = np.arange(first, first + 4)
        tally.add(buffer)
    tally.add([])
    assert tally == of(list(range(40)))
    assert (tally.n_batches, tally.n_rows) == (11, 40)


def test_powers_do_not_come_again_as_far_as_there_are_rows() -> None:
    # the order of a number divides p - 1; of these primes, only 2 can be left out
    primes = [2, 3, 5, 7, 11, 13, 31, 41, 61, 151, 331, 1321]
    rest = _P - 1
    for prime in primes:
        while rest % prime == 0:
            rest //= prime
    assert rest == 1
    assert all(pow(_X, (_P - 1) // prime, _P) != 1 for prime in primes[1:])


NOT_ROWS: dict[str, tuple[Any, type[Exception], str]] = {
    "fractions": ([0.5], TypeError, "Rows must be integers, got float64"),
    "whole floats": (np.array([1.0]), TypeError, "Rows must be integers, got float64"),
    # what a loader without return_index=True gives
    "None": (None, TypeError, r"Rows must be integers, got object.*return_index=True"),
    "a mask": (np.array([True, False]), TypeError, "Rows must be integers, got bool"),
    "objects": (np.array([1, 2], dtype=object), TypeError, "Rows must be integers, got object"),
    "texts": (["1"], TypeError, "Rows must be integers, got <U1"),
    "dates": (np.array(["2020-01-01"], dtype="datetime64[s]"), TypeError, "Rows must be integers, got datetime64"),
    "a generator": ((row for row in range(3)), TypeError, "Rows must be integers, got object"),
    "numbers beyond words": ([2**70], TypeError, "Rows must be integers, got object"),
    "a nullable series": (pd.Series([1, None], dtype="Int64"), TypeError, "Rows must be integers, got"),
    "a table": (
        np.zeros((2, 2), dtype=int),
        ValueError,
        r"Rows must have one dimension, got an array of shape \(2, 2\)",
    ),
    "a negative row": ([3, -1], ValueError, "Rows are counted from 0, got -1"),
    "a row that is the same as row 0": ([2**60 - 1], ValueError, "Rows must be below 1152921504606846975, got"),
    "a row beyond the prime": ([2**61], ValueError, "Rows must be below"),
    "an unsigned row": (np.array([2**64 - 1], dtype=np.uint64), ValueError, "Rows must be below"),
}


@pytest.mark.parametrize("name", NOT_ROWS)
def test_what_is_not_rows_is_refused_and_the_tally_stays_as_it_was(name: str) -> None:
    rows, error, message = NOT_ROWS[name]
    tally = of([1, 2], [3])
    with pytest.raises(error, match=message):
        tally.add(rows)
    assert tally.to_dict() == of([1, 2], [3]).to_dict()


@pytest.mark.parametrize(
    "rows",
    [
        [5, 3],
        (5, 3),
        np.array([5, 3], dtype=np.uint8),
        np.array([5, 3], dtype=">i4"),
        np.array([5, 0, 3])[::2],
        pd.Series([5, 3], index=[9, 8]),
        torch.tensor([5, 3]),
        range(5, 1, -2),
    ],
)
def test_rows_are_counted_whatever_holds_them(rows: Any) -> None:
    tally = Tally()
    tally.add(rows)
    assert tally.to_dict() == of([3, 5]).to_dict()


def test_a_single_row_and_the_last_one_there_can_be_are_batches_too() -> None:
    tally = Tally()
    tally.add(7)
    tally.add([2**60 - 2])
    assert (tally.n_batches, tally.n_rows, tally.largest) == (2, 2, 1)
    assert tally.value == (pow(_X, 7, _P) + pow(_X, 2**60 - 2, _P)) % _P
    assert pow(_X, 2**60 - 1, _P) == 1  # which is why there are no more


@pytest.mark.parametrize("size", [99, 100, 101, 205])
def test_batches_around_the_number_that_is_counted_at_once_count_as_others(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = of(list(range(size)), [1, 2, 3]).to_dict()
    monkeypatch.setattr("annbatch_distributed.checks.tally._AT_ONCE", 100)
    assert of(list(range(size)), [1, 2, 3]).to_dict() == expected
    assert of([1, 2, 3], list(range(size))).to_dict() == expected


ODD_NUMBERS: dict[str, tuple[tuple[Any, ...], type[Exception]]] = {
    "negative batches": ((-1,), ValueError),
    "negative rows": ((0, -1), ValueError),
    "a float": ((1.0,), TypeError),
    "a text": (("1",), TypeError),
    "None": ((0, None), TypeError),
    "a boolean": ((True,), TypeError),
    "a value that is no remainder": ((1, 1, _P), ValueError),
    "a negative value": ((1, 1, -1), ValueError),
    "a value of no rows": ((0, 0, 1), ValueError),
    "a huge negative number": ((-(10**5000),), ValueError),
}


@pytest.mark.parametrize("name", ODD_NUMBERS)
def test_a_tally_of_odd_numbers_is_an_error(name: str) -> None:
    numbers, error = ODD_NUMBERS[name]
    with pytest.raises(error, match="Tally"):
        Tally(*numbers)


def test_a_tally_comes_back_from_its_dict() -> None:
    tally = of([1, 2], [3])
    assert Tally(**tally.to_dict()).to_dict() == tally.to_dict() == {**tally.to_dict(), "largest": 2}
    assert {type(number) for number in Tally(np.int64(1), np.uint8(2), np.int64(3)).to_dict().values()} == {int}


def test_only_tallies_can_be_added_to_one() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        Tally() + 1  # type: ignore[operator]  # no Tally, to be refused


def test_only_rows_of_a_plan_are_counted_without_a_look_at_each() -> None:
    with pytest.raises(TypeError, match=r"rows must be Rows.*Tally\(\).add\(rows\)"):
        Tally.of_rows([1, 2])
    with pytest.raises(ValueError, match="Rows must be below"):
        Tally.of_rows(Rows((range(2**60, 2**60 + 5),)))
