"""Colors of the pictures of the README and the pages, on white and on dark pages.

Text and lines have a contrast of at least 4.5 with the page, which no color has with both white and dark pages. So each
of them has two colors, of which the style of a picture chooses one by the page: browsers tell a picture which color
scheme the page has. Boxes have the same fill on both, with dark text on it.
"""

from __future__ import annotations

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


def _scheme(place: int) -> str:
    return " ".join(f"--{name}: {colors[place]};" for name, colors in LINES.items())


#: Chooses the colors of text and lines. Without it, as in a converter to PNG, they would be black.
STYLE = f"<style>:root {{ {_scheme(0)} }} @media (prefers-color-scheme: dark) {{ :root {{ {_scheme(1)} }} }}</style>"


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
