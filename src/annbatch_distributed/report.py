"""How a plan looks: as text, as HTML, as a pandas table; and the labels of its ranks.

It knows the public answers of an :class:`~annbatch_distributed.EpochPlan`, and not how they are computed.
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
    """What ranks have of each label."""

    counts: Int64Array
    """For each rank and each label, how many rows of it the rank has; of shape (ranks, labels)."""
    distances: npt.NDArray[np.float64]
    """For each rank, the total variation distance of its labels to the window's: from 0, the same mix, to 1."""


def composition(plan: EpochPlan, labels: object) -> tuple[Composition, list[Any]]:
    """Count the labels of every rank's rows, and return the labels: ascending, and NaN last if some are missing.

    ``labels`` has a value for each row of the collection.
    """
    categorical = _categorical(labels, plan.n_obs, plan.unit)
    codes, names = categorical.codes, [*categorical.categories]
    if codes.min() < 0:
        names.append(np.nan)

    def count(rows: Rows) -> Int64Array:
        # codes 0 1 1 and -1, which is missing, are counted as 1 2 2 0: [1 1 2 0], which is rolled to [1 2 0 1]
        counts = np.zeros(len(categorical.categories) + 1, dtype=np.int64)
        for part in rows.arrays():
            counts += np.bincount(codes[part].astype(np.int64) + 1, minlength=len(counts))
        return np.roll(counts, -1)[: len(names)]

    # (labels,) of the window, and (ranks, labels): every rank draws from the whole window, or has rows of its own
    window = count(plan.window)
    if plan.n_draws is not None:
        counts = np.tile(window, (plan.n_streams, 1))
    else:
        counts = np.stack([count(plan.shard(rank).rows) for rank in range(plan.n_streams)])
    # (ranks, labels): the share of each label in a rank's rows; a rank without rows has no share of any
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return Composition(counts, np.abs(shares - window / window.sum()).sum(axis=1) / 2), names


def _categorical(labels: object, n_obs: int, unit: str) -> pd.Categorical:
    import pandas as pd

    expected = f"labels must have a value for each of the {plural(n_obs, unit)}, got"
    values: Any = getattr(labels, "array", labels) if isinstance(labels, pd.Series | pd.Index) else labels
    if not hasattr(values, "__len__") or isinstance(values, str | bytes) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"{expected} {shortened(labels)} in {getattr(values, 'ndim', 'no')} dimensions.")
    if len(values) != n_obs:
        raise ValueError(f"{expected} {len(values)}.")
    return values if isinstance(values, pd.Categorical) else pd.Categorical(values)


#: With more ranks, the table shows the first and the last ones.
_MOST_RANKS = 16
#: Rows are named by so many stretches at most.
_MOST_STRETCHES = 3


def percent(plan: EpochPlan) -> str:
    """Return how many of the window's rows are lost, of a hundred."""
    return f"{100 * plan.n_dropped / len(plan.window):.2g}%"


def title(plan: EpochPlan) -> str:
    """Return who shares which rows, and how, in a line."""
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
    # numbers end below each other; the last column, the rows, begins below its name
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join([*map(str.rjust, line[:-1], widths), line[-1]]) for line in lines]
    return "\n".join((title(plan), *table, *_notes(plan)))


def as_html(plan: EpochPlan) -> str:
    """Return the title, the table and the notes as HTML."""
    table = as_frame(plan).to_html(max_rows=_MOST_RANKS)
    notes = "<br/>".join(map(escape, _notes(plan)))
    return f"<p>{escape(title(plan))}</p>{table}<p>{notes}</p>"


def as_frame(plan: EpochPlan) -> pd.DataFrame:
    """Return a line for each rank, whatever their number."""
    import pandas as pd

    names = _names(plan)
    frame = pd.DataFrame([_cells(plan, rank) for rank in range(plan.n_streams)], columns=list(names))
    return frame.set_index(list(names[:-4])).rename_axis(index={"virtual": "virtual rank"})


def _names(plan: EpochPlan) -> tuple[str, ...]:
    ranks = ("rank",) if plan.n_processes is None else ("rank", "virtual")
    what = f"{plan.unit}s" if plan.n_draws is None else "samples"
    return *ranks, "batches", what, "repeated", "global rows" if plan.sets is None else "numbers"


def _cells(plan: EpochPlan, rank: int) -> tuple[int | str, ...]:
    shard, rows = plan.shard(rank), plan.in_order(rank).format(_MOST_STRETCHES)
    # of 4 virtual ranks on 2 ranks, 0 and 1 are run by rank 0, and 2 and 3 by rank 1
    runs_it = () if plan.n_processes is None else (rank * plan.n_processes // plan.n_streams,)
    return *runs_it, rank, plan.n_batches(rank), plan.size(rank), len(shard) - shard.n_own, rows


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
        lost = f"dropped in this epoch: {plural(plan.n_dropped, plan.unit)}"
        lost += f", {percent(plan)} ({plan.dropped.format(_MOST_STRETCHES)})" if plan.n_dropped else ""
        yield lost + (f"; repeated: {plan.n_repeated:,}" if plan.n_repeated else "")
    if plan.n_dropped and plan.remaining is None:
        yield 'to drop none: remainder="exact", "keep" or "pad"'
    if plan.rows_in_memory is not None:
        yield f"in memory: up to {plural(plan.rows_in_memory, 'row')} on each rank"
