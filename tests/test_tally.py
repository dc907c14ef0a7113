"""Tallies tell rows apart, whatever the order and the batches. What is expected is counted one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import Tally
from annbatch_distributed.sharding import Rows
from annbatch_distributed.sharding.blocks import shuffled
from annbatch_distributed.tally import _P, _X, _powers, _product

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
def test_tallies_add_up_to_that_of_all_rows_and_one_can_be_taken_away_again(one: list[int], other: list[int]) -> None:
    total = of(one) + of(other)
    assert total == of(one + other)
    assert (total.n_rows, total.n_batches) == (len(one) + len(other), 2)
    assert total - of(other) == of(one)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 60)), max_size=8))
def test_a_range_counts_as_its_rows_do(ranges: list[tuple[int, int]]) -> None:
    pieces = Rows(tuple(range(start, start + length) for start, length in ranges))
    assert Tally.of_rows(pieces) == of(list(pieces))


@given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 50), st.integers(0, 200))
def test_a_shard_counts_as_its_rows_do(n_rows: int, block_size: int, start: int, length: int) -> None:
    part = shuffled(Rows((range(7, 7 + n_rows),)), block_size, (0,)).cyclic(start % n_rows, min(length, n_rows))
    assert Tally.of_rows(part) == of(part.to_array().tolist())


def test_more_rows_than_are_looked_at_at_once_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("annbatch_distributed.tally._AT_ONCE", 10)
    assert Tally.of_rows(Rows((range(5, 98),))) == of(list(range(5, 98)))


@pytest.mark.parametrize("row", [0, 1, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**48, 2**62])
def test_powers_are_those_of_pythons_integers(row: int) -> None:
    assert _powers(np.array([row, 3])).tolist() == [pow(_X, row, _P), pow(_X, 3, _P)]


@given(st.lists(st.tuples(st.integers(0, _P - 1), st.integers(0, _P - 1)), min_size=1))
def test_products_are_those_of_pythons_integers(factors: list[tuple[int, int]]) -> None:
    factors += [(_P - 1, _P - 1), (0, _P - 1)]
    left, right = np.array(factors, dtype=np.uint64).T
    assert _product(left, right).tolist() == [one * other % _P for one, other in factors]


def test_sums_of_many_large_numbers_do_not_overflow() -> None:
    many = np.full(1000, 5)
    assert of(many.tolist()).value == 1000 * pow(_X, 5, _P) % _P


def test_batches_are_counted_together_and_the_rows_of_one_can_change_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("annbatch_distributed.tally._AT_ONCE", 80)
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


def test_what_is_not_rows_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Rows must be integers, got float64"):
        Tally().add([0.5])
    with pytest.raises(TypeError, match=r"Rows must be integers, got object.*return_index=True"):
        Tally().add(None)  # what a loader without return_index=True gives
    with pytest.raises(ValueError, match=r"Rows are counted from 0, got -1"):
        Tally().add([3, -1])
