"""How the rows of a window are divided among ranks in an epoch.

A sharding is asked once, and answers with one order of all rows or with rows for each rank. Its answer becomes one of
three, which say the same of every rank: an :class:`Order` is cut into even stretches, :class:`Shares` are filled up or
cut off one by one, and of :class:`Draws` the number is divided instead of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as shortened
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from annbatch_distributed.sharding.aligned import whole_chunks_first
from annbatch_distributed.sharding.contract import draws
from annbatch_distributed.sharding.remainder import Even, Uneven, drop_offset
from annbatch_distributed.sharding.rows import Rows
from annbatch_distributed.sharding.selection import Selected

if TYPE_CHECKING:
    from annbatch_distributed.sharding.contract import Sharding
    from annbatch_distributed.sharding.remainder import Remainder, Stretch
    from annbatch_distributed.sharding.rows import Piece
    from annbatch_distributed.sharding.selection import Selection

__all__ = ["Dealt", "Division", "Draws", "Order", "Shard", "Shares", "in_short"]


@dataclass(frozen=True)
class Shard:
    """The rows that one rank reads in one epoch; local row ``p`` is the ``p``-th of them."""

    rows: Rows
    """All of them, as global rows."""
    n_own: int
    """How many of them, the leading ones, are this rank's own. Those after them are repeats."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def repeated(self) -> Rows:
        """The rows that are repeats (under ``remainder="pad"``): they are some rank's own rows as well."""
        return self.rows.cyclic(self.n_own, len(self) - self.n_own)


@dataclass(frozen=True)
class Order:
    """One order of rows, cut into a stretch for each rank."""

    rows: Rows
    """The rows that the epoch keeps, in the order of the sharding."""
    lost: Rows
    """The rows of the window that no rank has in this epoch."""
    even: Even
    """How the rows are cut."""
    align: int | None = None
    """Of which number the first rows of whole chunks are multiples, see :mod:`aligned`; None leaves rows in order."""

    is_drawn: ClassVar[bool] = False
    """Whether ranks draw from their rows instead of reading each of them once."""

    def shard(self, rank: int) -> Shard:
        """Return the rows of a rank."""
        return _cut(self.rows, self.even.stretch(rank), self.align)

    def in_order(self, rank: int) -> Rows:
        """Return the rows of a rank in the order of the sharding, whatever comes first in its shard."""
        return _cut(self.rows, self.even.stretch(rank), None).rows

    def size(self, rank: int) -> int:
        """Return how many rows the shard of a rank has."""
        return self.even.stretch(rank).length

    @property
    def sizes(self) -> tuple[int, ...]:
        """For each rank, how many rows its shard has."""
        return self.even.sizes

    @property
    def n_lost(self) -> int:
        """How many rows of the window no rank has."""
        return len(self.lost)

    @property
    def n_repeated(self) -> int:
        """How many rows are read a second time, over all ranks."""
        return sum(self.sizes) - len(self.rows)


@dataclass(frozen=True)
class Shares:
    """Rows for each rank, of any number."""

    rows: tuple[Rows, ...]
    """For each rank, what it was dealt."""
    uneven: Uneven
    """How they are cut off or filled up."""
    align: int | None = None
    """As for :class:`Order`."""

    is_drawn: ClassVar[bool] = False

    def shard(self, rank: int) -> Shard:
        """Return the rows of a rank."""
        return _cut(self.rows[rank], self.uneven.stretch(rank), self.align)

    def in_order(self, rank: int) -> Rows:
        """As for :class:`Order`."""
        return _cut(self.rows[rank], self.uneven.stretch(rank), None).rows

    def size(self, rank: int) -> int:
        """Return how many rows the shard of a rank has."""
        return self.sizes[rank]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """For each rank, how many rows its shard has."""
        return tuple(self.uneven.stretch(rank).length for rank in range(len(self.rows)))

    @property
    def lost(self) -> Rows:
        """The rows of the window that no rank has in this epoch."""
        pieces: list[Piece] = []
        for rank, share in enumerate(self.rows):
            place = self.uneven.stretch(rank)
            n_lost = max(0, len(share) - place.length)
            pieces += share.cyclic(place.start - n_lost, n_lost).pieces
        return Rows(tuple(pieces))

    @property
    def n_lost(self) -> int:
        """How many rows of the window no rank has."""
        return max(0, sum(self.uneven.lengths) - sum(self.sizes))

    @property
    def n_repeated(self) -> int:
        """How many rows are read a second time, over all ranks."""
        return max(0, sum(self.sizes) - sum(self.uneven.lengths))


@dataclass(frozen=True)
class Draws:
    """Rows for each rank to draw from, which may overlap. The ranks share out the draws."""

    rows: tuple[Rows, ...]
    """For each rank, the rows to draw from."""
    even: Even
    """How the samples are shared out that the wrapped sampler would draw alone."""

    is_drawn: ClassVar[bool] = True
    lost: ClassVar[Rows] = Rows()
    n_lost: ClassVar[int] = 0
    n_repeated: ClassVar[int] = 0

    def shard(self, rank: int) -> Shard:
        """Return the rows that a rank draws from."""
        return Shard(self.rows[rank], len(self.rows[rank]))

    def in_order(self, rank: int) -> Rows:
        """As for :class:`Order`."""
        return self.rows[rank]

    def size(self, rank: int) -> int:
        """Return how many samples a rank draws."""
        return self.even.stretch(rank).length

    @property
    def sizes(self) -> tuple[int, ...]:
        """For each rank, how many samples it draws."""
        return self.even.sizes


type Dealt = Order | Shares | Draws


@dataclass(frozen=True)
class Division:
    """What a sharding is asked for an epoch, and its answer."""

    sharding: Sharding
    """What deals the rows to the ranks."""
    window: Rows
    """The rows that the ranks share out."""
    world_size: int
    """The number of ranks."""
    epoch: int
    """Which epoch this is of."""
    seed: int | None
    """What the sharding's own randomness begins from, the same on every rank."""
    remainder: Remainder
    """What becomes of the rows that don't divide evenly."""
    batch_size: int | None
    """Rows of a full batch; None where the wrapped sampler has none."""
    n_samples: int | None
    """How many samples the wrapped sampler would draw alone, where ranks share out draws; None where it is rows."""
    align: int | None = None
    """Of which number the first rows of whole chunks are multiples; None leaves rows in the sharding's order."""

    @cached_property
    def answer(self) -> Rows | tuple[Rows, ...]:
        """What the sharding makes of the window: an order of all rows, or rows for each rank."""
        return self._asked(self.window)

    @property
    def is_exhausted(self) -> bool:
        """Whether there is too little for every rank to read."""
        return self.even.n_rows < (self.world_size * (self.batch_size or 1) if self.remainder == "drop" else 1)

    def dealt(self, rotations: int) -> Dealt:
        """Return what every rank has when the rows that ``drop`` loses have moved on a number of times."""
        if rotations not in self._dealt:
            self._dealt[rotations] = self._deal(rotations)
        return self._dealt[rotations]

    @cached_property
    def _dealt(self) -> dict[int, Dealt]:
        """What was worked out before, which can take a while where the rest of an epoch is dealt."""
        return {}

    @property
    def even(self) -> Even:
        """The rows of the window, or the samples, shared out evenly."""
        n_rows = len(self.window) if self.n_samples is None else self.n_samples
        return Even(self.remainder, n_rows, self.world_size, self.batch_size)

    def _deal(self, rotations: int) -> Dealt:
        answer, even = self.answer, self.even
        if self.n_samples is not None:
            assert isinstance(answer, tuple)
            return Draws(answer, even)
        if isinstance(answer, tuple):
            uneven = Uneven(self.remainder, tuple(map(len, answer)), self.batch_size, rotations)
            return Shares(answer, uneven, self.align)
        n_rows, n_lost = even.n_rows, even.n_lost
        offset = drop_offset(rotations, lost=n_lost, n_rows=n_rows)
        if n_lost:
            answer = self._asked(self.window.cyclic(offset, n_rows - n_lost))
            if not isinstance(answer, Rows):
                name = type(self.sharding).__name__
                raise TypeError(
                    f"{name}.deal must return one Rows for every window, or a list of them for every window."
                )
        return Order(answer, self.window.cyclic(offset - n_lost, n_lost), even._replace(n_rows=len(answer)), self.align)

    def _asked(self, rows: Rows) -> Rows | tuple[Rows, ...]:
        """Ask the sharding, and check what can be checked at once."""
        name = type(self.sharding).__name__  # its own text may show what other ranks, who see this, mustn't see
        answer = self.sharding.deal(rows, world_size=self.world_size, epoch=self.epoch, seed=self.seed)
        shares = answer if isinstance(answer, Sequence) else [answer]
        is_drawn = draws(self.sharding)
        if not all(isinstance(share, Rows) for share in shares) or (is_drawn and isinstance(answer, Rows)):
            got = shortened(answer)  # which may be all row numbers
            what = "a list of Rows" if is_drawn else "Rows, or a list of them"
            raise TypeError(f"{name}.deal must return {what} with one for each rank, got {got}.")
        if isinstance(answer, Sequence) and len(answer) != self.world_size:
            raise ValueError(
                f"{name}.deal must return Rows for each of the {self.world_size} ranks, got {len(answer)}."
            )
        if is_drawn and not all(share == rows or _is_within(rows, share) for share in shares):
            raise ValueError(
                f"{name}.deal must deal rows of {in_short(rows)} and no other, for ranks to draw from, and it dealt "
                "others. annbatch_distributed.testing.check_sharding shows a small example of what is wrong."
            )
        if not is_drawn and not _each_once(rows, shares):
            raise ValueError(
                f"{name}.deal must deal each of the {len(rows)} rows of {in_short(rows)} once and no other; "
                f"it dealt {sum(map(len, shares))}. annbatch_distributed.testing.check_sharding shows a small example "
                "of what is wrong."
            )
        return answer if isinstance(answer, Rows) else tuple(answer)


def in_short(rows: Rows) -> str:
    """Return rows as a text of their first few pieces."""
    return rows.in_short(3)


def _cut(order: Rows, place: Stretch, align: int | None) -> Shard:
    own = order.cyclic(place.start, place.own)
    repeats = order.cyclic(place.start + place.own, place.length - place.own)
    if align is None:
        return Shard(own.blocks_first() + repeats, place.own)
    own, repeats = whole_chunks_first(own, align), whole_chunks_first(repeats, align, after=place.own)
    return Shard(own + repeats, place.own)


def _is_within(rows: Rows, share: Rows) -> bool:
    """Whether a share holds none but some rows, as far as ranges alone show."""
    if any(_is_worked_out(piece) for piece in (*rows.pieces, *share.pieces)):
        return True
    starts, stops = _ascending([rows]).bounds()
    share_starts, share_stops = share.bounds()
    which = np.searchsorted(starts, share_starts, side="right") - 1
    return bool(((which >= 0) & (share_stops <= stops[which])).all())


def _each_once(rows: Rows, shares: Sequence[Rows]) -> bool:
    """Whether shares hold each of some rows once and no others, as far as ranges alone show."""
    if sum(map(len, shares)) != len(rows):
        return False
    if list(shares) == [rows]:  # as they were, which there can be very many pieces of in the rest of an epoch
        return True
    if any(_is_worked_out(piece) for share in shares for piece in share.pieces):
        return True  # it would take each of them to tell
    if (stretches := _of_selection(shares)) is not None and (window := _of_selection([rows])) is not None:
        return stretches == window
    return _ascending(shares) == _ascending([rows])


def _is_worked_out(piece: Piece) -> bool:
    return not isinstance(piece, range | Selected)


def _of_selection(parts: Sequence[Rows]) -> tuple[Selection, Rows] | None:
    """The positions in one selection of all rows, ascending; None if they are not all of one."""
    pieces = [piece for part in parts for piece in part.pieces if isinstance(piece, Selected)]
    selections = {id(piece.selection): piece.selection for piece in pieces}
    if len(selections) != 1 or len(pieces) != sum(len(part.pieces) for part in parts):
        return None
    places = sorted((piece.places for piece in pieces), key=lambda places: places.start)
    return next(iter(selections.values())), Rows(tuple(places))


def _ascending(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts in ascending order."""
    starts, stops = map(np.concatenate, zip(*(part.bounds() for part in parts), strict=True))
    order = np.argsort(starts, kind="stable")
    return Rows.of_bounds(starts[order], stops[order])
