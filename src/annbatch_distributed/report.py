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
from annbatch_distributed.rows import Int64Array, Rows, counted

if TYPE_CHECKING:
    import pandas as pd


#: Lost rows, and rows outside the window: they stand out from every rank.
LOST, OUTSIDE = "#d55e00", "#c8c8c8"
#: From dark violet to green, as viridis has them, which are told apart in grey and by colour-blind readers.
_STOPS = (
    (0x44, 0x01, 0x54),
    (0x48, 0x24, 0x75),
    (0x41, 0x44, 0x87),
    (0x35, 0x5F, 0x8D),
    (0x2A, 0x78, 0x8E),
    (0x21, 0x91, 0x8C),
    (0x22, 0xA8, 0x84),
    (0x44, 0xBF, 0x70),
    (0x7A, 0xD1, 0x51),
)


def of_rank(rank: int, n_ranks: int) -> str:
    """Return the colour of a rank, as HTML and matplotlib write it.

    >>> [of_rank(rank, 3) for rank in range(3)]
    ['#440154', '#2a788e', '#7ad151']
    """
    place = rank * (len(_STOPS) - 1) / max(1, n_ranks - 1)
    below = min(int(place), len(_STOPS) - 2)
    mixed = (
        round(low + (place - below) * (high - low)) for low, high in zip(_STOPS[below], _STOPS[below + 1], strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def density(rows: Rows, n_obs: int, n_bins: int) -> npt.NDArray[np.float64]:
    """Return which part of each of ``n_bins`` stretches of ``n_obs`` rows is among some rows, from 0 to 1.

    The stretches, at most one for each row, are even but for a row. No part is more than 1, whatever is there twice.

    >>> from annbatch_distributed import Rows
    >>> density(Rows((range(0, 5), range(8, 10))), 10, 5)
    array([1. , 1. , 0.5, 0. , 1. ])
    """
    edges = np.array([number * n_obs // n_bins for number in range(n_bins + 1)])  # between rows
    found = np.diff(_before(edges, rows.starts) - _before(edges, rows.stops))
    parts: npt.NDArray[np.float64] = np.minimum(found / np.diff(edges), 1.0)
    return parts


def _before(edges: Int64Array, starts: Int64Array) -> npt.NDArray[np.float64]:
    """For each edge, how many rows lie before it, over half-lines of rows from each start on."""
    which = np.searchsorted(edges, starts, side="right")  # the edges from there on have it before them
    begun, total = (np.cumsum(np.bincount(which, weights, len(edges) + 1))[:-1] for weights in (None, starts))
    # floats, since a sum of rows may be beyond 64 bits
    before: npt.NDArray[np.float64] = begun * edges.astype(np.float64) - total
    return before


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
    categorical = _categorical(labels, plan.n_obs)
    codes, names = categorical.codes, [*categorical.categories]
    if codes.min() < 0:
        names.append(np.nan)

    def count(rows: Rows) -> Int64Array:
        counts = np.zeros(len(categorical.categories) + 1, dtype=np.int64)
        for part in rows.arrays():
            counts += np.bincount(codes[part].astype(np.int64) + 1, minlength=len(counts))
        return np.roll(counts, -1)[: len(names)]  # the code of missing labels is -1

    window = count(plan.window)
    if plan.n_draws is not None:
        counts = np.tile(window, (plan.world_size, 1))
    else:
        counts = np.stack([count(plan.shard(rank).rows) for rank in range(plan.world_size)])
    # a rank without rows has no share of any label
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return Composition(counts, np.abs(shares - window / window.sum()).sum(axis=1) / 2), names


def _categorical(labels: object, n_obs: int) -> pd.Categorical:
    import pandas as pd

    expected = f"labels must have a value for each of the {n_obs} rows, got"
    values: Any = getattr(labels, "array", labels) if isinstance(labels, pd.Series | pd.Index) else labels
    if not hasattr(values, "__len__") or isinstance(values, str | bytes) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"{expected} {shortened(labels)} in {getattr(values, 'ndim', 'no')} dimensions.")
    if len(values) != n_obs:
        raise ValueError(f"{expected} {len(values)}.")
    return values if isinstance(values, pd.Categorical) else pd.Categorical(values)


#: With more ranks, the table shows the first and the last ones.
_MOST_RANKS = 16
#: Notebooks and Sphinx align numbers, and divide the width, in other ways.
_LEFT, _RIGHT = (f"text-align: {side}; padding: 0 0.3em" for side in ("left", "right"))
_TABLE = "table-layout: auto; width: 100%; max-width: 40em; border-collapse: collapse; font-size: min(1em, 13px)"
#: A bar takes the width that numbers leave, below its first and its last row.
_WIDE = "width: 100%; padding: 0.1em 0.4em"
_APART = "display: flex; justify-content: space-between; gap: 0.4em; font-weight: normal"
#: It looks the same in light and in dark notebooks.
_BAR = "display: block; background: white; outline: 1px solid #c8c8c8"
#: A bar has so many parts at most.
_BINS = 240
#: Rows are named by so many stretches at most.
_MOST_STRETCHES = 3


def percent(plan: EpochPlan) -> str:
    """Return how many of the window's rows are lost, of a hundred."""
    return f"{100 * plan.n_lost / len(plan.window):.2g} %"


def title(plan: EpochPlan) -> str:
    """Return who shares which rows, and how, in a line."""
    settings = [f'remainder="{plan.remainder}"']
    if repr(plan.sharding) != "Contiguous()":  # the default
        settings.insert(0, f"sharding={getattr(plan.sharding, '__name__', plan.sharding)}")
    settings.append("no batch size" if plan.batch_size is None else f"batch size {plan.batch_size}")
    if plan.n_processes is None:
        who = counted(plan.world_size, "rank")
    else:
        who = f"{counted(plan.world_size, 'virtual rank')} on {counted(plan.n_processes, 'rank')}"
    verb = ("share" if plan.n_draws is None else "draw") + "s" * (plan.world_size == 1)
    what = verb if plan.n_draws is None else f"{verb} {counted(sum(plan.sizes), 'sample')} from"
    rows = f"{len(plan.window):,} of {counted(plan.n_obs, 'row')}"
    return f"epoch {plan.epoch}: {who} {what} {rows} ({', '.join(settings)})"


def as_text(plan: EpochPlan) -> str:
    """Return the table as text."""
    names = _names(plan)
    gap = ("...",) * len(names)
    lines = [names, *(gap if rank is None else tuple(map(str, _cells(plan, rank))) for rank in _shown(plan))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    table = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in lines
    ]
    return "\n".join((title(plan), *table, *_notes(plan)))


def as_html(plan: EpochPlan) -> str:
    """Return the table as HTML, with a bar for each rank that shows where in the collection its rows are.

    Below the ranks are the lost rows, and those outside the window, in the colours that a picture has for them.
    """
    names, n_obs = _names(plan)[:-1], plan.n_obs
    n_bins = min(_BINS, n_obs)
    body = []
    for rank in _shown(plan):
        if rank is None:
            body.append(f'<tr><td colspan="{len(names) + 1}">&hellip;</td></tr>')
        else:
            *numbers, rows = _cells(plan, rank)
            colour = of_rank(rank, plan.world_size)
            bar = _bar(density(plan.shard(rank).rows, n_obs, n_bins), colour, str(rows))
            cells = "".join(f'<td style="{_RIGHT}">{number}</td>' for number in numbers)
            body.append(f'<tr>{cells}<td style="{_WIDE}">{bar}</td></tr>')
    others = []
    if plan.n_lost:
        bar = _bar(density(plan.lost, n_obs, n_bins), LOST, plan.lost.in_short(_MOST_STRETCHES))
        others.append(("lost", plan.n_lost, bar))
    if n_outside := n_obs - len(plan.window):
        outside = 1 - density(plan.window, n_obs, n_bins)
        bar = _bar(np.where(outside > 1e-9, outside, 0.0), OUTSIDE, counted(n_outside, "row"))
        others.append(("left out by the mask", n_outside, bar))
    for what, number, bar in others:
        head = f'<th colspan="{len(names) - 2}" style="{_LEFT}">{what}</th>'
        number_cell = f'<td style="{_RIGHT}">{number}</td>'
        body.append(f'<tr>{head}{number_cell}<td></td><td style="{_WIDE}">{bar}</td></tr>')
    head = "".join(f'<th style="{_RIGHT}">{name}</th>' for name in names)
    ends = f'<div style="{_APART}"><span>0</span><span>{n_obs}</span></div>'
    head += f'<th style="{_WIDE}; text-align: left">global rows{ends}</th>'
    return (
        f'<div style="overflow-x: auto"><p>{escape(title(plan))}</p>'
        f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table><p>{'<br/>'.join(map(escape, _notes(plan)))}</p></div>"
    )


def as_frame(plan: EpochPlan) -> pd.DataFrame:
    """Return a line for each rank, whatever their number."""
    import pandas as pd

    names = _names(plan)
    frame = pd.DataFrame([_cells(plan, rank) for rank in range(plan.world_size)], columns=list(names))
    return frame.set_index(list(names[:-4])).rename_axis(index={"virtual": "virtual rank"})


def _names(plan: EpochPlan) -> tuple[str, ...]:
    ranks = ("rank",) if plan.n_processes is None else ("rank", "virtual")
    return *ranks, "batches", "rows" if plan.n_draws is None else "samples", "repeated", "global rows"


def _cells(plan: EpochPlan, rank: int) -> tuple[int | str, ...]:
    shard, rows = plan.shard(rank), plan.in_order(rank).in_short(_MOST_STRETCHES)
    runs_it = () if plan.n_processes is None else (rank * plan.n_processes // plan.world_size,)
    return *runs_it, rank, plan.n_batches(rank), plan.size(rank), len(shard) - shard.n_own, rows


def _shown(plan: EpochPlan) -> Sequence[int | None]:
    """Return the ranks that are shown; None stands for those between."""
    ranks = range(plan.world_size)
    return ranks if len(ranks) <= _MOST_RANKS else [*ranks[: _MOST_RANKS - 1], None, ranks[-1]]


def _bar(parts: npt.NDArray[np.float64], colour: str, label: str) -> str:
    """Return a bar that is darker where more of the rows are: an SVG, which needs no styles of a notebook."""
    # a single row can be seen
    opacities = np.where(parts > 0, np.maximum(0.15, parts), 0.0)
    rectangles, start = [], 0
    for stop in range(1, len(parts) + 1):
        if stop == len(parts) or abs(opacities[stop] - opacities[start]) > 0.02:
            if opacity := opacities[start]:
                rectangles.append(
                    f'<rect x="{start}" width="{stop - start}" height="12" fill-opacity="{opacity:.2f}"/>'
                )
            start = stop
    return (
        f'<svg width="100%" height="12" viewBox="0 0 {len(parts)} 12" preserveAspectRatio="none" role="img" '
        f'style="{_BAR}"><title>{escape(label)}</title><g fill="{colour}">{"".join(rectangles)}</g></svg>'
    )


def _notes(plan: EpochPlan) -> Iterable[str]:
    if plan.left is not None:
        least, most = min(plan.left), max(plan.left)
        batches = ("" if least == most else f"{least:,} to ") + counted(most, "batch")
        over = f"; lost: {plan.n_left_over:,}" if plan.n_left_over else ""
        who = counted(len(plan.left), "virtual rank" if plan.n_processes else "rank")
        yield f"remaining: {batches} on each of {who}{over}"
    if plan.n_draws is not None:
        yield f"alone, the wrapped sampler draws {counted(plan.n_draws, 'sample')}"
    else:
        lost = f"lost in this epoch: {counted(plan.n_lost, 'row')}"
        lost += f", {percent(plan)} ({plan.lost.in_short(_MOST_STRETCHES)})" if plan.n_lost else ""
        yield lost + (f"; repeated: {plan.n_repeated:,}" if plan.n_repeated else "")
    if plan.n_lost and plan.left is None:
        yield 'to lose none: remainder="exact", "keep" or "pad"'
    if plan.rows_in_memory is not None:
        yield f"in memory: up to {counted(plan.rows_in_memory, 'row')} on each rank"
