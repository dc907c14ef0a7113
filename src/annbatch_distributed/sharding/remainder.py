"""The remainder: what becomes of the rows that don't divide evenly among ranks and batches.

Let the window have N rows, W ranks, batch size b, and q = N // W. A rank's stretch of the window's positions is

=========  ==================================================  ==========================================
policy     rows of a rank                                      batches of a rank
=========  ==================================================  ==========================================
``drop``   q // b * b                                          q // b, all full
``keep``   q; the last N mod W ranks have q + 1                ceil(rows / b): may differ by one
``exact``  q; the last N mod W ranks have q + 1                B = ceil(N / (W * b)) on every rank
``pad``    B * b: its own as under ``exact``, then repeats     B, all full
=========  ==================================================  ==========================================

How 10 rows go to 2 ranks with a batch size of 2 (repeats in brackets)::

              rank 0               rank 1
    drop      0 1 2 3              4 5 6 7                epoch 0: 8 and 9 are lost
    drop      8 9 0 1              2 3 4 5                epoch 1: 6 and 7 are lost
    keep      0 1 2 3 4            5 6 7 8 9
    exact     0 1 2 3 4            5 6 7 8 9
    pad       0 1 2 3 4 [5]        5 6 7 8 9 [0]
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

type Remainder = Literal["drop", "keep", "exact", "pad"]

POLICIES: tuple[Remainder, ...] = get_args(Remainder.__value__)


class Stretch(NamedTuple):
    """One rank's positions in the window: ``length`` of them from ``start``, going on at the front."""

    start: int
    """The first position."""
    own: int
    """How many of the positions, the leading ones, are this rank's own; the others are other ranks' rows, repeated."""
    length: int
    """How many positions in all."""


def stretch(
    policy: Remainder, *, n_rows: int, world_size: int, batch_size: int | None, offset: int, rank: int
) -> Stretch:
    """Return the positions of the window that a rank reads in one epoch.

    Parameters
    ----------
    policy
        What becomes of the remainder.
    n_rows
        Rows of the window.
    world_size
        The number of ranks.
    batch_size
        Rows of a full batch; only ``keep`` does without.
    offset
        The position at which rank 0 begins under ``drop``, from :func:`drop_offset`.
    rank
        Whose positions.

    Examples
    --------
    >>> [stretch("pad", n_rows=10, world_size=2, batch_size=2, offset=0, rank=r) for r in (0, 1)]
    [Stretch(start=0, own=5, length=6), Stretch(start=5, own=5, length=6)]
    """
    rows, extra = divmod(n_rows, world_size)
    if policy == "drop":
        assert batch_size is not None
        length = rows // batch_size * batch_size
        return Stretch((offset + rank * length) % n_rows, length, length)
    n_small = world_size - extra  # the ranks that don't have a row more come first
    start, own = rank * rows + max(0, rank - n_small), rows + (rank >= n_small)
    if policy == "pad":
        assert batch_size is not None
        return Stretch(start, own, -(-n_rows // (world_size * batch_size)) * batch_size)
    return Stretch(start, own, own)


def n_lost(policy: Remainder, *, n_rows: int, world_size: int, batch_size: int | None) -> int:
    """Return how many rows of the window no rank reads in an epoch."""
    if policy != "drop":
        return 0
    assert batch_size is not None
    return n_rows % (world_size * batch_size)


#: How the rows that ``drop`` loses move from epoch to epoch, see :func:`drop_offset`.
type Movement = Literal["rotate", "alternate", "stay"]


def drop_offset(movement: Movement, *, lost: int, n_rows: int, epoch: int) -> int:
    """Return the position at which rank 0 begins under ``drop``, which decides what rows are lost in an epoch.

    In epoch 0 the last rows are lost, as annbatch has it. Fewer than half of the rows are ever lost at once, so that
    any two consecutive epochs together read every row, unless the lost rows stay.

    Parameters
    ----------
    movement
        ``"rotate"``: each epoch loses the rows before those that the last one lost, going round, so that every row is
        lost equally often. ``"alternate"``: epochs lose the last rows and the first rows in turn. The shards then have
        two layouts only, and never go round the end, so that a sampler that can't run on every layout can be tried on
        both beforehand. ``"stay"``: every epoch loses the last rows.
    lost
        How many rows an epoch loses.
    n_rows
        Rows of the window.
    epoch
        Which epoch.

    Examples
    --------
    >>> [drop_offset("rotate", lost=2, n_rows=10, epoch=epoch) for epoch in range(6)]
    [0, 8, 6, 4, 2, 0]
    >>> [drop_offset("alternate", lost=2, n_rows=10, epoch=epoch) for epoch in range(6)]
    [0, 2, 0, 2, 0, 2]
    """
    match movement:
        case "rotate":
            return -epoch * lost % n_rows
        case "alternate":
            return epoch % 2 * lost
        case "stay":
            return 0


def check(policy: Remainder, *, n_rows: int, world_size: int, batch_size: int | None) -> None:
    """Raise a ValueError if the window has too few rows for the policy: the same on every rank.

    Under ``exact`` it takes the sampler to tell whether a rank is a batch short, so that this only looks for a row
    per rank there.
    """
    size = f"The window has {n_rows} rows"
    if policy == "drop":
        assert batch_size is not None
        if n_rows < world_size * batch_size:
            msg = (
                f"{size}, too few for one full batch on every rank: {world_size} ranks times batch size {batch_size} "
                f"is {world_size * batch_size}. Use fewer ranks or a smaller batch_size, or remainder='exact' or 'pad'."
            )
            raise ValueError(msg)
    elif policy != "pad" and n_rows < world_size:
        msg = (
            f"{size}, too few for {world_size} ranks: under remainder={policy!r} every rank needs at least one. "
            "Use fewer ranks, or remainder='pad', which repeats rows."
        )
        raise ValueError(msg)
