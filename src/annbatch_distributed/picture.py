"""A picture of plans: which rank reads which rows of the collection, and which rows none reads; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from annbatch_distributed.plan import EpochPlan
from annbatch_distributed.report import percent, title
from annbatch_distributed.rows import Int64Array, Rows

type Floats = npt.NDArray[np.floating[Any]]

#: Colors of lost rows and of rows outside the window: neither is among those of ranks.
_DROPPED, _OUTSIDE = "#d55e00", "#c8c8c8"

#: Points of a picture along the rows.
_BINS = 1000
#: Up to as many ranks, each has its number beside its lane.
_MOST_NUMBERS = 32
#: In inches: on a phone, too, the text can be read.
_WIDTH = 5
#: So many letters of text fit above the lanes and below them.
_LETTERS = 46


class _NotebookFigure(Figure):
    """A figure that notebooks show: IPython has only text for a figure that pyplot didn't make."""

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.savefig(data, format="png", dpi=120)
        return data.getvalue()


def draw(plans: Sequence[EpochPlan]) -> Figure:
    """Draw plans below each other, each with a lane for every rank and one for the lost rows."""
    # few ranks have high lanes, and many share a page
    heights = [min(0.35, 6 / (plan.n_streams + 1)) * (plan.n_streams + 1) for plan in plans]
    figure = _NotebookFigure(figsize=(_WIDTH, 0.8 + sum(heights) + 0.6 * len(plans)), layout="constrained")
    axes = figure.subplots(len(plans), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for plan, plan_axes in zip(plans, axes, strict=True):
        _draw_plan(plan, plan_axes)
    most = max(plan.n_obs for plan in plans)  # of all, which share the axis
    axes[-1].set_xlabel("rows of the collection")
    axes[-1].set_xlim(0, most)
    n_labels = max(2, _LETTERS // (len(str(most)) + 3))
    axes[-1].xaxis.set_major_locator(MaxNLocator(n_labels - 1, steps=[1, 2, 2.5, 5, 10], integer=True))
    # the legend has only what is drawn
    signs = []
    if any(plan.n_dropped for plan in plans):
        signs.append(Patch(facecolor=_DROPPED, label="dropped"))
    if any(plan.n_repeated for plan in plans):
        signs.append(Patch(fill=False, hatch="////", label="repeated"))
    if any(map(_is_masked, plans)):
        signs.append(Patch(facecolor=_OUTSIDE, label="left out by the mask"))
    if signs:
        figure.legend(handles=signs, loc="outside lower right", ncols=3, frameon=False)
    return figure


def density(rows: Rows, n_obs: int, n_bins: int) -> npt.NDArray[np.float64]:
    """Return which part of each of ``n_bins`` stretches of ``n_obs`` rows is among some rows, from 0 to 1.

    The stretches, at most one for each row, are even but for a row. No part is more than 1, whatever is there twice.

    >>> from annbatch_distributed import Rows
    >>> density(Rows((range(0, 5), range(8, 10))), 10, 5)
    array([1. , 1. , 0.5, 0. , 1. ])
    """
    # 10 rows in 4 bins have the edges 0 2 5 7 10
    edges = np.array([number * n_obs // n_bins for number in range(n_bins + 1)])  # between rows
    found = np.diff(_before(edges, rows.starts) - _before(edges, rows.stops))
    parts: npt.NDArray[np.float64] = np.minimum(found / np.diff(edges), 1.0)
    return parts


def _before(edges: Int64Array, starts: Int64Array) -> npt.NDArray[np.float64]:
    """For each edge, how many rows lie before it, over half-lines of rows from each start on."""
    which = np.searchsorted(edges, starts, side="right")  # the edges from there on have it before them
    # a half-line from start s has edge - s rows before the edge: number of half-lines times edge, minus their starts
    begun, total = (np.cumsum(np.bincount(which, weights, len(edges) + 1))[:-1] for weights in (None, starts))
    # floats, since a sum of rows may be beyond 64 bits
    before: npt.NDArray[np.float64] = begun * edges.astype(np.float64) - total
    return before


def _draw_plan(plan: EpochPlan, axes: Axes) -> None:
    n_obs, n_ranks = plan.n_obs, plan.n_streams
    n_bins = min(_BINS, n_obs)
    bottom = n_ranks - 0.5 + max(1, n_ranks / 25)  # the lane of lost rows can be seen among any number of ranks
    if _is_masked(plan):
        outside = _points(to_rgb(_OUTSIDE), 1 - density(plan.window, n_obs, n_bins))
        _paint(axes, outside[np.newaxis], (0, n_obs, bottom, -0.5))
    # from dark violet to green, (n_ranks, RGBA): yellow, the end of the color map, can't be told from white
    colors = colormaps["viridis"](np.linspace(0, 0.8, n_ranks))
    lanes = np.empty((n_ranks, n_bins, 4))
    for rank in range(n_ranks):
        shard = plan.shard(rank)
        lanes[rank] = _points(colors[rank, :3], density(shard.rows, n_obs, n_bins))
        if plan.n_repeated:
            _hatch(axes, rank, density(shard.repeated, n_obs, n_bins) > 0, n_obs)
    _paint(axes, lanes, (0, n_obs, n_ranks - 0.5, -0.5))
    lost = _points(to_rgb(_DROPPED), density(plan.dropped, n_obs, n_bins) > 0)
    _paint(axes, lost[np.newaxis], (0, n_obs, bottom, n_ranks - 0.5))
    axes.set_title(fill(title(plan), _LETTERS), fontsize=9, loc="left")
    numbered = range(0, n_ranks, 1 if n_ranks <= _MOST_NUMBERS else n_ranks // 8)
    how_many = f"dropped: {percent(plan)}" if plan.n_dropped else "none dropped"
    middle = (n_ranks - 0.5 + bottom) / 2
    axes.set_yticks([*numbered, middle], [*map(str, numbered), how_many])
    axes.set_ylim(bottom, -0.5)
    axes.set_ylabel("rank" if plan.n_processes is None else "virtual rank")
    axes.ticklabel_format(axis="x", style="plain")


def _paint(axes: Axes, points: Floats, extent: tuple[float, float, float, float]) -> None:
    axes.imshow(points, aspect="auto", extent=extent, interpolation="nearest")


def _is_masked(plan: EpochPlan) -> bool:
    return len(plan.window) < plan.n_obs


def _points(color: npt.ArrayLike, parts: Floats | npt.NDArray[np.bool_]) -> Floats:
    """Return points of a color, as opaque as their part of the rows; a single row can be seen."""
    opacity = np.where(parts > 1e-9, 0.15 + 0.85 * parts, 0.0)
    # (RGB,) and (n_bins,) -> (n_bins, RGBA)
    return np.column_stack([np.broadcast_to(np.asarray(color), (len(parts), 3)), opacity])


def _hatch(axes: Axes, rank: int, are_repeated: npt.NDArray[np.bool_], n_obs: int) -> None:
    """Hatch the points of a rank's lane that it repeats."""
    changes = np.flatnonzero(np.diff(are_repeated, prepend=False, append=False)) * n_obs / len(are_repeated)
    spans = [(start, stop - start) for start, stop in changes.reshape(-1, 2)]
    axes.broken_barh(spans, (rank - 0.5, 1), facecolor="none", edgecolor="black", linewidth=0.5, hatch="////", zorder=3)
