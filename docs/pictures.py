"""Draw the pictures of the README and the pages from what the library computes: ``python docs/pictures.py``.

The colors are the logo's. The background is transparent, and text is readable on white and on black.
"""

from __future__ import annotations

from pathlib import Path

from annbatch.samplers import SequentialSampler
from annbatch_distributed import DistributedSampler, Rank

COLORS, DONE, INK = ("#3a86c8", "#e69f00", "#1fa187"), "#9a9a9a", "#8a8a8a"
N_ROWS, BATCH_SIZE = 24, 2
WIDTH, BOX, GAP, LEFT = 564, 40, 4, 20


def batches(n_ranks: int, state: dict[str, object] | None = None) -> list[list[int]]:
    """Return the numbers of the batches that each rank reads, from a state or from the beginning."""
    numbers = []
    for rank in range(n_ranks):
        sampler = DistributedSampler(
            SequentialSampler(BATCH_SIZE, 1, BATCH_SIZE), dist_info=Rank(rank, n_ranks)
        )
        if state is not None:
            sampler.load_state_dict(state)
        requests = sampler.sample(N_ROWS)
        numbers.append([part["requests"][0].start // BATCH_SIZE for part in requests])
    return numbers


def text(x: float, y: float, words: str, **attributes: str) -> str:
    """Write words."""
    given = "".join(
        f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items()
    )
    return f'<text x="{x:g}" y="{y:g}"{given}>{words}</text>'


def strip(top: int, title: str, ranks: list[list[int]]) -> list[str]:
    """Draw the batches of an epoch, each in the color of the rank that reads it."""
    parts = [text(LEFT, top + 13, title, fill=INK, font_weight="bold")]
    rank_of = {number: rank for rank, own in enumerate(ranks) for number in own}
    for number in range(N_ROWS // BATCH_SIZE):
        x, fill = LEFT + number * (BOX + GAP), DONE
        if number in rank_of:
            fill = COLORS[rank_of[number]]
        opacity = "" if number in rank_of else ' fill-opacity="0.35"'
        parts.append(
            f'<rect x="{x}" y="{top + 22}" width="{BOX}" height="{BOX}" rx="5" fill="{fill}"{opacity}/>'
        )
        ink = "white" if number in rank_of else INK
        parts.append(
            text(
                x + BOX / 2,
                top + 48,
                str(number),
                fill=ink,
                text_anchor="middle",
                font_size="17",
            )
        )
    for rank in range(len(ranks)):
        x = WIDTH - LEFT + 8 - 72 * (len(ranks) - rank)
        parts.append(
            f'<rect x="{x}" y="{top + 2}" width="12" height="12" rx="3" fill="{COLORS[rank]}"/>'
        )
        parts.append(text(x + 17, top + 13, f"rank {rank}", fill=INK, font_size="14"))
    return parts


def resume() -> str:
    """Draw an epoch that starts on two ranks, and resumes on two and on three after three steps."""
    whole = batches(2)
    sampler = DistributedSampler(
        SequentialSampler(BATCH_SIZE, 1, BATCH_SIZE), dist_info=Rank(0, 2)
    )
    sampler.sample(N_ROWS)
    state = sampler.state_dict(batches_done=3)
    parts = [
        *strip(6, "Start on 2 ranks", whole),
        *strip(88, "Resume on 2 ranks after 3 steps", batches(2, state)),
        *strip(170, "Resume on 3 ranks after 3 steps", batches(3, state)),
        text(
            WIDTH / 2,
            262,
            "Batches never change. Only who reads them does.",
            fill=INK,
            text_anchor="middle",
            font_style="italic",
        ),
    ]
    label = "One epoch of 12 batches, started on 2 ranks and resumed on 2 or 3 ranks"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 272" role="img">',
            f'<title>{label}</title>\n<g font-family="sans-serif" font-size="15">',
            *parts,
            "</g>\n</svg>\n",
        ]
    )


PICTURES = {"resume.svg": resume}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / "_static" / name).write_text(draw())
