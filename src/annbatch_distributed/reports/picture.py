"""A picture of plans: the rows that each rank reads, and the rows that no rank reads. It needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from annbatch_distributed.core.plan import Plan
from annbatch_distributed.core.rows import Rows
from annbatch_distributed.core.values import Int64Array

type Floats = npt.NDArray[np.floating[Any]]

#: Colors of ranks, in turns, so that neighbors differ.
_RANKS = "#3a86c8", "#e69f00", "#1fa187"
#: Colors of dropped rows and of masked rows; no rank has these colors.
_DROPPED, _OUTSIDE = "#cc3311", "#c8c8c8"

#: Number of points along the rows.
_BINS = 1000
#: Largest number of ranks that are all numbered on the axis.
_MOST_NUMBERS = 32
#: Width in inches, small enough to read the text on a phone.
_WIDTH = 5
#: Number of letters that fit into a line of text.
_LETTERS = 46


class _NotebookFigure(Figure):
    """Figure that notebooks show; IPython shows only figures of pyplot as images."""

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.savefig(data, format="png", dpi=120)
        return data.getvalue()


class Panel(NamedTuple):
    """Plan to draw, and its texts."""

    plan: Plan
    """Rows of each rank."""
    title: str
    """Title above the bars."""
    ranks: str
    """Label of the axis of ranks."""
    dropped: str
    """Label of the bar of dropped rows."""


def draw(panels: Sequence[Panel]) -> Figure:
    """Draw plans below each other, each with a bar for every rank and one for the dropped rows."""
    plans = [panel.plan for panel in panels]
    # the bars of a few ranks are high; many ranks fit on a page
    heights = [min(0.35, 6 / (plan.n_streams + 1)) * (plan.n_streams + 1) for plan in plans]
    figure = _NotebookFigure(figsize=(_WIDTH, 0.8 + sum(heights) + 0.6 * len(plans)), layout="constrained")
    axes = figure.subplots(len(plans), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for panel, panel_axes in zip(panels, axes, strict=True):
        _draw_panel(panel, panel_axes)
    most = max(len(plan.units) for plan in plans)  # the plans share the x axis
    axes[-1].set_xlabel(f"{plans[0].units.noun}s of the collection")
    axes[-1].set_xlim(0, most)
    n_labels = max(2, _LETTERS // (len(str(most)) + 3))
    axes[-1].xaxis.set_major_locator(MaxNLocator(n_labels - 1, steps=[1, 2, 2.5, 5, 10], integer=True))
    # the legend names only what is drawn
    handles = []
    if any(plan.n_dropped for plan in plans):
        handles.append(Patch(facecolor=_DROPPED, label="dropped"))
    if any(plan.n_repeated for plan in plans):
        handles.append(Patch(fill=False, hatch="////", label="repeated"))
    if any(map(_is_masked, plans)):
        handles.append(Patch(facecolor=_OUTSIDE, label="masked"))
    if handles:
        figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)
    return figure


def density(rows: Rows, n_obs: int, n_bins: int) -> npt.NDArray[np.float64]:
    """Return the fraction of each bin of ``n_obs`` rows that is among some rows, of shape ``(n_bins,)``.

    There is at most one bin per row, and the sizes of bins differ by at most one row. Repeated rows don't raise a
    fraction above 1.

    >>> from annbatch_distributed import Rows
    >>> density(Rows((range(0, 5), range(8, 10))), 10, 5)
    array([1. , 1. , 0.5, 0. , 1. ])
    """
    # 10 rows in 4 bins have the edges 0 2 5 7 10
    edges = np.array([number * n_obs // n_bins for number in range(n_bins + 1)])  # between rows
    # a range start:stop is the half-line from start, minus the half-line from stop
    counts = np.diff(_before(edges, rows.starts) - _before(edges, rows.stops))
    fractions: npt.NDArray[np.float64] = np.minimum(counts / np.diff(edges), 1.0)
    return fractions


def _before(edges: Int64Array, starts: Int64Array) -> npt.NDArray[np.float64]:
    """Return the number of rows before each edge, summed over half-lines of rows that begin at ``starts``."""
    # the first edge after each start: of edges 0 2 5 7 10, start 3 has edge 5, at position 2
    which = np.searchsorted(edges, starts, side="right")
    # A half-line from start s has edge - s rows before the edge. Over all half-lines, this is their number times the
    # edge, minus the sum of their starts: for starts 0 and 3 and edge 5, 2 * 5 - 3 = 7 = 5 + 2
    n_lines = np.cumsum(np.bincount(which, minlength=len(edges) + 1))[:-1]
    total = np.cumsum(np.bincount(which, starts, len(edges) + 1))[:-1]
    # floats, since a sum of rows may exceed 64 bits
    before: npt.NDArray[np.float64] = n_lines * edges.astype(np.float64) - total
    return before


def _draw_panel(panel: Panel, axes: Axes) -> None:
    plan = panel.plan
    n_obs, n_ranks = len(plan.units), plan.n_streams
    n_bins = min(_BINS, n_obs)
    bottom = n_ranks - 0.5 + max(1, n_ranks / 25)  # the bar of dropped rows is visible for any number of ranks
    if _is_masked(plan):
        outside = _points(to_rgb(_OUTSIDE), 1 - density(plan.selected, n_obs, n_bins))
        _paint(axes, outside[np.newaxis], (0, n_obs, bottom, -0.5))
    lanes = np.empty((n_ranks, n_bins, 4))
    for rank in range(n_ranks):
        shard = plan.shard(rank)
        lanes[rank] = _points(to_rgb(_RANKS[rank % len(_RANKS)]), density(shard.rows, n_obs, n_bins))
        if plan.n_repeated:
            _hatch(axes, rank, density(shard.repeated, n_obs, n_bins) > 0, n_obs)
    _paint(axes, lanes, (0, n_obs, n_ranks - 0.5, -0.5))
    dropped = _points(to_rgb(_DROPPED), density(plan.dropped, n_obs, n_bins) > 0)
    _paint(axes, dropped[np.newaxis], (0, n_obs, bottom, n_ranks - 0.5))
    axes.set_title(fill(panel.title, _LETTERS), fontsize=9, loc="left")
    numbered = range(0, n_ranks, 1 if n_ranks <= _MOST_NUMBERS else n_ranks // 8)
    middle = (n_ranks - 0.5 + bottom) / 2
    axes.set_yticks([*numbered, middle], [*map(str, numbered), panel.dropped])
    axes.set_ylim(bottom, -0.5)
    axes.set_ylabel(panel.ranks)
    axes.ticklabel_format(axis="x", style="plain")


def _paint(axes: Axes, points: Floats, extent: tuple[float, float, float, float]) -> None:
    axes.imshow(points, aspect="auto", extent=extent, interpolation="nearest")


def _is_masked(plan: Plan) -> bool:
    return len(plan.selected) < len(plan.units)


def _points(color: npt.ArrayLike, parts: Floats | npt.NDArray[np.bool_]) -> Floats:
    """Return points of a color whose opacity grows with their fraction of rows; a single row is visible."""
    opacity = np.where(parts > 1e-9, 0.15 + 0.85 * parts, 0.0)
    # (RGB,) and (n_bins,) -> (n_bins, RGBA)
    return np.column_stack([np.broadcast_to(np.asarray(color), (len(parts), 3)), opacity])


def _hatch(axes: Axes, rank: int, are_repeated: npt.NDArray[np.bool_], n_obs: int) -> None:
    """Hatch the repeated points of a rank's bar."""
    # 0 1 1 0 of 8 rows changes at points 1 and 3, which are the rows 2 and 6
    changes = np.flatnonzero(np.diff(are_repeated, prepend=False, append=False)) * n_obs / len(are_repeated)
    spans = [(start, stop - start) for start, stop in changes.reshape(-1, 2)]
    axes.broken_barh(spans, (rank - 0.5, 1), facecolor="none", edgecolor="black", linewidth=0.5, hatch="////", zorder=3)
