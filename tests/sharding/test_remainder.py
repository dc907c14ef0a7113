"""Who gets which positions, against counting them out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from annbatch_distributed.sharding.remainder import Movement, Remainder, check, drop_offset, n_lost, stretch, turns

job = st.tuples(st.integers(1, 200), st.integers(1, 9), st.integers(1, 12))


def positions(policy: Remainder, n_rows: int, world_size: int, batch_size: int, offset: int = 0) -> list[list[int]]:
    """Every rank's positions, enumerated from what ``stretch`` says."""
    found = []
    for rank in range(world_size):
        start, own, length = stretch(policy, n_rows=n_rows, world_size=world_size, batch_size=batch_size, rank=rank)
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
    assert n_lost("drop", n_rows=n_rows, world_size=world_size, batch_size=batch_size) == len(undealt)


@pytest.mark.parametrize("policy", ["keep", "exact"])
@given(job)
def test_keep_and_exact_cut_the_window_as_evenly_as_can_be_the_longer_stretches_last(
    policy: Remainder, sizes: tuple[int, int, int]
) -> None:
    n_rows, world_size, batch_size = sizes
    expected = [part.tolist() for part in np.array_split(np.arange(n_rows)[::-1], world_size)]
    assert [rank[::-1] for rank in positions(policy, n_rows, world_size, batch_size)] == expected[::-1]
    assert n_lost(policy, n_rows=n_rows, world_size=world_size, batch_size=batch_size) == 0


@given(job)
def test_pad_fills_every_ranks_last_batch_with_the_rows_that_follow(sizes: tuple[int, int, int]) -> None:
    n_rows, world_size, batch_size = sizes
    n_batches = next(n for n in range(1, 201) if n * world_size * batch_size >= n_rows)
    kept = positions("keep", n_rows, world_size, batch_size)
    for own, padded in zip(kept, positions("pad", n_rows, world_size, batch_size), strict=True):
        assert padded[: len(own)] == own
        assert len(padded) == n_batches * batch_size
        assert all((after - before) % n_rows == 1 % n_rows for before, after in pairwise(padded))


@pytest.mark.parametrize("movement", ["rotate", "alternate", "stay"])
@given(job, st.integers(0, 50))
def test_the_lost_positions_are_never_dealt_and_move_with_the_epoch(
    movement: Movement, sizes: tuple[int, int, int], epoch: int
) -> None:
    n_rows, world_size, batch_size = sizes
    assume(n_rows >= world_size * batch_size)
    lost = n_lost("drop", n_rows=n_rows, world_size=world_size, batch_size=batch_size)
    left_out = []
    for e in (epoch, epoch + 1):
        offset = drop_offset(turns(movement, e), lost=lost, n_rows=n_rows)
        dealt = [position for rank in positions("drop", n_rows, world_size, batch_size, offset) for position in rank]
        assert len(dealt) == len(set(dealt)) == n_rows - lost
        left_out.append(set(range(n_rows)) - set(dealt))
        if movement != "rotate":
            assert dealt == sorted(dealt)  # every shard is one stretch
    if movement == "stay":
        assert left_out[0] == left_out[1] == set(range(n_rows - lost, n_rows))
    else:
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
        check(policy, n_rows=n_rows, world_size=world_size, batch_size=batch_size, what=f"The window has {n_rows} rows")
    check(policy, n_rows=n_rows + 1, world_size=world_size, batch_size=batch_size, what="")


def test_pad_needs_a_single_row() -> None:
    check("pad", n_rows=1, world_size=5, batch_size=7, what="")
    assert positions("pad", 1, 5, 7) == [[0] * 7] * 5
