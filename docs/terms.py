"""Draw terms.svg, the drawing of the glossary: ``python docs/terms.py``.

Colours are of Okabe and Ito, which colour-blind readers tell apart, and whatever a colour says, a word says too. The
background is white, so that it can be read in dark pages as well.
"""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT = 120, 740
INK, NO_RANK = "#222222", "#E4E4E4"
RANKS, CHUNKS = (
    ("#56B4E9", "#E69F00"),
    ("#B3DDF5", "#F7DC9C"),
)  # blue and orange, and lighter ones
N_ROWS, MASKED, CHUNK, N_CHUNKS = 48, (20, 28), 4, 3


def x(row: float) -> float:
    """Where a row is drawn."""
    return LEFT + (RIGHT - LEFT) * row / N_ROWS


def box(start: float, stop: float, top: int, fill: str) -> str:
    """Draw rows."""
    return (
        f'<rect x="{x(start) + 0.5:.1f}" y="{top}" width="{x(stop) - x(start) - 1:.1f}" height="26" '
        f'fill="{fill}" stroke="{INK}"/>'
    )


def text(
    at: float, top: float, words: str, *, anchor: str = "middle", weight: str = "normal"
) -> str:
    """Write words."""
    return f'<text x="{at:.1f}" y="{top:.1f}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """Draw a line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" stroke-dasharray="3 3"/>'


def drawing() -> str:
    """Draw it."""
    parts: list[str] = []

    def name(top: int, words: str, more: str) -> None:
        parts.append(text(LEFT - 12, top + 12, words, anchor="end", weight="bold"))
        parts.append(text(LEFT - 12, top + 27, more, anchor="end"))

    first, last = (0, MASKED[0]), (MASKED[1], N_ROWS)
    name(30, "collection", "all rows")
    parts += [box(0, 32, 30, NO_RANK), box(32, N_ROWS, 30, NO_RANK)]
    parts += [text(x(16), 47, "data set 0"), text(x(40), 47, "data set 1")]

    name(90, "mask, window", "rows to share out")
    parts += [box(*first, 90, NO_RANK), box(*last, 90, NO_RANK)]
    parts += [
        text(x(10), 107, "window"),
        text(x(38), 107, "window"),
        text(x(24), 107, "held out"),
    ]
    parts += [line(x(row), 56, x(row), 90) for row in MASKED]

    # 40 rows of the window, 20 for each rank: 0 to 20, and 28 to 48
    name(150, "shard", "rows of a rank")
    parts += [box(*first, 150, RANKS[0]), box(*last, 150, RANKS[1])]
    parts += [text(x(10), 167, "rank 0"), text(x(38), 167, "rank 1")]

    name(210, "chunk", "read together")
    parts += [
        box(start, start + CHUNK, 210, CHUNKS[0]) for start in range(0, 20, CHUNK)
    ]
    parts += [
        box(start, start + CHUNK, 210, CHUNKS[1]) for start in range(28, 48, CHUNK)
    ]
    for number, start in enumerate((*range(0, 20, CHUNK), *range(28, 48, CHUNK))):
        parts.append(text(x(start + CHUNK / 2), 227, f"{'abcdefghij'[number]}"))

    name(270, "load request", "of rank 0, drawn")
    top, width = 270, N_CHUNKS * CHUNK
    for place, letter in enumerate("dae"):
        parts.append(box(place * CHUNK, (place + 1) * CHUNK, top, CHUNKS[0]))
        parts.append(text(x((place + 0.5) * CHUNK), top + 17, letter))
        origin = "abcde".index(letter) * CHUNK + CHUNK / 2
        parts.append(line(x(origin), 236, x((place + 0.5) * CHUNK), top))
    for place, letter in enumerate("cb"):
        parts.append(box(14 + place * CHUNK, 14 + (place + 1) * CHUNK, top, CHUNKS[0]))
        parts.append(text(x(14 + (place + 0.5) * CHUNK), top + 17, letter))
    parts.append(
        text(x(26.5), top + 11, "chunk_size=4, preload_nchunks=3:", anchor="start")
    )
    parts.append(
        text(
            x(26.5),
            top + 26,
            "3 chunks in memory at once, then the others.",
            anchor="start",
        )
    )

    name(330, "batch", "what a step sees")
    for place, rows in enumerate(("d1 e0 a3 d3 a0 d0", "e2 a2 e1 d2 a1 e3")):
        parts.append(box(place * 13, place * 13 + 12, 330, CHUNKS[0]))
        parts += [
            text(x(place * 13 + 2 * at + 1), 347, row)
            for at, row in enumerate(rows.split())
        ]
    parts += [line(x(0), 296, x(0), 330), line(x(width), 296, x(25), 330)]
    parts.append(
        text(
            x(26.5), 341, "batch_size=6: rows of a load request, mixed.", anchor="start"
        )
    )
    parts.append(
        text(
            x(26.5), 356, "Rank 1 has as many batches, of its own rows.", anchor="start"
        )
    )
    last_line = (
        "A pass reads all of a rank's load requests. An epoch is a pass of every rank."
    )
    parts.append(text(LEFT, 398, last_line, anchor="start"))
    label = "From the rows of a collection to the batches of one rank"
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {size} role="img">',
            f'<title>{label}</title>\n<rect {size} fill="white"/>',
            f'<g font-family="sans-serif" font-size="12" fill="{INK}">',
            *parts,
            "</g>\n</svg>\n",
        ]
    )


if __name__ == "__main__":
    (Path(__file__).parent / "_static" / "terms.svg").write_text(drawing())
