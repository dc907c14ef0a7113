"""Reports on a plan: as text, as HTML, as a DataFrame, and the composition of its ranks.

They use only the public results of an :class:`~annbatch_distributed.EpochPlan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from annbatch_distributed.plan import EpochPlan
from annbatch_distributed.rows import Int64Array, Rows, plural
from annbatch_distributed.sharding import Contiguous

if TYPE_CHECKING:
    import pandas as pd


class Composition(NamedTuple):
    """Labels of each rank's rows."""

    counts: Int64Array
    """Number of rows of each label on each rank, of shape ``(n_ranks, n_labels)``."""
    distances: npt.NDArray[np.float64]
    """Total variation distance of each rank's labels from the labels of all selected rows, of shape ``(n_ranks,)``."""


def composition(plan: EpochPlan, labels: object) -> tuple[Composition, list[Any]]:
    """Count the labels of every rank's rows. Also return the labels: ascending, with NaN last if some are missing.

    ``labels`` has a value for each row of the collection.
    """
    categorical = _categorical(labels, plan.n_obs, plan.unit)
    codes, names = categorical.codes, [*categorical.categories]
    if codes.min() < 0:
        names.append(np.nan)

    def count(rows: Rows) -> Int64Array:
        # codes 0 1 1 -1 of 3 labels, where -1 is missing, are counted as 1 2 2 0: [1 1 2 0], rolled to [1 2 0 1]
        counts = np.zeros(len(categorical.categories) + 1, dtype=np.int64)
        for part in rows.arrays():
            counts += np.bincount(codes[part].astype(np.int64) + 1, minlength=len(counts))
        return np.roll(counts, -1)[: len(names)]

    # (labels,) of all selected rows, and (ranks, labels): each rank samples from all selected rows, or has its shard
    window = count(plan.window)
    if plan.n_draws is not None:
        counts = np.tile(window, (plan.n_streams, 1))
    else:
        counts = np.stack([count(plan.shard(rank).rows) for rank in range(plan.n_streams)])
    # (ranks, labels): the fraction of each label in a rank's rows; a rank without rows has zeros
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return Composition(counts, np.abs(shares - window / window.sum()).sum(axis=1) / 2), names


def _categorical(labels: object, n_obs: int, unit: str) -> pd.Categorical:
    import pandas as pd

    expected = f"labels must have one value for each of the {plural(n_obs, unit)}, got"
    values: Any = getattr(labels, "array", labels) if isinstance(labels, pd.Series | pd.Index) else labels
    if not hasattr(values, "__len__") or isinstance(values, str | bytes) or getattr(values, "ndim", 1) != 1:
        raise ValueError(
            f"{expected} {shortened(labels)} in {getattr(values, 'ndim', 'no')} dimensions. Pass an array or a Series "
            "of one dimension."
        )
    if len(values) != n_obs:
        raise ValueError(f"{expected} {len(values):,}. Take them from the obs of the whole collection.")
    return values if isinstance(values, pd.Categorical) else pd.Categorical(values)


#: Largest number of ranks that the table shows: the first ones and the last one.
_MOST_RANKS = 16
#: Largest number of ranges of rows that are listed.
_MOST_RANGES = 3


def percent(plan: EpochPlan) -> str:
    """Format the fraction of selected rows that are dropped."""
    return f"{100 * plan.n_dropped / len(plan.window):.2g}%"


def title(plan: EpochPlan) -> str:
    """Return the first line: the ranks, the rows and the settings."""
    settings = [f'remainder="{plan.remainder}"']
    if not isinstance(plan.sharding, Contiguous):  # the default
        settings.insert(0, f"sharding={getattr(plan.sharding, '__name__', plan.sharding)}")
    settings.append("no batch size" if plan.batch_size is None else f"batch size {plan.batch_size}")
    if plan.n_processes is None:
        who = plural(plan.n_streams, "rank")
    else:
        who = f"{plural(plan.n_streams, 'virtual rank')} on {plural(plan.n_processes, 'rank')}"
    ending = "s" * (plan.n_streams == 1)
    what = f"share{ending}" if plan.n_draws is None else f"take{ending} {plural(sum(plan.sizes), 'sample')} from"
    rows = f"{len(plan.window):,} of {plural(plan.n_obs, plan.unit)}"
    return f"epoch {plan.epoch}: {who} {what} {rows} ({', '.join(settings)})"


def as_text(plan: EpochPlan) -> str:
    """Return the table as text."""
    ranks: Sequence[int] = range(plan.n_streams)
    shown = ranks if len(ranks) <= _MOST_RANKS else [*ranks[: _MOST_RANKS - 1], ranks[-1]]
    lines = [_names(plan), *(tuple(map(str, _cells(plan, rank))) for rank in shown)]
    if len(shown) < len(ranks):
        lines.insert(-1, ("...",) * len(lines[0]))
    # columns of numbers are aligned on the right; the last one, of rows, on the left
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join([*map(str.rjust, line[:-1], widths), line[-1]]) for line in lines]
    return "\n".join((title(plan), *table, *_notes(plan)))


def as_html(plan: EpochPlan) -> str:
    """Return the title, the table and the notes as HTML."""
    table = as_frame(plan).to_html(max_rows=_MOST_RANKS)
    notes = "<br/>".join(map(escape, _notes(plan)))
    return f"<p>{escape(title(plan))}</p>{table}<p>{notes}</p>"


def as_frame(plan: EpochPlan) -> pd.DataFrame:
    """Return a DataFrame with one line per rank."""
    import pandas as pd

    names = _names(plan)
    frame = pd.DataFrame([_cells(plan, rank) for rank in range(plan.n_streams)], columns=list(names))
    return frame.set_index(list(names[:-4])).rename_axis(index={"virtual": "virtual rank"})


def _names(plan: EpochPlan) -> tuple[str, ...]:
    ranks = ("rank",) if plan.n_processes is None else ("rank", "virtual")
    what = f"{plan.unit}s" if plan.n_draws is None else "samples"
    return *ranks, "batches", what, "repeated", "global rows" if plan.sets is None else "numbers"


def _cells(plan: EpochPlan, rank: int) -> tuple[int | str, ...]:
    shard, rows = plan.shard(rank), plan.in_order(rank).format(_MOST_RANGES)
    # of 4 virtual ranks on 2 ranks, rank 0 runs 0 and 1, and rank 1 runs 2 and 3
    real_rank = () if plan.n_processes is None else (rank * plan.n_processes // plan.n_streams,)
    return *real_rank, rank, plan.n_batches(rank), plan.size(rank), len(shard) - shard.n_own, rows


def _notes(plan: EpochPlan) -> Iterable[str]:
    if plan.remaining is not None:
        least, most = min(plan.remaining), max(plan.remaining)
        batches = ("" if least == most else f"{least:,} to ") + plural(most, "batch")
        over = f"; dropped: {plan.n_dropped_batches:,}" if plan.n_dropped_batches else ""
        who = plural(len(plan.remaining), "virtual rank" if plan.n_processes else "rank")
        yield f"remaining: {batches} on each of {who}{over}"
    if plan.n_draws is not None:
        yield f"without sharding: {plural(plan.n_draws, 'sample')}"
    else:
        dropped = f"dropped in this epoch: {plural(plan.n_dropped, plan.unit)}"
        dropped += f", {percent(plan)} ({plan.dropped.format(_MOST_RANGES)})" if plan.n_dropped else ""
        yield dropped + (f"; repeated: {plan.n_repeated:,}" if plan.n_repeated else "")
    if plan.n_dropped and plan.remaining is None:
        yield 'to drop none: remainder="exact", "keep" or "pad"'
    if plan.rows_in_memory is not None:
        yield f"in memory: up to {plural(plan.rows_in_memory, 'row')} on each rank"
