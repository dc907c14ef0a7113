"""The look of all figures: transparent, and with the colors of docs/palette.py for light and dark pages."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from docs.palette import LINES, themed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

#: Colors on light pages. `themed` adds the colors of dark pages.
BLUE, ORANGE, GREEN, GRAY, INK = (LINES[name][0] for name in ("blue", "orange", "green", "gray", "ink"))


@contextmanager
def figure(out: Path, width: float, height: float) -> Iterator[Figure]:
    """Make a figure of a size in inches, and write it; the same figure is the same file."""
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": out.stem,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    for part in ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"):
        settings[part] = INK
    with mpl.rc_context(settings):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made
        out.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(out, metadata={"Date": None}, transparent=True)
    out.write_text(themed(out.read_text()))


def label_lines(axis: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the name of each line at its end, given as (x, y, name, color), on an axis whose y is logarithmic."""
    low, high = np.log10(axis.get_ylim())
    ends = sorted(ends, key=lambda end: end[1])
    places = np.log10([y for _, y, _, _ in ends])
    for _ in range(500):  # names that would overlap move apart, with a line to their places
        overlaps = np.maximum((high - low) / 18 - np.diff(places), 0) / 2
        places[:-1] -= overlaps
        places[1:] += overlaps
    for (x, y, name, color), place in zip(ends, places, strict=True):
        line: dict[str, Any] = {
            "arrowstyle": "-",
            "color": color,
            "linewidth": 0.8,
            "shrinkA": 0,
            "shrinkB": 0,
            "relpos": (0, 0.5),
        }
        look: dict[str, Any] = {"va": "center", "color": color}
        axis.annotate(name, (x, y), (14, 10**place), textcoords=("offset points", "data"), arrowprops=line, **look)
