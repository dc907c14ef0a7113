"""An epoch goes on with another number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler
from hypothesis import assume, event, given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.resume.remaining import _merged, _without
from annbatch_distributed.sharding import Rows
from tests.samplers import batches, flat, job, repeats
from tests.strategies import PASSING, jobs
from tests.test_shardings import LABELS, N_OBS, classes

if TYPE_CHECKING:
    from tests.strategies import Job

segments = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), min_size=1, max_size=3)


pytestmark = pytest.mark.usefixtures("small_blocks")


def started(drawn: Job, world_size: int, epoch: int, state: Any) -> list[DistributedSampler]:
    """Every rank of a job, in processes of their own for all that they know."""
    ranks = job(drawn.sampler, world_size, **drawn.options | {"seed": 0})
    for rank in ranks:
        if state is None:
            rank.set_epoch(epoch)
        else:
            rank.load_state_dict(json.loads(json.dumps(state)))
    return ranks


@given(jobs(kinds=PASSING), segments, st.integers(1, 5), st.integers(0, 2))
def test_every_row_of_an_epoch_is_read_once_whatever_the_numbers_of_ranks(
    drawn: Job, before: list[tuple[int, int]], last: int, epoch: int
) -> None:
    assume(not getattr(drawn.sampler, "_drop_last", False))
    remainder = drawn.options["remainder"]
    state, read = None, []
    for world_size, done in [*before, (last, None)]:
        ranks = started(drawn, world_size, epoch, state)
        outcomes = []
        for rank in ranks:
            try:
                outcomes.append(rank.n_batches(drawn.n_obs))
            except ValueError as error:
                outcomes.append(str(error))
        if isinstance(outcomes[0], str):
            assert len(set(outcomes)) == 1
            event("can't go on" if state is not None else "can't begin")
            return
        assert remainder == "keep" or len(set(outcomes)) == 1
        for rank, n_batches in zip(ranks, outcomes, strict=True):
            requests = list(rank.sample(drawn.n_obs))
            assert len(batches(requests)) == n_batches
            rows = batches(requests)[:done]
            marks = repeats(requests)[:done] if remainder == "pad" else [[False] * len(batch) for batch in rows]
            read += [row for row, mark in zip(flat(rows), flat(marks), strict=True) if not mark]
        if done is not None:
            if done >= max(outcomes):
                return  # that epoch is over
            states = [
                rank.state_dict(batches_done=rank.batches_done + done)
                for rank in started(drawn, world_size, epoch, state)
            ]
            assert len(ranks) == 1 or states[0] == states[1]
            state = states[0]
    event(f"{drawn.kind}, {remainder}, {len(before)} changes")
    # by another sampler: those that have read to the end have a whole epoch before them
    lost = list(started(drawn, last, epoch, state)[0].plan(drawn.n_obs).lost)
    assert sorted(read + lost) == drawn.window()
    assert remainder == "drop" or not lost


def random(rank: int, world_size: int, **options: Any) -> DistributedSampler:
    return DistributedSampler(RandomSampler(4, 4, 8), dist_info=Rank(rank, world_size), **{"seed": 0} | options)


def test_the_rest_is_shared_out_by_every_rank_alike_and_in_an_order_of_its_own() -> None:
    state = random(0, 4).state_dict(batches_done=5)
    ranks = [random(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    plans = {rank.plan(1000) for rank in ranks}
    assert len(plans) == 1
    (plan,) = plans
    assert len(plan.window) == 1000 - 4 * 5 * 8
    assert str(plan).startswith("what is left of epoch 0: 3 ranks share 840 of 1000 rows")
    read = [row for rank in ranks for row in flat(batches(rank.sample(1000)))]
    assert len(read) == len(set(read)) == 840
    # after it, epochs are whole again
    for rank in ranks:
        assert rank.n_batches(1000) == 1000 // 24
        assert str(rank.plan(1000)).startswith("epoch 0: 3 ranks share 1000 of 1000 rows")


def test_a_state_in_which_an_old_rank_has_done_more_than_there_was_is_an_error() -> None:
    state = random(0, 4).state_dict(batches_done=50)
    three = random(0, 3)
    three.load_state_dict(state)
    with pytest.raises(ValueError, match="50 batches of epoch 0 are done, but for 1000 rows and 4 ranks it has 31"):
        three.n_batches(1000)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sharding", ["contiguous", "shuffled", "independent"])
def test_a_million_old_ranks_cost_no_more_than_those_that_had_rows(sharding: Any) -> None:
    """100 rows on 2**20 ranks: under pad, each has a batch, and a hundred of them have rows of their own in it."""
    sampler = RandomSampler(4, 2, 4, replacement=sharding == "independent")
    options = {"seed": 0, "remainder": "pad", "sharding": sharding}
    before = DistributedSampler(sampler, dist_info=Rank(0, 2**20), **options)
    state = before.state_dict(batches_done=1)
    assert state["segments"] == [[2**20, 1, 1]]
    after = DistributedSampler(sampler, dist_info=Rank(0, 2), **options)
    after.load_state_dict(state)
    assert after.n_batches(100) == 0
    assert before.n_batches(100) == 1


@pytest.mark.parametrize("sharding", ["contiguous", "shuffled"])
def test_more_old_ranks_than_can_be_run_through_are_refused_and_go_on_among_themselves(
    sharding: Any,
) -> None:
    n_obs, world_size = 10**8, 2**14 + 1
    options = {"seed": 0, "sharding": sharding, "remainder": "exact"}
    before = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, world_size), **options)
    next(iter(before.sample(n_obs)))
    state = before.state_dict(batches_done=3)
    after = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), **options)
    with pytest.raises(ValueError, match=r"is of 16385 ranks\. .* 16384 of them can be\. .* with set_epoch\(1\)"):
        after.load_state_dict(state)
    assert after.batches_done == 0
    again = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(5, world_size), **options)
    again.load_state_dict(state)
    assert again.n_batches(n_obs) == before.plan(n_obs).n_batches(5) - 3


@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 3))
def test_under_pad_what_more_ranks_than_rows_had_is_taken_for_read(n_rows: int, world_size: int, done: int) -> None:
    ranks = job(SequentialSampler(4, 1, 2), world_size, remainder="pad")
    own = set()
    for rank in ranks:
        requests = list(rank.sample(n_rows))
        done = min(done, len(batches(requests)))
        pairs = zip(flat(batches(requests)[:done]), flat(repeats(requests)[:done]), strict=True)
        own |= {row for row, is_repeat in pairs if not is_repeat}
    (alone,) = job(SequentialSampler(4, 1, 2), 1, remainder="pad")
    alone.load_state_dict(job(SequentialSampler(4, 1, 2), world_size, remainder="pad")[0].state_dict(batches_done=done))
    expected = sorted(set(range(n_rows)) - own) if world_size > 1 else list(range(n_rows))
    assert list(alone.plan(n_rows).window) == expected


def test_going_back_to_the_old_number_is_another_segment() -> None:
    state = random(0, 4).state_dict(batches_done=5)
    three = random(0, 3)
    three.load_state_dict(state)
    state = three.state_dict(batches_done=5 + 2)
    assert state["segments"] == [[4, 1, 5], [3, 1, 2]]
    four = random(0, 4)
    four.load_state_dict(state)
    assert len(four.plan(1000).window) == 1000 - 4 * 5 * 8 - 3 * 2 * 8
    assert four.state_dict(batches_done=5 + 2 + 1)["segments"] == [[4, 1, 5], [3, 1, 2], [4, 1, 1]]


def test_back_on_the_old_number_before_anything_was_done_it_is_bit_for_bit_the_old_segment() -> None:
    whole = batches(random(1, 4).sample(1000))
    three = random(0, 3)
    three.load_state_dict(random(0, 4).state_dict(batches_done=5))
    four = random(1, 4)
    four.load_state_dict(three.state_dict(batches_done=5))
    assert batches(four.sample(1000)) == whole[5:]


def test_the_state_of_a_resized_pass_is_that_of_its_end_whenever_it_is_asked_for() -> None:
    three = random(0, 3)
    three.load_state_dict(random(0, 4).state_dict(batches_done=5))
    n_batches = three.n_batches(1000)
    states = []
    for read_first in (False, True):
        begun = three.sample(1000) if not read_first else None
        if begun is not None:
            states.append([three.state_dict(batches_done=5 + done) for done in range(n_batches + 1)])
            list(begun)
        states.append([three.state_dict(batches_done=5 + done) for done in range(n_batches + 1)])
    assert states[0] == states[1] == states[2]
    assert [state["segments"] for state in states[0][:-1]] == [[[4, 1, 5], [3, 1, done]] for done in range(n_batches)]
    assert (states[0][-1]["pass"], states[0][-1]["segments"]) == (1, [[3, 1, 0]])


def test_a_segment_in_which_nothing_was_done_is_none() -> None:
    state = random(0, 4).state_dict(batches_done=0)
    three = random(0, 3)
    three.load_state_dict(state)
    assert batches(three.sample(1000)) == batches(random(0, 3).sample(1000))


def test_setting_the_epoch_again_goes_on_and_setting_another_begins_it() -> None:
    state = random(0, 4).state_dict(batches_done=5)
    three = random(0, 3)
    three.load_state_dict(state)
    three.set_epoch(0)
    assert len(three.plan(1000).window) == 840
    three.set_epoch(1)
    assert len(three.plan(1000).window) == 1000
    three.load_state_dict(state)
    three.mask = slice(0, 500)
    assert len(three.plan(1000).window) == 500


@pytest.mark.parametrize("remainder", ["drop", "pad", "keep", "exact"])
def test_where_nothing_is_left_to_read_the_epoch_is_over(remainder: Any) -> None:
    """100 rows are 12 batches of 8 and 4 rows more."""
    state = random(0, 1, remainder=remainder).state_dict(batches_done=13 if remainder != "drop" else 12)
    ranks = [random(rank, 2, remainder=remainder) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
        assert rank.n_batches(100) == 0
        assert batches(rank.sample(100)) == []
        assert rank.n_batches(100) > 0


def test_too_few_rows_for_so_many_ranks_are_the_same_error_on_all_of_them() -> None:
    state = random(0, 1, remainder="exact").state_dict(batches_done=12)
    messages = set()
    for rank in range(5):
        more = random(rank, 5, remainder="exact")
        more.load_state_dict(state)
        with pytest.raises(ValueError, match="The window has 4 rows, too few for 5 ranks") as error:
            more.n_batches(100)
        messages.add(str(error.value))
    assert len(messages) == 1


@pytest.mark.parametrize("remainder", ["drop", "keep", "exact", "pad"])
@pytest.mark.parametrize(("old", "done", "new"), [(2, 5, 3), (4, 1, 1), (3, 2, 7), (1, 3, 2)])
def test_independent_ranks_go_on_with_the_draws_that_are_left(remainder: Any, old: int, done: int, new: int) -> None:
    sampler = classes(num_samples=397)
    options = {"sharding": "independent", "remainder": remainder, "seed": 0}
    before = job(sampler, old, **options)
    drawn = sum(len(flat(batches(rank.sample(N_OBS))[:done])) for rank in before)
    after = job(sampler, new, **options)
    for rank in after:
        rank.load_state_dict(before[0].state_dict(batches_done=done))
    read = [batches(rank.sample(N_OBS)) for rank in after]
    assert len({len(rank) for rank in read}) == 1 or remainder == "keep"
    in_all = drawn + sum(len(flat(rank)) for rank in read)
    match remainder:
        case "drop":
            assert 397 - 8 * new < in_all <= 397
        case "pad":
            assert 397 <= in_all < 397 + 8 * new
        case _:
            assert in_all == 397
    assert all(len(set(LABELS[batch])) == 1 for rank in read for batch in rank)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (RandomSampler(4, 4, 8, num_samples=80), "RandomSampler was given the number of rows to draw on each rank"),
        (RandomSampler(4, 4, 8, replacement=True), "With sharding='independent' the job makes the draws that are left"),
        (
            ClassSampler(4, 4, 8, classes=LABELS, num_samples=80),
            "ClassSampler was given the number of rows to draw on each rank",
        ),
    ],
)
def test_samplers_that_were_told_how_much_to_draw_are_refused_and_left_as_they_were(sampler: Any, message: str) -> None:
    state = job(sampler, 2, seed=0, remainder="exact")[0].state_dict(batches_done=2)
    (again,) = job(sampler, 1, seed=0, remainder="exact")
    with pytest.raises(ValueError, match=message):
        again.load_state_dict(state)
    assert again.state_dict(batches_done=0)["segments"] == [[1, 1, 0]]


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=8)


@given(intervals, intervals)
def test_intervals_are_merged_and_taken_out_of_a_window(
    kept: list[tuple[int, int]], out: list[tuple[int, int]]
) -> None:
    inside = {row for start, length in out for row in range(start, start + length)}
    window = inside | {row for start, length in kept for row in range(start, start + length)}
    starts, lengths = np.array(out, dtype=np.int64).reshape(-1, 2).T
    merged = _merged(starts, starts + lengths)
    assert [row for bounds in zip(*merged, strict=True) for row in range(*bounds)] == sorted(inside)
    assert list(_without(Rows.of(sorted(window)), *merged)) == sorted(window - inside)


def test_what_was_repeated_under_pad_is_not_taken_for_read() -> None:
    """10 rows on 2 ranks in 2 batches of 4: rank 0 repeats rows 5, 6 and 7, which rank 1 has in its first batch."""
    ranks = job(SequentialSampler(4, 1, 4), 2, remainder="pad")
    assert [batches(rank.sample(10)) for rank in ranks] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[5, 6, 7, 8], [9, 0, 1, 2]]]
    (alone,) = job(SequentialSampler(4, 1, 4), 1, remainder="pad")
    alone.load_state_dict(ranks[0].state_dict(batches_done=1))
    assert list(alone.plan(10).window) == [4, 9]
    assert Counter(flat(batches(alone.sample(10)))) == Counter([4, 9, 4, 9])
