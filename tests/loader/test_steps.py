"""Steps: states that are saved within one, by a signal's handler or after an error, lead to its batch."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank
from tests.loaders import numbered, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch_distributed import StatefulLoader


def loader(**options: Any) -> StatefulLoader:
    sampler = DistributedSampler(RandomSampler(8, 2, 8), dist_info=Rank(1, 2), seed=0, sharding="shuffled")
    return numbered(sampler, 160, **options)


MADE: dict[str, Callable[[], Any]] = {
    "alone": loader,
    "reading ahead": lambda: loader(read_ahead=2),
    "without workers": lambda: loader().to_dataloader(),
    "with workers": lambda: loader().to_dataloader(num_workers=2, multiprocessing_context="fork"),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_once_steps_are_told_states_count_those_that_are_done(make: Callable[[], Any]) -> None:
    batches = make()
    batches.set_epoch(0)
    whole = rows(batches)
    for epoch in range(2):
        batches.set_epoch(epoch)
        for done, _ in enumerate(islice(batches, 5)):
            within = batches.state_dict()
            if not epoch and not done:  # nobody has said anything yet
                assert within["segments"][-1][-1] == 1
            else:
                assert within["segments"][-1][-1] == done
            batches.step_done()
            assert batches.state_dict()["segments"][-1][-1] == done + 1
        if not epoch:
            again = make()
            again.load_state_dict(within)
            assert rows(again) == whole[4:]


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_an_epoch_has_ended_when_its_last_step_is_done(make: Callable[[], Any]) -> None:
    batches = make()
    for _ in batches:
        within = batches.state_dict()
        batches.step_done()
    assert (within["pass"], within["segments"][-1][-1]) == (0, 9)
    after = batches.state_dict()
    assert (after["finished"], after["segments"][-1][-1]) == (True, 10)
