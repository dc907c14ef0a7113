"""The plan of an epoch: every rank's rows and batches, and which rows are dropped or repeated.

A sharding puts the rows of the window into one order, and that is cut into a contiguous range for each rank. The plan
is a description, computes a rank's shard on demand, and gives the same answers on every rank.

Let the window have N rows, W ranks, batch size b, and q = N // W. The range of a rank has

=========  ==================================================  ==========================================
policy     rows of a rank                                      batches of a rank
=========  ==================================================  ==========================================
``drop``   q // b * b                                          q // b, all full
``keep``   q; the last N mod W ranks have q + 1                ceil(rows / b): may differ by one
``exact``  q; the last N mod W ranks have q + 1                B = ceil(N / (W * b)) on every rank
``pad``    B * b: its own as under ``exact``, then repeats     B, all full
=========  ==================================================  ==========================================

``count`` asks the wrapped sampler how many batches it makes of every rank's shard. Every rank asks about all ranks, in
the same order, so an error for one of them is raised on every rank, before any has read a row:

1. The wrapped sampler must accept the shards: one of each length, or every shard if it holds a value for each row.
2. If the policy promises every row, its batches must hold all rows.
3. If the policy promises equal counts, the sampler's counts must be equal, or, under ``exact``, such that a short rank
   can split one of its batches.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler

from annbatch_distributed.lanes import Remainder
from annbatch_distributed.masks import check_names
from annbatch_distributed.rows import BOUND, Rows, integer, names_of, whole_chunks_first
from annbatch_distributed.sets import EpochSets
from annbatch_distributed.sharding import Contiguous, Sharding, ordered
from annbatch_distributed.wrapped import (
    drawable_classes,
    localize,
    needs_global_rows,
    private_copy,
    reads_every_row,
    set_draws,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_NO_ROWS = Rows()


@dataclass(frozen=True)
class Shard:
    """The rows that one rank reads in one epoch; local row ``p`` is the ``p``-th of them."""

    rows: Rows
    """All of them, as global rows."""
    n_own: int
    """How many of them, the leading ones, are this rank's own. Those after them are repeats."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def repeated(self) -> Rows:
        """The rows that are repeats (under ``remainder="pad"``): they are some rank's own rows as well."""
        return self.rows.cut(self.n_own, len(self))


@dataclass(frozen=True, repr=False)
class EpochPlan:
    """What every rank reads in one epoch; made by :meth:`DistributedSampler.plan`.

    ``str(plan)`` is a small table, with what would drop fewer rows; notebooks show it, too. :meth:`to_frame` returns
    it as a pandas table, and :meth:`plot` draws it.

    Examples
    --------
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler, Rank
    >>> sampler = RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256)
    >>> plan = DistributedSampler(sampler, dist_info=Rank(0, 2)).plan(20_000)
    >>> print(plan)
    epoch 0: 2 ranks share 20,000 of 20,000 rows (remainder="drop", batch size 256)
    rank  batches  rows  repeated  global rows
       0       39  9984         0  0:9984
       1       39  9984         0  9984:19968
    dropped in this epoch: 32 rows, 0.16% (19968:20000)
    to drop none: remainder="exact", "keep" or "pad"
    in memory: up to 2,048 rows on each rank
    >>> plan.n_batches(1), len(plan.shard(1)), list(plan.dropped)[0]
    (39, 9984, 19968)
    """

    n_obs: int
    """Rows of the whole collection; or number of sets, if the sampler samples sets of cells."""
    epoch: int
    """Which epoch this is the plan of."""
    n_streams: int
    """Number of ranks, or of virtual ranks if there are such."""
    window: Rows
    """The rows that the ranks share out: those that the mask selects."""
    remainder: Remainder
    """What becomes of the rows that don't divide evenly."""
    batch_size: int | None
    """Rows of a full batch; None where the wrapped sampler has none."""
    sharding: Sharding
    """What deals the rows to the ranks."""
    seed: int | None
    """What the sharding's own randomness begins from, the same on every rank."""
    n_draws: int | None
    """How many samples the wrapped sampler would draw alone, where ranks share out draws; None where it is rows."""
    order: Rows = field(default=_NO_ROWS, repr=False)
    """The rows that are not lost, in the order of the sharding."""
    dropped: Rows = field(default=_NO_ROWS, repr=False)
    """The rows of the window that no rank is given in this epoch.

    What the wrapped sampler itself leaves out of a rank's rows (``drop_last``, ``num_samples``) is not among them.
    """
    align: int | None = None
    """Of which number the first rows of whole chunks are multiples; None leaves rows in the order of the sharding."""
    sampler_batches: tuple[int, ...] = field(default=(), repr=False)
    """For each rank, the batches that the wrapped sampler gives for its shard by itself."""
    remaining: tuple[int, ...] | None = field(default=None, repr=False)
    """For each rank of a job that resumes an epoch, how many batches it has left; None where it begins."""
    n_dropped_batches: int = field(default=0, repr=False)
    """How many batches of an epoch no rank reads any more, since ``drop`` leaves them over when ranks change."""
    n_processes: int | None = None
    """How many ranks run the ranks of the plan side by side, which are virtual then; None if they aren't."""
    rows_per_request: int | None = field(default=None, repr=False, compare=False)
    """Rows that a loader holds at most: those of a load request, and of those that are read ahead; None if unknown."""
    cells: tuple[pd.Index[Any], ...] | None = field(default=None, repr=False, compare=False)
    """The names of the cells of each data set, where a loader has made the plan and knows them."""

    sets: EpochSets | None = field(default=None, repr=False, compare=False)
    """Sets of this epoch, if the sampler samples sets: rows are then numbers of sets everywhere in the plan."""

    @property
    def unit(self) -> str:
        """Noun for what the plan counts: row, or set."""
        return "row" if self.sets is None else "set"

    @property
    def n_cells(self) -> int:
        """Number of cells of the whole collection."""
        return self.n_obs if self.sets is None else self.sets.sets.n_obs

    def with_order(self, *, rotates: bool, align: int | None) -> Self:
        """Return the same plan with the dropped rows, and the others in the order of the sharding.

        ``rotates`` says whether the rows that ``drop`` loses move from epoch to epoch: in epoch 0 the last rows are
        dropped, as annbatch has it, and each epoch drops the rows before those of the last one, going round. So
        every row is dropped equally often, and if fewer than half of the rows are dropped at once, any two consecutive
        epochs together read every row.
        """
        self.check_enough()
        kept, dropped, n_rows, n_dropped = self.window, Rows(), len(self.window), self.n_dropped
        if n_dropped:
            # of 10 rows, 4 are dropped: epoch 0 keeps 0:6, epoch 1 begins at -4 mod 10 = 6 and keeps 6:10 0:2
            start = -self.epoch * n_dropped % n_rows if rotates else 0
            kept = self.window.cyclic(start, n_rows - n_dropped)
            dropped = self.window.cyclic(start - n_dropped, n_dropped)
        if self._has_annbatchs_layout:
            align = None
        order = ordered(self.sharding, kept, epoch=self.epoch, seed=self.seed)
        return replace(self, order=order, dropped=dropped, align=align)

    @property
    def _has_annbatchs_layout(self) -> bool:
        """Whether annbatch's own ``DistributedSampler`` gives each rank the same rows, whose order stays the same."""
        is_whole = self.remainder == "drop" or (self.remainder == "keep" and self.n_obs % self.n_streams == 0)
        is_open = len(self.window) == self.n_obs
        return not self.epoch and is_open and is_whole and isinstance(self.sharding, Contiguous)

    def check_enough(self) -> None:
        """Raise a ValueError if there are too few rows, or samples, for the policy: the same on every rank.

        Under ``exact`` it takes the sampler to tell whether a rank is a batch short, so that this only looks for a row
        per rank there.
        """
        n_rows, world_size, size = self._n_shared, self.n_streams, self.batch_size
        drawn = f"The wrapped sampler takes {n_rows:,} samples"
        what = f"The mask selects {n_rows:,} {self.unit}s" if self.n_draws is None else drawn
        if self.remainder == "drop":
            assert size is not None
            if n_rows < world_size * size:
                raise ValueError(
                    f"{what}, too few for one full batch on every rank: {world_size} ranks times batch size {size} is "
                    f"{world_size * size:,}. Use fewer ranks or a smaller batch_size, or remainder='exact' or 'pad'."
                )
        elif self.remainder != "pad" and n_rows < world_size:
            raise ValueError(
                f"{what}, too few for {world_size} ranks: under remainder={self.remainder!r} every rank needs at least "
                "one. Use fewer ranks, or remainder='pad', which has full batches on all of them."
            )
        elif n_rows < 1:
            raise ValueError(f"{what}, but at least one is needed. Pass a larger mask, or check loader.n_obs.")

    @property
    def _n_shared(self) -> int:
        """How many rows are shared out, or samples."""
        return len(self.window) if self.n_draws is None else self.n_draws

    def _stretch(self, rank: int) -> tuple[int, int, int]:
        """Return where in the order the stretch of a rank starts, how much of it is its own, and how long it is."""
        size = self.batch_size or 1
        rows, extra = divmod(self._n_shared, self.n_streams)
        if self.remainder == "drop":
            length = rows // size * size
            return rank * length, length, length
        # 7 rows on 3 ranks: 2, 2 and 3 rows, from 0, 2 and 4 on
        n_small = self.n_streams - extra  # the ranks that don't have a row more come first
        start, own = rank * rows + max(0, rank - n_small), rows + (rank >= n_small)
        if self.remainder == "pad":
            # ceil(samples / (streams * size)) full batches: 10 rows on 2 ranks in batches of 4 are 2 batches, 8 rows
            return start, own, -(-self._n_shared // (self.n_streams * size)) * size
        return start, own, own

    def shard(self, rank: int) -> Shard:
        """Return the rows of a rank; an IndexError if there is no such rank."""
        return self._shard(self._checked(rank), self.align)

    def _shard(self, rank: int, align: int | None) -> Shard:
        if self.n_draws is not None:  # ranks share out draws, and each draws from all rows
            return Shard(self.order, len(self.order))
        start, n_own, length = self._stretch(rank)
        # repeats are the rows that follow in the order, from the front again behind its end
        own, repeats = self.order.cut(start, start + n_own), self.order.cyclic(start + n_own, length - n_own)
        if align is not None:
            own, repeats = whole_chunks_first(own, align), whole_chunks_first(repeats, align, after=n_own)
        return Shard(own + repeats, n_own)

    def in_order(self, rank: int) -> Rows:
        """Return the rows of a rank in the order of the sharding, whatever comes first in its shard."""
        return self._shard(rank, None).rows

    def n_batches(self, rank: int) -> int:
        """Return the number of batches of a rank: the same for every rank, unless ``remainder`` is ``"keep"``."""
        rank = self._checked(rank)
        return self.sampler_batches[rank] if self.remainder == "keep" else self.most_batches

    @cached_property
    def most_batches(self) -> int:
        """The number of batches of the rank that has the most."""
        return max(self.sampler_batches)

    @property
    def counts(self) -> list[int]:
        """For each stream, the number of its batches."""
        return list(map(self.n_batches, range(self.n_streams)))

    @cached_property
    def _firsts(self) -> list[int]:
        """For each stream, the number of its first batch in the epoch, and how many there are in all."""
        return list(accumulate(self.counts, initial=0))

    def first_number(self, stream: int) -> int:
        """Return the number of the first batch of a stream, all streams laid end to end."""
        return self._firsts[stream]

    def stream_of(self, number: int) -> int:
        """Return which stream a batch is of."""
        return bisect_right(self._firsts, number) - 1

    def size(self, rank: int) -> int:
        """Return how many rows the shard of a rank has; or samples, where ranks share out draws."""
        return self._stretch(rank)[2]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """For each rank, how many rows its shard has; or samples, where ranks share out draws."""
        # the last ones have a row more, if any have; where all have the same, both halves agree
        n_longer = self._n_shared % self.n_streams
        return (self.size(0),) * (self.n_streams - n_longer) + (self.size(self.n_streams - 1),) * n_longer

    @property
    def n_dropped(self) -> int:
        """How many rows of the window no rank is given in this epoch."""
        is_whole = self.remainder != "drop" or self.n_draws is not None
        return 0 if is_whole else self._n_shared % (self.n_streams * (self.batch_size or 1))

    @property
    def n_repeated(self) -> int:
        """How many rows are read a second time, over all ranks."""
        return sum(self.sizes) - len(self.order) if self.n_draws is None else 0

    @property
    def rows_in_memory(self) -> int | None:
        """How many rows a rank's loader holds at a time at most, with virtual ranks those of all that it runs.

        To read takes about as much memory again. None if the size of a load request isn't known, or if short gaps are
        read as well: between the rows of a window, or between the cells of sets.
        """
        if self.rows_per_request is None or not self.window.is_stretch or self.sets is not None:
            return None
        # a process runs an equal number of virtual ranks, side by side
        n_own = 1 if self.n_processes is None else self.n_streams // self.n_processes
        return min(self.rows_per_request, max(self.sizes)) * n_own

    def composition(self, labels: npt.ArrayLike | pd.Series[Any] | pd.Categorical | None = None) -> pd.DataFrame:
        """Return how many rows of each label every rank has, and how far that is from the window's mix.

        Parameters
        ----------
        labels
            A value for each row of the collection in order, such as its donor or cell type: an array, a Categorical or
            a Series, whose names are compared with those of the cells if a loader has made the plan. Missing values are
            a label of their own, NaN. A Categorical is counted fastest. Of sets, a value for each set; None stands for
            their groups.

        Returns
        -------
        A table with a line for each rank: under ``"rows"`` (or ``"sets"``) how many rows of each label it reads,
        repeats included, or draws from; and ``"distance"``, the total variation distance of its mix of labels to that
        of the window: the part of its rows that would have to be others, from 0 to 1 (0.5 of a rank without rows).

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

        from annbatch_distributed.report import composition

        if labels is None and self.sets is not None:
            labels = self.sets.sets.groups
        labels_names = names_of("labels", labels)
        if labels_names is not None and self.cells is not None:
            check_names("labels", labels_names, self.cells)
        counted, names = composition(self, labels)
        ranks = pd.RangeIndex(self.n_streams, name="rank" if self.n_processes is None else "virtual rank")
        table = pd.DataFrame(
            counted.counts, index=ranks, columns=pd.MultiIndex.from_product([[f"{self.unit}s"], names])
        )
        table["distance", ""] = counted.distances
        return table

    def _checked(self, rank: int) -> int:
        rank = integer("rank", rank)
        if not 0 <= rank < self.n_streams:
            raise IndexError(f"rank must be in [0, {self.n_streams}), the ranks of this plan, got {rank}.")
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
        from annbatch_distributed import report

        return report.as_frame(self)

    def plot(self, *others: EpochPlan) -> Figure:
        """Draw which rank reads which rows, where some are dropped or repeated, and what the mask leaves out.

        Rows of the collection lie along one axis; each rank has a line and a color of its own.

        Parameters
        ----------
        others
            Plans of other epochs, or of other settings, which are drawn under each other.

        Returns
        -------
        A figure of matplotlib (extra ``plot``), which notebooks show; ``savefig`` writes it to a file.

        Examples
        --------
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
        >>> sampler = RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256)
        >>> plan = DistributedSampler(sampler, dist_info=Rank(0, 2)).plan(20_000)
        >>> picture = plan.plot()
        """
        try:
            from annbatch_distributed.picture import draw
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}. Pictures need annbatch-distributed[plot].", name=error.name) from error
        return draw([self, *others])

    def __repr__(self) -> str:
        what = f"{self.unit}s" if self.n_draws is None else "samples drawn"
        dropped = f", {self.n_dropped} dropped" if self.n_dropped else ""
        repeated = f", {self.n_repeated} repeated" if self.n_repeated else ""
        ranks = f"{self.n_streams} {'ranks' if self.n_processes is None else 'virtual ranks'}"
        return (
            f"<EpochPlan of epoch {self.epoch}: {ranks}, {sum(self.sizes)} {what} of {self.n_obs}, "
            f"up to {self.most_batches} batches each{dropped}{repeated}>"
        )

    def __str__(self) -> str:
        from annbatch_distributed import report

        return report.as_text(self)

    def _repr_html_(self) -> str:
        from annbatch_distributed import report

        return report.as_html(self)


#: A rank, and the classes that it can draw.
type Classes = tuple[int, frozenset[str]]


class Counts(NamedTuple):
    """The wrapped sampler's answers about every rank's shard."""

    sampler_batches: tuple[int, ...]
    """For each rank, the batches that the sampler gives for its shard by itself."""
    classes: tuple[Classes, ...]
    """What each rank can draw, if the sampler is a class sampler."""


def count(sampler: Sampler, plan: EpochPlan) -> Counts:
    """Ask a sampler about every rank's shard of a plan. It is left as it is.

    Of ranks whose shards make no difference to the sampler, one is asked about. A ValueError if any rank could not run,
    or could not have the number of batches that the policy promises.
    """
    # `kinds` tells shards apart that may have different answers: by rank, or else by their number of rows
    differs = needs_global_rows(sampler) and plan.n_draws is None
    kinds = range(plan.n_streams) if differs else plan.sizes
    counts: dict[int, int] = {}
    classes: list[Classes] = []
    for rank, kind in enumerate(kinds):
        if kind not in counts:
            local, counts[kind] = _count(sampler, plan, rank)
            if (drawable := drawable_classes(local)) is not None:
                classes.append((rank, drawable))
    sampler_batches = tuple(map(counts.__getitem__, kinds))
    _check_equal(sampler, plan, sampler_batches)
    return Counts(sampler_batches, tuple(classes))


def _count(sampler: Sampler, plan: EpochPlan, rank: int) -> tuple[Sampler, int]:
    """Ask about one rank."""
    shard, size = plan.shard(rank), plan.size(rank)
    try:
        local = prepared(sampler, plan, rank, shard)
        local.validate(len(shard))  # annbatch's own error, if the sampler can't run on so many rows
        _refuse_short_draws(local, len(shard))
        n_batches = _checked_count(sampler, local.n_batches(len(shard)), len(shard))
        if plan.n_draws is not None or (reads_every_row(sampler) and plan.remainder in ("exact", "pad")):
            _refuse_impossible(n_batches, plan, size)
    except ValueError as error:
        hint = ""
        if drawable_classes(sampler) is not None:  # what is cut short is a run of a class
            hint = (
                " With sharding='independent' every rank draws from all rows, and no boundary between ranks cuts a run."
                if plan.n_draws is None
                else " A mask cuts runs too: write rows that are held out to a collection of their own. "
                "annbatch-distributed collect --group-by COLUMN writes cells of each class together."
            )
        raise ValueError(
            f"{type(sampler).__name__} can't run on the rows of rank {rank} of {plan.n_streams}, which are "
            f"{shard.rows} of the collection's {plan.n_obs} (remainder={plan.remainder!r}). Given them as "
            f"[0, {len(shard)}), it says: {error}{hint}"
        ) from error
    return local, n_batches


def _what(plan: EpochPlan) -> str:
    """Return what ranks share out."""
    return f"{plan.unit}s" if plan.n_draws is None else "samples"


def _check_equal(sampler: Sampler, plan: EpochPlan, counts: tuple[int, ...]) -> None:
    """Raise if the ranks can't have the same number of batches where that is promised."""
    most, remainder = max(counts), plan.remainder
    if remainder == "keep" or min(counts) == most:
        return
    short = [rank for rank, n_batches in enumerate(counts) if n_batches < most]
    # a rank that is one batch short splits one of its batches, if that is sure to be possible
    if remainder == "exact" and all(most - counts[rank] == 1 for rank in short):
        short = [rank for rank in short if not _is_full(sampler, plan, counts[rank], plan.size(rank))]
    if not short:
        return
    rank = short[0]
    halved = "A rank that is one batch short can make up for it only if all its batches are full, of two rows or more. "
    raise ValueError(
        f"remainder={remainder!r} promises the same number of batches on each of the {len(counts)} ranks, but "
        f"{type(sampler).__name__} makes {counts[rank]} of the {plan.size(rank)} {_what(plan)} of rank {rank}, and "
        f"{most} on rank {counts.index(most)}. {halved if remainder == 'exact' else ''}Use another batch_size, "
        "mask or number of ranks, or remainder='keep' without a collective in each step."
    )


def _is_full(sampler: Sampler, plan: EpochPlan, n_batches: int, n_rows: int) -> bool:
    """Whether all batches of a rank are sure to be full, of two rows or more, so that any of them can be halved."""
    size = plan.batch_size
    assert size is not None
    return (plan.n_draws is not None or reads_every_row(sampler)) and size > 1 and 0 < n_rows == n_batches * size


def _refuse_impossible(n_batches: int, plan: EpochPlan, n_rows: int) -> None:
    """Raise a ValueError if so many batches can't hold all rows, or samples, of a rank."""
    policy, size, what = plan.remainder, plan.batch_size, _what(plan)
    if size is None:
        return
    # 10 rows in batches of 4: 2 batches leave 2 rows out
    if n_batches * size < n_rows:
        raise ValueError(
            f"it makes {n_batches} batches of {size} rows at most, and so leaves out some of its {n_rows} {what}, but "
            f"remainder={policy!r} promises every {what[:-1]}. Use drop_last=False, or remainder='drop'."
        )
    # more than 2 full batches, or more than 10 of at least one row each, would need more rows
    if n_batches > (n_rows // size if policy in ("drop", "pad") else n_rows):
        kind = f"full batches of {size} rows" if policy in ("drop", "pad") else "batches"
        raise ValueError(
            f"it makes {n_batches} batches, and its {n_rows} {what} are too few for that many {kind}, which "
            f"remainder={policy!r} promises. Fix its n_batches, or pass remainder='keep'."
        )


def _checked_count(sampler: Sampler, n_batches: object, n_rows: int) -> int:
    """Return a number of batches as an integer; one that ``np.ceil`` gives is a float."""
    expected = (
        f"{type(sampler).__name__}.n_batches({n_rows}) must return how many batches it yields for {n_rows} rows, an "
        "integer of at least 0 and below 2**63, got "
    )
    if isinstance(n_batches, bool) or not isinstance(n_batches, Integral | float | np.floating):
        # not what it is: other ranks see this, and a user's own object may show anything
        raise TypeError(f"{expected}something of type {type(n_batches).__name__}. Return an int.")
    if not 0 <= float(n_batches) < BOUND or not (isinstance(n_batches, Integral) or n_batches.is_integer()):
        advice = "Round a quotient up with math.ceil where the last batch may be short, else down with //."
        raise ValueError(f"{expected}{n_batches}. {advice}")
    return int(n_batches)


def _refuse_short_draws(sampler: Sampler, n_rows: int) -> None:
    """Raise where annbatch's RandomSampler yields fewer batches than its ``n_batches`` says.

    With ``replacement`` and ``drop_last`` it draws whole chunks only, and counts as if it drew the rest as well.
    tests/test_counts.py fails when annbatch changes it.
    """
    if not (isinstance(sampler, RandomSampler) and sampler._replacement and sampler._drop_last):
        return
    # 100 samples in batches of 8 are promised as 12 batches; 6 whole chunks of 16 make 12 too, but 1 of 64 only 8
    n_samples, chunk_size = sampler._num_samples or n_rows, sampler._chunk_size
    promised, drawn = n_samples // sampler.batch_size, n_samples // chunk_size * chunk_size // sampler.batch_size
    if drawn < promised:
        raise ValueError(
            f"with replacement=True and drop_last=True it draws whole chunks of {chunk_size} rows, which make "
            f"{drawn} batches of the {promised} that {n_samples} samples should be. Use drop_last=False."
        )


def prepared(
    sampler: Sampler, plan: EpochPlan, stream: int, shard: Shard, rng: np.random.Generator | None = None
) -> Sampler:
    """Return a private copy of a sampler that runs on the local rows of a stream in the plan's epoch.

    ``rng`` takes the place of its generator. A ValueError if it can't run on these rows.
    """
    duplicate = private_copy(sampler, rng)
    localize(duplicate, shard.rows, plan.n_obs)
    if plan.n_draws is not None:
        set_draws(duplicate, plan.size(stream))
    # where the generator is worked out instead of held, so that the copy has another one
    if rng is not None and duplicate.rng is not None and duplicate.rng is not rng:
        duplicate.rng = rng
    if callable(set_epoch := getattr(duplicate, "set_epoch", None)):
        set_epoch(plan.epoch)
    return duplicate
