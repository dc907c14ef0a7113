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

__all__ = [
    "POLICIES",
    "Even",
    "Remainder",
    "Stretch",
    "check",
    "drop_offset",
]

type Remainder = Literal["drop", "keep", "exact", "pad"]

POLICIES: tuple[Remainder, ...] = get_args(Remainder.__value__)


class Stretch(NamedTuple):
    """One rank's positions in an order of rows: ``length`` of them from ``start``, going on at the front."""

    start: int
    """The first position."""
    own: int
    """How many of the positions, the leading ones, are this rank's own; the others are repeats."""
    length: int
    """How many positions in all."""


class Even(NamedTuple):
    """Positions of an order of rows, or a number of draws, that all ranks share out evenly.

    >>> [Even("pad", 10, world_size=2, batch_size=2).stretch(rank) for rank in (0, 1)]
    [Stretch(start=0, own=5, length=6), Stretch(start=5, own=5, length=6)]
    """

    policy: Remainder
    n_rows: int
    world_size: int
    batch_size: int | None
    """Rows of a full batch, or of a batch on each rank within a rank; only ``keep`` and ``exact`` do without."""

    def stretch(self, rank: int) -> Stretch:
        """Return the positions that a rank reads."""
        rows, extra = divmod(self.n_rows, self.world_size)
        if self.policy == "drop":
            assert self.batch_size is not None
            length = rows // self.batch_size * self.batch_size
            return Stretch(rank * length, length, length)
        n_small = self.world_size - extra  # the ranks that don't have a row more come first
        start, own = rank * rows + max(0, rank - n_small), rows + (rank >= n_small)
        if self.policy == "pad":
            assert self.batch_size is not None
            return Stretch(start, own, -(-self.n_rows // (self.world_size * self.batch_size)) * self.batch_size)
        return Stretch(start, own, own)

    @property
    def sizes(self) -> tuple[int, ...]:
        """For each rank, how many positions it reads."""
        n_longer = self.n_rows % self.world_size
        first, last = self.stretch(0).length, self.stretch(self.world_size - 1).length
        return (first,) * (self.world_size - n_longer) + (last,) * n_longer

    @property
    def n_lost(self) -> int:
        """How many positions no rank reads."""
        if self.policy != "drop":
            return 0
        assert self.batch_size is not None
        return self.n_rows % (self.world_size * self.batch_size)


def drop_offset(rotations: int, *, lost: int, n_rows: int) -> int:
    """Return the position, of ``n_rows``, at which what ``drop`` keeps begins; the ``lost`` rows come before it.

    In epoch 0 the last rows are lost, as annbatch has it, and each epoch loses the rows before those that the last one
    lost, going round: every row is lost equally often, and where fewer than half of the rows are lost at once, any two
    consecutive epochs together read every row.

    >>> [drop_offset(-epoch, lost=2, n_rows=10) for epoch in range(6)]
    [0, 8, 6, 4, 2, 0]
    """
    return rotations * lost % n_rows if lost else 0


def check(even: Even, what: str) -> None:
    """Raise a ValueError if there are too few rows, or samples, for the policy: the same on every rank.

    Under ``exact`` it takes the sampler to tell whether a rank is a batch short, so that this only looks for a row
    per rank there. ``what`` says how many there are, as the beginning of a sentence.
    """
    policy, n_rows, world_size, batch_size = even
    if policy == "drop":
        assert batch_size is not None
        if n_rows < world_size * batch_size:
            raise ValueError(
                f"{what}, too few for one full batch on every rank: {world_size} ranks times batch size {batch_size} "
                f"is {world_size * batch_size}. Use fewer ranks or a smaller batch_size, or remainder='exact' or 'pad'."
            )
    elif policy != "pad" and n_rows < world_size:
        raise ValueError(
            f"{what}, too few for {world_size} ranks: under remainder={policy!r} every rank needs at least one. "
            "Use fewer ranks, or remainder='pad', which has full batches on all of them."
        )
    elif n_rows < 1:
        raise ValueError(f"{what}, and there must be at least one.")
