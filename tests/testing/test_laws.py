"""The laws hold for the shardings of this package, and notice those that break them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings

from annbatch_distributed import Contiguous, Independent, Shuffled
from annbatch_distributed.sharding import Rows
from annbatch_distributed.testing import check_sharding, deals
from tests.testing.shardings import (
    Counts,
    DrawsBeyond,
    DrawsFromElsewhere,
    GivesAllToRank0,
    GivesNumbers,
    HashesNames,
    LooksAtPythonsState,
    LooksAtTheGlobalState,
    LooksAtTheRank,
    LosesARow,
    NeedsASeed,
    NeverAnswers,
    Overlapping,
    Own,
    RankIsMissing,
    RepeatsARow,
    StraysFromTheWindow,
    Thawed,
)

if TYPE_CHECKING:
    from annbatch_distributed.sharding import Sharding
    from annbatch_distributed.testing import Deal


@pytest.mark.parametrize("sharding", [Contiguous(), Shuffled(5), Independent()], ids=str)
def test_the_shardings_of_this_package_keep_the_laws(sharding: Sharding) -> None:
    check_sharding(sharding)


def test_a_users_own_sharding_with_a_share_for_each_rank_keeps_the_laws() -> None:
    check_sharding(Own(), max_world_size=3)


def test_a_users_own_sharding_whose_ranks_draw_keeps_the_laws() -> None:
    check_sharding(Overlapping(), max_world_size=3)


def test_rows_beyond_the_window_to_draw_from_are_noticed() -> None:
    with pytest.raises(AssertionError, match="A rank draws from rows of the window"):
        check_sharding(DrawsBeyond())


@pytest.mark.parametrize(
    ("broken", "error", "law"),
    [
        (
            LosesARow(),
            AssertionError,
            r"Every row of the window is dealt once and no other, but dealt how often: {\d+: 0}",
        ),
        (RepeatsARow(), AssertionError, r"Every row of the window is dealt once .* {\d+: 2, \d+: 0}"),
        (RankIsMissing(), AssertionError, "There are Rows for each of 2 ranks"),
        (StraysFromTheWindow(), AssertionError, r"Every row of the window is dealt once .* {\d+: 0, \d+: 1}"),
        (LooksAtTheGlobalState(), AssertionError, "The same question has the same answer"),
        (LooksAtPythonsState(), AssertionError, "The same question has the same answer"),
        (Counts(), AssertionError, "The same question has the same answer"),
        (LooksAtTheRank(), AssertionError, "The same question has the same answer in every process"),
        (HashesNames(), AssertionError, "The same question has the same answer in every process"),
        (Thawed(), AssertionError, "A sharding is frozen, but its 'world_size' can be set"),
        (GivesNumbers(), AssertionError, "deal returns Rows, or a list of them, but gave"),
        (GivesAllToRank0(), AssertionError, "No job of two ranks or more could run, with any remainder"),
        (NeverAnswers(), AssertionError, "every question was a ValueError. .*not today"),
        (Shuffled(), AssertionError, "every question was a ValueError"),
        (NeedsASeed(), TypeError, "NoneType"),
        (DrawsFromElsewhere(), AssertionError, "A rank draws from rows of the window"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_sharding_is_noticed(broken: Any, error: type[Exception], law: str) -> None:
    with pytest.raises(error, match=law):
        check_sharding(broken)


def test_a_sharding_may_hold_arrays() -> None:
    @dataclass(frozen=True)
    class Donors:
        """Knows which donor each row is of."""

        donors: np.ndarray

        def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Any:
            listed = rows.to_array()
            return [Rows.of(listed[self.donors[listed] % world_size == rank]) for rank in range(world_size)]

    check_sharding(Donors(np.arange(40) * 7 % 5), n_obs=40)


def test_the_global_random_states_are_left_as_they_were() -> None:
    @dataclass(frozen=True)
    class Local(Own):
        pass

    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 what must not change
    check_sharding(Local(), n_obs=40)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002 what must not change


@given(deals(max_world_size=3))
@settings(max_examples=30)
def test_a_drawn_question_is_of_a_window_of_the_collection(asked: Deal) -> None:
    assert 0 < len(asked.rows) <= asked.n_obs <= 300
    assert set(asked.rows) <= set(range(asked.n_obs))
    assert 1 <= asked.world_size <= 3
    assert asked.ask(Contiguous()) == asked.rows
