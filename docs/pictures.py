"""Draw the pictures of the README and the pages from what the library computes: ``python docs/pictures.py``.

The pictures have the colors of the logo. The background is transparent, and text is readable on white and on black.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from annbatch.samplers import SequentialSampler
from annbatch_distributed import DistributedSampler, Rank

COLORS, DONE, INK = ("#3a86c8", "#e69f00", "#1fa187"), "#9a9a9a", "#8a8a8a"
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


def batches(sampler: DistributedSampler, n_rows: int) -> list[list[tuple[int, bool]]]:
    """Return the rows of each batch of a rank, each with whether it is repeated."""
    found = []
    for request in sampler.sample(n_rows):
        rows = np.concatenate(
            [np.arange(part.start, part.stop) for part in request["requests"]]
        )
        repeated = request.get("repeated", np.zeros(len(rows), dtype=bool))
        for split in request["splits"]:
            marks = repeated[split].tolist()
            found.append(list(zip(rows[split].tolist(), marks, strict=True)))
    return found


# Shapes


def text(x: float, y: float, words: str, **attributes: str) -> str:
    """Write words."""
    options = {"fill": INK} | attributes
    named = "".join(
        f' {name.replace("_", "-")}="{value}"' for name, value in options.items()
    )
    return f'<text x="{x:g}" y="{y:g}"{named}>{words}</text>'


def box(
    x: float, y: float, width: float, height: float, words: str, fill: str, **more: str
) -> str:
    """Draw a box with words in its middle."""
    named = "".join(
        f' {name.replace("_", "-")}="{value}"' for name, value in more.items()
    )
    ink = INK if more else "white"
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}"{named}/>'
        + text(
            x + width / 2,
            y + height / 2 + 6,
            words,
            fill=ink,
            text_anchor="middle",
            font_size="17",
        )
    )


def picture(height: int, label: str, caption: str, parts: list[str]) -> str:
    """Return the drawing, with a caption at its bottom."""
    if caption:
        parts = [
            *parts,
            text(
                WIDTH / 2,
                height - 10,
                caption,
                text_anchor="middle",
                font_style="italic",
            ),
        ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f'<title>{label}</title>\n<g font-family="sans-serif" font-size="15">',
            *parts,
            "</g>\n</svg>\n",
        ]
    )


# Pictures


def strip(top: int, title: str, ranks: list[list[int]]) -> list[str]:
    """Draw the twelve batches of an epoch, each in the color of the rank that reads it."""
    parts = [text(LEFT, top + 13, title, font_weight="bold")]
    rank_of = {number: rank for rank, own in enumerate(ranks) for number in own}
    for number in range(12):
        x = LEFT + number * 44
        if number in rank_of:
            parts.append(box(x, top + 22, 40, 40, str(number), COLORS[rank_of[number]]))
        else:
            parts.append(
                box(x, top + 22, 40, 40, str(number), DONE, fill_opacity="0.35")
            )
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

    def numbers(n_ranks: int, state: dict[str, Any] | None = None) -> list[list[int]]:
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
    label = "One epoch of 12 batches, started on 2 ranks and resumed on 2 or 3 ranks"
    return picture(
        272, label, "After a resume, the ranks read the remaining batches.", parts
    )


def virtual() -> str:
    """Draw two steps of four virtual ranks, on one, two and four GPUs."""
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
                    parts.append(box(x, top + 22, width, 36, words, COLORS[0]))
                # the bracket of the GPU, below its virtual ranks
                x, span = left + gpu * own * (width + 4), own * (width + 4) - 4
                parts.append(
                    f'<path d="M{x:g} {top + 64} v6 h{span:g} v-6" fill="none" stroke="{INK}" stroke-width="1.5"/>'
                )
                parts.append(
                    text(
                        x + span / 2,
                        top + 85,
                        f"GPU {gpu}",
                        text_anchor="middle",
                        font_size="14",
                    )
                )
    label = "Two steps of four virtual ranks, on 1, 2 and 4 GPUs"
    caption = "The global batch of a step is the same; only the brackets move."
    return picture(356, label, caption, parts)


def remainder() -> str:
    """Draw nine rows on two ranks in batches of two, under each remainder."""
    n_rows, width = 9, 40
    parts = [
        (
            '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="2" height="6" fill="{DONE}"/></pattern></defs>'
        ),
    ]
    for place, policy in enumerate(("drop", "exact", "pad", "keep")):
        top = 6 + place * 94
        parts.append(text(LEFT, top + 42, f'"{policy}"', font_weight="bold"))
        seen = set()
        for rank in range(2):
            y = top + rank * 44
            parts.append(text(LEFT + 76, y + 25, f"rank {rank}", font_size="14"))
            x = LEFT + 132.0
            for batch in batches(rank_of_job(rank, 2, remainder=policy), n_rows):
                for row, is_repeated in batch:
                    seen.add(row)
                    if is_repeated:
                        drawn = box(
                            x, y, width, 36, str(row), "none", stroke=COLORS[rank]
                        )
                    else:
                        drawn = box(x, y, width, 36, str(row), COLORS[rank])
                    parts.append(drawn)
                    x += width + 2
                x += 14
        dropped = sorted({*range(n_rows)} - seen)
        for number, row in enumerate(dropped):
            x = 430 + number * (width + 2)
            parts.append(
                box(x, top + 22, width, 36, str(row), "url(#hatch)", stroke=DONE)
            )
    label = "Nine rows on two ranks, in batches of two, under each remainder"
    return picture(416, label, "Hatched: dropped. Outlined: repeated.", parts)


def terms() -> str:
    """Draw the way from the rows of a collection to the batches of rank 0, as an example."""
    n_rows, size = 48, (WIDTH - 2 * LEFT) / 48
    parts: list[str] = []

    def title(line: int, word: str, words: str) -> None:
        y = 18 + line * 74
        parts.append(text(LEFT, y, word, font_weight="bold"))
        parts.append(text(LEFT + 120, y, words, font_size="14"))

    def rows(line: int, start: float, stop: float, words: str, fill: str) -> None:
        x, y = LEFT + start * size, 28 + line * 74
        more = {DONE: {"fill_opacity": "0.35"}, "none": {"stroke": DONE}}.get(fill, {})
        parts.append(box(x + 1, y, (stop - start) * size - 2, 34, words, fill, **more))

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
    title(4, "load request", "preload_nchunks=3 chunks in random order")
    for place, letter in enumerate("daecb"):
        start = 4 * place + 2 * (place > 2)
        rows(4, start, start + 4, letter, COLORS[0])
    title(5, "batch", "batch_size=6 rows of one load request, shuffled")
    for place, words in enumerate(("d1 e0 a3 d3 a0 d0", "e2 a2 e1 d2 a1 e3")):
        rows(5, 17 * place, 17 * place + 16, words, COLORS[0])
    label = "From the rows of a collection to the batches of one rank"
    return picture(444, label, "", parts)


PICTURES = {
    "resume.svg": resume,
    "virtual.svg": virtual,
    "remainder.svg": remainder,
    "terms.svg": terms,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / "_static" / name).write_text(draw())
