"""What a plan says of its rows, against every rank's rows listed one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice, pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.sharding import Contiguous, Division, EpochPlan, Independent, Rows, Shuffled
from annbatch_distributed.sharding.division import Order, Shares
from tests.samplers import flat

if TYPE_CHECKING:
    from annbatch_distributed.sharding import Remainder

WINDOW = Rows((range(10, 30), range(40, 61)))
POLICIES: list[Any] = ["drop", "keep", "exact", "pad"]


@dataclass(frozen=True)
class Uneven:
    """Deals each rank a stretch of its own size."""

    sizes: tuple[int, ...]

    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> list[Rows]:
        bounds = pairwise(accumulate(self.sizes, initial=0))
        return [rows.cyclic(start, stop - start) for start, stop in bounds]


@dataclass(frozen=True)
class Answering:
    """Gives prepared answers, one after the other, and remembers what it was asked."""

    answers: tuple[Any, ...]
    asked: list[Any] = field(default_factory=list, compare=False)

    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Any:
        self.asked.append((rows, world_size, epoch, seed))
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        return rows if answer is None else answer


def plan(sharding: Any, remainder: Remainder, **changes: Any) -> EpochPlan:
    of_plan: dict[str, Any] = {"n_obs": 100, "batch_size": 4, "segment": 0, "sampler_batches": (1, 1, 1)}
    of_division: dict[str, Any] = {"window": WINDOW, "world_size": 3, "epoch": 0, "seed": 0, "n_samples": None}
    of_plan |= {name: value for name, value in changes.items() if name in of_plan}
    rotations = changes.pop("rotations", 0)
    of_division |= {"batch_size": of_plan["batch_size"]}
    of_division |= {name: value for name, value in changes.items() if name not in of_plan}
    division = Division(sharding, remainder=remainder, **of_division)
    return EpochPlan(division=division, dealt=division.dealt(rotations), **of_plan)


def shares(world_size: int) -> st.SearchStrategy[Uneven]:
    """Shares of at least 5 rows, for up to 5 ranks."""
    cuts = st.lists(st.integers(0, len(WINDOW) - 5 * world_size), min_size=world_size - 1, max_size=world_size - 1)
    return cuts.map(
        lambda cuts: Uneven(
            tuple(5 + after - before for before, after in pairwise([0, *sorted(cuts), len(WINDOW) - 5 * world_size]))
        )
    )


def rotations_of(made: EpochPlan) -> int:
    """How often the lost rows have moved on, in a plan that was made by ``plan``."""
    return next(rotations for rotations in range(-3, 4) if made.division.dealt(rotations) is made.dealt)


plans = st.integers(1, 5).flatmap(
    lambda world_size: st.builds(
        plan,
        shares(world_size) | st.sampled_from([Contiguous(), Shuffled(3), Shuffled(7)]),
        st.sampled_from(POLICIES),
        world_size=st.just(world_size),
        batch_size=st.integers(1, 5),
        epoch=st.integers(0, 3),
        rotations=st.integers(-3, 3),
    )
)


@given(plans)
def test_own_rows_and_lost_ones_are_the_window_and_the_numbers_are_counted_right(made: EpochPlan) -> None:
    shards = [made.shard(rank) for rank in range(made.world_size)]
    own = [list(shard.rows)[: shard.n_own] for shard in shards]
    repeated = [list(shard.rows)[shard.n_own :] for shard in shards]
    assert sorted([*flat(own), *made.lost]) == list(WINDOW)
    assert [list(shard.repeated) for shard in shards] == repeated
    assert made.sizes == tuple(map(len, shards)) == tuple(len(list(shard.rows)) for shard in shards)
    assert made.n_lost == len(list(made.lost))
    assert made.n_repeated == sum(map(len, repeated))
    assert not made.shares_draws
    if made.remainder != "drop":
        assert made.n_lost == 0
    if made.remainder != "pad":
        assert made.n_repeated == 0


@given(plans)
def test_shards_have_the_sizes_that_the_policy_promises(made: EpochPlan) -> None:
    batch_size, world_size = made.batch_size, made.world_size
    assert batch_size is not None
    own = [made.shard(rank).n_own for rank in range(world_size)]
    # as shared out by giving each rank a row in turn, the last rank first
    dealt = [sum(row % world_size == world_size - 1 - rank for row in range(len(WINDOW))) for rank in range(world_size)]
    if isinstance(made.sharding, Uneven):
        dealt = list(made.sharding.sizes)
        assert isinstance(made.dealt, Shares)
        assert made.dealt.uneven.lengths == made.sharding.sizes
    if made.remainder == "drop":
        assert len(set(made.sizes)) == 1
        n_full = max(n for n in range(42) if all(n * batch_size <= size for size in dealt))
        assert made.sizes[0] == n_full * batch_size
        return
    assert own == dealt
    if made.remainder == "pad":
        assert len(set(made.sizes)) == 1
        n_full = min(n for n in range(1, 100) if all(n * batch_size >= size for size in dealt))
        assert made.sizes[0] == n_full * batch_size
    else:
        assert list(made.sizes) == dealt


@given(plans)
def test_shards_follow_each_other_round_the_window_with_the_lost_rows_before_them(made: EpochPlan) -> None:
    if isinstance(made.sharding, Shuffled):
        return
    own = [list(made.shard(rank).rows)[: made.shard(rank).n_own] for rank in range(made.world_size)]
    rounds = [(list(WINDOW), [*flat(own), *made.lost], len(list(made.lost)))]
    if isinstance(made.sharding, Uneven):
        dealt = made.sharding.deal(WINDOW, world_size=made.world_size, epoch=0, seed=None)
        rounds = [
            (list(share), [*rows, *(row for row in made.lost if row in list(share))], len(share) - len(rows))
            for share, rows in zip(dealt, own, strict=True)
        ]
    for in_order, found, n_lost in rounds:
        first = rotations_of(made) * n_lost % len(in_order) if n_lost else 0
        assert found == in_order[first:] + in_order[:first]


@given(plans)
def test_repeats_are_the_rows_that_come_next(made: EpochPlan) -> None:
    for rank in range(made.world_size):
        shard = made.shard(rank)
        repeated = list(shard.repeated)
        if isinstance(made.sharding, Uneven):
            assert repeated == list(islice(cycle(list(shard.rows)[: shard.n_own]), len(repeated)))
        else:
            assert isinstance(made.dealt, Order)
            order = list(made.dealt.rows)
            n_before = sum(made.shard(other).n_own for other in range(rank + 1))
            assert repeated == list(islice(cycle(order), n_before, n_before + len(repeated)))


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


def test_what_has_been_dealt_is_not_dealt_again() -> None:
    sharding = Answering((None,))
    division = plan(sharding, "drop", epoch=5, seed=8).division
    assert [asked[1:] for asked in sharding.asked] == [(3, 5, 8)] * 2
    assert [len(asked[0]) for asked in sharding.asked] == [41, 36]
    division.dealt(0).shard(1)
    assert len(sharding.asked) == 2
    rotated = division.dealt(1)
    assert list(rotated.lost) == list(WINDOW)[:5]
    assert rotated.shard(0).rows.pieces[0].start == list(WINDOW)[5]
    assert len(sharding.asked) == 3


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ((7,), TypeError, r"deal must return Rows, or a list of them with one for each rank, got 7\."),
        (([WINDOW, WINDOW, 7],), TypeError, "deal must return Rows, or a list of them with one for each rank, got "),
        (([WINDOW],), ValueError, r"deal must return Rows for each of the 3 ranks, got 1\."),
        (([Rows()] * 4,), ValueError, r"deal must return Rows for each of the 3 ranks, got 4\."),
        (
            (WINDOW.cyclic(0, 40),),
            ValueError,
            r"each of the 41 rows of 10:30, 40:61 once and no other; it dealt 40\. .*check_sharding",
        ),
        ((WINDOW.cyclic(0, 42),), ValueError, "it dealt 42"),
        ((WINDOW.cyclic(0, 40) + Rows((range(7, 8),)),), ValueError, "it dealt 41"),
        (([WINDOW.cyclic(0, 10), WINDOW.cyclic(0, 10), WINDOW.cyclic(20, 21)],), ValueError, "it dealt 41"),
        (
            (None, [WINDOW.cyclic(0, 12)] * 3),
            ValueError,
            "each of the 36 rows of 10:30, 40:56 once",
        ),
        (
            (None, [WINDOW.cyclic(0, 12), WINDOW.cyclic(12, 12), WINDOW.cyclic(24, 12)]),
            TypeError,
            "deal must return one Rows for every window, or a list of them for every window",
        ),
    ],
)
def test_a_sharding_that_breaks_its_contract_is_an_error_that_says_how(
    answers: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(Answering(answers), "drop").shard(0)


def test_ranges_in_any_order_and_blocks_may_be_dealt() -> None:
    backwards = WINDOW.cyclic(30, 11) + WINDOW.cyclic(0, 30)
    assert plan(Answering((backwards,)), "keep").shard(0).rows == backwards.cyclic(0, 13)
    assert plan(Shuffled(2), "keep").division.answer == Shuffled(2).deal(WINDOW, world_size=3, epoch=0, seed=0)
    made = plan(Answering(([backwards.cyclic(0, 20), Rows(), backwards.cyclic(20, 21)],)), "keep")
    assert made.division.answer == (backwards.cyclic(0, 20), Rows(), backwards.cyclic(20, 21))


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
    lines = str(plan(Uneven((5, 30, 6)), "drop", segment=2, epoch=3)).splitlines()
    assert lines[0] == (
        "what is left of epoch 3: 3 ranks share 41 of 100 rows "
        '(sharding=Uneven(sizes=(5, 30, 6)), remainder="drop", batch size 4)'
    )
    assert lines[-1] == "lost in this epoch: 29 rows, 71 % (14:15, 19:30, 40:55, ...)"


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
    assert Independent().deal(rows, world_size=3, epoch=0, seed=None) == [rows, rows, rows]
