"""Colours: of each rank and of what no rank reads, the same in pictures and in notebooks' tables."""

from __future__ import annotations

__all__ = ["LOST", "OUTSIDE", "of_rank"]

#: Lost rows, and rows outside the window: they stand out from every rank.
LOST, OUTSIDE = "#d55e00", "#c8c8c8"
#: From dark violet to green, as viridis has them, which are told apart in grey and by colour-blind readers.
_STOPS = (
    (0x44, 0x01, 0x54),
    (0x48, 0x24, 0x75),
    (0x41, 0x44, 0x87),
    (0x35, 0x5F, 0x8D),
    (0x2A, 0x78, 0x8E),
    (0x21, 0x91, 0x8C),
    (0x22, 0xA8, 0x84),
    (0x44, 0xBF, 0x70),
    (0x7A, 0xD1, 0x51),
)


def of_rank(rank: int, n_ranks: int) -> str:
    """Return the colour of a rank, as HTML and matplotlib write it.

    >>> [of_rank(rank, 3) for rank in range(3)]
    ['#440154', '#2a788e', '#7ad151']
    """
    place = rank * (len(_STOPS) - 1) / max(1, n_ranks - 1)
    below = min(int(place), len(_STOPS) - 2)
    mixed = (
        round(low + (place - below) * (high - low)) for low, high in zip(_STOPS[below], _STOPS[below + 1], strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)
