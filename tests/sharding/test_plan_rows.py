"""What a plan says of its rows, against every rank's rows listed one by one."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.sharding import Contiguous, Division, EpochPlan, Independent, Rows

if TYPE_CHECKING:
    from annbatch_distributed.sharding import Remainder

WINDOW = Rows((range(10, 30), range(40, 61)))
POLICIES: list[Any] = ["drop", "keep", "exact", "pad"]


def plan(sharding: Any, remainder: Remainder, **changes: Any) -> EpochPlan:
    of_plan: dict[str, Any] = {"n_obs": 100, "batch_size": 4, "segment": 0, "sampler_batches": (1, 1, 1)}
    of_division: dict[str, Any] = {"window": WINDOW, "world_size": 3, "epoch": 0, "seed": 0, "n_samples": None}
    of_plan |= {name: value for name, value in changes.items() if name in of_plan}
    rotations = changes.pop("rotations", 0)
    of_division |= {"batch_size": of_plan["batch_size"]}
    of_division |= {name: value for name, value in changes.items() if name not in of_plan}
    division = Division(sharding, remainder=remainder, **of_division)
    return EpochPlan(division=division, dealt=division.dealt(rotations), **of_plan)


@pytest.mark.parametrize("policy", POLICIES)
@given(st.integers(40, 90), st.integers(1, 5), st.integers(1, 8))
def test_independent_ranks_have_the_whole_window_and_share_out_the_draws(
    policy: Remainder, n_samples: int, world_size: int, batch_size: int
) -> None:
    made = plan(Independent(), policy, world_size=world_size, batch_size=batch_size, n_samples=n_samples)
    assert made.shares_draws
    assert made.lost == Rows()
    assert (made.n_lost, made.n_repeated) == (0, 0)
    for rank in range(world_size):
        assert made.shard(rank).rows == WINDOW
        assert made.shard(rank).n_own == len(WINDOW)
        assert len(made.shard(rank).repeated) == 0
    even = [sum(draw % world_size == world_size - 1 - rank for draw in range(n_samples)) for rank in range(world_size)]
    if policy == "drop":
        even = [n_samples // (world_size * batch_size) * batch_size] * world_size
    if policy == "pad":
        even = [ceil(n_samples / (world_size * batch_size)) * batch_size] * world_size
    assert list(made.sizes) == even


def test_every_rank_has_the_most_batches_that_any_has_unless_rows_are_kept_as_they_are() -> None:
    for policy in POLICIES:
        made = plan(Contiguous(), policy, sampler_batches=(3, 5, 4))
        assert [made.n_batches(rank) for rank in range(3)] == ([3, 5, 4] if policy == "keep" else [5, 5, 5])


@pytest.mark.parametrize(
    ("policy", "n_left", "is_over"),
    [
        ("drop", 11, True),
        ("drop", 12, False),
        ("keep", 0, True),
        ("keep", 1, False),
        ("exact", 0, True),
        ("exact", 1, False),
        ("pad", 0, True),
        ("pad", 1, False),
    ],
)
def test_the_rest_of_an_epoch_is_over_when_no_rank_could_read_of_it(
    policy: Remainder, n_left: int, is_over: bool
) -> None:
    window = Rows((range(n_left),))
    assert plan(Contiguous(), policy, window=window, segment=1).is_over is is_over
    assert plan(Contiguous(), policy, window=window, segment=2).is_over is is_over
    assert plan(Independent(), policy, segment=1, n_samples=n_left).is_over is is_over
    assert not plan(Contiguous(), policy, window=window).is_over  # there is no rest of what has not begun


@pytest.mark.parametrize(("n_left", "is_exhausted"), [(2, True), (3, False)])
def test_without_a_batch_size_a_row_for_each_rank_is_enough(n_left: int, is_exhausted: bool) -> None:
    division = Division(Contiguous(), Rows((range(n_left),)), 3, 0, 0, "drop", None, None)
    assert division.is_exhausted is is_exhausted


def test_the_table_says_what_is_drawn() -> None:
    made = plan(Independent(), "keep", batch_size=None, n_samples=50, sampler_batches=(4, 4, 5))
    settings = 'sharding=Independent(), remainder="keep", no batch size'
    assert str(made).splitlines() == [
        f"epoch 0: 3 ranks draw 50 samples from 41 of 100 rows ({settings})",
        "rank  batches  samples  repeated  global rows",
        "   0        4       16         0  10:30, 40:61",
        "   1        4       17         0  10:30, 40:61",
        "   2        5       17         0  10:30, 40:61",
        "alone, the wrapped sampler draws 50 samples",
    ]


def test_the_table_says_what_is_left_and_how_it_is_dealt() -> None:
    lines = str(plan(Contiguous(), "drop", segment=2, epoch=3)).splitlines()
    assert lines[0] == 'what is left of epoch 3: 3 ranks share 41 of 100 rows (remainder="drop", batch size 4)'
    assert lines[-1] == "lost in this epoch: 5 rows, 12 % (56:61)"


def test_a_table_of_16_ranks_shows_all_of_them_and_one_of_17_all_but_one() -> None:
    for world_size in (16, 17):
        window = Rows((range(2 * world_size + 1),))
        made = plan(Contiguous(), "keep", window=window, world_size=world_size, sampler_batches=(1,) * world_size)
        rows = [line.split() for line in str(made).splitlines()[2:-1]]
        expected = [[str(rank), "1", "2", "0", f"{2 * rank}:{2 * rank + 2}"] for rank in range(world_size)]
        expected[-1] = [str(world_size - 1), "1", "3", "0", f"{2 * world_size - 2}:{2 * world_size + 1}"]
        if world_size == 17:
            expected[15] = ["..."] * 5
        assert rows == expected


def test_rows_in_three_pieces_are_shown_and_of_four_the_first_three() -> None:
    for n_pieces, shown in [(3, "0:1, 2:3, 4:5"), (4, "0:1, 2:3, 4:5, ...")]:
        window = Rows(tuple(range(start, start + 1) for start in range(0, 2 * n_pieces, 2)))
        made = plan(Contiguous(), "keep", window=window, world_size=1, sampler_batches=(1,))
        assert str(made).splitlines()[2].endswith(f"  {shown}")


def test_every_rank_draws_from_all_rows() -> None:
    rows = Rows((range(5),))
    assert Independent()(rows, epoch=0, seed=None) == rows
