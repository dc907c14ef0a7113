"""Rows against the list that they stand for."""

from __future__ import annotations

import copy
import pickle
from itertools import groupby, pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import Rows
from annbatch_distributed.rows import cut_at_multiples, whole_chunks_first

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
def test_rows_are_their_ranges_in_order_joined_where_they_continue_each_other(parts: list[range]) -> None:
    rows, expected = Rows(tuple(parts)), listed(parts)
    assert list(rows) == rows.to_array().tolist() == expected
    assert len(rows) == len(expected)
    kept = of_bounds(rows.starts, rows.stops)
    assert all(kept)
    assert all(before.stop != after.start for before, after in pairwise(kept))
    assert rows.is_contiguous == (len(kept) < 2)
    starts, stops = np.array([(part.start, part.stop) for part in parts], dtype=np.int64).reshape(-1, 2).T
    assert Rows.of_bounds(starts, stops) == rows


@given(ranges, ranges)
def test_rows_are_equal_if_they_are_the_same_rows_in_the_same_order(one: list[range], other: list[range]) -> None:
    rows = Rows(tuple(one)), Rows(tuple(other))
    assert (rows[0] == rows[1]) == (listed(one) == listed(other))
    again = Rows.of(listed(one))
    assert again == rows[0]
    assert hash(again) == hash(rows[0])
    assert rows[0] != listed(one)
    assert Rows.of(range(3)) != Rows.of(range(4)) != Rows.of(range(1, 4))


@given(ranges, ranges)
def test_rows_can_be_put_behind_others(before: list[range], after: list[range]) -> None:
    assert Rows(tuple(before)) + Rows(tuple(after)) == Rows((*before, *after))


@given(st.lists(st.integers(0, 30)))
def test_rows_can_be_made_of_numbers_in_any_order(numbers: list[int]) -> None:
    rows = Rows.of(numbers)
    assert list(rows) == rows.to_array().tolist() == numbers
    assert len(rows.starts) == sum(after != before + 1 for before, after in pairwise([-5, *numbers]))
    assert Rows.of(np.array(numbers, dtype=np.uint8)) == rows  # 255 + 1 would be 0


@given(st.lists(st.booleans()))
def test_rows_can_be_made_of_flags(flags: list[bool]) -> None:
    rows = Rows.where(np.array(flags, dtype=np.bool_))
    assert list(rows) == [row for row, flag in enumerate(flags) if flag]
    assert len(rows.starts) == sum(flag for flag, _ in groupby(flags))


@given(ranges, st.data())
def test_a_cut_is_that_of_the_list(parts: list[range], data: st.DataObject) -> None:
    rows, expected = Rows(tuple(parts)), listed(parts)
    start, stop = (data.draw(st.integers(0, len(rows))) for _ in range(2))
    assert list(rows.cut(start, stop)) == expected[start:stop]
    assert list(rows) == expected


@given(ranges.filter(listed), st.integers(-60, 120), st.integers(0, 150))
def test_a_cyclic_stretch_goes_on_at_the_front(parts: list[range], start: int, length: int) -> None:
    rows, expected = Rows(tuple(parts)), listed(parts)
    found = rows.cyclic(start, length)
    assert list(found) == [expected[(start + place) % len(expected)] for place in range(length)]
    assert found == Rows.of(list(found))  # its ranges are joined


@given(ranges.filter(listed), st.data())
def test_local_rows_are_places_in_the_list(parts: list[range], data: st.DataObject) -> None:
    rows, expected = Rows(tuple(parts)), listed(parts)
    local = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    found = rows.to_global(np.array(local, dtype=data.draw(st.sampled_from([np.int8, np.uint64]))))
    assert found.tolist() == [expected[place] for place in local]
    assert found.dtype == np.int64
    values = np.arange(50) ** 2
    assert rows.take(values).tolist() == [row**2 for row in expected]


@given(ranges, st.data())
def test_slices_of_local_rows_are_those_of_the_list(parts: list[range], data: st.DataObject) -> None:
    rows, expected = Rows(tuple(parts)), listed(parts)
    bounds = st.integers(0, len(rows))
    slices = data.draw(st.lists(st.tuples(bounds, bounds)))
    starts, stops, which = rows.slices_to_global(*np.array(slices, dtype=np.int64).reshape(-1, 2).T)
    assert starts.dtype == stops.dtype == np.int64
    assert which.tolist() == sorted(which)
    found: list[list[range]] = [[] for _ in slices]
    for part, its in zip(of_bounds(starts, stops), which, strict=True):
        assert part
        found[its].append(part)
    assert list(map(listed, found)) == [expected[start:stop] for start, stop in slices]


@given(ranges, st.integers(1, 12))
def test_ranges_are_cut_at_the_multiples_of_a_size(parts: list[range], size: int) -> None:
    rows = Rows(tuple(parts))
    kept = of_bounds(rows.starts, rows.stops)
    expected = [list(block) for part in kept for _, block in groupby(part, key=lambda row: row // size)]
    assert list(map(list, of_bounds(*cut_at_multiples(rows, size)))) == expected


def test_rows_never_change_so_that_copies_are_the_same_and_arrays_cannot_be_written() -> None:
    given_ = np.array([4, 8])
    rows = Rows.of_bounds(given_, given_ + 2)
    assert copy.deepcopy(rows) is copy.copy(rows) is rows
    for array in (rows.starts, rows.stops, Rows.of([3, 5]).starts, Rows((range(4),)).stops):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    assert given_.flags.writeable  # which is the caller's


def test_rows_of_any_number_are_a_few_integers() -> None:
    rows = Rows((range(10**12), range(2 * 10**12, 3 * 10**12)))
    assert len(rows) == 2 * 10**12
    assert rows.cyclic(10**12 - 1, 2) == Rows((range(10**12 - 1, 10**12), range(2 * 10**12, 2 * 10**12 + 1)))
    rows.to_global(np.array([10**12]))  # what is kept to look up rows isn't pickled
    assert len(pickle.dumps(rows)) < 500
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert not pickle.loads(pickle.dumps(rows)).starts.flags.writeable


def test_rows_are_worked_out_in_arrays_of_a_bounded_length() -> None:
    rows = Rows((range(2_000_000, 3_500_000), range(1_000_000)))
    parts = list(rows.arrays())
    assert max(map(len, parts)) == 1 << 20
    expected = np.r_[2_000_000:3_500_000, :1_000_000]
    assert np.array_equal(np.concatenate(parts), expected)
    values = np.arange(3_500_000, dtype=np.int32)
    assert np.array_equal(rows.take(values), expected)
    assert np.shares_memory(Rows((range(5, 9),)).take(values), values)


def test_rows_read_as_half_open_intervals_and_very_many_as_their_number() -> None:
    assert str(Rows((range(3), range(5, 9)))) == "0:3, 5:9"
    assert repr(Rows((range(3),))) == "Rows(0:3)"
    assert str(Rows()) == "none"
    assert Rows.of([1, 3, 5]).format(3) == "1:2, 3:4, 5:6"
    assert Rows.of([1, 3, 5]).format(2) == "3 of 1:6"
    assert len(repr(Rows.of(np.arange(0, 2000, 2)))) < 120


def test_the_last_row_that_64_bits_can_count_is_one() -> None:
    last = 2**63 - 2
    assert list(Rows.of([last])) == list(Rows((range(last, last + 1),))) == [last]
    assert Rows.of(range(5, 0, -1)).to_array().tolist() == [5, 4, 3, 2, 1]
    assert list(Rows().cyclic(3, 0)) == list(Rows().cut(0, 0)) == Rows().to_global(np.arange(0)).tolist() == []


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("n_rows", [1, 9])
def test_whole_chunks_lie_at_multiples_whatever_comes_before_them(size: int, after: int, n_rows: int) -> None:
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
    # where too few ragged rows come first, one chunk is cut up for it
    assert n_whole >= len(chunks) - 1
    n_ragged = len(rows) - size * len(chunks)
    assert n_whole == len(chunks) or n_ragged < -after % size
