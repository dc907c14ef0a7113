"""Shards with whole chunks first, against rows that are listed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.sharding import Rows
from annbatch_distributed.sharding.aligned import whole_chunks_first
from annbatch_distributed.sharding.blocks import shuffled
from annbatch_distributed.sharding.selection import BLOCK, Selected, Selection

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    type Flags = np.typing.NDArray[np.bool_]


@st.composite
def flags(draw: st.DrawFn) -> Flags:
    """Booleans, True in some stretches and for some rows by themselves."""
    size = draw(st.integers(1, 3 * BLOCK))
    found = np.random.default_rng(draw(st.integers(0, 5))).random(size) < draw(st.sampled_from([0.0, 0.02, 0.9]))
    for start in draw(st.lists(st.integers(0, size), max_size=4)):
        found[start : start + draw(st.integers(1, 2 * BLOCK))] = draw(st.sampled_from([True, True, False]))
    return found


def chunks_at_multiples(rows: list[int], align: int, after: int = 0) -> set[int]:
    """The chunks of which all rows follow each other from a multiple of the number, in the rows and in a shard."""
    return {
        rows[place]
        for place in range(-after % align, len(rows) - align + 1, align)
        if rows[place] % align == 0 and rows[place : place + align] == list(range(rows[place], rows[place] + align))
    }


def whole_chunks(rows: list[int], align: int) -> set[int]:
    """The chunks of which all rows are among some."""
    have = set(rows)
    return {row for row in have if row % align == 0 and have >= set(range(row, row + align))}


@given(flags(), st.integers(2, 40), st.integers(0, 100), st.data())
def test_all_whole_chunks_come_at_multiples_but_for_one_that_fills_a_gap(
    chosen: Flags, align: int, after: int, data: st.DataObject
) -> None:
    listed = np.flatnonzero(chosen)
    start = data.draw(st.integers(0, len(listed)))
    listed = listed[start : data.draw(st.integers(start, len(listed)))]
    found = list(whole_chunks_first(Rows.of(listed), align, after=after))
    assert sorted(found) == listed.tolist()
    expected = whole_chunks(listed.tolist(), align)
    n_missing = len(expected - chunks_at_multiples(found, align, after))
    assert n_missing <= bool(after % align)


@given(flags(), st.integers(2, 700), st.integers(0, 100), st.data())
def test_a_selection_is_taken_apart_like_ranges_unless_hardly_any_of_it_is_whole_chunks(
    chosen: Flags, align: int, after: int, data: st.DataObject
) -> None:
    selection = Selection.of_flags(chosen)
    start = data.draw(st.integers(0, len(selection)))
    places = range(start, data.draw(st.integers(start, len(selection))))
    rows = Rows((Selected(selection, places),) if places else ())
    found = list(whole_chunks_first(rows, align, after=after))
    assert sorted(found) == np.flatnonzero(chosen)[places.start : places.stop].tolist()
    is_worth_it = 4 * align * len(whole_chunks(np.flatnonzero(chosen).tolist(), align)) >= len(selection)
    if not is_worth_it or not places:
        assert found == sorted(found)
        return
    expected = whole_chunks(list(rows), align)
    assert len(expected - chunks_at_multiples(found, align, after)) <= bool(after % align)


@given(flags(), st.sampled_from([2, 5, 8, 16]), st.sampled_from([4, 8, 16]), st.integers(0, 20), st.data())
def test_blocks_come_first_and_count_as_chunks_if_they_are_whole_ones(
    chosen: Flags, align: int, block_size: int, after: int, data: st.DataObject
) -> None:
    order = shuffled(Rows.of(np.flatnonzero(chosen)), block_size, (0,))
    start = data.draw(st.integers(0, len(order)))
    rows = order.cyclic(start, data.draw(st.integers(0, len(order)))) if len(order) else order
    found = list(whole_chunks_first(rows, align, after=after))
    assert sorted(found) == sorted(rows)
    in_blocks = [row for piece in rows.pieces if not isinstance(piece, range) for row in piece]
    if not after:
        assert found[: len(in_blocks)] == in_blocks
    if not block_size % align:
        blocks = {row for row in in_blocks if row % align == 0}
        assert len(blocks - chunks_at_multiples(found, align, after)) <= bool(after % align)


SIZES = {"chunk_size": 8, "preload_nchunks": 4, "batch_size": 16}


def shard(sampler: Sampler, epoch: int, **options: Any) -> list[int]:
    return shard_of(DistributedSampler(sampler, dist_info=Rank(1, 3), seed=0, **options), epoch)


def shard_of(sampler: DistributedSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler.plan(500).shard(1).rows)


def test_samplers_that_keep_an_order_or_draw_have_their_rows_in_order() -> None:
    labels = pd.Categorical(["B"] * 500)
    kept: list[Sampler] = [
        SequentialSampler(**SIZES),
        RandomSampler(**SIZES, replacement=True),
        ClassSampler(**SIZES, classes=labels, num_samples=64),
    ]
    for sampler in kept:
        assert shard(sampler, 1, mask=slice(3, 490)) == sorted(shard(sampler, 1, mask=slice(3, 490)))
    assert shard(RandomSampler(**SIZES), 1, mask=slice(3, 490)) != sorted(
        shard(RandomSampler(**SIZES), 1, mask=slice(3, 490))
    )
    assert shard(RandomSampler(**SIZES), 1, mask=slice(3, 490), align=1) == sorted(
        shard(RandomSampler(**SIZES), 1, mask=slice(3, 490), align=1)
    )


def test_the_grid_is_that_of_the_chunks_unless_it_is_given() -> None:
    found = shard(RandomSampler(**SIZES), 1, mask=slice(3, 490))
    assert len(chunks_at_multiples(found, 8)) == len(found) // 8 - 1
    coarse = shard(RandomSampler(**SIZES), 1, mask=slice(3, 490), align=32)
    assert len(chunks_at_multiples(coarse, 32)) == len(found) // 32 - 1
    assert sorted(coarse) == sorted(found)


def test_a_state_of_another_grid_is_refused() -> None:
    state = DistributedSampler(RandomSampler(**SIZES), dist_info=Rank(0, 2), seed=0).state_dict(batches_done=1)
    other = DistributedSampler(RandomSampler(**SIZES), dist_info=Rank(0, 2), seed=0, align=16)
    with pytest.raises(ValueError, match="align is 8 in the state and 16 here"):
        other.load_state_dict(state)


@pytest.mark.parametrize("align", [0, -1, 1.5, "64", True])
def test_the_grid_is_an_integer_of_at_least_1(align: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"align must be .*, got"):
        DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), align=align)


def test_ranks_of_other_grids_dont_agree() -> None:
    def both(text: str) -> list[str]:
        return [text, text.replace('"rank": 0', '"rank": 1').replace('"align": 8', '"align": 1')]

    sampler = DistributedSampler(RandomSampler(**SIZES), dist_info=Rank(0, 2), seed=0)
    with pytest.raises(ValueError, match="align: 8 on rank 0; 1 on rank 1"):
        sampler.check_ranks_agree(500, gather=both)
