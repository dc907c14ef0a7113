"""Positions in an epoch and what a pass makes of them, against segments and workers gone through one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, dropwhile, islice, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.resume.cursor import PassRecord
from annbatch_distributed.resume.state import Position, Segment, brief, from_state, to_state
from annbatch_distributed.sharding.batches import Worker

segments = st.lists(
    st.builds(Segment, st.integers(1, 3), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=5
).map(tuple)


@given(segments, st.integers(1, 3))
def test_the_last_segments_are_those_after_the_last_one_of_another_world_size(
    segments: tuple[Segment, ...], world_size: int
) -> None:
    position = Position(7, 2, segments)
    backwards = segments[::-1]
    last = tuple(takewhile(lambda segment: segment.world_size == world_size, backwards))[::-1]
    assert position.collected(world_size) == tuple(segment[1:] for segment in last)
    assert position.before(world_size) == segments[: -len(last) or None]
    assert position.done(world_size) == sum(done for _, _, done in last)
    assert Position(7).collected(world_size) == ()
    assert Position(7).before(world_size) == ()
    assert tuple(dropwhile(lambda segment: segment.world_size == world_size, backwards))[::-1] == position.before(
        world_size
    )


@given(segments)
def test_a_segment_in_which_nothing_was_done_is_idle(segments: tuple[Segment, ...]) -> None:
    position = Position(7, 2, segments, Worker(1, 2))
    busy = tuple(segment for segment in segments if segment.done > 0)
    assert position.without_idle_segments() == Position(7, 2, busy, Worker(1, 2))
    assert position.resumes is (len(busy) > 0)


@given(segments, st.integers(1, 3), st.integers(1, 3))
def test_going_on_with_as_many_ranks_and_workers_stays_in_the_last_segment(
    segments: tuple[Segment, ...], world_size: int, n_workers: int
) -> None:
    position = Position(7, 2, segments, Worker(1, 2))
    on = position.going_on(world_size, n_workers)
    new = () if segments[-1][:2] == (world_size, n_workers) else (Segment(world_size, n_workers, 0),)
    assert on == Position(7, 2, (*segments, *new), Worker(1, 2))
    assert on.going_on(world_size, n_workers) is on
    assert Position(7).going_on(world_size, n_workers).segments == ((world_size, n_workers, 0),)


def test_the_pass_after_one_is_the_next_of_the_same_epoch_with_nothing_done() -> None:
    position = Position(7, 2, (Segment(2, 1, 3), Segment(3, 2, 4)), Worker(1, 2))
    assert position.moved_to(9) == Position(7, 2, (Segment(2, 1, 3), Segment(3, 2, 9)), Worker(1, 2))
    assert position.after() == Position(7, 3, (), None)


@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 8), st.data())
def test_a_worker_knows_how_many_batches_were_collected_when_its_own_last_one_was(
    n_workers: int, done: int, n_yielded: int, data: st.DataObject
) -> None:
    worker = data.draw(st.integers(0, n_workers - 1))
    position = Position(7, 2, (Segment(2, 1, 3), Segment(4, 1, 5), Segment(3, n_workers, done)))
    record = PassRecord(position, n_due=100, worker=Worker(worker, n_workers))
    # batches are collected from the workers in turn
    own = islice((number for number in count(done) if number % n_workers == worker), n_yielded)
    collected = [done, *(number + 1 for number in own)][-1]
    assert record.position_after(n_yielded) == replace(position.moved_to(collected), worker=record.worker)
    assert PassRecord(position, n_due=100).position_after(n_yielded) == position.moved_to(done + n_yielded)


def test_two_passes_are_never_equal() -> None:
    position = Position(0, 0, (Segment(1, 1, 0),))
    assert PassRecord(position, 3, 3, 3) != PassRecord(position, 3, 3, 3)


def test_a_state_is_the_one_that_format_1_describes() -> None:
    position = Position(2, 1, (Segment(4, 2, 7), Segment(3, 1, 0)))
    state = {
        "version": 1,
        "epoch": 2,
        "pass": 1,
        "segments": [[4, 2, 7], [3, 1, 0]],
        "identity": {"n_obs": 100, "seed": None, "mask": "0:"},
    }
    identity: dict[str, int | str | None] = {"n_obs": 100, "seed": None, "mask": "0:"}
    assert to_state(position, identity) == state
    of_a_worker = Position(2, 1, (Segment(4, 2, 7), Segment(3, 1, 0)), Worker(0, 2))
    assert to_state(of_a_worker, identity) == state | {"worker": [0, 2]}


@pytest.mark.parametrize("worker", [None, (0, 1), (1, 2)])
def test_counts_in_a_state_may_be_the_least_that_there_can_be(worker: tuple[int, int] | None) -> None:
    state = {"version": 1, "epoch": 0, "pass": 0, "segments": [[1, 1, 0]], "identity": {"align": 1}}
    state |= {} if worker is None else {"worker": list(worker)}
    position, _ = from_state(state)
    assert position == Position(0, 0, (Segment(1, 1, 0),), None if worker is None else Worker(*worker))


def test_texts_of_an_identity_are_cut_as_they_were_in_states_saved_before() -> None:
    assert brief("x" * 160) == "x" * 160
    assert brief("x" * 161) == "x" * 120 + "... 9248d4045b25894727af7255a63652f6"  # b2sum --length 128
