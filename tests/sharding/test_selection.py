"""Selections against the rows that they stand for."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import Shuffled
from annbatch_distributed.sharding import Rows, rows
from annbatch_distributed.sharding.blocks import shuffled
from annbatch_distributed.sharding.selection import BLOCK, Selected, Selection

if TYPE_CHECKING:
    import numpy.typing as npt

    Flags = npt.NDArray[np.bool_]


@st.composite
def flags(draw: st.DrawFn) -> Flags:
    """Booleans of several blocks, some of which have none that is True."""
    size = draw(st.integers(1, 4 * BLOCK))
    found = np.random.default_rng(draw(st.integers(0, 5))).random(size) < draw(st.sampled_from([0.02, 0.5, 0.9]))
    for start in draw(st.lists(st.integers(0, size), max_size=3)):
        found[start : start + draw(st.integers(1, 2 * BLOCK))] = draw(st.booleans())
    return found


def all_of(selection: Selection) -> Rows:
    return Rows((Selected(selection, range(len(selection))),))


@given(flags())
def test_a_selection_has_the_rows_whose_flag_is_set(chosen: Flags) -> None:
    selection, expected = Selection.of_flags(chosen), np.flatnonzero(chosen).tolist()
    assert len(selection) == len(expected)
    assert selection.rows_at(np.arange(len(expected))).tolist() == expected
    if expected:
        selected = all_of(selection)
        assert list(selected) == selected.to_array().tolist() == expected
        assert Selection.of_bounds(*selected.bounds()) == selection
        assert hash(Selection.of_bounds(*selected.bounds())) == hash(selection)
        values = np.arange(len(chosen)) * 3
        assert selected.take(values).tolist() == values[chosen].tolist()
    assert all(selection.rank(row) == sum(chosen[:row]) for row in range(0, len(chosen) + 600, 97))
    assert pickle.loads(pickle.dumps(selection)) == selection is copy.deepcopy(selection)


@given(flags(), st.data())
def test_rows_of_a_selection_are_at_positions_in_any_order(chosen: Flags, data: st.DataObject) -> None:
    expected = np.flatnonzero(chosen)
    selection = Selection.of_flags(chosen)
    if len(expected):
        positions = data.draw(st.lists(st.integers(0, len(expected) - 1)))
        assert selection.rows_at(np.array(positions, dtype=np.int64)).tolist() == expected[positions].tolist()


@given(flags(), st.data())
def test_stretches_of_a_selection_are_those_of_the_list(chosen: Flags, data: st.DataObject) -> None:
    listed = np.flatnonzero(chosen).tolist()
    if not listed:
        return
    selected = all_of(Selection.of_flags(chosen))
    start, length = data.draw(st.integers(0, 2 * len(listed))), data.draw(st.integers(0, 2 * len(listed)))
    found = selected.cyclic(start, length)
    assert found.to_array().tolist() == [listed[place % len(listed)] for place in range(start, start + length)]
    assert found == Rows(found.pieces)
    first, last = sorted((data.draw(st.integers(0, len(chosen))), data.draw(st.integers(0, len(chosen)))))
    assert list(selected.within(first, last)) == [row for row in listed if first <= row < last]
    bounds = sorted((data.draw(st.integers(0, len(listed))), data.draw(st.integers(0, len(listed)))))
    starts, stops, given_ = selected.slices_to_global(*np.array([bounds, [0, 0], bounds]).T)
    assert (starts < stops).all()
    half = [range(*pair) for pair, which in zip(np.c_[starts, stops].tolist(), given_, strict=True) if which == 0]
    assert [row for part in half for row in part] == listed[slice(*bounds)]
    assert given_.tolist() == [0] * len(half) + [2] * len(half)


@given(flags(), st.integers(1, 40), st.integers(0, 3))
def test_a_selection_is_shuffled_in_blocks_of_its_positions(chosen: Flags, block_size: int, key: int) -> None:
    listed = np.flatnonzero(chosen).tolist()
    if not listed:
        return
    order = shuffled(all_of(Selection.of_flags(chosen)), block_size, (key,))
    found = order.blocks_first().to_array().tolist()
    assert sorted(found) == listed == sorted(order)
    whole = [
        listed[start : start + block_size] for start in range(0, len(listed) // block_size * block_size, block_size)
    ]
    assert sorted(found[start : start + block_size] for start in range(0, len(whole) * block_size, block_size)) == whole
    part = order.cyclic(len(listed) // 3, len(listed) // 2)
    assert part.to_array().tolist() == list(part) == (order.to_array().tolist() * 2)[len(listed) // 3 :][: len(part)]


@given(flags(), flags())
def test_rows_are_taken_out_of_a_selection(chosen: Flags, other: Flags) -> None:
    left = Selection.of_flags(chosen).without(Selection.of_flags(other))
    assert list(all_of(left)) == sorted({*np.flatnonzero(chosen).tolist()} - {*np.flatnonzero(other).tolist()})


@given(flags(), st.sampled_from([4, 1 << 20]))
def test_rows_are_those_of_flags_whether_as_ranges_or_as_a_selection(chosen: Flags, most_ranges: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_LISTED", most_ranges)
        found = Rows.where(chosen)
        again = [Rows.of(list(found)), Rows.of_bounds(*found.bounds())]
    assert list(found) == list(again[0]) == list(again[1]) == np.flatnonzero(chosen).tolist()
    assert (len(found.pieces) == 1 and isinstance(found.pieces[0], Selected)) == (len(found.bounds()[0]) > most_ranges)
    assert Rows.of(list(found)[::-1]).to_array().tolist() == list(found)[::-1]


@pytest.mark.parametrize("flags", [np.arange(3), [[True]], np.ones(3), "split", None])
def test_anything_but_booleans_is_no_flag(flags: Any) -> None:
    with pytest.raises(TypeError, match=r"Rows.where takes a boolean array of one dimension, got"):
        Rows.where(flags)


def test_rows_far_apart_take_no_memory_for_those_between() -> None:
    far = np.arange(3000) * 10**12
    found = Rows.of(far)
    assert len(pickle.dumps(found)) < 400_000
    assert found.to_array().tolist() == far.tolist()


def test_very_many_rows_are_selected_at_once_and_kept_as_bits() -> None:
    chosen = np.random.default_rng(0).random(4_000_000, dtype=np.float32) < 0.9
    tracemalloc.start()
    found = Rows.where(chosen)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(pickle.dumps(found)) < 700_000
    assert peak < 8_000_000
    shard = Shuffled(64)(found, epoch=0, seed=0).cyclic(0, len(found) // 2)
    assert len(pickle.dumps((found, shard))) < 700_000  # what they share is there once
    assert len(repr(found)) < 60
    assert len(repr(Rows.of(np.arange(0, 2000, 2)))) < 120
