"""Rows compared with the list of their row numbers."""

from __future__ import annotations

import copy
import pickle
from itertools import accumulate, groupby, pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import Rows
from annbatch_distributed.core.rows import Order, block_bounds, whole_chunks_first

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Ranges in any order, some of which are empty, overlap or continue each other.
ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: range(pair[0], sum(pair))), max_size=6
)


def listed(parts: Iterable[range]) -> list[int]:
    return [row for part in parts for row in part]


def of_bounds(starts: Any, stops: Any) -> list[range]:
    return list(map(range, starts.tolist(), stops.tolist()))


@given(ranges)
def test_rows_join_adjacent_ranges(parts: list[range]) -> None:
    """Rows keep their ranges in order, and join ranges that continue each other."""
    rows, expected = Rows(tuple(parts)), listed(parts)
    assert list(rows) == rows.to_array().tolist() == expected
    assert len(rows) == len(expected)
    joined = of_bounds(rows.starts, rows.stops)
    assert all(joined)
    assert all(before.stop != after.start for before, after in pairwise(joined))
    assert rows.is_contiguous == (len(joined) < 2)
    starts, stops = np.array([(part.start, part.stop) for part in parts], dtype=np.int64).reshape(-1, 2).T
    assert Rows.of_bounds(starts, stops) == rows


@given(ranges, ranges)
def test_rows_are_equal_in_equal_order_only(one: list[range], other: list[range]) -> None:
    """Rows are equal, and have equal hashes, if they are the same rows in the same order."""
    rows = Rows(tuple(one)), Rows(tuple(other))
    assert (rows[0] == rows[1]) == (listed(one) == listed(other))
    again = Rows.from_indices(listed(one))
    assert again == rows[0]
    assert hash(again) == hash(rows[0])
    assert rows[0] != listed(one)
    assert Rows.from_indices(range(3)) != Rows.from_indices(range(4)) != Rows.from_indices(range(1, 4))


@given(ranges, ranges)
def test_rows_can_be_concatenated(before: list[range], after: list[range]) -> None:
    """The sum of two `Rows` has the ranges of the first, then the ranges of the second."""
    assert Rows(tuple(before)) + Rows(tuple(after)) == Rows((*before, *after))


@given(st.lists(st.integers(0, 30)))
def test_rows_of_numbers_keep_their_order(numbers: list[int]) -> None:
    """`Rows.from_indices` keeps the order of numbers, and accepts small integer dtypes."""
    rows = Rows.from_indices(numbers)
    assert list(rows) == rows.to_array().tolist() == numbers
    assert len(rows.starts) == sum(after != before + 1 for before, after in pairwise([-5, *numbers]))
    assert Rows.from_indices(np.array(numbers, dtype=np.uint8)) == rows  # 255 + 1 would be 0


@given(st.lists(st.booleans()))
def test_rows_can_be_made_of_flags(flags: list[bool]) -> None:
    rows = Rows.from_mask(np.array(flags, dtype=np.bool_))
    assert list(rows) == [row for row, flag in enumerate(flags) if flag]
    assert len(rows.starts) == sum(flag for flag, _ in groupby(flags))


@given(ranges, st.data())
def test_cut_equals_a_slice_of_the_list(parts: list[range], data: st.DataObject) -> None:
    """`cut` returns the same rows as a slice of the list."""
    rows, expected = Rows(tuple(parts)), listed(parts)
    start, stop = (data.draw(st.integers(0, len(rows))) for _ in range(2))
    assert list(rows.cut(start, stop)) == expected[start:stop]
    assert list(rows) == expected


@given(ranges.filter(listed), st.integers(-60, 120), st.integers(0, 150))
def test_cyclic_range_continues_at_the_front(parts: list[range], start: int, length: int) -> None:
    """`cyclic` continues at the first row after the last row."""
    rows, expected = Rows(tuple(parts)), listed(parts)
    cyclic = rows.cyclic(start, length)
    assert list(cyclic) == [expected[(start + place) % len(expected)] for place in range(length)]
    assert cyclic == Rows.from_indices(list(cyclic))  # its ranges are joined


@given(ranges.filter(listed), st.data())
def test_local_rows_are_positions_in_the_list(parts: list[range], data: st.DataObject) -> None:
    """`to_global` returns the rows at positions, and `take` returns the values of all rows."""
    rows, expected = Rows(tuple(parts)), listed(parts)
    local = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    global_rows = rows.to_global(np.array(local, dtype=data.draw(st.sampled_from([np.int8, np.uint64]))))
    assert global_rows.tolist() == [expected[place] for place in local]
    assert global_rows.dtype == np.int64
    values = np.arange(50) ** 2
    assert rows.take(values).tolist() == [row**2 for row in expected]


@given(ranges, st.data())
def test_local_slices_become_global_ranges(parts: list[range], data: st.DataObject) -> None:
    """`slices_to_global` turns slices of positions into ranges of the same rows."""
    rows, expected = Rows(tuple(parts)), listed(parts)
    bounds = st.integers(0, len(rows))
    slices = data.draw(st.lists(st.tuples(bounds, bounds)))
    starts, stops, numbers = rows.slices_to_global(*np.array(slices, dtype=np.int64).reshape(-1, 2).T)
    assert starts.dtype == stops.dtype == np.int64
    assert numbers.tolist() == sorted(numbers)
    result: list[list[range]] = [[] for _ in slices]
    for part, number in zip(of_bounds(starts, stops), numbers, strict=True):
        assert part
        result[number].append(part)
    assert list(map(listed, result)) == [expected[start:stop] for start, stop in slices]


@given(ranges, st.integers(1, 12))
def test_block_bounds_are_multiples(parts: list[range], size: int) -> None:
    """`block_bounds` cuts rows where the next row is in a different block, whichever ranges are processed at once."""
    rows = Rows(tuple(parts))
    lengths = [len(list(block)) for _, block in groupby(rows, key=lambda row: row // size)]
    for at_once in (1, 2, 1 << 18):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("annbatch_distributed.core.rows._AT_ONCE", at_once)
            assert block_bounds(rows, size).tolist() == [0, *accumulate(lengths)]


@given(ranges.filter(listed), st.data())
def test_order_expands_requested_rows(parts: list[range], data: st.DataObject) -> None:
    """An order returns the same rows as the list of its rows, whole or in part."""
    rows, expected = Rows(tuple(parts)), listed(parts)
    assert Order.of(rows).to_rows() is rows
    places = data.draw(st.permutations(range(len(expected))).flatmap(lambda order: st.sampled_from([order, order[1:]])))
    order, reordered = Order(rows, Rows.from_indices(places)), [expected[place] for place in places]
    assert len(order) == len(places)
    assert order.to_rows() == Rows.from_indices(reordered)
    start, stop = (data.draw(st.integers(0, len(order))) for _ in range(2))
    assert list(order.cut(start, stop)) == reordered[start:stop]
    if places:
        length = data.draw(st.integers(0, 2 * len(order)))
        assert list(order.cyclic(start, length)) == [reordered[(start + k) % len(order)] for k in range(length)]


def test_rows_are_immutable() -> None:
    """Rows are immutable: a copy is the same object, and the arrays are read-only."""
    starts = np.array([4, 8])
    rows = Rows.of_bounds(starts, starts + 2)
    assert copy.deepcopy(rows) is copy.copy(rows) is rows
    for array in (rows.starts, rows.stops, Rows.from_indices([3, 5]).starts, Rows((range(4),)).stops):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    assert starts.flags.writeable  # the caller's array


def test_rows_of_any_number_stay_small() -> None:
    """Trillions of rows are a few integers, also when they are pickled."""
    rows = Rows((range(10**12), range(2 * 10**12, 3 * 10**12)))
    assert len(rows) == 2 * 10**12
    assert rows.cyclic(10**12 - 1, 2) == Rows((range(10**12 - 1, 10**12), range(2 * 10**12, 2 * 10**12 + 1)))
    rows.to_global(np.array([10**12]))  # the lookup table isn't pickled
    assert len(pickle.dumps(rows)) < 500
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert not pickle.loads(pickle.dumps(rows)).starts.flags.writeable


def test_rows_expand_in_bounded_arrays() -> None:
    """Rows are expanded in arrays of at most 2**18 rows."""
    rows = Rows((range(2_000_000, 3_500_000), range(1_000_000)))
    parts = list(rows.arrays())
    assert max(map(len, parts)) == 1 << 18
    expected = np.r_[2_000_000:3_500_000, :1_000_000]
    assert np.array_equal(np.concatenate(parts), expected)
    values = np.arange(3_500_000, dtype=np.int32)
    assert np.array_equal(rows.take(values), expected)
    assert np.shares_memory(Rows((range(5, 9),)).take(values), values)


def test_rows_print_as_half_open_intervals() -> None:
    """Rows are printed as half-open intervals, or as their number and span if they have many."""
    assert str(Rows((range(3), range(5, 9)))) == "0:3, 5:9"
    assert repr(Rows((range(3),))) == "Rows(0:3)"
    assert str(Rows()) == "none"
    assert Rows.from_indices([1, 3, 5]).format(3) == "1:2, 3:4, 5:6"
    assert Rows.from_indices([1, 3, 5]).format(2) == "3 of 1:6"
    assert len(repr(Rows.from_indices(np.arange(0, 2000, 2)))) < 120


def test_rows_reach_the_64_bit_limit() -> None:
    """The largest row is 2**63 - 2; descending rows and no rows are valid, too."""
    last = 2**63 - 2
    assert list(Rows.from_indices([last])) == list(Rows((range(last, last + 1),))) == [last]
    assert Rows.from_indices(range(5, 0, -1)).to_array().tolist() == [5, 4, 3, 2, 1]
    assert list(Rows().cyclic(3, 0)) == list(Rows().cut(0, 0)) == Rows().to_global(np.arange(0)).tolist() == []


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("n_rows", [1, 9])
def test_whole_chunks_lie_at_multiples(size: int, after: int, n_rows: int) -> None:
    """Whole chunks lie at multiples of their size, whatever the number of rows before them."""
    for start, n, other in product(range(4), range(1, 13), range(4)):
        _check_whole_chunks(Rows((range(start, start + n), range(100 + other, 100 + other + n_rows))), size, after)
        _check_whole_chunks(Rows((range(start, start + n),)), size, after)


def _check_whole_chunks(rows: Rows, size: int, after: int) -> None:
    ordered = list(whole_chunks_first(rows, size, after=after))
    assert sorted(ordered) == list(rows)
    chunks = {row for row in rows if row % size == 0 and {*range(row, row + size)} <= {*rows}}
    at_multiples = range(-after % size, len(ordered), size)
    placed = [ordered[place : place + size] for place in at_multiples]
    n_whole = sum(part == list(range(part[0], part[0] + size)) and part[0] in chunks for part in placed)
    # if too few ragged rows come first, one chunk is split to fill them up
    assert n_whole >= len(chunks) - 1
    n_ragged = len(rows) - size * len(chunks)
    assert n_whole == len(chunks) or n_ragged < -after % size
