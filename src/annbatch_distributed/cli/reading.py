"""Reading: what one rank reads in an epoch, as a user's loop would, compared with its plan row by row.

1. Each batch's rows are marked, one bit for each row of the collection, and tallied.
2. A few cells, spread over the epoch, are kept, and compared afterwards with what the store has for their rows.
3. The rows of the plan are marked likewise; what only one of the two has is missing or foreign.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed.checks.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from annbatch_distributed.cli.cells import Cells
    from annbatch_distributed.cli.settings import Settings
    from annbatch_distributed.sharding import EpochPlan, Rows
    from annbatch_distributed.sharding.rows import Int64Array

__all__ = ["Read", "RowSet", "Some", "readings"]

#: How many cells of a rank are compared with the store in an epoch, and how many rows that differ are named.
_COMPARED, _NAMED = 64, 5
#: After so many seconds it is said how far a rank is.
_SAID = 0.2
#: How many rows of the plan, or eights of rows, are compared at once.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Some:
    """How many rows there are of a kind, and the first few of them."""

    n: int = 0
    first: tuple[int, ...] = ()

    def __str__(self) -> str:
        rows = "row" if self.n == 1 else "rows"
        return f"{self.n} {rows}: {', '.join(map(str, self.first))}{', ...' if self.n > len(self.first) else ''}"


class RowSet:
    """A set of rows, with one bit for each row of the collection.

    >>> rows, other = RowSet(20), RowSet(20)
    >>> rows.add(np.array([3, 17, 3])).tolist()
    [3]
    >>> rows.add(np.array([17, 4])).tolist()
    [17]
    >>> other.add(np.array([17])).tolist()
    []
    >>> rows.without(other)
    Some(n=2, first=(3, 4))
    """

    def __init__(self, n_obs: int) -> None:
        self._bits = np.zeros(-(-n_obs // 8), dtype=np.uint8)

    def add(self, rows: Int64Array) -> Int64Array:
        """Add rows, and return those that were there before or come twice."""
        distinct, counts = np.unique(rows, return_counts=True)
        places, flags = distinct >> 3, np.left_shift(1, distinct & 7).astype(np.uint8)
        were_there = (self._bits[places] & flags) > 0
        if len(distinct):
            firsts = np.flatnonzero(np.diff(places, prepend=-1))
            self._bits[places[firsts]] |= np.bitwise_or.reduceat(flags, firsts)
        again: Int64Array = distinct[were_there | (counts > 1)]
        return again

    def without(self, other: RowSet) -> Some:
        """Return how many rows the other one doesn't have, and the first few of them, in ascending order."""
        n_rows, first = 0, list[int]()
        for start in range(0, len(self._bits), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            left = self._bits[part] & ~other._bits[part]
            n_rows += int(np.bitwise_count(left).sum())
            places = start + np.flatnonzero(left)[: _NAMED - len(first)]
            which, bits = np.nonzero(np.unpackbits(left[places - start, None], axis=1, bitorder="little"))
            first += (places[which] * 8 + bits).tolist()[: _NAMED - len(first)]
        return Some(n_rows, tuple(first))


@dataclass(frozen=True)
class Read:
    """What a rank has read in an epoch."""

    rank: int
    epoch: int
    tally: dict[str, int]
    """Its rows and batches, as :meth:`Tally.to_dict` has them."""
    seconds: float
    """How long the pass took."""
    longest_wait: float
    """For how many seconds it waited for a batch at most."""
    missing: Some = field(default_factory=Some)
    """Rows of the plan that were not read."""
    repeated: Some = field(default_factory=Some)
    """Rows that were read again, though the plan doesn't have them twice."""
    foreign: Some = field(default_factory=Some)
    """Rows that were read, though the plan doesn't have them."""
    compared: int = 0
    """How many cells were compared with what the store has for their rows."""
    other_cells: Some = field(default_factory=Some)
    """Rows of those that were other cells."""

    @property
    def rows_per_second(self) -> float:
        """How many rows were read in a second of the pass."""
        return self.tally["n_rows"] / max(self.seconds, 1e-9)

    def problems(self, plan: EpochPlan, own: range) -> list[str]:
        """Return what is otherwise than planned for a rank, which is some ranks of the plan."""
        read, n_batches = Tally.of_dict(self.tally), max(map(plan.n_batches, own))
        found = [
            f"has not read {self.missing}" * bool(self.missing.n),
            f"has read again {self.repeated}" * bool(self.repeated.n),
            f"has read what is not its own, {self.foreign}" * bool(self.foreign.n),
            f"has read other cells than the store has for {self.other_cells}" * bool(self.other_cells.n),
            f"has read {read.n_batches} batches, not {n_batches}" * (read.n_batches != n_batches),
        ]
        if plan.batch_size is not None and read.largest > (most := plan.batch_size * len(own)):
            found.append(f"has read a batch of {read.largest} rows, with batch size {most}")
        if not any(found) and read != sum((Tally.of_rows(plan.shard(one).rows) for one in own), Tally()):
            found.append(f"has read {read.n_rows} rows, but not each as often as planned")
        return [f"rank {self.rank} {problem}" for problem in found if problem]


def readings(
    cells: Cells, settings: Settings, rank: int, *, begin: Callable[[], object], say: Callable[[int], object]
) -> Iterator[Read]:
    """Stream each epoch as a rank, and yield what was read in it; ``begin`` waits for all ranks before each epoch."""
    from annbatch_distributed import StatefulLoader

    loader = StatefulLoader(
        batch_sampler=settings.sampler(rank),
        return_index=True,
        preload_to_gpu=False,
        read_ahead=settings.read_ahead,
    ).use_collection(cells.collection)
    if loader.n_obs != cells.n_obs:
        raise RuntimeError(f"the loader has {loader.n_obs} rows, and the collection {cells.n_obs}")
    own = settings.own_ranks(rank)
    for epoch in settings.epochs:
        loader.set_epoch(epoch)
        plan = loader.plan()
        begin()
        found = _Pass(loader.n_obs)
        found.stream(loader, -(-max(map(plan.n_batches, own)) // _COMPARED), say)
        yield found.compared_with(cells, [plan.shard(one).rows for one in own], rank, epoch)


class _Pass:
    """A pass of a rank, as it is read."""

    def __init__(self, n_obs: int) -> None:
        self._n_obs = n_obs
        self._tally, self._read, self._again = Tally(), RowSet(n_obs), RowSet(n_obs)
        self._n_beyond, self._beyond = 0, list[int]()
        self._seconds = self._longest_wait = 0.0
        self._kept: list[tuple[int, Any, Any]] = []

    def stream(self, batches: Iterable[Mapping[str, Any]], every: int, say: Callable[[int], object]) -> None:
        """Read all batches, keep a cell of every so many, and say now and then how many rows have been read since."""
        began = asked = said = perf_counter()
        n_said = 0
        for batch in batches:
            now = perf_counter()
            self._longest_wait = max(self._longest_wait, now - asked)
            rows = np.asarray(batch["index"])
            if not self._tally.n_batches % every:
                self._keep(batch, self._tally.n_batches % len(rows))
            self._tally.add(rows)
            is_known = rows < self._n_obs
            self._n_beyond += len(rows) - int(is_known.sum())
            self._beyond += rows[~is_known].tolist()[: _NAMED - len(self._beyond)]
            self._again.add(self._read.add(rows[is_known]))
            if now - said > _SAID:
                say(self._tally.n_rows - n_said)
                n_said, said = self._tally.n_rows, now
            asked = perf_counter()
        self._seconds = perf_counter() - began
        say(self._tally.n_rows - n_said)

    def _keep(self, batch: Mapping[str, Any], place: int) -> None:
        values, obs = batch["X"][[place]], batch.get("obs")
        self._kept.append((int(batch["index"][place]), values, None if obs is None else obs.iloc[place]))

    def compared_with(self, cells: Cells, shares: Iterable[Rows], rank: int, epoch: int) -> Read:
        """Compare what was read with the rows that were planned, and the cells that were kept with the store."""
        planned, planned_again = RowSet(self._n_obs), RowSet(self._n_obs)
        for share in shares:
            for start in range(0, len(share), _AT_ONCE):
                rows = share.to_global(np.arange(start, min(start + _AT_ONCE, len(share))))
                planned_again.add(planned.add(rows))
        foreign = self._read.without(planned)
        kept = {row: (values, obs) for row, values, obs in self._kept if row < self._n_obs}
        others = sorted(row for row, values, obs in cells.stored(list(kept)) if not _is_same(*kept[row], values, obs))
        return Read(
            rank,
            epoch,
            self._tally.to_dict(),
            self._seconds,
            self._longest_wait,
            missing=planned.without(self._read),
            repeated=self._again.without(planned_again),
            foreign=Some(foreign.n + self._n_beyond, (*foreign.first, *self._beyond)[:_NAMED]),
            compared=len(kept),
            other_cells=Some(len(others), tuple(others[:_NAMED])),
        )


def _is_same(values: Any, obs: Any, stored_values: Any, stored_obs: Any) -> bool:  # noqa: ANN401 what batches hold
    """Whether a cell of a batch is the one of the store."""
    import pandas as pd

    values = np.asarray(values.toarray() if hasattr(values, "toarray") else values).reshape(-1)
    if not np.array_equal(values, stored_values, equal_nan=values.dtype.kind == "f"):
        return False
    if obs is None:
        return True
    pairs = [(obs[column], stored_obs[column]) for column in obs.index]
    # asked first, because pandas' NA equals nothing and is no answer either
    return all(pd.isna(one) == pd.isna(other) and (pd.isna(one) or one == other) for one, other in pairs)
