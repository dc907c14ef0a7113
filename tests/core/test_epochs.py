"""Epochs answer for each position alone, whatever they were asked before."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import Rank
from annbatch_distributed.core.epochs import Epochs
from annbatch_distributed.core.lanes import Segment
from annbatch_distributed.core.state import Position
from annbatch_distributed.ranks import RankSource
from tests.samplers import Irregular, batches, config_of


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
    questions = [(n_obs, Position(epoch, parts)) for n_obs in (18, 30) for epoch in range(6) for parts in segments]
    alone = {question: answer(new(), *question) for question in questions}
    for first, second in permutations(questions, 2):
        epochs = new()
        answer(epochs, *first)
        assert answer(epochs, *second) == alone[second]
    # two ranks share a batch, which has enough rows in some epochs only
    kinds = {type(alone[30, Position(epoch, segments[1])]) for epoch in range(6)}
    assert kinds == {list, str}


@pytest.mark.parametrize("n_rows", [2, 3])
def test_last_batch_is_split_into_single_rows(n_rows: int) -> None:
    """A remaining batch is split among as many ranks as it has rows, and not among more."""
    epochs = Epochs(config_of(RandomSampler(1, n_rows, n_rows), remainder="exact", seed=0), RankSource.of(Rank(0, 1)))
    one_done = Position(0, (Segment(1, 1, 1),))
    parts = []
    for rank in range(n_rows):
        here = epochs.moved(RankSource.of(Rank(rank, n_rows)))
        (own,) = batches(here.pass_at(2 * n_rows, here.here(one_done)))
        parts += own
    (whole,) = batches(epochs.pass_at(2 * n_rows, one_done))
    assert sorted(parts) == sorted(whole)
    more = epochs.moved(RankSource.of(Rank(0, n_rows + 1)))
    with pytest.raises(ValueError, match=f"some have only {n_rows} rows"):
        more.pass_at(2 * n_rows, more.here(one_done))


@pytest.mark.parametrize(("virtual_ranks", "notes"), [(None, []), (4, ["These ranks are the 4 virtual ranks."])])
def test_error_of_plan_notes_that_ranks_are_virtual(virtual_ranks: int | None, notes: list[str]) -> None:
    config, rank = config_of(RandomSampler(4, 2, 8), remainder="drop", seed=0), RankSource.of(Rank(1, 4))
    epochs = Epochs(config, rank, virtual_ranks=virtual_ranks)
    with pytest.raises(ValueError, match="too few for one full batch on every rank: 4 ranks") as caught:
        epochs.plan(10, epochs.here(Position()))
    assert getattr(caught.value, "__notes__", []) == notes
