"""Who gets which positions, against counting them out."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from annbatch_distributed.sharding.remainder import (
    Even,
    Remainder,
    check,
    drop_offset,
)

job = st.tuples(st.integers(1, 200), st.integers(1, 9), st.integers(1, 12))


def positions(policy: Remainder, n_rows: int, world_size: int, batch_size: int, offset: int = 0) -> list[list[int]]:
    """Every rank's positions, enumerated from what ``Even`` says."""
    found = []
    for rank in range(world_size):
        start, own, length = Even(policy, n_rows, world_size, batch_size).stretch(rank)
        assert own <= length
        found.append([(offset + start + step) % n_rows for step in range(length)])
    return found


@given(job)
def test_drop_in_epoch_0_deals_the_front_of_the_window_in_equal_numbers_of_full_batches(
    sizes: tuple[int, int, int],
) -> None:
    n_rows, world_size, batch_size = sizes
    assume(n_rows >= world_size * batch_size)
    undealt, dealt = list(range(n_rows)), [[] for _ in range(world_size)]
    while len(undealt) >= world_size * batch_size:
        for rank in dealt:
            rank += [undealt.pop() for _ in range(batch_size)]
    found = positions("drop", n_rows, world_size, batch_size)
    assert [len(rank) for rank in found] == [len(rank) for rank in dealt]
    assert [position for rank in found for position in rank] == list(range(n_rows - len(undealt)))
    assert Even("drop", n_rows, world_size, batch_size).n_lost == len(undealt)


@pytest.mark.parametrize("policy", ["keep", "exact"])
@given(job)
def test_keep_and_exact_cut_the_window_as_evenly_as_can_be_the_longer_stretches_last(
    policy: Remainder, sizes: tuple[int, int, int]
) -> None:
    n_rows, world_size, batch_size = sizes
    expected = [part.tolist() for part in np.array_split(np.arange(n_rows)[::-1], world_size)]
    assert [rank[::-1] for rank in positions(policy, n_rows, world_size, batch_size)] == expected[::-1]
    assert Even(policy, n_rows, world_size, batch_size).n_lost == 0


@given(job)
def test_pad_fills_every_ranks_last_batch_with_the_rows_that_follow(sizes: tuple[int, int, int]) -> None:
    n_rows, world_size, batch_size = sizes
    n_batches = next(n for n in range(1, 201) if n * world_size * batch_size >= n_rows)
    kept = positions("keep", n_rows, world_size, batch_size)
    for own, padded in zip(kept, positions("pad", n_rows, world_size, batch_size), strict=True):
        assert padded[: len(own)] == own
        assert len(padded) == n_batches * batch_size
        assert all((after - before) % n_rows == 1 % n_rows for before, after in pairwise(padded))


@given(job, st.integers(0, 50))
def test_the_lost_positions_are_never_dealt_and_move_with_the_epoch(sizes: tuple[int, int, int], epoch: int) -> None:
    n_rows, world_size, batch_size = sizes
    assume(n_rows >= world_size * batch_size)
    lost = Even("drop", n_rows, world_size, batch_size).n_lost
    left_out = []
    for e in (epoch, epoch + 1):
        offset = drop_offset(-e, lost=lost, n_rows=n_rows)
        dealt = [position for rank in positions("drop", n_rows, world_size, batch_size, offset) for position in rank]
        assert len(dealt) == len(set(dealt)) == n_rows - lost
        left_out.append(set(range(n_rows)) - set(dealt))
    assert not left_out[0] & left_out[1]


@pytest.mark.parametrize(
    ("policy", "sizes", "message"),
    [
        (
            "drop",
            (99, 10, 10),
            "has 99 rows, too few for one full batch on every rank: 10 ranks times batch size 10 is 100",
        ),
        ("keep", (3, 4, 2), "has 3 rows, too few for 4 ranks"),
        ("exact", (3, 4, 2), "has 3 rows, too few for 4 ranks"),
    ],
)
def test_too_few_rows_is_an_error_that_counts_them(
    policy: Remainder, sizes: tuple[int, int, int], message: str
) -> None:
    n_rows, world_size, batch_size = sizes
    with pytest.raises(ValueError, match=message):
        check(Even(policy, n_rows, world_size, batch_size), f"The window has {n_rows} rows")
    check(Even(policy, n_rows + 1, world_size, batch_size), "")


def test_pad_needs_a_single_row() -> None:
    check(Even("pad", 1, 5, 7), "")
    assert positions("pad", 1, 5, 7) == [[0] * 7] * 5


def test_no_rows_are_too_few_for_any_policy() -> None:
    with pytest.raises(ValueError, match="The window has 0 rows, and there must be at least one"):
        check(Even("pad", 0, 2, 3), "The window has 0 rows")
    with pytest.raises(ValueError, match="too few for 2 ranks"):
        check(Even("keep", 0, 2, None), "The window has 0 rows")
    assert drop_offset(3, lost=0, n_rows=0) == 0


def test_an_epoch_loses_the_rows_before_those_that_the_last_one_lost() -> None:
    kept = [[(drop_offset(-epoch, lost=2, n_rows=10) + position) % 10 for position in range(8)] for epoch in range(3)]
    assert kept == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 0, 1, 2, 3]]


@given(st.integers(1, 60), st.integers(1, 7))
def test_padded_stretches_begin_where_those_before_them_end(n_rows: int, world_size: int) -> None:
    found = [Even("pad", n_rows, world_size, 3).stretch(rank) for rank in range(world_size)]
    assert [part.start for part in found] == [0, *accumulate(part.own for part in found)][:-1]
    assert sum(part.own for part in found) == n_rows
