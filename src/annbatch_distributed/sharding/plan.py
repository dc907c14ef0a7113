"""The plan of an epoch: every rank's rows and batches, and what is lost or repeated.

It is a description. It holds a few integers whatever the number of rows and ranks, works out a rank's shard when asked
for it, and gives the same answers on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from annbatch_distributed.report import table
from annbatch_distributed.sharding.composition import composition
from annbatch_distributed.sharding.integers import integer
from annbatch_distributed.sharding.names import check_names, names_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd
    from matplotlib.figure import Figure

    from annbatch_distributed.sharding.contract import Sharding
    from annbatch_distributed.sharding.division import Dealt, Division, Shard
    from annbatch_distributed.sharding.remainder import Remainder
    from annbatch_distributed.sharding.rows import Rows

__all__ = ["EpochPlan"]


@dataclass(frozen=True, repr=False)
class EpochPlan:
    """What every rank reads in one epoch; made by :meth:`DistributedSampler.plan`.

    ``str(plan)`` is a small table, and what would lose fewer rows; in a notebook, each rank has a bar that shows where
    its rows are.
    :meth:`to_frame` and :meth:`plot` make a table of pandas' and a picture of it.

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
    lost in this epoch: 32 rows, 0.16 % (19968:20000)
    to lose none: remainder="exact", "keep" or "pad"
    in memory: up to 2048 rows on each rank
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
    n_processes: int | None = None
    """How many ranks run the ranks of the plan side by side, which are virtual then; None if they aren't."""
    rows_per_request: int | None = field(default=None, repr=False, compare=False)
    """Rows that a loader holds at most: those of a load request, and of those that are read ahead; None if unknown."""
    cells: tuple[pd.Index[Any], ...] | None = field(default=None, repr=False, compare=False)
    """The names of the cells of each data set, where a loader has made the plan and knows them."""

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

    @property
    def rows_in_memory(self) -> int | None:
        """How many rows a rank's loader holds at a time at most, with virtual ranks those of all that it runs.

        To read takes about as much memory again. None if the size of a load request isn't known, or the window has
        holes, of which short ones are read as well.
        """
        if self.rows_per_request is None or not self.window.is_stretch:
            return None
        n_own = 1 if self.n_processes is None else self.world_size // self.n_processes
        return min(self.rows_per_request, max(self.sizes)) * n_own

    def composition(self, labels: npt.ArrayLike | pd.Series[Any] | pd.Categorical) -> pd.DataFrame:
        """Return which cells every rank has: how many rows of each label, and how far that is from the window's mix.

        Parameters
        ----------
        labels
            A value for each row of the collection in order, such as its donor or cell type: an array, a Categorical or
            a Series. The names in the index of a Series are compared with those of the cells if a loader has made the
            plan; all else is by position. Missing values are a label of their own, NaN. A Categorical is counted
            fastest, since nothing of it is copied.

        Returns
        -------
        A table with a line for each rank, and in its columns ``"rows"``, for each label, the number of rows that the
        rank reads, repeats included, or draws from; and ``"distance"``, the total variation distance of the rank's mix
        of labels to that of the window: the part of its rows that would have to be others, from 0 to 1. Of a rank
        without rows it is 0.5.

        Raises
        ------
        ValueError
            If there is not one value for each row, in one dimension, or the names of a Series are in another order.

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

        labels_names = names_of("labels", labels)
        if labels_names is not None and self.cells is not None:
            check_names("labels", labels_names, self.cells)
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

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a line for each rank: its batches, rows, repeated rows, and the first stretches of rows.

        Examples
        --------
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
        >>> sampler = RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256)
        >>> DistributedSampler(sampler, dist_info=Rank(0, 2)).plan(20_000).to_frame()
              batches  rows  repeated global rows
        rank
        0          39  9984         0      0:9984
        1          39  9984         0  9984:19968
        """
        return table.as_frame(self)

    def plot(self, *others: EpochPlan) -> Figure:
        """Draw which rank reads which rows, where some are lost or repeated, and what the mask leaves out.

        Rows of the collection lie along one axis; each rank has a lane and a colour of its own. Where blocks of rows
        are smaller than a point of the picture, a lane is as dark as its part of the rows is large.

        Parameters
        ----------
        others
            Plans of other epochs, or of other settings, which are drawn under each other.

        Returns
        -------
        A figure of matplotlib (extra ``plot``), which notebooks show; ``savefig`` writes it to a file.

        Raises
        ------
        ModuleNotFoundError
            If matplotlib is not installed.

        Examples
        --------
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
        >>> sampler = RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256)
        >>> distributed = DistributedSampler(
        ...     sampler, dist_info=Rank(0, 2), sharding="shuffled", seed=0
        ... )
        >>> plans = []
        >>> for epoch in range(3):
        ...     distributed.set_epoch(epoch)
        ...     plans.append(distributed.plan(20_000))
        >>> picture = plans[0].plot(*plans[1:])
        >>> len(picture.axes)
        3
        """
        try:
            from annbatch_distributed.report.picture import Picture
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}. Pictures need annbatch-distributed[plot].", name=error.name) from error
        return Picture([self, *others])

    def __repr__(self) -> str:
        what = "samples drawn" if self.shares_draws else "rows"
        lost = f", {self.n_lost} lost" if self.n_lost else ""
        repeated = f", {self.n_repeated} repeated" if self.n_repeated else ""
        ranks = f"{self.world_size} {'ranks' if self.n_processes is None else 'virtual ranks'}"
        return (
            f"<EpochPlan of epoch {self.epoch}: {ranks}, {sum(self.sizes)} {what} of {self.n_obs}, "
            f"up to {self.most_batches} batches each{lost}{repeated}>"
        )

    def __str__(self) -> str:
        return table.as_text(self)

    def _repr_html_(self) -> str:
        return table.as_html(self)
