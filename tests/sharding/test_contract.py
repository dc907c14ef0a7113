"""What a sharding may say about itself beside how it deals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from annbatch_distributed.sharding import Contiguous, Independent, Rows, Shuffled
from annbatch_distributed.sharding.contract import draws


@dataclass(frozen=True)
class Own:
    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Any:
        return [rows] * world_size


class Draws(Own):
    draws = True


class ReadsOnce(Own):
    draws = False


def test_ranks_draw_where_the_sharding_says_so_and_only_there() -> None:
    assert draws(Draws())
    assert draws(Independent())
    assert not any(map(draws, (Own(), ReadsOnce(), Contiguous(), Shuffled(2))))


def test_a_method_of_the_same_name_says_nothing() -> None:
    class WithAMethod(Own):
        def draws(self) -> bool:
            return True

    assert not draws(WithAMethod())


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_whether_ranks_draw_is_true_or_false(answer: Any) -> None:
    class Odd(Own):
        pass

    Odd.draws = answer  # type: ignore[attr-defined] # as a user might write it
    with pytest.raises(TypeError, match=r"^Odd\.draws must be True, .* or False, .* got .* of type "):
        draws(Odd())
