"""An epoch goes on where it was left."""

from __future__ import annotations

import copy
import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import assume, event, given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank
from tests.samplers import batches, job, repeats, request_rows
from tests.strategies import jobs

if TYPE_CHECKING:
    from annbatch_distributed.sharding import Rows
    from tests.strategies import Job


def random(**options: Any) -> DistributedSampler:
    """A rank whose epoch has 12 batches, in 3 requests."""
    sampler = RandomSampler(4, 4, 4, rng=np.random.default_rng(0))
    return DistributedSampler(sampler, dist_info=Rank(0, 2), **({"seed": 0} | options))


N_OBS = 96


def resumed(before: DistributedSampler, done: int, **options: Any) -> DistributedSampler:
    """Another sampler, in another process for all that it knows, that has loaded the state of one."""
    after = random(**options)
    after.load_state_dict(json.loads(json.dumps(before.state_dict(batches_done=done))))
    return after


@given(jobs(), st.integers(0, 3), st.integers(0, 2), st.data())
def test_the_rest_of_an_epoch_is_bit_for_bit_the_rest_of_the_uninterrupted_run(
    drawn: Job, epoch: int, passes: int, data: st.DataObject
) -> None:
    ranks = drawn.ranks()
    try:
        ranks[0].validate(drawn.n_obs)
    except ValueError:
        assume(False)
    plan = ranks[0].plan(drawn.n_obs)
    total = max(plan.natural_batches)
    done = data.draw(st.integers(0, total), label="done")
    states = []
    for rank in ranks:
        rank.set_epoch(epoch)
        for _ in range(passes):
            rank.sample(drawn.n_obs)
        requests = list(rank.sample(drawn.n_obs))
        following = batches(rank.sample(drawn.n_obs))
        again = drawn.ranks()[rank.rank]
        rank.set_epoch(epoch)
        for _ in range(passes + 1):
            rank.sample(drawn.n_obs)
        state = json.loads(json.dumps(rank.state_dict(batches_done=done)))
        states.append(state)
        again.load_state_dict(state)
        event(f"{drawn.kind}, {drawn.options['remainder']}, {drawn.options['sharding'].__class__.__name__}")

        expected = following if done == total else batches(requests)[done:]
        assert again.n_batches(drawn.n_obs) == len(expected)
        if 0 < done < total and expected:  # a look at the first batch changes nothing
            next(again.sample(drawn.n_obs))
        assert again.n_batches(drawn.n_obs) == len(expected)
        rest_requests = list(again.sample(drawn.n_obs))
        assert batches(rest_requests) == expected
        if drawn.options["remainder"] == "pad" and done < total:
            assert repeats(rest_requests) == repeats(requests)[done:]
        if done < total:
            assert batches(again.sample(drawn.n_obs)) == following
    assert all(state == states[0] for state in states)


def test_of_the_request_in_the_middle_only_the_rows_still_due_are_read() -> None:
    before = random()
    requests = list(before.sample(N_OBS))
    sizes = [len(request["splits"]) for request in requests]
    assert sizes == [4, 4, 4]
    for done in range(12):
        rest = list(resumed(before, done).sample(N_OBS))
        assert [len(request["splits"]) for request in rest] == [
            size - max(0, min(size, done - sum(sizes[:which]))) for which, size in enumerate(sizes)
        ][done // 4 :]
        for request in rest:
            assert len(request_rows(request)) == sum(len(split) for split in request["splits"])


def test_a_resumed_epoch_can_be_left_and_resumed_again() -> None:
    before = random()
    whole = batches(before.sample(N_OBS))
    for first, second in ((1, 2), (3, 9), (4, 4), (5, 11)):
        middle = resumed(before, first)
        next(iter(middle.sample(N_OBS)))
        last = resumed(middle, second)
        assert batches(last.sample(N_OBS)) == whole[second:]


@pytest.mark.parametrize("done", [0, 5, 12])
@pytest.mark.parametrize("passes", [0, 1])
def test_a_state_that_was_just_loaded_is_the_state(done: int, passes: int) -> None:
    before = random()
    before.set_epoch(3)
    for _ in range(passes + 1):
        before.sample(N_OBS)
    state = before.state_dict(batches_done=done)
    after = random()
    for _ in range(2):
        after.load_state_dict(state)
        assert after.state_dict(batches_done=after.batches_done) == state
        after.set_epoch(3)  # as frameworks do
        assert after.state_dict(batches_done=after.batches_done) == state
        list(after.sample(N_OBS))


def test_after_a_pass_that_was_done_the_next_one_comes_although_its_epoch_is_set_again() -> None:
    before = random()
    before.set_epoch(3)
    list(before.sample(N_OBS))
    after = resumed(before, 12)
    after.set_epoch(after.epoch)
    assert batches(after.sample(N_OBS)) == batches(before.sample(N_OBS))


def test_an_older_pass_that_ends_does_not_end_a_newer_resumption() -> None:
    before, after = random(), random()
    before.sample(N_OBS)
    after.load_state_dict(before.state_dict(batches_done=5))
    older = after.sample(N_OBS)
    after.load_state_dict(before.state_dict(batches_done=7))
    list(older)
    assert after.n_batches(N_OBS) == 5
    newer = after.sample(N_OBS)
    list(older)
    list(newer)
    assert after.n_batches(N_OBS) == 12


def test_asking_about_another_collection_leaves_the_state_as_it_is() -> None:
    before = random()
    before.sample(N_OBS)
    state = before.state_dict(batches_done=6)
    before.plan(50)
    assert before.n_batches(48) == 6
    assert before.state_dict(batches_done=6) == state


def test_a_new_generator_begins_the_epoch_anew() -> None:
    before = random()
    before.sample(N_OBS)
    after = resumed(before, 5)
    after.rng = np.random.default_rng(3)
    assert after.n_batches(N_OBS) == 12


def test_a_sharding_counts_by_what_it_holds_and_not_by_its_repr() -> None:
    class Turned:
        def __init__(self, by: int) -> None:
            self.by = by

        def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Rows:
            return rows.cyclic(self.by, len(rows))

    state = random(sharding=Turned(3)).state_dict(batches_done=1)
    random(sharding=Turned(3)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"sharding is 'Turned\(\w{32}\)' in the state and 'Turned\(\w{32}\)' here"):
        random(sharding=Turned(4)).load_state_dict(state)


def test_frameworks_may_set_the_epoch_that_they_have_loaded_and_the_next_one_is_whole() -> None:
    before = random()
    before.set_epoch(3)
    whole = batches(before.sample(N_OBS))
    after = resumed(before, 5)
    after.set_epoch(3)
    assert (after.epoch, after.n_batches(N_OBS)) == (3, 7)
    assert batches(after.sample(N_OBS)) == whole[5:]
    assert after.n_batches(N_OBS) == 12
    after.set_epoch(4)
    before.set_epoch(4)
    assert batches(after.sample(N_OBS)) == batches(before.sample(N_OBS))
    after = resumed(before, 5)
    after.set_epoch(9)
    assert after.n_batches(N_OBS) == 12


def test_a_resumed_pass_is_copied_and_pickled_in_the_middle() -> None:
    before = random()
    whole = batches(before.sample(N_OBS))
    after = resumed(before, 5)
    begun = after.sample(N_OBS)
    first = batches([next(begun)])
    for duplicate in (copy.deepcopy(begun), pickle.loads(pickle.dumps(begun)), begun):
        assert first + batches(duplicate) == whole[5:]
    for duplicate in (copy.deepcopy(resumed(before, 5)), pickle.loads(pickle.dumps(resumed(before, 5)))):
        assert batches(duplicate.sample(N_OBS)) == whole[5:]


def test_a_state_is_a_few_hundred_bytes_whatever_the_collection() -> None:
    masks = [slice(10**6 * i, 10**6 * i + 17) for i in range(1000)]
    before = random(mask=masks)
    before.n_batches(10**9)
    assert len(json.dumps(before.state_dict(batches_done=10))) < 2_000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 1}, ["root is ", "seed is 0 in the state and 1 here"]),
        ({"mask": slice(0, 90)}, ["mask is '0:' in the state and '0:90' here"]),
        ({"remainder": "exact"}, ["remainder is 'drop' in the state and 'exact' here"]),
        ({"sharding": "shuffled"}, ["sharding is 'Contiguous"]),
    ],
)
def test_a_state_of_other_settings_is_an_error_that_names_each_and_leaves_the_sampler_as_it_was(
    options: dict[str, Any], named: list[str]
) -> None:
    before = random()
    list(before.sample(N_OBS))
    state = before.state_dict(batches_done=5)
    after = random(**options)
    untouched = batches(random(**options).sample(N_OBS))
    with pytest.raises(ValueError, match="The state is of a sampler with other settings") as error:
        after.load_state_dict(state)
    message = str(error.value)
    assert all(name in message for name in named)
    assert message.count(" in the state and ") == len(named)
    assert batches(after.sample(N_OBS)) == untouched
    after.load_state_dict(state, strict=False)
    assert after.n_batches(N_OBS) == len(untouched) - 5


def test_another_wrapped_sampler_is_named() -> None:
    state = random().state_dict(batches_done=2)
    for wrapped in (RandomSampler(4, 2, 4), SequentialSampler(4, 4, 4)):
        after = DistributedSampler(wrapped, dist_info=Rank(0, 2), seed=0)
        with pytest.raises(ValueError, match=r"sampler is 'RandomSampler\(.*' in the state and '.*Sampler\("):
            after.load_state_dict(state)


@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_state_leaves_the_sampler_as_it_was(strict: bool) -> None:
    after, untouched = random(), batches(random().sample(N_OBS))
    for damaged in ({}, random().state_dict(batches_done=5) | {"epoch": "last"}):
        with pytest.raises(ValueError, match="The state is damaged"):
            after.load_state_dict(damaged, strict=strict)
    assert batches(after.sample(N_OBS)) == untouched


def test_a_state_of_another_collection_is_an_error_before_any_row_is_read() -> None:
    before = random()
    before.sample(N_OBS)
    after = resumed(before, 5)
    for ask in (after.n_batches, after.sample, after.plan, after.validate):
        with pytest.raises(ValueError, match="The state is of a collection of 96 rows, and this one has 95"):
            ask(95)
    begun = random()
    begun.sample(N_OBS)
    with pytest.raises(ValueError, match="batches_done must be at most 12, the batches of this pass, got 13"):
        begun.state_dict(batches_done=13)
    unknown = random()
    unknown.load_state_dict(random().state_dict(batches_done=13))
    for ask in (unknown.n_batches, unknown.sample):
        with pytest.raises(
            ValueError,
            match=r"The state says that 13 batches of epoch 0 are done, but for 96 rows and 2 ranks it has 12",
        ):
            ask(N_OBS)


def test_samplers_without_a_seed_in_common_are_refused_unless_they_have_no_randomness() -> None:
    ranks = [
        DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 2)),
        DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 2)),
    ]
    with pytest.raises(
        ValueError,
        match=r"root is .*a seed=.*, or else the generator of the wrapped sampler, which must be seeded alike",
    ):
        ranks[1].load_state_dict(ranks[0].state_dict(batches_done=2))
    ranks[1].load_state_dict(ranks[0].state_dict(batches_done=0))  # no order has to be brought back
    ordered = job(SequentialSampler(4, 4, 4), 2)
    whole = batches(ordered[0].sample(N_OBS))
    again = DistributedSampler(SequentialSampler(4, 4, 4), dist_info=Rank(0, 2))
    again.load_state_dict(ordered[1].state_dict(batches_done=2))
    assert batches(again.sample(N_OBS)) == whole[2:]


@pytest.mark.parametrize("done", [-1, 1.5, None])
def test_batches_done_count_from_0(done: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="batches_done must be"):
        random().state_dict(batches_done=done)
