"""Blocks in a shuffled order, against the lists that they stand for."""

from __future__ import annotations

import pickle
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import Shuffled
from annbatch_distributed.sharding import Rows
from annbatch_distributed.sharding.blocks import Blocks, shuffled

#: Ranges that don't touch, as those of a window.
ranges = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30)), min_size=1, max_size=4).map(
    lambda gaps: [
        range(start := sum(map(sum, gaps[:which])) + gap, start + length) for which, (gap, length) in enumerate(gaps)
    ]
)


def blocks_of(parts: list[range], block_size: int) -> list[list[int]]:
    """Every block, ragged ones as well, as a list of rows."""
    return [list(block) for part in parts for _, block in groupby(part, key=lambda row: row // block_size)]


@given(ranges, st.integers(1, 12), st.integers(0, 3))
def test_a_shuffled_order_is_made_of_blocks_that_are_cut_at_the_multiples_of_their_size(
    parts: list[range], block_size: int, seed: int
) -> None:
    left, expected = list(shuffled(Rows(tuple(parts)), block_size, (seed,))), blocks_of(parts, block_size)
    found = []
    while left:
        (block,) = (block for block in expected if block[0] == left[0])
        assert left[: len(block)] == block
        found.append(block)
        left = left[len(block) :]
    assert sorted(found) == sorted(expected)


@given(ranges, st.integers(1, 12), st.integers(-60, 120), st.integers(0, 150), st.data())
def test_stretches_and_slices_of_a_shuffled_order_are_those_of_its_list(
    parts: list[range], block_size: int, start: int, length: int, data: st.DataObject
) -> None:
    order = shuffled(Rows(tuple(parts)), block_size, (0,))
    enumerated = list(order)
    expected = [enumerated[(start + position) % len(enumerated)] for position in range(length)]
    rows = order.cyclic(start, length)
    assert list(rows) == rows.to_array().tolist() == expected
    if not expected:
        return
    local = data.draw(st.lists(st.integers(0, length - 1)))
    assert rows.to_global(np.array(local, dtype=np.int16)).tolist() == [expected[position] for position in local]
    bounds = data.draw(st.lists(st.tuples(st.integers(0, length), st.integers(0, length))))
    starts, stops = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
    found: list[list[int]] = [[] for _ in bounds]
    for global_start, global_stop, which in zip(*rows.slices_to_global(starts, stops), strict=True):
        assert global_start < global_stop
        found[which] += range(global_start, global_stop)
    assert found == [expected[first:last] for first, last in bounds]


@given(ranges, st.integers(1, 12), st.integers(0, 60), st.integers(1, 100))
def test_with_blocks_first_every_whole_block_begins_at_a_multiple_of_its_size(
    parts: list[range], block_size: int, start: int, length: int
) -> None:
    rows = shuffled(Rows(tuple(parts)), block_size, (0,)).cyclic(start, length)
    aligned = rows.blocks_first()
    assert sorted(aligned) == sorted(rows)
    n_whole = sum(len(piece) for piece in rows.pieces if isinstance(piece, Blocks))
    whole = [block for block in blocks_of(parts, block_size) if len(block) == block_size]
    enumerated = list(aligned)
    assert all(enumerated[first : first + block_size] in whole for first in range(0, n_whole, block_size))
    if length <= sum(map(len, parts)):  # joined where ragged ends were between; in two if the end was reached
        assert sum(isinstance(piece, Blocks) for piece in aligned.pieces) <= 2


def test_the_ragged_block_is_at_every_place_in_some_epoch_and_the_blocks_in_every_order() -> None:
    orders = {tuple(Shuffled(2)(Rows((range(5),)), epoch=epoch, seed=0)) for epoch in range(100)}
    assert orders == {
        (*first, *second, *third)
        for first, second, third in [
            ([0, 1], [2, 3], [4]),
            ([2, 3], [0, 1], [4]),
            ([0, 1], [4], [2, 3]),
            ([2, 3], [4], [0, 1]),
            ([4], [0, 1], [2, 3]),
            ([4], [2, 3], [0, 1]),
        ]
    }


def test_another_seed_is_another_order_and_no_epoch_of_one_is_that_of_the_other() -> None:
    rows = Rows((range(1000),))
    orders = [tuple(Shuffled(10)(rows, epoch=epoch, seed=seed)) for epoch in range(5) for seed in range(5)]
    assert len(set(orders)) == 25


def test_a_shuffled_order_of_any_number_of_rows_is_a_few_integers() -> None:
    order = shuffled(Rows((range(10**15), range(2 * 10**15, 2 * 10**15 + 77))), 512, (0, 0))
    assert len(order) == 10**15 + 77
    shard = order.cyclic(10**14 + 3, 10**14).blocks_first()
    assert len(shard) == 10**14
    assert len(pickle.dumps(shard)) < 2_000
    starts, stops, whose = shard.slices_to_global(np.array([0, 512 * 10**9]), np.array([512, 512 * 10**9 + 512]))
    assert (stops - starts).tolist() == [512, 512]
    assert whose.tolist() == [0, 1]


def test_a_row_is_in_the_same_block_in_every_epoch_whatever_the_window() -> None:
    for epoch in range(5):
        for window in (range(64), range(3, 61), range(17, 50)):
            order = Shuffled(8)(Rows((window,)), epoch=epoch, seed=0)
            whole = [piece for piece in order.pieces if isinstance(piece, Blocks)]
            assert {
                start % 8 for piece in whole for start in piece.to_global(np.arange(0, len(piece), 8)).tolist()
            } == {0}


def test_rows_read_as_blocks() -> None:
    assert str(shuffled(Rows((range(4, 16),)), 4, (0,))) == "3 blocks of 4"
    assert str(shuffled(Rows((range(4, 8),)), 4, (0,))) == "1 block of 4"
    assert "8:10" in str(shuffled(Rows((range(4, 10),)), 4, (0,)))


def test_shuffled_rows_cannot_be_narrowed_down() -> None:
    with pytest.raises(TypeError, match="Only rows in ranges can be narrowed down"):
        shuffled(Rows((range(16),)), 4, (0,)).within(0, 3)


@pytest.mark.parametrize("block_size", [0, -3])
def test_a_block_has_at_least_one_row(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size must be at least 1, got {block_size}"):
        Shuffled(block_size)


@pytest.mark.parametrize("block_size", [2.0, "64", [64]])
def test_a_block_size_is_an_integer(block_size: object) -> None:
    with pytest.raises(TypeError, match="block_size must be an integer, got"):
        Shuffled(block_size)


def test_a_block_size_may_be_numpys() -> None:
    assert Shuffled(np.int32(64)) == Shuffled(64)


def test_shuffled_alone_has_neither_seed_nor_block_size() -> None:
    with pytest.raises(ValueError, match="needs a seed"):
        Shuffled(2)(Rows((range(4),)), epoch=0, seed=None)
    with pytest.raises(ValueError, match=r"Shuffled\(\) has no block size of its own"):
        Shuffled()(Rows((range(4),)), epoch=0, seed=0)


def test_orders_are_the_same_as_in_every_version_before() -> None:
    rows, mixed = Rows((range(12),)), Rows((range(1, 8), range(10, 21)))
    assert [list(Shuffled(2)(rows, epoch=epoch, seed=0)) for epoch in range(3)] == [
        [6, 7, 2, 3, 4, 5, 10, 11, 0, 1, 8, 9],
        [0, 1, 4, 5, 2, 3, 10, 11, 8, 9, 6, 7],
        [10, 11, 4, 5, 6, 7, 2, 3, 0, 1, 8, 9],
    ]
    assert list(shuffled(mixed, 4, (5, 2))) == [4, 5, 6, 7, 20, 12, 13, 14, 15, 1, 2, 3, 16, 17, 18, 19, 10, 11]


def test_two_ends_of_blocks_without_a_whole_one_between_them_are_two() -> None:
    orders = {tuple(shuffled(Rows((range(3, 6),)), 4, (seed,))) for seed in range(20)}
    assert orders == {(3, 4, 5), (4, 5, 3)}


def test_a_row_can_be_a_block_and_a_size_is_an_integer_of_python() -> None:
    assert repr(Shuffled(1)) == "Shuffled(block_size=1)"
    assert repr(Shuffled(np.int64(64))) == "Shuffled(block_size=64)"
    assert sorted(shuffled(Rows((range(5),)), 1, (0,))) == [0, 1, 2, 3, 4]
    assert [str(shuffled(Rows((range(4 * n),)), 4, (0,))) for n in (1, 2)] == ["1 block of 4", "2 blocks of 4"]
