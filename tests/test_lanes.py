"""Lanes against lists of batches that are handed out one by one, through every short sequence of changes."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.lanes import Lane, Segment, Worker, each_segment
from tests.strategies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: A batch that a lane reads: its number, which part of how many, and whether it is a repeat.
type Item = tuple[int, int, int, bool]


class Model:
    """An epoch that has come so far: for each lane, the batches that it still has to read."""

    def __init__(self, counts: Sequence[int], policy: str) -> None:
        numbers = iter(range(sum(counts)))
        self.policy, self.over = policy, list[int]()
        self.lanes: list[list[Item]] = [[(next(numbers), 0, 1, False) for _ in range(count)] for count in counts]
        self.ends_alone = True

    def recut(self, n_lanes: int) -> None:
        """Go on with a number of lanes, as many or others."""
        if n_lanes == len(self.lanes):
            return
        left = [lane[place][0] for lane in self.lanes for place in range(self.n_own(lane))] + self.over
        n_over = 0 if self.policy == "keep" else len(left) % n_lanes
        self.over, left = left[:n_over], left[n_over:]
        sizes = [0] * n_lanes
        for number in range(len(left)):
            sizes[number % n_lanes] += 1
        self.lanes = [[(left.pop(0), 0, 1, False) for _ in range(size)] for size in sizes]
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
        """What each worker has: the lane in stretches, but for a shared step, which is the last to be collected."""
        turns = [place % n_workers for place in range(len(lane))]
        left, found = lane[: self.n_own(lane)], list[list[Item]]()
        for worker in range(n_workers):
            n_here = sum(turn == worker for turn in turns[: self.n_own(lane)])
            found.append(left[:n_here])
            left = left[n_here:]
        if len(lane) > self.n_own(lane):
            found[turns[-1]].append(lane[-1])
        return found

    def read(self, n_workers: int, n_batches: int) -> list[Item]:
        """Take batches out of every lane, which its workers give in turn."""
        taken = [in_turn(self.workers(lane, n_workers))[:n_batches] for lane in self.lanes]
        self.lanes = [[item for item in lane if item not in read] for lane, read in zip(self.lanes, taken, strict=True)]
        if not any(self.lanes) and not self.ends_alone:
            self.over, self.ends_alone = [], True
        return [item for read in taken for item in read]


def in_turn(workers: list[list[Item]]) -> list[Item]:
    most = max(map(len, workers))
    return [own[place] for place in range(most) for own in workers if place < len(own)]


def listed(lane: Lane) -> list[Item]:
    last = [] if lane.last is None else [(lane.last.number, lane.last.part, lane.last.n_parts, lane.last.is_repeat)]
    return [*((number, 0, 1, False) for part in lane.numbers for number in part), *last]


def check(counts: Sequence[int], segments: list[Segment], n_lanes: int, policy: Any) -> list[Lane]:
    """Compare the lanes after some segments, and those of their workers, with the model's; return them."""
    model = Model(counts, policy)
    for segment in segments:
        model.recut(segment.n_lanes)
        model.read(segment.n_workers, segment.done)
    model.recut(n_lanes)
    *_, (found, over) = each_segment(counts, (*segments, Segment(n_lanes, 1, 0)), policy)
    assert [listed(lane) for lane in found] == model.lanes
    assert [number for part in over for number in part] == model.over
    assert [len(lane) for lane in found] == list(map(len, model.lanes))
    assert policy == "keep" or len({*map(len, found)}) == 1
    for lane, own in zip(found, model.lanes, strict=True):
        for n_workers in (1, 2, 3):
            workers = [Worker(number, n_workers) for number in range(n_workers)]
            parts = [listed(lane.of_worker(worker, keeps_order=False)) for worker in workers]
            assert parts == model.workers(own, n_workers)
            parts = [listed(lane.of_worker(worker, keeps_order=True)) for worker in workers]
            assert in_turn(parts) == own
            assert [len(part) for part in parts] == [len(own[number::n_workers]) for number in range(n_workers)]
    return found


def sequences(counts: Sequence[int], policy: Any, segments: list[Segment], n_changes: int) -> Iterator[list[Segment]]:
    """Every way to come so far, with up to so many changes of lanes (to 1 to 4) and of workers (1 to 3)."""
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
    if policy != "keep":  # under which alone they may differ
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
