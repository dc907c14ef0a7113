"""Draw the pictures of the README and the pages from what the library computes: ``python -m docs.pictures``.

Their background is transparent, and their colors are in palette.py.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

import numpy as np
import pandas as pd
from annbatch.samplers import RandomSampler, SequentialSampler
from annbatch_distributed import CellSets, DistributedSampler, Rank
from docs.palette import FILLS, LINES, TEXT, themed

#: Of ranks, GPUs and files.
COLORS = FILLS["blue"], FILLS["orange"], FILLS["green"], FILLS["gray"]
DONE = FILLS["gray"]
INK, BLUE, ORANGE, GREEN = (
    LINES[name][0] for name in ("ink", "blue", "orange", "green")
)
#: Attributes of boxes without a fill.
OUTLINED = {"stroke": INK, "stroke_width": "1.5"}
DASHED = OUTLINED | {"stroke_dasharray": "4 3"}
BATCH_SIZE = 2
WIDTH, LEFT = 564, 20


def rank_of_job(
    rank: int,
    n_ranks: int,
    *,
    remainder: Literal["drop", "exact", "pad", "keep"] = "drop",
    virtual_ranks: int | None = None,
) -> DistributedSampler:
    """Return the sampler of a rank, for batches of two rows in the order of the collection."""
    return DistributedSampler(
        SequentialSampler(BATCH_SIZE, 1, BATCH_SIZE),
        dist_info=Rank(rank, n_ranks),
        remainder=remainder,
        virtual_ranks=virtual_ranks,
    )


def batches(
    sampler: DistributedSampler, n_rows: int
) -> list[list[tuple[int, bool]]]:
    """Return the rows of each batch of a rank, each with whether it is repeated."""
    read = []
    for request in sampler.sample(n_rows):
        rows = np.concatenate(
            [np.arange(part.start, part.stop) for part in request["requests"]]
        )
        repeated = request.get("repeated", np.zeros(len(rows), dtype=bool))
        for split in request["splits"]:
            marks = repeated[split].tolist()
            read.append(list(zip(rows[split].tolist(), marks, strict=True)))
    return read


# Shapes


def text(x: float, y: float, words: str, **attributes: str) -> str:
    """Write words."""
    named = "".join(
        f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items()
    )
    return f'<text x="{x:g}" y="{y:g}"{named}>{words}</text>'


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    words: str,
    fill: str,
    **more: str,
) -> str:
    """Draw a box with words in its middle: dark ones on a fill, and the page's color without one."""
    named = "".join(
        f' {name.replace("_", "-")}="{value}"' for name, value in more.items()
    )
    ink = {} if fill == "none" else {"fill": TEXT}
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}"{named}/>'
        + text(
            x + width / 2,
            y + height / 2 + 6,
            words,
            text_anchor="middle",
            font_size="17",
            **ink,
        )
    )


def line(*points: tuple[float, float], **attributes: str) -> str:
    """Draw a line through points."""
    options = {"fill": "none", "stroke": INK, "stroke_width": "1.5"}
    named = "".join(
        f' {name.replace("_", "-")}="{value}"'
        for name, value in (options | attributes).items()
    )
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}"{named}/>'


def arrow(x: float, top: float, bottom: float) -> str:
    """Draw an arrow that points down."""
    head = line((x - 5, bottom - 6), (x, bottom), (x + 5, bottom - 6))
    return line((x, top), (x, bottom)) + head


def bracket(x: float, y: float, width: float) -> str:
    """Draw a bracket below things."""
    return line((x, y), (x, y + 6), (x + width, y + 6), (x + width, y))


def middle(x: float, y: float, words: str, **attributes: str) -> str:
    """Write words around a place."""
    return text(x, y, words, text_anchor="middle", **attributes)


def cell(x: float, y: float, width: float, fill: str) -> str:
    """Draw a cell without words."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="26" rx="4" fill="{fill}"/>'


def picture(height: int, label: str, caption: str, parts: list[str]) -> str:
    """Return the drawing, with a caption at its bottom."""
    if caption:
        x, y = WIDTH / 2, height - 10
        slanted = {"text_anchor": "middle", "font_style": "italic"}
        parts = [*parts, text(x, y, caption, **slanted)]
    drawing = "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{label}</title>",
            f'<g font-family="sans-serif" font-size="15" fill="{INK}">',
            *parts,
            "</g>\n</svg>\n",
        ]
    )
    return themed(drawing)


# Pictures


def strip(top: int, title: str, ranks: list[list[int]]) -> list[str]:
    """Draw the twelve batches of an epoch, each in the color of the rank that reads it."""
    parts = [text(LEFT, top + 13, title, font_weight="bold")]
    rank_of = {number: rank for rank, own in enumerate(ranks) for number in own}
    for number in range(12):
        x = LEFT + number * 44
        if number in rank_of:
            parts.append(
                box(x, top + 22, 40, 40, str(number), COLORS[rank_of[number]])
            )
        else:
            parts.append(box(x, top + 22, 40, 40, str(number), "none", **DASHED))
    for rank in range(len(ranks)):
        x = WIDTH - LEFT + 8 - 72 * (len(ranks) - rank)
        parts.append(
            f'<rect x="{x}" y="{top + 2}" width="12" height="12" rx="3" fill="{COLORS[rank]}"/>'
        )
        parts.append(text(x + 17, top + 13, f"rank {rank}", font_size="14"))
    return parts


def resume() -> str:
    """Draw an epoch that starts on two ranks, and resumes on two and on three after three steps."""
    n_rows = 24

    def numbers(
        n_ranks: int, state: dict[str, Any] | None = None
    ) -> list[list[int]]:
        ranks = [rank_of_job(rank, n_ranks) for rank in range(n_ranks)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        return [
            [batch[0][0] // BATCH_SIZE for batch in batches(rank, n_rows)]
            for rank in ranks
        ]

    first = rank_of_job(0, 2)
    first.sample(n_rows)
    state = first.state_dict(batches_done=3)
    parts = [
        *strip(6, "Start on 2 ranks", numbers(2)),
        *strip(88, "Resume on 2 ranks after 3 steps", numbers(2, state)),
        *strip(170, "Resume on 3 ranks after 3 steps", numbers(3, state)),
    ]
    label = (
        "One epoch of 12 batches, started on 2 ranks and resumed on 2 or 3 ranks"
    )
    caption = "Dashed batches are done. The ranks divide the remaining ones."
    return picture(272, label, caption, parts)


def virtual() -> str:
    """Draw two steps of four virtual ranks, on one, two and four GPUs, each in the color of its GPU."""
    n_rows, n_virtual, width = 24, 4, 60
    parts = []
    for place, n_gpus in enumerate((1, 2, 4)):
        top = 6 + place * 108
        title = f"{n_gpus} GPU" if n_gpus == 1 else f"{n_gpus} GPUs"
        parts.append(text(LEFT, top + 13, title, font_weight="bold"))
        own = n_virtual // n_gpus  # virtual ranks of a GPU
        for gpu in range(n_gpus):
            sampler = rank_of_job(gpu, n_gpus, virtual_ranks=n_virtual)
            for step, batch in enumerate(batches(sampler, n_rows)[:2]):
                left = LEFT + step * (n_virtual * (width + 4) + 20)
                if gpu == 0 and place == 0:
                    x = left + n_virtual * (width + 4) / 2
                    parts.append(
                        text(x, top + 13, f"step {step}", text_anchor="middle")
                    )
                for part in range(own):
                    rows = batch[part * BATCH_SIZE : (part + 1) * BATCH_SIZE]
                    words = " ".join(str(row) for row, _ in rows)
                    x = left + (gpu * own + part) * (width + 4)
                    parts.append(box(x, top + 22, width, 36, words, COLORS[gpu]))
                # the bracket of the GPU, below its virtual ranks
                x, span = left + gpu * own * (width + 4), own * (width + 4) - 4
                y = top + 64
                parts.append(
                    line((x, y), (x, y + 6), (x + span, y + 6), (x + span, y))
                )
                middle = {"text_anchor": "middle", "font_size": "14"}
                parts.append(text(x + span / 2, top + 85, f"GPU {gpu}", **middle))
    label = "Two steps of four virtual ranks, on 1, 2 and 4 GPUs"
    caption = (
        "The rows of a step stay the same; only the GPUs that read them change."
    )
    return picture(356, label, caption, parts)


def remainder() -> str:
    """Draw nine rows on two ranks in batches of two, under each remainder, in columns of steps."""
    n_rows, width, column, first = 9, 38, 92, LEFT + 136
    parts = [
        text(
            first + step * column + width, 16, f"step {step}", text_anchor="middle"
        )
        for step in range(3)
    ]
    for place, policy in enumerate(("drop", "exact", "pad", "keep")):
        top = 28 + place * 96
        parts.append(text(LEFT, top + 44, f'"{policy}"', font_weight="bold"))
        seen = set()
        for rank in range(2):
            y = top + rank * 42
            parts.append(text(LEFT + 76, y + 24, f"rank {rank}", font_size="14"))
            read = batches(rank_of_job(rank, 2, remainder=policy), n_rows)
            for step, batch in enumerate(read):
                for number, (row, is_repeated) in enumerate(batch):
                    seen.add(row)
                    x = first + step * column + number * (width + 2)
                    look = ("none", OUTLINED) if is_repeated else (COLORS[rank], {})
                    parts.append(box(x, y, width, 36, str(row), look[0], **look[1]))
        for number, row in enumerate(sorted({*range(n_rows)} - seen)):
            x = first + 3 * column + 20 + number * (width + 2)
            parts.append(box(x, top + 21, width, 36, str(row), "none", **DASHED))
            parts.append(text(x + width + 8, top + 44, "dropped", font_size="14"))
    label = "Nine rows on two ranks, in batches of two, under each remainder"
    return picture(436, label, "Outlined: repeated. Dashed: dropped.", parts)


def terms() -> str:
    """Draw the way from the rows of a collection to the batches of rank 0, as an example."""
    n_rows, size = 48, (WIDTH - 2 * LEFT) / 48
    parts: list[str] = []

    def title(place: int, word: str, words: str) -> None:
        y = 18 + place * 74
        parts.append(text(LEFT, y, word, font_weight="bold"))
        parts.append(text(LEFT + 120, y, words, font_size="14"))

    def rows(place: int, start: float, stop: float, words: str, fill: str) -> None:
        x, y = LEFT + start * size, 28 + place * 74
        more = DASHED if fill == "none" else {}
        parts.append(
            box(x + 1, y, (stop - start) * size - 2, 34, words, fill, **more)
        )

    title(0, "collection", f"{n_rows} rows in two datasets")
    rows(0, 0, 32, "dataset 0", DONE)
    rows(0, 32, 48, "dataset 1", DONE)
    title(1, "mask", "selects 40 rows")
    rows(1, 0, 20, "selected", DONE)
    rows(1, 20, 28, "held out", "none")
    rows(1, 28, 48, "selected", DONE)
    title(2, "shard", "20 rows for each rank")
    rows(2, 0, 20, "rank 0", COLORS[0])
    rows(2, 28, 48, "rank 1", COLORS[1])
    title(3, "chunk", "chunk_size=4 consecutive rows")
    for number, letter in enumerate("abcde"):
        rows(3, 4 * number, 4 * number + 4, letter, COLORS[0])
        rows(3, 28 + 4 * number, 32 + 4 * number, "fghij"[number], COLORS[1])
    title(4, "load request", "of rank 0: preload_nchunks=3 chunks in random order")
    for place, letter in enumerate("daecb"):
        start = 4 * place + 2 * (place > 2)
        rows(4, start, start + 4, letter, COLORS[0])
    title(5, "batch", "of rank 0: batch_size=6 rows of one load request, shuffled")
    for place, words in enumerate(("d1 e0 a3 d3 a0 d0", "e2 a2 e1 d2 a1 e3")):
        rows(5, 17 * place, 17 * place + 16, words, COLORS[0])
    label = "From the rows of a collection to the batches of one rank"
    return picture(444, label, "", parts)


def collect() -> str:
    """Draw the way from a sample sheet to files, to the chunks of a collection, and to batches, as an example."""
    n_files, n_cells, size = 3, 8, 21
    parts: list[str] = []

    def title(y: float, word: str, words: str) -> None:
        parts.append(text(LEFT, y, word, font_weight="bold"))
        parts.append(text(LEFT + 124, y, words, font_size="14"))

    def cells(x: float, y: float, own: np.ndarray) -> None:
        for number, cell in enumerate(own.tolist()):
            fill = COLORS[cell // n_cells]
            place = f'x="{x + number * size:g}" y="{y:g}"'
            parts.append(
                f'<rect {place} width="{size - 2}" height="26" rx="4" fill="{fill}"/>'
            )

    files = "lab_a/d1.h5ad", "lab_b/d2.h5ad", "lab_b/d3.h5ad"
    places = "X", "layer counts", "raw"
    title(18, "sample sheet", "where each file has its counts, and its donor")
    for number in range(n_files):
        x, y = LEFT + number * 178, 42
        parts.append(text(x, y, files[number], font_family="monospace"))
        parts.append(text(x, y + 20, places[number], font_size="14"))
    title(96, "files", "h5ad, of different labs")
    for number in range(n_files):
        own = np.arange(number * n_cells, (number + 1) * n_cells)
        cells(LEFT + number * 178, 106, own)
    shuffled = np.random.default_rng(3).permutation(n_files * n_cells)
    title(168, "collection", "all cells, shuffled, in chunks")
    for number in range(6):
        cells(LEFT + number * 88, 178, shuffled[4 * number : 4 * number + 4])
    title(240, "batches", "of two ranks: shuffled chunks of the collection")
    for rank, chunks in enumerate(((2, 0), (5, 3))):
        own = np.concatenate(
            [shuffled[4 * chunk : 4 * chunk + 4] for chunk in chunks]
        )
        x = LEFT + rank * 276
        cells(x, 250, np.random.default_rng(rank).permutation(own))
        parts.append(text(x + 178, 268, f"rank {rank}", font_size="14"))
    label = (
        "From a sample sheet to files, to a collection, and to the batches of ranks"
    )
    caption = "A color is a file. Cells are shuffled before they are written."
    return picture(314, label, caption, parts)


def weights() -> str:
    """Draw how often cells are drawn in an epoch, and on average over 100 epochs, against the expected number."""
    n_cells, n_samples, most = 150, 300, 8
    values = np.random.default_rng(1).lognormal(0, 0.8, n_cells)
    sampler = DistributedSampler(
        SequentialSampler(BATCH_SIZE, n_samples // BATCH_SIZE, BATCH_SIZE),
        dist_info=Rank(0, 1),
        weights=values,
        num_samples=n_samples,
        remainder="exact",
        seed=0,
    )
    counts = []
    for epoch in range(100):
        sampler.set_epoch(epoch)
        drawn = sampler.rows_of(n_cells, slice(None))["row"]
        counts.append(np.bincount(drawn, minlength=n_cells))
    expected = n_samples * values / values.sum()
    unit = 36.0

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + 50 + x * unit * 1.6, 20 + (most - y) * unit

    parts = [
        line(at(0, most), at(0, 0), at(most, 0)),
        line(at(0, 0), at(most, most)),
    ]
    for tick in range(most + 1):
        x, y = at(tick, 0)
        parts.append(
            text(x, y + 20, str(tick), text_anchor="middle", font_size="14")
        )
        x, y = at(0, tick)
        parts.append(
            text(x - 10, y + 5, str(tick), text_anchor="end", font_size="14")
        )
    shown = expected < most
    for value, count in zip(expected[shown], counts[0][shown], strict=True):
        x, y = at(value, count)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" stroke="{ORANGE}" stroke-width="1.5"/>'
        )
    mean = np.mean(counts, axis=0)[shown]
    for value, count in zip(expected[shown], mean, strict=True):
        x, y = at(value, count)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{BLUE}"/>')
    x, y = at(0.3, most - 0.3)
    parts.append(text(x, y, "○ in one epoch", fill=ORANGE))
    parts.append(text(x, y + 22, "● mean of 100 epochs", fill=BLUE))
    x, y = at(most / 2, 0)
    parts.append(text(x, y + 42, "expected number of draws", text_anchor="middle"))
    x, y = at(0, most / 2)
    turned = {"transform": f"rotate(-90 {LEFT + 8} {y:g})", "text_anchor": "middle"}
    parts.append(text(LEFT + 8, y, "number of draws", **turned))
    label = "Number of draws of cells in one epoch, and on average over 100 epochs"
    return picture(366, label, "", parts)


def way() -> str:
    """Draw the way of cells from files to a collection, and to the batches of three GPUs."""
    n_labs, n_cells, size = 3, 8, 20.5
    span = (WIDTH - 2 * LEFT) / n_labs
    middles = [LEFT + span * (number + 0.5) for number in range(n_labs)]
    parts = []
    for number, x in enumerate(middles):
        name = f"lab_{'abc'[number]}.h5ad"
        parts.append(middle(x, 18, name, font_family="monospace", font_size="16"))
        left = x - n_cells * size / 2
        parts += [
            cell(left + place * size + 1, 28, size - 2, COLORS[number])
            for place in range(n_cells)
        ]
        parts.append(arrow(x, 62, 90))
    parts.append(
        text(middles[1] + 14, 82, "collect", font_weight="bold", font_size="16")
    )
    n_rows = n_labs * n_cells
    files = np.random.default_rng(5).permutation(n_rows) // n_cells
    pitch = span / n_cells
    for row, file in enumerate(files.tolist()):
        parts.append(cell(LEFT + row * pitch + 1, 98, pitch - 2, COLORS[file]))
    parts.append(
        middle(WIDTH / 2, 146, "one collection of shuffled cells", font_size="16")
    )
    for rank, x in enumerate(middles):
        sampler = DistributedSampler(
            RandomSampler(chunk_size=2, preload_nchunks=4, batch_size=4),
            dist_info=Rank(rank, n_labs),
            seed=0,
        )
        read = batches(sampler, n_rows)
        # the brackets show three contiguous ranges: rows 0 to 7, 8 to 15 and 16 to 23
        assert {row // n_cells for batch in read for row, _ in batch} == {rank}
        parts.append(bracket(x - span / 2 + 3, 156, span - 6))
        parts.append(arrow(x, 162, 188))
        inner = 18.5
        width = 4 * inner + 2
        for number, batch in enumerate(read):
            left = x + (number - 1) * (width + 6) + 3
            for place, (row, _) in enumerate(batch):
                fill = COLORS[files[row]]
                parts.append(cell(left + place * inner + 2, 200, inner - 2, fill))
            parts.append(
                f'<rect x="{left - 1:g}" y="196" width="{width + 2:g}" height="34" rx="6" fill="none" stroke="{INK}" '
                'stroke-width="1.5"/>'
            )
            parts.append(
                middle(left + width / 2, 248, f"batch {number}", font_size="14")
            )
        parts.append(arrow(x, 256, 278))
        parts.append(box(x - 60, 284, 120, 38, f"GPU {rank}", "none", **OUTLINED))
    label = "From the h5ad files of three labs to a collection, and to the batches of three GPUs"
    caption = (
        "Each GPU reads its own cells, and each cell is read once in an epoch."
    )
    return picture(358, label, caption, parts)


def prefetch() -> str:
    """Draw when a rank reads three load requests and trains on their batches, without and with prefetching."""
    n_requests, n_batches, reading, unit, first = 3, 3, 2, 30, LEFT + 72
    parts = []
    titles = (
        "reads a load request, then trains",
        "reads the next load request while it trains",
    )
    for prefetched, title in enumerate(titles):
        top = 6 + prefetched * 138
        name = f"prefetch={prefetched}"
        parts.append(text(LEFT, top + 13, name, font_weight="bold"))
        parts.append(text(LEFT + 112, top + 13, title))
        for lane, words in enumerate(("reading", "GPU")):
            parts.append(text(LEFT, top + 50 + lane * 44, words, font_size="14"))
        # a load request is read when the GPU starts on the one before, or has finished it
        starts, free, ready = [], 0, 0
        for request in range(n_requests):
            start = starts[-1] if prefetched and starts else free
            ready = start + reading
            parts.append(
                box(
                    first + start * unit,
                    top + 26,
                    reading * unit - 2,
                    36,
                    f"{request}",
                    COLORS[request],
                )
            )
            if ready > free:
                waits = (ready - free) * unit - 2
                parts.append(
                    box(
                        first + free * unit,
                        top + 70,
                        waits,
                        36,
                        "waits",
                        "none",
                        **DASHED,
                    )
                )
            starts.append(max(ready, free))
            for batch in range(n_batches):
                x = first + (starts[-1] + batch) * unit
                parts.append(box(x, top + 70, unit - 2, 36, "", COLORS[request]))
            free = starts[-1] + n_batches
    y = 278
    parts.append(line((first, y), (WIDTH - LEFT, y)))
    parts.append(
        line(
            (WIDTH - LEFT - 6, y - 5), (WIDTH - LEFT, y), (WIDTH - LEFT - 6, y + 5)
        )
    )
    parts.append(text(LEFT, y + 5, "time", font_size="14"))
    label = "When a rank reads load requests and trains on their batches, without and with prefetching"
    caption = (
        "With prefetch=1, the GPU waits once if reading is faster than training."
    )
    return picture(320, label, caption, parts)


def sets() -> str:
    """Draw the rows of a batch of three sets of four cells and their controls."""
    n_sets, size = 3, 4
    drugs = np.repeat(["DMSO", "a", "b", "c"], size)
    cells = CellSets.from_obs(
        pd.DataFrame({"drug": drugs}),
        by="drug",
        set_size=size,
        controls={"drug": "DMSO"},
    )
    sampler = DistributedSampler(
        SequentialSampler(n_sets, 1, n_sets),
        sets=cells,
        dist_info=Rank(0, 1),
        seed=0,
    )
    rows = sampler.rows_of(len(drugs), steps=0)
    number_of, is_control = rows["set"].to_numpy(), rows["is_control"].to_numpy()
    lines = BLUE, ORANGE, GREEN

    def look(row: int) -> tuple[str, dict[str, str]]:
        if is_control[row]:
            return "none", OUTLINED | {"stroke": lines[number_of[row]]}
        return COLORS[number_of[row]], {}

    mono = {"font_family": "monospace", "font_size": "14"}
    parts = [text(LEFT, 17, "A batch of 3 sets", font_weight="bold")]
    pitch = (WIDTH - 2 * LEFT) / len(rows)
    for row in range(len(rows)):
        fill, more = look(row)
        parts.append(
            box(LEFT + row * pitch + 1.5, 28, pitch - 3, 30, "", fill, **more)
        )
    for start in range(0, len(rows), size):
        x, span = LEFT + start * pitch, size * pitch
        parts.append(bracket(x + 2, 62, span - 4))
        parts.append(middle(x + span / 2, 86, str(is_control[start]), **mono))
    parts.append(middle(WIDTH / 2, 108, 'batch["is_control"]', **mono))
    for start in range(0, len(rows), 2 * size):
        x, span = LEFT + start * pitch, 2 * size * pitch
        parts.append(bracket(x + 2, 116, span - 4))
        parts.append(middle(x + span / 2, 140, str(number_of[start]), **mono))
    parts.append(middle(WIDTH / 2, 162, 'batch["set"]', **mono))

    top, column, first = 196, 54, LEFT + 64
    parts.append(
        text(LEFT, top, "x.reshape(3, 2, 4, -1)", font_weight="bold", **mono)
    )
    shape = np.arange(len(rows)).reshape(n_sets, 2, size)
    for part, words in enumerate(("treated", "controls")):
        x = first + part * (size * column + 20)
        parts.append(middle(x + size * column / 2, top + 26, words))
        for number in range(n_sets):
            y = top + 36 + number * 42
            if not part:
                parts.append(text(LEFT, y + 24, f"set {number}"))
            for place, row in enumerate(shape[number, part].tolist()):
                fill, more = look(row)
                parts.append(
                    box(
                        x + place * column,
                        y,
                        column - 4,
                        36,
                        str(row),
                        fill,
                        **more,
                    )
                )
    label = "The rows of a batch of three sets: four treated cells of each set, then its four controls"
    return picture(
        394, label, "A color is a set. Outlined rows are its controls.", parts
    )


def mesh() -> str:
    """Draw the ranks of eight processes in a mesh of 2 x 2 x 2."""
    processes = np.arange(8).reshape(2, 2, 2)
    # the tensor-parallel dimension is last, so ranks count the first two: 0 1 2 3
    ranks = np.arange(4).reshape(2, 2)
    width, first, block = 99, LEFT + 106, 220
    parts = []
    for replica in range(2):
        x = first + replica * block
        parts.append(
            middle(x + width, 17, f"dp_replicate {replica}", font_weight="bold")
        )
        parts += [
            middle(x + (part + 0.5) * width, 42, f"tp {part}") for part in range(2)
        ]
        for shard in range(2):
            y = 52 + shard * 92
            rank = int(ranks[replica, shard])
            if not replica:
                parts.append(
                    text(LEFT, y + 25, f"dp_shard {shard}", font_weight="bold")
                )
            for part in range(2):
                words = f"process {processes[replica, shard, part]}"
                parts.append(
                    box(x + part * width + 1, y, width - 4, 38, words, COLORS[rank])
                )
            parts.append(bracket(x + 1, y + 43, 2 * width - 4))
            parts.append(middle(x + width, y + 66, f"rank {rank}"))
    label = "A mesh of 2 x 2 x 2 processes: two processes that differ only in tp are one rank"
    caption = "A color is a rank. Its two processes read the same cells."
    return picture(262, label, caption, parts)


#: Lines that ``./dev demo`` prints, without its tables. Copy them again if the demo prints something else.
DEMO = """\
$ ./dev demo
700 cells: 560 to train on, 140 held out; 2 Gloo ranks
…
✓ no row was read by two ranks
✓ every rank had the same number of batches
✓ no held-out row was trained on
✓ 16 rows were dropped in each epoch
✓ each of the 140 held-out cells was counted once
…
One more epoch: one of 2 ranks is killed halfway, and 3 ranks resume
  steps 0 to 8 on 2 ranks, 9 to 14 on 3 ranks
✓ each of the 560 training cells of that epoch was read once
"""
#: Colors of the marks of these lines.
MARKS = {"✓ ": GREEN, "$ ": BLUE}


def demo() -> str:
    """Draw a terminal with lines that the demo prints."""
    # a terminal of 60 columns wraps one of the lines
    lines = [part for printed in DEMO.splitlines() for part in wrap(printed, 60)]
    height = 46 + 22 * len(lines)
    look = f'rx="8" fill="none" stroke="{INK}" stroke-width="1.5"'
    parts = [f'<rect x="8" y="4" width="{WIDTH - 16}" height="{height}" {look}/>']
    parts.append(line((8, 28), (WIDTH - 8, 28)))
    parts += [
        f'<circle cx="{x}" cy="16" r="4.5" fill="none" stroke="{INK}" stroke-width="1.5"/>'
        for x in (24, 40, 56)
    ]
    for number, printed in enumerate(lines):
        y = 53 + 22 * number
        mono = {"font_family": "monospace", "font_size": "13.5"}
        if number == 0:
            mono["font_weight"] = "bold"
        mark, words = printed[:2], printed[2:]
        if mark in MARKS:
            parts.append(text(20, y, mark[0], **mono | {"fill": MARKS[mark]}))
        else:
            words = printed
        # a line with a mark or an indent starts in the third column
        x = 20 if words == printed.lstrip() else 36
        parts.append(text(x, y, words.strip(), **mono))
    label = "A terminal with the output of ./dev demo: six checks of the rows that ranks read passed"
    return picture(height + 12, label, "", parts)


PICTURES = {
    "way.svg": way,
    "prefetch.svg": prefetch,
    "sets.svg": sets,
    "mesh.svg": mesh,
    "demo.svg": demo,
    "resume.svg": resume,
    "virtual.svg": virtual,
    "remainder.svg": remainder,
    "terms.svg": terms,
    "collect.svg": collect,
    "weights.svg": weights,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / "_static" / name).write_text(draw())
