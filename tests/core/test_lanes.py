"""Lanes compared with a model of lists of batches, after every short sequence of changes."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.core.lanes import Lane, Segment, Worker, each_segment
from tests.lanes import Item, Model, in_turn
from tests.strategies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def listed(lane: Lane) -> list[Item]:
    last = [] if lane.last is None else [(lane.last.number, lane.last.part, lane.last.n_parts, lane.last.is_repeat)]
    return [*((number, 0, 1, False) for part in lane.numbers for number in part), *last]


def check(counts: Sequence[int], segments: list[Segment], n_lanes: int, policy: Any) -> list[Lane]:
    """Compare the lanes after some segments, and the lanes of their workers, with the model's; return the lanes."""
    model = Model(counts, policy)
    for segment in segments:
        model.recut(segment.n_lanes)
        model.read(segment.n_workers, segment.done)
    model.recut(n_lanes)
    *_, lanes = each_segment(counts, (*segments, Segment(n_lanes, 1, 0)), policy)
    assert [listed(lane) for lane in lanes] == model.lanes
    assert [len(lane) for lane in lanes] == list(map(len, model.lanes))
    assert policy == "keep" or len({*map(len, lanes)}) == 1
    for lane, own in zip(lanes, model.lanes, strict=True):
        for n_workers in (1, 2, 3):
            workers = [Worker(number, n_workers) for number in range(n_workers)]
            parts = [listed(lane.of_worker(worker, keeps_order=False)) for worker in workers]
            assert parts == model.workers(own, n_workers)
            parts = [listed(lane.of_worker(worker, keeps_order=True)) for worker in workers]
            assert in_turn(parts) == own
            assert [len(part) for part in parts] == [len(own[number::n_workers]) for number in range(n_workers)]
    return lanes


def sequences(counts: Sequence[int], policy: Any, segments: list[Segment], n_changes: int) -> Iterator[list[Segment]]:
    """Every sequence of segments with at most `n_changes` more, each of 1 to 4 lanes and 1 to 3 workers."""
    yield segments
    if not n_changes:
        return
    for n_lanes in range(1, 5) if segments else [len(counts)]:
        model = Model(counts, policy)
        for segment in segments:
            model.recut(segment.n_lanes)
            model.read(segment.n_workers, segment.done)
        model.recut(n_lanes)
        for n_workers in range(1, 4):
            for done in range(1, max(map(len, model.lanes)) + 1):
                more = [*segments, Segment(n_lanes, n_workers, done)]
                yield from sequences(counts, policy, more, n_changes - 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("counts", [(5,), (2, 2), (1, 2, 2)])
def test_lanes_match_the_model_after_short_sequences(counts: tuple[int, ...], policy: Any) -> None:
    """Lanes equal the model's lists after every short sequence of changes of lanes and workers."""
    if policy != "keep":  # the only policy under which counts may differ
        counts = (max(counts),) * len(counts)
    for segments in sequences(counts, policy, [], 3):
        for n_lanes in range(1, 5) if segments else [len(counts)]:
            check(counts, segments, n_lanes, policy)


@given(st.sampled_from(POLICIES), st.integers(1, 7), st.integers(0, 12), st.data())
def test_every_number_is_read_once(policy: Any, n_streams: int, count: int, data: st.DataObject) -> None:
    """Any sequence of lanes and workers reads every batch once; `drop` may drop fewer batches than lanes."""
    counts = [count + (policy == "keep" and data.draw(st.booleans())) for _ in range(n_streams)]
    segments: list[Segment] = []
    n_lanes = n_streams
    for turn in range(data.draw(st.integers(1, 6))):
        n_lanes, n_workers = data.draw(st.integers(1, 9)) if turn else n_streams, data.draw(st.integers(1, 4))
        own = check(counts, segments, n_lanes, policy)
        done = data.draw(st.integers(0, max(map(len, own))))
        segments.append(Segment(n_lanes, n_workers, done))
    own = check(counts, segments, n_lanes, policy)
    segments.append(Segment(n_lanes, 2, max(map(len, own))))
    assert not any(map(len, check(counts, segments, n_lanes, policy)))
    model, read = Model(counts, policy), dict[int, Fraction]()
    for segment in segments:
        model.recut(segment.n_lanes)
        for number, _, n_parts, is_repeat in model.read(segment.n_workers, segment.done):
            if not is_repeat:
                read[number] = read.get(number, Fraction(0)) + Fraction(1, n_parts)
    assert {*read.values()} <= {Fraction(1)}
    n_dropped = sum(counts) - len(read)
    assert n_dropped < n_lanes if policy == "drop" else n_dropped == 0
