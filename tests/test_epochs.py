"""Epochs answer for each position alone, whatever they were asked before."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import Rank
from annbatch_distributed.core.epochs import Epochs
from annbatch_distributed.core.lanes import Segment
from annbatch_distributed.core.state import Position
from annbatch_distributed.ranks import RankSource
from tests.samplers import MaskBlind, batches, config_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest


class Irregular(MaskBlind):
    """A sampler of three batches, of which the small one is at a random place in each pass."""

    epoch = 0
    _rng: np.random.Generator | None = np.random.default_rng(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def n_batches(self, n_obs: int) -> int:
        return 3 + self.epoch % 2

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        assert self._rng is not None
        n_batches = self.n_batches(n_obs)
        sizes = np.full(n_batches, (n_obs - 1) // (n_batches - 1))
        sizes[self._rng.integers(n_batches)] = 1
        splits = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
        yield {"requests": [slice(0, int(sizes.sum()))], "splits": splits}


def answer(epochs: Epochs, n_obs: int, position: Position) -> Any:
    """The batches of the pass at a position, or the error."""
    try:
        return batches(epochs.pass_at(n_obs, position))
    except ValueError as error:
        return str(error)


def test_answers_are_independent_of_earlier_questions() -> None:
    """The pass at a position, or the error, is the same if any other position was asked about before."""

    def new() -> Epochs:
        return Epochs(config_of(Irregular(8), remainder="exact", seed=3), RankSource.of(Rank(1, 2)))

    segments = [
        (Segment(2, 1, 1),),
        (Segment(3, 1, 1), Segment(2, 1, 0)),
        (Segment(1, 1, 1), Segment(2, 1, 0)),
    ]
    questions = [
        (n_obs, Position(epoch, passes, parts))
        for n_obs in (18, 30)
        for epoch in range(2)
        for passes in range(2)
        for parts in segments
    ]
    alone = {question: answer(new(), *question) for question in questions}
    for first, second in permutations(questions, 2):
        epochs = new()
        answer(epochs, *first)
        assert answer(epochs, *second) == alone[second]
    # two ranks share a batch, which has enough rows in the first pass only
    first_pass, second_pass = (alone[30, Position(1, passes, segments[1])] for passes in range(2))
    assert isinstance(first_pass, list)
    assert "can't be divided evenly" in second_pass


@pytest.mark.parametrize(("virtual_ranks", "notes"), [(None, []), (4, ["These ranks are the 4 virtual ranks."])])
def test_error_of_plan_notes_that_ranks_are_virtual(virtual_ranks: int | None, notes: list[str]) -> None:
    config, rank = config_of(RandomSampler(4, 2, 8), remainder="drop", seed=0), RankSource.of(Rank(1, 4))
    epochs = Epochs(config, rank, virtual_ranks=virtual_ranks)
    with pytest.raises(ValueError, match="too few for one full batch on every rank: 4 ranks") as caught:
        epochs.plan(10, epochs.here(Position()))
    assert getattr(caught.value, "__notes__", []) == notes
