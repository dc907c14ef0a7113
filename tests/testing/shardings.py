"""Shardings of a user's own, of which all but `Own` and `Overlapping` break a law.

They are asked in another process too, which imports this module: it loads no framework.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from annbatch_distributed.sharding import Independent, Rows


@dataclass(frozen=True)
class Own:
    """A sharding of a user's own: the rows at even and at odd positions, and so on, for any number of ranks."""

    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Any:
        listed = list(rows)
        return [_rows(listed[rank::world_size]) for rank in range(world_size)]


def _rows(listed: list[int]) -> Rows:
    return Rows.of(listed)


@dataclass(frozen=True)
class Overlapping:
    """A sharding of a user's own: each rank draws from its half or so of the rows, a row of which may be in two."""

    draws = True

    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Any:
        return [rows.cyclic(rank, len(rows) // 2 + 1) for rank in range(world_size)]


@dataclass(frozen=True)
class DrawsBeyond(Overlapping):
    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Any:
        return [_rows([row + 1 for row in rows])] * world_size


class LosesARow(Own):
    def deal(self, rows: Rows, **asked: Any) -> Any:
        return _rows(list(rows)[:-1]) if len(rows) > 7 else rows


class RepeatsARow(Own):
    def deal(self, rows: Rows, **asked: Any) -> Any:
        listed = list(rows)
        return _rows([listed[0], *listed[:-1]])


class RankIsMissing(Own):
    def deal(self, rows: Rows, *, world_size: int, **asked: Any) -> Any:
        return super().deal(rows, world_size=max(1, world_size - 1), epoch=0, seed=0)


class StraysFromTheWindow(Own):
    def deal(self, rows: Rows, **asked: Any) -> Any:
        return _rows([row + 1 for row in rows])


class LooksAtTheGlobalState(Own):
    def deal(self, rows: Rows, **asked: Any) -> Any:
        return _rows(list(np.random.permutation(list(rows))))  # noqa: NPY002 the mistake that this sharding makes


class LooksAtPythonsState(Own):
    def deal(self, rows: Rows, **asked: Any) -> Any:
        return _rows(random.sample(list(rows), len(rows)))


class Counts(Own):
    calls = count()

    def deal(self, rows: Rows, **asked: Any) -> Any:
        return rows.cyclic(next(self.calls), len(rows))


class LooksAtTheRank(Own):
    def deal(self, rows: Rows, **asked: Any) -> Any:
        return rows.cyclic(int(os.environ.get("RANK", "0")), len(rows))


class HashesNames(Own):
    def deal(self, rows: Rows, **asked: Any) -> Any:
        order = np.random.default_rng(hash("donor 1") % 2**62).permutation(len(rows))
        return _rows(rows.to_array()[order].tolist())


@dataclass
class Thawed:
    world_size: int = 2

    def deal(self, rows: Rows, **asked: Any) -> Any:
        return rows


class GivesNumbers(Own):
    def deal(self, rows: Rows, **asked: Any) -> Any:
        return list(rows)


class GivesAllToRank0(Own):
    def deal(self, rows: Rows, *, world_size: int, **asked: Any) -> Any:
        return [rows] + [Rows()] * (world_size - 1)


class NeverAnswers(Own):
    def deal(self, rows: Rows, **asked: Any) -> Any:
        msg = "not today"
        raise ValueError(msg)


class NeedsASeed(Own):
    def deal(self, rows: Rows, *, seed: Any, **asked: Any) -> Any:
        return rows.cyclic(seed % len(rows), len(rows))


@dataclass(frozen=True)
class DrawsFromElsewhere(Independent):
    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> list[Rows]:
        return [rows + _rows([len(rows) + 1000])] * world_size
