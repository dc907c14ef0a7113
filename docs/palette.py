"""Colors of the pictures of the README and the pages, on white and on dark pages.

Text and lines have a contrast of at least 4.5 with the page, which no color has with both white and dark pages. So each
of them has two colors. A picture is drawn in the light color, and its style replaces that color on dark pages: browsers
tell a picture which color scheme the page has. Boxes have the same fill on both, with dark text on it.
"""

from __future__ import annotations

import re

#: Backgrounds of the pages.
PAGES = {"light": "#ffffff", "dark": "#121212"}
#: Text and lines, on light and on dark pages.
LINES = {
    "ink": ("#4d4d4d", "#c9c9c9"),
    "blue": ("#1f6cb0", "#6fb1ee"),
    "orange": ("#9c5700", "#e69f00"),
    "green": ("#0b7658", "#3fc9a2"),
    "gray": ("#6b6b6b", "#a0a0a0"),
}
#: Boxes, with text in TEXT.
FILLS = {
    "blue": "#8ebfed",
    "orange": "#f2b84b",
    "green": "#6fcfb0",
    "gray": "#cfcfcf",
}
TEXT = "#121212"


def _rules(light: str, dark: str) -> str:
    """Return the rules that replace a color, as an attribute and as matplotlib writes it."""
    return " ".join(
        f'[{part}="{light}"] {{ {part}: {dark} }} [style*="{part}: {light}"] {{ {part}: {dark} !important }}'
        for part in ("fill", "stroke")
    )


#: Replaces the colors of text and lines on dark pages. A renderer without CSS shows the light colors.
STYLE = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(_rules(*pair) for pair in LINES.values())} }}</style>"


def themed(drawing: str) -> str:
    """Add STYLE to an SVG whose text and lines have the light colors of LINES.

    STYLE finds them as attributes (``fill="#1f6cb0"``) and as matplotlib writes them (``style="fill: #1f6cb0"``).

    Parameters
    ----------
    drawing
        The text of an SVG.

    Returns
    -------
    str
        The same text, with STYLE after the opening tag and the title.

    Raises
    ------
    ValueError
        If the text has no opening tag of an SVG, or has STYLE already.
    """
    opening = re.search(r"<svg\b[^>]*>(\s*<title>[^<]*</title>)?", drawing)
    if opening is None or STYLE in drawing:
        raise ValueError(
            f"drawing must be an SVG without STYLE, got {drawing[:60]!r}. Pass a new drawing, once."
        )
    return f"{drawing[: opening.end()]}\n{STYLE}{drawing[opening.end() :]}"


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colors, from 1 to 21, as WCAG 2 defines it."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    channels = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
