"""The look of all figures: transparent, and with the colors of docs/palette.py for light and dark pages."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from docs.palette import LINES, STYLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

#: Colors on light pages. The style of a figure replaces them on dark ones.
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
    drawing = out.read_text()
    for name, (light, _) in LINES.items():
        drawing = drawing.replace(light, f"var(--{name})")
    out.write_text(drawing.replace(" <metadata>", f" {STYLE}\n <metadata>", 1))


def label_lines(axis: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the name of each line at its end, given as (x, y, name, color), on an axis whose y is logarithmic."""
    low, high = np.log10(axis.get_ylim())
    gap, last = (high - low) / 18, -np.inf
    for x, y, name, color in sorted(ends, key=lambda end: end[1]):
        last = max(np.log10(y), last + gap)  # names that would overlap move up
        axis.annotate(name, (x, 10**last), xytext=(6, 0), textcoords="offset points", va="center", color=color)
