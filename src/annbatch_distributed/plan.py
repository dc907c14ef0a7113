"""The plan of an epoch: every rank's rows and batches, and the rows that are dropped or repeated.

A sharding determines the order of the selected rows, which is cut into a contiguous range for each rank. The plan is a
description. It computes a rank's shard on demand, and is the same on every rank.

With N selected rows, W ranks, batch size b, and q = N // W, the range of a rank has

=========  ==================================================  ==========================================
policy     rows of a rank                                      batches of a rank
=========  ==================================================  ==========================================
``drop``   q // b * b                                          q // b, all full
``keep``   q; the last N mod W ranks have q + 1                ceil(rows / b): may differ by one
``exact``  q; the last N mod W ranks have q + 1                B = ceil(N / (W * b)) on every rank
``pad``    B * b: its own as under ``exact``, then repeats     B, all full
=========  ==================================================  ==========================================

``count`` asks the wrapped sampler for the number of batches of every rank's shard. Every rank asks about all ranks, in
the same order, so an error for one rank is raised on every rank, before any of them has read a row:

1. The wrapped sampler must accept the shards: one of each length, or every shard if it holds a value for each row.
2. If the policy requires every row, its batches must hold all rows.
3. If the policy requires equal counts, the sampler's counts must be equal. Under ``exact``, a short rank may also split
   one of its batches.
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

from annbatch_distributed.lanes import Remainder
from annbatch_distributed.masks import check_names
from annbatch_distributed.rows import BOUND, Rows, integer, names_of, plural, whole_chunks_first
from annbatch_distributed.sets import EpochSets
from annbatch_distributed.sharding import Contiguous, Sharding, ordered
from annbatch_distributed.wrapped import (
    drawable_classes,
    localize,
    needs_global_rows,
    private_copy,
    reads_every_row,
    refuse_short_draws,
    set_draws,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_NO_ROWS = Rows()


@dataclass(frozen=True)
class Shard:
    """Rows that one rank reads in one epoch.

    Examples
    --------
    >>> shard = sampler.plan(50).shard(1)
    >>> len(shard), shard.rows
    (24, Rows(24:48))
    """

    rows: Rows
    """Global rows of the shard; local row ``p`` is the ``p``-th of them."""
    n_own: int
    """Number of rows at the front that are the rank's own. Rows after them are repeats of other rows."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def repeated(self) -> Rows:
        """Repeated rows, under ``remainder="pad"``; otherwise empty."""
        return self.rows.cut(self.n_own, len(self))


@dataclass(frozen=True, repr=False)
class EpochPlan:
    """Rows and batches of every rank in one epoch.

    Create it with :meth:`DistributedSampler.plan`. ``print(plan)`` shows a table, as do notebooks. :meth:`to_frame`
    returns the table as a DataFrame, and :meth:`plot` draws it.

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
    """Number of rows of the whole collection; number of sets if the sampler samples sets of cells."""
    epoch: int
    """Number of the epoch."""
    n_streams: int
    """Number of ranks, or of virtual ranks if they are used."""
    window: Rows
    """Rows that are sharded: the rows that the mask selects."""
    remainder: Remainder
    """Policy for the rows that don't divide evenly."""
    batch_size: int | None
    """Number of rows of a full batch; None if the wrapped sampler has no batch size."""
    sharding: Sharding
    """Assignment of rows to ranks."""
    seed: int | None
    """Seed of the sharding, the same on every rank."""
    n_draws: int | None
    """Number of samples that a single rank would take, if the sharding is independent; else None."""
    order: Rows = field(default=_NO_ROWS, repr=False)
    """Selected rows that aren't dropped, in the order of the sharding."""
    dropped: Rows = field(default=_NO_ROWS, repr=False)
    """Selected rows that are in no shard of this epoch.

    Rows of a shard that the wrapped sampler leaves out (``drop_last``, ``num_samples``) are not included.
    """
    align: int | None = None
    """Number whose multiples are the first rows of whole chunks; None keeps the order of the sharding."""
    sampler_batches: tuple[int, ...] = field(default=(), repr=False)
    """Number of batches that the wrapped sampler yields for each rank's shard."""
    remaining: tuple[int, ...] | None = field(default=None, repr=False)
    """Number of remaining batches of each rank, if an epoch is resumed; else None."""
    n_dropped_batches: int = field(default=0, repr=False)
    """Number of batches that are dropped in this epoch because the number of ranks has changed."""
    n_processes: int | None = None
    """Number of real ranks that run the plan's virtual ranks; None if virtual ranks are not used."""
    rows_per_request: int | None = field(default=None, repr=False, compare=False)
    """Largest number of rows that a loader holds, including prefetched load requests; None if unknown."""
    cells: tuple[pd.Index[Any], ...] | None = field(default=None, repr=False, compare=False)
    """``obs_names`` of each dataset, if a loader has created the plan and knows them; else None."""

    sets: EpochSets | None = field(default=None, repr=False, compare=False)
    """Sets of this epoch, if the sampler samples sets: the plan then counts sets instead of rows."""

    @property
    def unit(self) -> str:
        """Noun for the unit of the plan: row or set."""
        return "row" if self.sets is None else "set"

    @property
    def n_cells(self) -> int:
        """Number of cells of the whole collection."""
        return self.n_obs if self.sets is None else self.sets.sets.n_obs

    def with_order(self, *, rotates: bool, align: int | None) -> Self:
        """Return the plan with its dropped rows, and the other rows in the order of the sharding.

        If ``rotates`` is True, ``drop`` drops different rows in each epoch: in epoch 0 the last rows, as annbatch does,
        and in each later epoch the rows before the ones dropped in the previous epoch, cyclically. Each row is
        therefore dropped equally often. Fewer than half of the rows are dropped at once, so any two consecutive epochs
        together read every row.
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
        """True if annbatch's own ``DistributedSampler`` gives each rank the same rows, which then keep their order."""
        is_whole = self.remainder == "drop" or (self.remainder == "keep" and self.n_obs % self.n_streams == 0)
        is_open = len(self.window) == self.n_obs
        return not self.epoch and is_open and is_whole and isinstance(self.sharding, Contiguous)

    def check_enough(self) -> None:
        """Raise a ValueError if there are too few rows, or samples, for the policy.

        Under ``exact``, only the sampler can tell if a rank is one batch short, so only one row per rank is required
        here.
        """
        n_rows, world_size, size = self._n_shared, self.n_streams, self.batch_size
        samples = f"The wrapped sampler takes {plural(n_rows, 'sample')}"
        what = f"The mask selects {plural(n_rows, self.unit)}" if self.n_draws is None else samples
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
                "one. Use fewer ranks, or remainder='pad', which repeats rows."
            )
        elif n_rows < 1:
            raise ValueError(f"{what}, but at least one is needed. Pass a larger num_samples, or drop_last=False.")

    @property
    def _n_shared(self) -> int:
        """Number of rows, or samples, that are divided among ranks."""
        return len(self.window) if self.n_draws is None else self.n_draws

    def _range(self, rank: int) -> tuple[int, int, int]:
        """Return the start of a rank's range in the order, the number of its own rows, and its length with repeats."""
        size = self.batch_size or 1
        rows, extra = divmod(self._n_shared, self.n_streams)
        if self.remainder == "drop":
            length = rows // size * size
            return rank * length, length, length
        # 7 rows on 3 ranks: 2, 2 and 3 rows, starting at 0, 2 and 4
        n_small = self.n_streams - extra  # ranks with one row less come first
        start, own = rank * rows + max(0, rank - n_small), rows + (rank >= n_small)
        if self.remainder == "pad":
            # ceil(samples / (streams * size)) full batches: 10 rows on 2 ranks in batches of 4 are 2 batches, 8 rows
            return start, own, -(-self._n_shared // (self.n_streams * size)) * size
        return start, own, own

    def shard(self, rank: int) -> Shard:
        """Return the rows of a rank.

        Parameters
        ----------
        rank
            Rank, or virtual rank, of this plan.

        Returns
        -------
        Shard
            The rows of the rank. Under ``sharding="independent"``, these are all selected rows.

        Raises
        ------
        IndexError
            If the plan has no such rank.

        Examples
        --------
        >>> plan = sampler.plan(50)
        >>> plan.shard(0).rows
        Rows(0:24)
        """
        return self._shard(self._checked(rank), self.align)

    def _shard(self, rank: int, align: int | None) -> Shard:
        if self.n_draws is not None:  # samples are divided among ranks, and each rank samples from all rows
            return Shard(self.order, len(self.order))
        start, n_own, length = self._range(rank)
        # repeats are the next rows in the order, which continues at the front after its end
        own, repeats = self.order.cut(start, start + n_own), self.order.cyclic(start + n_own, length - n_own)
        if align is not None:
            own, repeats = whole_chunks_first(own, align), whole_chunks_first(repeats, align, after=n_own)
        return Shard(own + repeats, n_own)

    def in_order(self, rank: int) -> Rows:
        """Return the rows of a rank in the order of the sharding, without alignment."""
        return self._shard(rank, None).rows

    def n_batches(self, rank: int) -> int:
        """Return the number of batches of a rank.

        Parameters
        ----------
        rank
            Rank, or virtual rank, of this plan.

        Returns
        -------
        int
            Number of batches of the whole epoch; the same for every rank, unless ``remainder`` is ``"keep"``.

        Raises
        ------
        IndexError
            If the plan has no such rank.

        Examples
        --------
        >>> sampler.plan(50).n_batches(0)
        6
        """
        rank = self._checked(rank)
        return self.sampler_batches[rank] if self.remainder == "keep" else self.most_batches

    @cached_property
    def most_batches(self) -> int:
        """Number of batches of the rank with the most batches."""
        return max(self.sampler_batches)

    @property
    def counts(self) -> list[int]:
        """Number of batches of each stream."""
        return list(map(self.n_batches, range(self.n_streams)))

    @cached_property
    def _firsts(self) -> list[int]:
        """Number of the first batch of each stream, and the number of all batches: 0 4 7 of streams of 4 and 3."""
        return list(accumulate(self.counts, initial=0))

    def first_number(self, stream: int) -> int:
        """Return the number of the first batch of a stream, counted over all streams."""
        return self._firsts[stream]

    def stream_of(self, number: int) -> int:
        """Return the stream of a batch."""
        return bisect_right(self._firsts, number) - 1

    def size(self, rank: int) -> int:
        """Return the number of rows of a rank's shard; of its samples, if the sharding is independent."""
        return self._range(rank)[2]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each rank's shard; of its samples, if the sharding is independent."""
        # the last ranks may have one row more: 7 rows on 3 ranks are 2 2 3
        n_longer = self._n_shared % self.n_streams
        return (self.size(0),) * (self.n_streams - n_longer) + (self.size(self.n_streams - 1),) * n_longer

    @property
    def n_dropped(self) -> int:
        """Number of selected rows that are dropped in this epoch."""
        is_whole = self.remainder != "drop" or self.n_draws is not None
        return 0 if is_whole else self._n_shared % (self.n_streams * (self.batch_size or 1))

    @property
    def n_repeated(self) -> int:
        """Number of repeated rows, over all ranks."""
        return sum(self.sizes) - len(self.order) if self.n_draws is None else 0

    @property
    def rows_in_memory(self) -> int | None:
        """Largest number of rows that a rank's loader holds.

        With virtual ranks, it counts all that the rank runs. Reading takes about the same amount of memory again. None
        if the size of a load request is unknown, or if short gaps between selected rows, or between the cells of sets,
        are read as well.
        """
        if self.rows_per_request is None or not self.window.is_contiguous or self.sets is not None:
            return None
        # each process runs the same number of virtual ranks
        n_own = 1 if self.n_processes is None else self.n_streams // self.n_processes
        return min(self.rows_per_request, max(self.sizes)) * n_own

    def composition(self, labels: npt.ArrayLike | pd.Series[Any] | pd.Categorical | None = None) -> pd.DataFrame:
        """Count the rows of each label on every rank.

        Parameters
        ----------
        labels
            Label of each row of the collection, such as its donor or cell type: an array, a Categorical (fastest) or a
            Series of shape ``(n_obs,)``. If a loader has created the plan, the index of a Series is compared with its
            ``obs_names``. Missing values are counted as the label NaN. If the sampler samples sets, one label per set;
            None (default) then takes their groups.

        Returns
        -------
        pandas.DataFrame
            One line per rank. The integer columns ``("rows", label)``, or ``("sets", label)``, count the rows of each
            label that the rank reads, including repeated rows, or samples from. The float column ``"distance"`` is the
            total variation distance between the rank's labels and the labels of all selected rows: from 0 (the same
            proportions) to 1; 0.5 for a rank without rows.

        Raises
        ------
        ValueError
            If ``labels`` does not have one value per row, in one dimension, or the index of a Series has a different
            order.

        Examples
        --------
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
        """Return the plan as a table.

        Returns
        -------
        pandas.DataFrame
            One line per rank, with the integer columns ``batches``, ``rows`` (``samples`` or ``sets``) and
            ``repeated``, and the column ``global rows`` (``numbers`` for sets), a string of up to three ranges of rows.
            With virtual ranks, the index has the levels ``rank`` and ``virtual rank``.

        Examples
        --------
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
        """Draw the rows of each rank, and the dropped, repeated and masked rows.

        The rows of the collection are along the x axis. Each rank has its own line, and neighboring lines differ in
        color. It needs the extra ``plot``.

        Parameters
        ----------
        others
            Plans of other epochs or with other settings, to draw below this one.

        Returns
        -------
        matplotlib.figure.Figure
            The figure. Notebooks show it; ``savefig`` writes it to a file.

        Raises
        ------
        ModuleNotFoundError
            If matplotlib is not installed.

        Examples
        --------
        >>> figure = sampler.plan(50).plot()
        """
        try:
            from annbatch_distributed.picture import draw
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}. EpochPlan.plot needs matplotlib: install annbatch-distributed[plot].", name=error.name
            ) from error
        return draw([self, *others])

    def __repr__(self) -> str:
        what = f"{self.unit}s" if self.n_draws is None else "samples"
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


#: A rank, and the classes that it can sample from.
type Classes = tuple[int, frozenset[str]]


class Counts(NamedTuple):
    """The wrapped sampler's answers about every rank's shard."""

    sampler_batches: tuple[int, ...]
    """Number of batches that the sampler yields for each rank's shard."""
    classes: tuple[Classes, ...]
    """Classes that each rank can sample from, if the sampler is a class sampler; else empty."""


def count(sampler: Sampler, plan: EpochPlan) -> Counts:
    """Ask a sampler about every rank's shard of a plan, without changing it.

    Shards that make no difference to the sampler are asked about once. A ValueError if a rank can't run on its shard,
    or can't have the number of batches that the policy requires.
    """
    # shards of one kind have the same answers: each rank is its own kind, or else shards of the same length are
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
        local.validate(len(shard))  # annbatch's own error, if the sampler can't run on this number of rows
        refuse_short_draws(local, len(shard))
        n_batches = _checked_count(sampler, local.n_batches(len(shard)), len(shard))
        if plan.n_draws is not None or (reads_every_row(sampler) and plan.remainder in ("exact", "pad")):
            _refuse_impossible(n_batches, plan, size)
    except ValueError as error:
        hint = ""
        if drawable_classes(sampler) is not None:  # the shard cuts a run of a class
            hint = (
                " Pass sharding='independent', under which no boundary between ranks cuts a run of a class."
                if plan.n_draws is None
                else " A mask cuts runs of a class, too: write held-out rows to their own collection. "
                "annbatch-distributed collect --group-by COLUMN writes cells of each class together."
            )
        raise ValueError(
            f"{type(sampler).__name__} can't run on the shard of rank {rank} of {plan.n_streams}, rows {shard.rows} of "
            f"{plan.n_obs} (remainder={plan.remainder!r}). For local rows [0, {len(shard)}), it raises: {error}{hint}"
        ) from error
    return local, n_batches


def _what(plan: EpochPlan) -> str:
    """Return the noun for the unit that is divided among ranks."""
    return f"{plan.unit}s" if plan.n_draws is None else "samples"


def _check_equal(sampler: Sampler, plan: EpochPlan, counts: tuple[int, ...]) -> None:
    """Raise if the policy requires equal numbers of batches, but the ranks can't have them."""
    most, remainder = max(counts), plan.remainder
    if remainder == "keep" or min(counts) == most:
        return
    short = [rank for rank, n_batches in enumerate(counts) if n_batches < most]
    # a rank that is one batch short splits one of its batches, if that is always possible
    if remainder == "exact" and all(most - counts[rank] == 1 for rank in short):
        short = [rank for rank in short if not _is_full(sampler, plan, counts[rank], plan.size(rank))]
    if not short:
        return
    rank = short[0]
    split = "A rank that is one batch short can split a batch only if all its batches are full, of 2 rows or more. "
    raise ValueError(
        f"remainder={remainder!r} requires the same number of batches on each of the {len(counts)} ranks, but "
        f"{type(sampler).__name__} yields {counts[rank]} for the {plan.size(rank)} {_what(plan)} of rank {rank}, and "
        f"{most} on rank {counts.index(most)}. {split if remainder == 'exact' else ''}Pass a different batch_size, "
        "mask or number of ranks; or remainder='keep', if no step has a collective."
    )


def _is_full(sampler: Sampler, plan: EpochPlan, n_batches: int, n_rows: int) -> bool:
    """Return True if all batches of a rank are full and have two rows or more, so that any of them can be split."""
    size = plan.batch_size
    assert size is not None
    return (plan.n_draws is not None or reads_every_row(sampler)) and size > 1 and 0 < n_rows == n_batches * size


def _refuse_impossible(n_batches: int, plan: EpochPlan, n_rows: int) -> None:
    """Raise a ValueError if the number of batches doesn't fit the rows, or samples, of a rank."""
    policy, size, what = plan.remainder, plan.batch_size, _what(plan)
    if size is None:
        return
    # 10 rows in batches of 4: 2 batches leave out 2 rows
    if n_batches * size < n_rows:
        raise ValueError(
            f"its {n_batches} batches of at most {size} rows leave out some of its {n_rows} {what}, but "
            f"remainder={policy!r} requires every {what[:-1]}. Pass drop_last=False, or remainder='drop'."
        )
    # more than 2 full batches, or more than 10 of at least one row each, would need more rows
    if n_batches > (n_rows // size if policy in ("drop", "pad") else n_rows):
        kind = f"full batches of {size} rows" if policy in ("drop", "pad") else "batches"
        raise ValueError(
            f"its {n_rows} {what} are too few for {n_batches} {kind}, which remainder={policy!r} requires. Fix its "
            "n_batches, or pass remainder='keep'."
        )


def _checked_count(sampler: Sampler, n_batches: object, n_rows: int) -> int:
    """Return a number of batches as an integer; ``np.ceil`` returns a float, for example."""
    expected = (
        f"{type(sampler).__name__}.n_batches({n_rows}) must return the number of batches for {n_rows} rows, an integer "
        "within [0, 2**63), got "
    )
    if isinstance(n_batches, bool) or not isinstance(n_batches, Integral | float | np.floating):
        # without its value, since other ranks see this message, and the object may be private
        raise TypeError(f"{expected}an object of type {type(n_batches).__name__}. Return an int.")
    if not 0 <= float(n_batches) < BOUND or not (isinstance(n_batches, Integral) or n_batches.is_integer()):
        advice = "Round quotients up with math.ceil if the last batch may be smaller, otherwise down with //."
        raise ValueError(f"{expected}{n_batches}. {advice}")
    return int(n_batches)


def prepared(
    sampler: Sampler, plan: EpochPlan, stream: int, shard: Shard, rng: np.random.Generator | None = None
) -> Sampler:
    """Return a private copy of a sampler that runs on the local rows of a stream in the plan's epoch.

    ``rng`` replaces its generator. A ValueError if it can't run on these rows.
    """
    duplicate = private_copy(sampler, rng)
    localize(duplicate, shard.rows, plan.n_obs)
    if plan.n_draws is not None:
        set_draws(duplicate, plan.size(stream))
    # if a property computes the generator, the copy has a different one
    if rng is not None and duplicate.rng is not None and duplicate.rng is not rng:
        duplicate.rng = rng
    if callable(set_epoch := getattr(duplicate, "set_epoch", None)):
        set_epoch(plan.epoch)
    return duplicate
