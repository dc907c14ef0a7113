"""Lanes compared with a model of lists of batches, after every short sequence of changes."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.core.lanes import Lane, Segment, Worker, each_segment
from tests.strategies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: A batch of a lane: its number, the index and the number of its parts, and True if it is repeated.
type Item = tuple[int, int, int, bool]


class Model:
    """A model of a partly read epoch: the remaining batches of each lane."""

    def __init__(self, counts: Sequence[int], policy: str) -> None:
        numbers = iter(range(sum(counts)))
        self.policy, self.over = policy, list[int]()
        self.lanes: list[list[Item]] = [[(next(numbers), 0, 1, False) for _ in range(count)] for count in counts]
        self.ends_alone = True

    def recut(self, n_lanes: int) -> None:
        """Continue with a number of lanes, which may be unchanged."""
        if n_lanes == len(self.lanes):
            return
        remaining = [lane[place][0] for lane in self.lanes for place in range(self.n_own(lane))] + self.over
        n_over = 0 if self.policy == "keep" else len(remaining) % n_lanes
        self.over, remaining = remaining[:n_over], remaining[n_over:]
        sizes = [0] * n_lanes
        for number in range(len(remaining)):
            sizes[number % n_lanes] += 1
        self.lanes = [[(remaining.pop(0), 0, 1, False) for _ in range(size)] for size in sizes]
        self.ends_alone = not self.over or self.policy in ("drop", "keep")
        if not self.ends_alone and self.policy == "pad":
            for lane, own in enumerate(self.lanes):
                own.append((self.over[lane % n_over], 0, 1, lane >= n_over))
        if not self.ends_alone and self.policy == "exact":
            readers = [which * n_lanes // n_over for which in range(n_over + 1)]
            for number, first, stop in zip(self.over, readers, readers[1:], strict=False):
                for lane in range(first, stop):
                    self.lanes[lane].append((number, lane - first, stop - first, False))

    def n_own(self, lane: list[Item]) -> int:
        return len(lane) if self.ends_alone or not lane else len(lane) - 1

    def workers(self, lane: list[Item], n_workers: int) -> list[list[Item]]:
        """The batches of each worker: contiguous ranges of the lane, then a shared step, which is collected last."""
        turns = [place % n_workers for place in range(len(lane))]
        remaining, parts = lane[: self.n_own(lane)], list[list[Item]]()
        for worker in range(n_workers):
            n_here = sum(turn == worker for turn in turns[: self.n_own(lane)])
            parts.append(remaining[:n_here])
            remaining = remaining[n_here:]
        if len(lane) > self.n_own(lane):
            parts[turns[-1]].append(lane[-1])
        return parts

    def read(self, n_workers: int, n_batches: int) -> list[Item]:
        """Take batches out of every lane, in the turns of its workers."""
        parts = [in_turn(self.workers(lane, n_workers))[:n_batches] for lane in self.lanes]
        self.lanes = [[item for item in lane if item not in read] for lane, read in zip(self.lanes, parts, strict=True)]
        if not any(self.lanes) and not self.ends_alone:
            self.over, self.ends_alone = [], True
        return [item for read in parts for item in read]


def in_turn(workers: list[list[Item]]) -> list[Item]:
    most = max(map(len, workers))
    return [own[place] for place in range(most) for own in workers if place < len(own)]


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
@pytest.mark.parametrize("counts", [(6,), (2, 2), (1, 2, 2)])
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
