"""Rows against the list that they stand for."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.sharding import Rows

ranges = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda pair: range(pair[0], sum(pair))),
    min_size=1,
    max_size=5,
)


@given(ranges)
def test_rows_are_their_ranges_in_order(parts: list[range]) -> None:
    rows, expected = Rows(tuple(parts)), [row for part in parts for row in part]
    assert list(rows) == rows.to_array().tolist() == expected
    assert len(rows) == len(expected)
    assert all(before.stop != after.start for before, after in zip(rows.pieces, rows.pieces[1:], strict=False))


@given(ranges, st.integers(-60, 120), st.integers(0, 150))
def test_a_cyclic_stretch_goes_on_at_the_front(parts: list[range], start: int, length: int) -> None:
    rows = Rows(tuple(parts))
    enumerated = list(rows)
    expected = [enumerated[(start + position) % len(enumerated)] for position in range(length)]
    found = rows.cyclic(start, length)
    assert list(found) == expected
    assert found == Rows(found.pieces)  # its pieces are joined


@given(ranges, st.integers(0, 60), st.integers(3, 40), st.data())
def test_rows_that_come_again_and_again_are_those_of_the_list(
    parts: list[range], start: int, times: int, data: st.DataObject
) -> None:
    rows = Rows(tuple(parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("annbatch_distributed.sharding.rows._LISTED", 4)
        length = len(rows) * times + data.draw(st.integers(0, 30))
        again = rows.cyclic(start, length)
        part_start = data.draw(st.integers(0, length))
        part_length = data.draw(st.integers(0, length))
        part, twice = again.cyclic(part_start, part_length), again + rows.cyclic(start + length, length)
    listed = [list(rows)[(start + position) % len(rows)] for position in range(length)]
    assert list(again) == again.to_array().tolist() == again.to_global(np.arange(length)).tolist() == listed
    assert len(again) == length
    assert list(part) == (listed + listed)[part_start : part_start + part_length]
    assert again == Rows(again.pieces)
    assert len(twice) == 2 * length
    assert list(twice)[:length] == listed
    stops = data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2).map(sorted))
    bounds = again.slices_to_global(*(np.array([stop]) for stop in stops))[:2]
    found = [row for bound in zip(*bounds, strict=True) for row in range(*bound)]
    assert found == listed[slice(*stops)]
    assert copy.deepcopy(again) == pickle.loads(pickle.dumps(again)) == again


def test_a_row_that_comes_a_billion_times_takes_no_more_than_a_few_numbers() -> None:
    rows = Rows((range(5, 8),)).cyclic(1, 10**9)
    assert len(rows) == 10**9
    assert len(rows.pieces) == 3
    assert str(rows) == "6:8, 5:8 again and again (333333332 times), 5:7"
    assert rows.to_global(np.array([0, 1, 2, 10**9 - 1])).tolist() == [6, 7, 5, 6]
    assert rows.cyclic(10**9 - 1, 3) == Rows((range(6, 7), range(6, 8)))


@given(ranges, ranges)
def test_rows_behind_others_are_joined_to_them(before: list[range], after: list[range]) -> None:
    rows = Rows(tuple(before)) + Rows(tuple(after))
    assert rows == Rows((*before, *after))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_rows_can_be_made_of_bounds(bounds: list[tuple[int, int]]) -> None:
    starts, stops = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
    assert Rows.of_bounds(starts, stops) == Rows(tuple(range(*pair) for pair in bounds))


@given(ranges, st.data())
def test_local_rows_are_positions(parts: list[range], data: st.DataObject) -> None:
    rows = Rows(tuple(parts))
    local = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    assert rows.to_global(np.array(local, dtype=np.int64)).tolist() == [list(rows)[position] for position in local]


@given(ranges, st.data())
def test_slices_of_local_rows_are_those_of_the_list(parts: list[range], data: st.DataObject) -> None:
    rows = Rows(tuple(parts))
    bounds = st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows)))
    slices = data.draw(st.lists(bounds))
    starts, stops = np.array(slices, dtype=np.int64).reshape(-1, 2).T
    found: list[list[int]] = [[] for _ in slices]
    order = []
    for start, stop, which in zip(*rows.slices_to_global(starts, stops), strict=True):
        assert start < stop
        found[which] += range(start, stop)
        order.append(which)
    assert found == [list(rows)[start:stop] for start, stop in slices]
    assert order == sorted(order)


def test_rows_of_any_number_are_a_handful_of_integers() -> None:
    rows = Rows((range(10**12), range(2 * 10**12, 3 * 10**12)))
    assert len(rows) == 2 * 10**12
    assert rows.cyclic(10**12 - 1, 2) == Rows((range(10**12 - 1, 10**12), range(2 * 10**12, 2 * 10**12 + 1)))
    assert len(pickle.dumps(rows)) < 300
    assert copy.deepcopy(rows) == pickle.loads(pickle.dumps(rows)) == rows


@given(st.lists(st.integers(0, 30)))
def test_any_rows_can_be_made_of_a_list(listed: list[int]) -> None:
    rows = Rows.of(listed)
    assert list(rows) == rows.to_array().tolist() == listed
    assert len(rows.pieces) == sum(after != before + 1 for before, after in pairwise([-5, *listed]))


@pytest.mark.parametrize("stretch", [range(0, 12, 3), range(5, 0, -1)])
def test_ranges_with_another_step_are_no_rows(stretch: range) -> None:
    with pytest.raises(ValueError, match=r"ranges with step 1, got range\(.*Rows.of"):
        Rows((stretch,))
    assert list(Rows.of(stretch)) == list(stretch)


def test_rows_read_as_half_open_intervals() -> None:
    assert str(Rows((range(3), range(5, 9)))) == "0:3, 5:9"
    assert str(Rows(())) == "none"
    assert len(Rows(())) == 0


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda pair: range(pair[0], sum(pair))), max_size=4),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_rows_are_narrowed_down_to_those_between_two_bounds(parts: list[range], start: int, stop: int) -> None:
    narrowed = Rows(tuple(parts)).within(start, stop)
    assert list(narrowed) == [row for part in parts for row in part if start <= row < stop]


def test_numbers_of_a_narrow_type_do_not_go_round_its_end() -> None:
    assert list(Rows.of(np.array([255, 0, 1], dtype=np.uint8))) == [255, 0, 1]


def test_bounds_that_meet_are_joined_to_those_right_before_them() -> None:
    starts, stops = np.array([0, 2, 5, 5, 8]), np.array([2, 5, 6, 8, 9])
    assert Rows.of_bounds(starts, stops).pieces == (range(6), range(5, 9))


def test_of_no_rows_the_global_ones_are_integers_too() -> None:
    none = np.array([], dtype=np.int64)
    found = [Rows().to_global(none), *Rows().slices_to_global(none, none)]
    assert [part.tolist() for part in found] == [[]] * 4
    assert all(part.dtype == np.int64 for part in found)


def test_cycles_are_joined_to_their_like_and_to_no_others() -> None:
    one, other = Rows((range(3, 5),)), Rows((range(7, 9),))
    n = 10_000
    alike, unlike = one.cyclic(0, n) + one.cyclic(0, n), one.cyclic(0, n) + other.cyclic(0, n)
    assert (len(alike.pieces), len(unlike.pieces)) == (1, 2)
    assert list(alike) == [3, 4] * n
    assert list(unlike) == [3, 4] * (n // 2) + [7, 8] * (n // 2)
