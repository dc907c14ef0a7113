"""A picture of plans: which rank reads which rows of the collection, and which rows none reads; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from annbatch_distributed.plan import EpochPlan
from annbatch_distributed.report import LOST, OUTSIDE, density, of_rank, percent, title

type Floats = npt.NDArray[np.floating[Any]]


#: Points of a picture along the rows.
_BINS = 1000
#: Up to as many ranks, each has its number beside its lane.
_MOST_NUMBERS = 32
#: In inches: on a phone, too, the text can be read.
_WIDTH = 5
#: So many letters of text fit above the lanes and below them.
_LETTERS = 46


class Picture(Figure):
    """Plans under each other, each with a lane for every rank and another for the lost rows."""

    def __init__(self, plans: Sequence[EpochPlan]) -> None:
        # few ranks have high lanes, and many share a page
        heights = [min(0.35, 6 / (plan.world_size + 1)) * (plan.world_size + 1) for plan in plans]
        super().__init__(figsize=(_WIDTH, 0.8 + sum(heights) + 0.6 * len(plans)), layout="constrained")
        axes = self.subplots(len(plans), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for plan, plan_axes in zip(plans, axes, strict=True):
            _draw(plan, plan_axes)
        most = max(plan.n_obs for plan in plans)  # of all, which share the axis
        axes[-1].set_xlabel("rows of the collection")
        axes[-1].set_xlim(0, most)
        n_labels = max(2, _LETTERS // (len(str(most)) + 3))
        axes[-1].xaxis.set_major_locator(MaxNLocator(n_labels - 1, steps=[1, 2, 2.5, 5, 10], integer=True))
        signs = {}
        if any(plan.n_lost for plan in plans):
            signs["lost"] = Patch(facecolor=LOST)
        if any(plan.n_repeated for plan in plans):
            signs["repeated"] = Patch(fill=False, hatch="////")
        if any(map(_is_masked, plans)):
            signs["left out by the mask"] = Patch(facecolor=OUTSIDE)
        if signs:
            self.legend(list(signs.values()), list(signs), loc="outside lower right", ncols=3, frameon=False)

    def _repr_png_(self) -> bytes:
        """Show it in a notebook that has not imported pyplot."""
        data = BytesIO()
        self.savefig(data, format="png", dpi=120)
        return data.getvalue()


def _draw(plan: EpochPlan, axes: Axes) -> None:
    n_obs, n_ranks = plan.n_obs, plan.world_size
    n_bins = min(_BINS, n_obs)
    bottom = n_ranks - 0.5 + max(1, n_ranks / 25)  # the lane of lost rows can be seen among any number of ranks
    if _is_masked(plan):
        outside = _coloured(OUTSIDE, 1 - density(plan.window, n_obs, n_bins))
        _paint(axes, outside[np.newaxis], (0, n_obs, bottom, -0.5))
    lanes = np.empty((n_ranks, n_bins, 4))
    for rank in range(n_ranks):
        shard = plan.shard(rank)
        lanes[rank] = _coloured(of_rank(rank, n_ranks), density(shard.rows, n_obs, n_bins))
        if plan.n_repeated:
            _hatch(axes, rank, density(shard.repeated, n_obs, n_bins) > 0, n_obs)
    _paint(axes, lanes, (0, n_obs, n_ranks - 0.5, -0.5))
    lost = _coloured(LOST, density(plan.lost, n_obs, n_bins) > 0)
    _paint(axes, lost[np.newaxis], (0, n_obs, bottom, n_ranks - 0.5))
    axes.set_title(fill(title(plan), _LETTERS), fontsize=9, loc="left")
    numbered = range(0, n_ranks, 1 if n_ranks <= _MOST_NUMBERS else n_ranks // 8)
    how_many = f"lost: {percent(plan)}" if plan.n_lost else "none lost"
    middle = (n_ranks - 0.5 + bottom) / 2
    axes.set_yticks([*numbered, middle], [*map(str, numbered), how_many])
    axes.set_ylim(bottom, -0.5)
    axes.set_ylabel("rank" if plan.n_processes is None else "virtual rank")
    axes.ticklabel_format(axis="x", style="plain")


def _paint(axes: Axes, points: Floats, extent: tuple[float, float, float, float]) -> None:
    axes.imshow(points, aspect="auto", extent=extent, interpolation="nearest")


def _is_masked(plan: EpochPlan) -> bool:
    return len(plan.window) < plan.n_obs


def _coloured(colour: str, parts: Floats | npt.NDArray[np.bool_]) -> Floats:
    """Return points of a colour, as opaque as their part of the rows; a single row can be seen."""
    opacity = np.where(parts > 1e-9, 0.15 + 0.85 * parts, 0.0)
    return np.column_stack([np.broadcast_to(to_rgb(colour), (len(parts), 3)), opacity])


def _hatch(axes: Axes, rank: int, are_repeated: npt.NDArray[np.bool_], n_obs: int) -> None:
    """Hatch the points of a rank's lane that it repeats."""
    changes = np.flatnonzero(np.diff(are_repeated, prepend=False, append=False)) * n_obs / len(are_repeated)
    spans = [(start, stop - start) for start, stop in changes.reshape(-1, 2)]
    axes.broken_barh(spans, (rank - 0.5, 1), facecolor="none", edgecolor="black", linewidth=0.5, hatch="////", zorder=3)
