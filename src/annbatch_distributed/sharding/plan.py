"""The plan of an epoch: every rank's rows and batches, and what is lost or repeated.

It is a description. It holds a few integers whatever the number of rows and ranks, works out a rank's shard when asked
for it, and gives the same answers on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from annbatch_distributed.sharding.remainder import n_lost, stretch
from annbatch_distributed.sharding.rows import Rows

if TYPE_CHECKING:
    from annbatch_distributed.sharding.remainder import Remainder

#: More ranks than this, and the table shows the first and the last ones.
_TABLE_RANKS = 16


@dataclass(frozen=True)
class Shard:
    """The rows that one rank reads in one epoch; local row ``p`` is the ``p``-th of them."""

    rows: Rows
    """All of them, as global rows."""
    n_own: int
    """How many of them, the leading ones, are this rank's own. Those after them are repeats of the rows that follow."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def repeated(self) -> Rows:
        """The rows that are repeats (under ``remainder="pad"``): they are some rank's own rows as well."""
        return self.rows.cyclic(self.n_own, len(self) - self.n_own)


@dataclass(frozen=True)
class EpochPlan:
    """What every rank reads in one epoch; made by :meth:`DistributedSampler.plan`.

    ``str(plan)`` is a small table.

    Examples
    --------
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler, Rank
    >>> sampler = RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256)
    >>> plan = DistributedSampler(sampler, dist_info=Rank(0, 2)).plan(20_000)
    >>> print(plan)
    epoch 0: 2 ranks share 20000 of 20000 rows (remainder="drop", batch size 256)
    rank  batches  rows  repeated  global rows
       0       39  9984         0  0:9984
       1       39  9984         0  9984:19968
    lost in this epoch: 32 rows (19968:20000)
    >>> plan.n_batches(1), len(plan.shard(1)), list(plan.lost)[0]
    (39, 9984, 19968)
    """

    n_obs: int
    """Rows of the whole collection."""
    window: Rows
    """The rows that the ranks share out: those that the mask selects."""
    world_size: int
    """The number of ranks."""
    batch_size: int | None
    """Rows of a full batch; None where the wrapped sampler has none."""
    remainder: Remainder
    """What becomes of the rows that don't divide evenly."""
    epoch: int
    """Which epoch this is the plan of."""
    offset: int
    """The position in the window at which rank 0 begins; it moves the lost rows from epoch to epoch."""
    natural_batches: tuple[int, ...]
    """For each rank, the batches that the wrapped sampler gives for its shard by itself."""

    def shard(self, rank: int) -> Shard:
        """Return the rows of a rank.

        Raises
        ------
        IndexError
            If there is no such rank.
        """
        self._check(rank)
        start, own, length = stretch(
            self.remainder,
            n_rows=len(self.window),
            world_size=self.world_size,
            batch_size=self.batch_size,
            offset=self.offset,
            rank=rank,
        )
        return Shard(self.window.cyclic(start, length), own)

    def n_batches(self, rank: int) -> int:
        """Return the number of batches of a rank: the same for every rank, unless ``remainder`` is ``"keep"``.

        Raises
        ------
        IndexError
            If there is no such rank.
        """
        self._check(rank)
        return self.natural_batches[rank] if self.remainder == "keep" else max(self.natural_batches)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            msg = f"rank must be in [0, {self.world_size}), the ranks of this plan, got {rank}."
            raise IndexError(msg)

    @property
    def lost(self) -> Rows:
        """The rows of the window that no rank is given in this epoch.

        What the wrapped sampler itself leaves out of a rank's rows (``drop_last``, ``num_samples``) is not among them.
        """
        return self.window.cyclic(self.offset - self.n_lost, self.n_lost)

    @property
    def n_lost(self) -> int:
        """How many rows of the window no rank is given in this epoch."""
        return n_lost(self.remainder, n_rows=len(self.window), world_size=self.world_size, batch_size=self.batch_size)

    @property
    def n_repeated(self) -> int:
        """How many rows are read a second time, over all ranks."""
        if self.remainder != "pad":
            return 0
        return self.world_size * len(self.shard(0)) - len(self.window)

    def __str__(self) -> str:
        lines = [("rank", "batches", "rows", "repeated", "global rows")]
        if self.world_size <= _TABLE_RANKS:
            lines += map(self._line, range(self.world_size))
        else:
            lines += [*map(self._line, range(_TABLE_RANKS - 1)), ("...",) * 5, self._line(self.world_size - 1)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
        table = "\n".join(
            "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]])
            for line in lines
        )
        size = "no batch size" if self.batch_size is None else f"batch size {self.batch_size}"
        title = (
            f"epoch {self.epoch}: {self.world_size} ranks share {len(self.window)} of {self.n_obs} rows "
            f'(remainder="{self.remainder}", {size})'
        )
        lost = f" ({_shortened(self.lost)})" if self.n_lost else ""
        foot = f"lost in this epoch: {self.n_lost} rows{lost}"
        if self.n_repeated:
            foot += f"; repeated: {self.n_repeated}"
        return "\n".join((title, table, foot))

    def _line(self, rank: int) -> tuple[str, str, str, str, str]:
        shard = self.shard(rank)
        n_repeated = len(shard) - shard.n_own
        return str(rank), str(self.n_batches(rank)), str(len(shard)), str(n_repeated), _shortened(shard.rows)


def _shortened(rows: Rows) -> str:
    """Rows as text, the first few ranges only."""
    return str(rows) if len(rows.ranges) <= 3 else f"{Rows(rows.ranges[:3])}, ..."
