"""A model of lanes: the batches of a partly read epoch, in lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
