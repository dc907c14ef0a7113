"""The plan of an epoch for users: rows and batches of every rank, as text, as a table, as HTML and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, Self

from annbatch_distributed.core.lanes import Lane, Remainder
from annbatch_distributed.core.masks import AnyNames, check_names
from annbatch_distributed.core.plan import Plan, Shard
from annbatch_distributed.core.rows import Rows
from annbatch_distributed.core.sharding import Contiguous, Sharding
from annbatch_distributed.core.state import Position
from annbatch_distributed.core.values import integer, names_of, plural
from annbatch_distributed.core.wrapped import batches_per_request, rows_per_request
from annbatch_distributed.reports.words import words_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd
    from matplotlib.figure import Figure

#: Largest number of ranks that the table shows: the first ones and the last one.
_SHOWN_RANKS = 16
#: Largest number of ranges of rows that are listed.
_SHOWN_RANGES = 3


@dataclass(frozen=True, repr=False)
class EpochPlan:
    """Rows and batches of every rank in one epoch.

    Create it with :meth:`DistributedSampler.plan`. ``print(plan)`` shows a table, as do notebooks. :meth:`to_frame`
    returns the table as a DataFrame, and :meth:`plot` draws it. With virtual ranks, it is a plan of these.

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
    to drop none: remainder="exact"
    in memory: up to 2,048 rows on each rank
    >>> plan.n_batches(1), len(plan.shard(1)), list(plan.dropped)[0]
    (39, 9984, 19968)
    """

    _plan: Plan
    n_processes: int | None = None
    """Number of real ranks that run the plan's virtual ranks; None if virtual ranks are not used."""
    remaining: tuple[int, ...] | None = None
    """Number of remaining batches of each rank, if an epoch is resumed; else None."""
    n_dropped_batches: int = 0
    """Number of batches that are dropped in this epoch because the number of ranks has changed."""
    _n_requests: int = field(default=1, compare=False)
    _cells: tuple[AnyNames, ...] | None = field(default=None, compare=False)

    @classmethod
    def _of(cls, plan: Plan, position: Position, left: Sequence[Lane], n_processes: int | None) -> Self:
        """Return the plan at a position, for the remaining batches of each lane."""
        if not position.done:
            return cls(plan, n_processes)
        # under drop, batches that don't divide evenly among the ranks of a resumed epoch are dropped, too
        remaining, n_over = tuple(map(len, left)), 0
        if plan.config.remainder == "drop":
            n_done = sum(segment.n_lanes * segment.done for segment in position.segments)
            n_over = plan.first_number(plan.n_streams) - n_done - sum(remaining)
        return cls(plan, n_processes, remaining, n_over)

    def _for_loader(self, n_requests: int, cells: tuple[AnyNames, ...] | None) -> Self:
        """Return the plan for a loader that holds some load requests, with the ``obs_names`` of each dataset."""
        return replace(self, _n_requests=n_requests, _cells=cells)

    @property
    def n_obs(self) -> int:
        """Number of rows of the whole collection; number of sets if the sampler samples sets of cells."""
        return len(self._plan.units)

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._plan.epoch

    @property
    def n_streams(self) -> int:
        """Number of ranks, or of virtual ranks if they are used."""
        return self._plan.n_streams

    @property
    def remainder(self) -> Remainder:
        """Policy for the rows that don't divide evenly."""
        return self._plan.config.remainder

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a full batch; None if the wrapped sampler has no batch size."""
        return self._plan.config.batch_size

    @property
    def sharding(self) -> Sharding:
        """Assignment of rows to ranks."""
        return self._plan.config.sharding

    @property
    def selected(self) -> Rows:
        """Rows that are sharded: the rows that the mask selects."""
        return self._plan.selected

    @property
    def dropped(self) -> Rows:
        """Selected rows that are in no shard of this epoch.

        Rows of a shard that the wrapped sampler leaves out (``drop_last``, ``num_samples``) are not included.
        """
        return self._plan.dropped

    @property
    def n_dropped(self) -> int:
        """Number of selected rows that are dropped in this epoch."""
        return self._plan.n_dropped

    @property
    def n_repeated(self) -> int:
        """Number of repeated rows, over all ranks."""
        return self._plan.n_repeated

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each rank's shard; of its samples, if the sharding is independent."""
        return self._plan.sizes

    @property
    def most_batches(self) -> int:
        """Number of batches of the rank with the most batches."""
        return self._plan.most_batches

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
        return self._plan.shard(self._checked(rank))

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
        return self._plan.n_batches(self._checked(rank))

    def _checked(self, rank: int) -> int:
        rank = integer("rank", rank)
        if not 0 <= rank < self.n_streams:
            raise IndexError(f"rank must be in [0, {self.n_streams}), the ranks of this plan, got {rank}.")
        return rank

    @property
    def rows_in_memory(self) -> int | None:
        """Largest number of rows that a rank's loader holds.

        With virtual ranks, it counts all that the rank runs. While a load request is read, buffers need about as much
        memory as its rows. None if the size of a load request is unknown, or if short gaps between selected rows, or
        between the cells of sets, are read as well.
        """
        if self._rows_held is None or not self.selected.is_contiguous or words_of(self._plan.units).has_gaps:
            return None
        # each process runs the same number of virtual ranks
        n_own = 1 if self.n_processes is None else self.n_streams // self.n_processes
        return min(self._rows_held, max(self.sizes)) * n_own

    @property
    def _rows_held(self) -> int | None:
        """Largest number of units in the load requests of a loader; None if unknown."""
        n_rows = rows_per_request(self._plan.config.sampler)
        return None if n_rows is None else n_rows * self._n_requests

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
            proportions) to 1.

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
        from annbatch_distributed.reports.composition import composition

        labels = words_of(self._plan.units).labels if labels is None else labels
        labels_names = names_of("labels", labels)
        if labels_names is not None and self._cells is not None:
            check_names("labels", labels_names, self._cells)
        return composition(self._plan, labels).rename_axis(index="rank" if self.n_processes is None else "virtual rank")

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
        import pandas as pd

        names = self._columns
        frame = pd.DataFrame([self._line(rank) for rank in range(self.n_streams)], columns=list(names))
        return frame.set_index(list(names[:-4])).rename_axis(index={"virtual": "virtual rank"})

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
            from annbatch_distributed.reports.picture import Panel, draw
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}. EpochPlan.plot needs matplotlib: install annbatch-distributed[plot].", name=error.name
            ) from error
        return draw(
            [
                Panel(
                    plan._plan,
                    title=plan._title,
                    ranks="rank" if plan.n_processes is None else "virtual rank",
                    dropped=f"dropped: {plan._percent}" if plan.n_dropped else "none dropped",
                )
                for plan in (self, *others)
            ]
        )

    def __repr__(self) -> str:
        dropped = f", {self.n_dropped} dropped" if self.n_dropped else ""
        repeated = f", {self.n_repeated} repeated" if self.n_repeated else ""
        ranks = f"{self.n_streams} {'ranks' if self.n_processes is None else 'virtual ranks'}"
        return (
            f"<EpochPlan of epoch {self.epoch}: {ranks}, {sum(self.sizes)} {self._plan.noun}s of {self.n_obs}, "
            f"up to {self.most_batches} batches each{dropped}{repeated}>"
        )

    def __str__(self) -> str:
        ranks: Sequence[int] = range(self.n_streams)
        shown = ranks if len(ranks) <= _SHOWN_RANKS else [*ranks[: _SHOWN_RANKS - 1], ranks[-1]]
        lines = [self._columns, *(tuple(map(str, self._line(rank))) for rank in shown)]
        if len(shown) < len(ranks):
            lines.insert(-1, ("...",) * len(lines[0]))
        # columns of numbers are aligned on the right; the last one, of rows, on the left
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join([*map(str.rjust, line[:-1], widths), line[-1]]) for line in lines]
        return "\n".join((self._title, *table, *self._notes()))

    def _repr_html_(self) -> str:
        table = self.to_frame().to_html(max_rows=_SHOWN_RANKS)
        notes = "<br/>".join(map(escape, self._notes()))
        return f"<p>{escape(self._title)}</p>{table}<p>{notes}</p>"

    # Parts of the table

    @property
    def _title(self) -> str:
        """The first line: the ranks, the rows and the settings."""
        plan, config = self._plan, self._plan.config
        settings = [f'remainder="{config.remainder}"']
        if not isinstance(config.sharding, Contiguous):  # the default
            settings.insert(0, f"sharding={getattr(config.sharding, '__name__', config.sharding)}")
        settings.append("no batch size" if config.batch_size is None else f"batch size {config.batch_size}")
        who = plural(plan.n_streams, "rank")
        if self.n_processes is not None:
            who = f"{plural(plan.n_streams, 'virtual rank')} on {plural(self.n_processes, 'rank')}"
        ending = "s" * (plan.n_streams == 1)
        what = f"share{ending}" if plan.n_samples is None else f"take{ending} {plural(sum(plan.sizes), 'sample')} from"
        rows = f"{len(plan.selected):,} of {plural(len(plan.units), plan.units.noun)}"
        return f"epoch {plan.epoch}: {who} {what} {rows} ({', '.join(settings)})"

    @property
    def _percent(self) -> str:
        """Share of the selected rows that are dropped."""
        return f"{100 * self.n_dropped / len(self.selected):.2g}%"

    @property
    def _columns(self) -> tuple[str, ...]:
        ranks = ("rank",) if self.n_processes is None else ("rank", "virtual")
        return *ranks, "batches", f"{self._plan.noun}s", "repeated", words_of(self._plan.units).column

    def _line(self, rank: int) -> tuple[int | str, ...]:
        plan, shard = self._plan, self._plan.shard(rank)
        # of 4 virtual ranks on 2 ranks, rank 0 runs 0 and 1, and rank 1 runs 2 and 3
        real_rank = () if self.n_processes is None else (rank * self.n_processes // plan.n_streams,)
        rows = plan.in_order(rank).format(_SHOWN_RANGES)
        return *real_rank, rank, plan.n_batches(rank), plan.size(rank), len(shard) - shard.n_own, rows

    def _notes(self) -> Iterable[str]:
        plan = self._plan
        if self.remaining is not None:
            least, most = min(self.remaining), max(self.remaining)
            batches = ("" if least == most else f"{least:,} to ") + plural(most, "batch")
            over = f"; dropped: {self.n_dropped_batches:,}" if self.n_dropped_batches else ""
            who = plural(len(self.remaining), "virtual rank" if self.n_processes else "rank")
            yield f"remaining: {batches} on each of {who}{over}"
        if plan.n_samples is not None:
            yield f"without sharding: {plural(plan.n_samples, 'sample')}"
        else:
            dropped = f"dropped in this epoch: {plural(plan.n_dropped, plan.units.noun)}"
            dropped += f", {self._percent} ({plan.dropped.format(_SHOWN_RANGES)})" if plan.n_dropped else ""
            yield dropped + (f"; repeated: {plan.n_repeated:,}" if plan.n_repeated else "")
        if plan.n_dropped and self.remaining is None:
            yield 'to drop none: remainder="exact"'
        if note := words_of(plan.units).note(batches_per_request(plan.config.sampler)):
            yield note
        if self.rows_in_memory is not None:
            yield f"in memory: up to {plural(self.rows_in_memory, 'row')} on each rank"
