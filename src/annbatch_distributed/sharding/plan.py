"""The plan of an epoch: every rank's rows and batches, and what is lost or repeated.

It is a description. It holds a few integers whatever the number of rows and ranks, works out a rank's shard when asked
for it, and gives the same answers on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from annbatch_distributed.sharding.composition import composition
from annbatch_distributed.sharding.contiguous import Contiguous
from annbatch_distributed.sharding.division import in_short
from annbatch_distributed.sharding.integers import integer

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd

    from annbatch_distributed.sharding.contract import Sharding
    from annbatch_distributed.sharding.division import Dealt, Division, Shard
    from annbatch_distributed.sharding.remainder import Remainder
    from annbatch_distributed.sharding.rows import Rows

__all__ = ["EpochPlan"]

#: More ranks than this, and the table shows the first and the last ones.
_TABLE_RANKS = 16


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
    batch_size: int | None
    """Rows of a full batch; None where the wrapped sampler has none."""
    segment: int
    """How many times the epoch went on with another number of ranks; the window is what was left of it then."""
    division: Division
    """What the sharding was asked, and its answer."""
    dealt: Dealt
    """What that comes to in this epoch, for every rank."""
    sampler_batches: tuple[int, ...] = field(repr=False)
    """For each rank, the batches that the wrapped sampler gives for its shard by itself."""
    is_aligned: bool = field(default=True, repr=False)
    """Whether shards may have whole chunks first; not in an epoch that a version began which didn't have it so."""
    n_processes: int | None = None
    """How many ranks run the ranks of the plan side by side, which are virtual then; None if they aren't."""

    @property
    def window(self) -> Rows:
        """The rows that the ranks share out: those that the mask selects."""
        return self.division.window

    @property
    def world_size(self) -> int:
        """The number of ranks, or of virtual ranks if there are such."""
        return self.division.world_size

    @property
    def epoch(self) -> int:
        """Which epoch this is the plan of."""
        return self.division.epoch

    @property
    def remainder(self) -> Remainder:
        """What becomes of the rows that don't divide evenly."""
        return self.division.remainder

    @property
    def sharding(self) -> Sharding:
        """What deals the rows to the ranks."""
        return self.division.sharding

    @property
    def seed(self) -> int | None:
        """What the sharding's own randomness begins from, the same on every rank."""
        return self.division.seed

    @property
    def n_samples(self) -> int | None:
        """How many samples the wrapped sampler would draw alone, where ranks share out draws; None where it is rows."""
        return self.division.n_samples

    @property
    def shares_draws(self) -> bool:
        """Whether the ranks share out draws, each of which may be of any row of the window, instead of the rows."""
        return self.dealt.is_drawn

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of the epoch that a rank could read."""
        return self.segment > 0 and self.division.is_exhausted

    def shard(self, rank: int) -> Shard:
        """Return the rows of a rank.

        Raises
        ------
        TypeError
            If the rank is no integer.
        IndexError
            If there is no such rank.
        """
        return self.dealt.shard(self._checked(rank))

    def n_batches(self, rank: int) -> int:
        """Return the number of batches of a rank: the same for every rank, unless ``remainder`` is ``"keep"``.

        Raises
        ------
        TypeError
            If the rank is no integer.
        IndexError
            If there is no such rank.
        """
        rank = self._checked(rank)
        return self.sampler_batches[rank] if self.remainder == "keep" else self.most_batches

    @cached_property
    def most_batches(self) -> int:
        """The number of batches of the rank that has the most."""
        return max(self.sampler_batches)

    @property
    def sizes(self) -> tuple[int, ...]:
        """For each rank, how many rows its shard has; or samples, where ranks share out draws."""
        return self.dealt.sizes

    @property
    def lost(self) -> Rows:
        """The rows of the window that no rank is given in this epoch.

        What the wrapped sampler itself leaves out of a rank's rows (``drop_last``, ``num_samples``) is not among them.
        """
        return self.dealt.lost

    @property
    def n_lost(self) -> int:
        """How many rows of the window no rank is given in this epoch."""
        return self.dealt.n_lost

    @property
    def n_repeated(self) -> int:
        """How many rows are read a second time, over all ranks."""
        return self.dealt.n_repeated

    def composition(self, labels: npt.ArrayLike | pd.Series[Any] | pd.Categorical) -> pd.DataFrame:
        """Return which cells every rank has: how many rows of each label, and how far that is from the window's mix.

        Parameters
        ----------
        labels
            A value for each row of the collection in order, such as its donor or cell type: an array, a Categorical or
            a Series, whose index counts for nothing. Missing values are a label of their own, NaN. A Categorical is
            counted fastest, since nothing of it is copied.

        Returns
        -------
        A table with a line for each rank, and in its columns ``"rows"``, for each label, the number of rows that the
        rank reads, repeats included, or draws from; and ``"distance"``, the total variation distance of the rank's mix
        of labels to that of the window: the part of its rows that would have to be others, from 0 to 1. (Of a rank
        without rows it is 0.5.)

        Raises
        ------
        ValueError
            If there is not one value for each row, in one dimension.

        Examples
        --------
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
        >>> sampler = RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256)
        >>> plan = DistributedSampler(sampler, dist_info=Rank(0, 2)).plan(20_000)
        >>> donors = np.repeat(["d1", "d2", "d3"], [8_000, 8_000, 4_000])
        >>> plan.composition(donors)
              rows              distance
                d1    d2    d3
        rank
        0     8000  1984     0  0.401282
        1        0  6016  3968  0.400000
        """
        import pandas as pd

        found, names = composition(self, labels)
        ranks = pd.RangeIndex(self.world_size, name="rank" if self.n_processes is None else "virtual rank")
        table = pd.DataFrame(found.counts, index=ranks, columns=pd.MultiIndex.from_product([["rows"], names]))
        table["distance", ""] = found.distances
        return table

    def _checked(self, rank: int) -> int:
        rank = integer("rank", rank)
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank must be in [0, {self.world_size}), the ranks of this plan, got {rank}.")
        return rank

    def __str__(self) -> str:
        ranks = range(self.world_size)
        names = ("rank",) if self.n_processes is None else ("rank", "virtual")
        lines: list[tuple[str, ...]] = [
            (*names, "batches", "samples" if self.shares_draws else "rows", "repeated", "global rows")
        ]
        if self.world_size <= _TABLE_RANKS:
            lines += map(self._line, ranks)
        else:
            lines += [*map(self._line, ranks[: _TABLE_RANKS - 1]), ("...",) * len(lines[0]), self._line(ranks[-1])]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
        table = "\n".join(
            "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]])
            for line in lines
        )
        settings = [f'remainder="{self.remainder}"']
        if not isinstance(self.sharding, Contiguous):
            settings.insert(0, f"sharding={self.sharding}")
        settings.append("no batch size" if self.batch_size is None else f"batch size {self.batch_size}")
        epoch = f"what is left of epoch {self.epoch}" if self.segment else f"epoch {self.epoch}"
        if self.shares_draws:
            done = f"draw {sum(self.sizes)} samples from {len(self.window)} of {self.n_obs}"
            foot = f"alone, the wrapped sampler draws {self.n_samples} samples"
        else:
            done = f"share {len(self.window)} of {self.n_obs}"
            foot = f"lost in this epoch: {self.n_lost} rows" + (f" ({in_short(self.lost)})" if self.n_lost else "")
            foot += f"; repeated: {self.n_repeated}" if self.n_repeated else ""
        who = f"{self.world_size} {'' if self.n_processes is None else 'virtual '}ranks"
        who += "" if self.n_processes is None else f" on {self.n_processes} ranks"
        title = f"{epoch}: {who} {done} rows ({', '.join(settings)})"
        return "\n".join((title, table, foot))

    def _line(self, rank: int) -> tuple[str, ...]:
        shard = self.shard(rank)
        n_repeated = len(shard) - shard.n_own
        runs = [] if self.n_processes is None else [rank * self.n_processes // self.world_size]
        numbers = [*runs, rank, self.n_batches(rank), self.dealt.size(rank), n_repeated]
        return *map(str, numbers), in_short(self.dealt.in_order(rank))
