"""Rows: an ordered run of global rows, kept as a few pieces.

A window, a shard, the rows lost in an epoch: all are rows in some order, and all are a handful of pieces even where
they hold 10^10 rows. What is kept is the pieces, so that every operation costs in their number, never in the rows.

A piece is a half-open range, or a :class:`Run`, which works its rows out: blocks in a shuffled order, for one, or a
:mod:`selection` of rows here and there.
Position ``p`` of ``Rows`` (a *local* row) is its ``p``-th row (a *global* row):

1. ``cyclic`` takes a stretch of positions, going on at the front when the end is reached.
2. ``to_global`` and ``slices_to_global`` turn local rows into global ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, repeat
from math import gcd
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from annbatch_distributed.sharding.integers import BOUND, integer, integers
from annbatch_distributed.sharding.names import names_of
from annbatch_distributed.sharding.selection import BLOCK, Selected, Selection, chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Int64Array", "IntArray", "Piece", "Rows", "Run"]

type IntArray = npt.NDArray[np.integer[Any]]
type Int64Array = npt.NDArray[np.int64]


class Run(Protocol):
    """Rows that are worked out when they are asked for: whole blocks, one after the other."""

    @property
    def block_size(self) -> int:
        """Rows of a block, all blocks being whole."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def part(self, start: int, stop: int) -> Iterable[Piece]:
        """The rows at positions ``[start, stop)``, as pieces."""

    def to_array(self) -> Int64Array:
        """All global rows, in order."""

    def joined(self, following: Run) -> Run | None:
        """This run and the following one as one run; None if they can't be."""

    def to_global(self, positions: Int64Array) -> Int64Array:
        """The global rows at positions ``[0, len(self))`` of this run."""

    def slices_to_global(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Slices of this run, each of them within one block, as :meth:`Rows.slices_to_global` has them."""


type Piece = range | Run


@dataclass(frozen=True)
class Rows:
    """Global rows in the order of their local positions.

    Parameters
    ----------
    pieces
        Ascending half-open ranges of global rows with step 1, or runs, in order. Rows may go down from one piece to the
        next, and a row may be in several of them. Pieces that continue each other are joined, empty ones left out.

    Raises
    ------
    TypeError
        If they are something else.
    ValueError
        If a range has another step, or holds what is no number of a row: one below 0, or ``2**63`` and more.

    Examples
    --------
    >>> window = Rows((range(0, 3), range(10, 14)))
    >>> len(window), list(window)
    (7, [0, 1, 2, 10, 11, 12, 13])
    >>> window.cyclic(5, 4)
    Rows(12:14, 0:2)
    >>> window.within(2, 12) + Rows((range(20, 22),))
    Rows(2:3, 10:12, 20:22)
    """

    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.pieces, tuple | list):
            raise TypeError(
                f"Rows takes a tuple of ranges, such as Rows((range(5),)), got {self.pieces!r} of type "
                f"{type(self.pieces).__name__}. Make Rows of row numbers with Rows.of."
            )
        for piece in self.pieces:
            _check_piece(piece)
        object.__setattr__(self, "pieces", tuple(_joined(self.pieces)))

    @classmethod
    def _of_joined(cls, pieces: Iterable[Piece]) -> Rows:
        """Return the rows of pieces that are joined already: of 10^5 of them, that takes as long as all the rest."""
        rows = object.__new__(cls)
        object.__setattr__(rows, "pieces", tuple(pieces))
        return rows

    @classmethod
    def of(cls, rows: npt.ArrayLike | range) -> Rows:
        """Return any rows, one by one, as ranges wherever they follow each other.

        Parameters
        ----------
        rows
            Integers of at least 0, in order. For a boolean array, see :meth:`where`.

        Raises
        ------
        TypeError
            If they are not integers.
        ValueError
            If one is no number of a row, or they have more than one dimension.

        Examples
        --------
        >>> Rows.of([4, 5, 6, 2, 9])
        Rows(4:7, 2:3, 9:10)
        """
        listed = integers("Rows", rows)
        _check_listed("Rows", listed)
        starts = np.flatnonzero(np.diff(listed, prepend=listed[:1] - 2) != 1)
        lengths = np.diff(starts, append=len(listed))
        firsts = listed[starts]
        return cls._of_joined(_pieces(firsts, firsts + lengths))

    @classmethod
    def where(cls, flags: npt.ArrayLike) -> Rows:
        """Return the rows whose flag is set, in ascending order.

        Parameters
        ----------
        flags
            A boolean array of one dimension with a value for each row of the collection. Many ranges are kept as one
            bit for each of its rows.

        Raises
        ------
        TypeError
            If it is no such array, or a Series with names, which rows don't have: a mask can be such a Series itself.

        Examples
        --------
        >>> Rows.where(np.array([False, True, True, False, True]))
        Rows(1:3, 4:5)
        """
        given = flags
        flags = np.asarray(given)
        if flags.dtype != np.bool_ or flags.ndim != 1:
            raise TypeError(f"Rows.where takes a boolean array of one dimension, got {shortened(given)}.")
        if (names := names_of("flags", given)) is not None:
            raise TypeError(
                "Rows have no names that could be compared with those of a collection's cells, got a Series with the "
                f"index {shortened(list(names[:3]))}. Pass the Series itself as mask; or, if it is right by position, "
                "flags.to_numpy()."
            )
        selection = Selection.of_flags(flags)
        if _takes_less_as_bits(*selection.n_ranges):
            return cls._of_joined([Selected(selection, range(len(selection)))])
        step = 1 << 24  # a stretch has one flag in common with the next
        parts = ((start, flags[start : start + step + 1]) for start in range(0, len(flags), step))
        changes = [start + 1 + np.flatnonzero(part[1:] != part[:-1]) for start, part in parts]
        ends = [np.arange(0), *changes, np.array([len(flags)] * bool(len(flags) and flags[-1]), dtype=np.int64)]
        bounds = np.concatenate([np.zeros(int(bool(len(flags) and flags[0])), dtype=np.int64), *ends])
        return cls._of_joined(_ranges(bounds[::2], bounds[1::2]))

    @classmethod
    def of_bounds(cls, starts: Int64Array, stops: Int64Array) -> Rows:
        """Return the rows of half-open ranges, in order; a range that stops no later than it starts has none.

        >>> Rows.of_bounds(np.array([4, 7, 9, 3]), np.array([7, 8, 9, 5]))
        Rows(4:8, 3:5)
        """
        starts, stops = _bounds(starts, stops)
        _check_listed("Starts", starts)
        _check_listed("Stops", stops)
        some = starts < stops
        starts, stops = starts[some], stops[some]
        apart = starts[1:] != stops[:-1]
        ends = np.ones(min(1, len(starts)), dtype=np.bool_)  # the first one starts a piece, the last one stops a piece
        return cls._of_joined(_pieces(starts[np.append(ends, apart)], stops[np.append(apart, ends)]))

    def __len__(self) -> int:
        return self._stops[-1] if self.pieces else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.pieces)

    def __add__(self, other: Rows) -> Rows:
        if not isinstance(other, Rows):
            raise TypeError(f"Only Rows can be put behind Rows, got {other!r}. Make Rows of row numbers with Rows.of.")
        return Rows._of_joined(_chained((self.pieces, other.pieces)))

    def __repr__(self) -> str:
        return f"Rows({self})"

    def __str__(self) -> str:
        return self.in_short(_SHOWN)

    def in_short(self, most: int) -> str:
        """Return the rows as a text of at most so many pieces."""
        texts = [
            f"{piece.start}:{piece.stop}" if isinstance(piece, range) else str(piece) for piece in self.pieces[:most]
        ]
        return ", ".join([*texts, "..."] if len(self.pieces) > most else texts) or "none"

    @property
    def is_stretch(self) -> bool:
        """Whether these are consecutive rows, or none."""
        return not self.pieces or (len(self.pieces) == 1 and isinstance(self.pieces[0], range))

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        """The local row at which each piece stops."""
        return tuple(accumulate(map(len, self.pieces)))

    @cached_property
    def _runs(self) -> tuple[tuple[int, Run], ...]:
        """The pieces that are runs, and which of the pieces each of them is."""
        return tuple((which, piece) for which, piece in enumerate(self.pieces) if not isinstance(piece, range))

    @cached_property
    def _cells(self) -> _Cells:
        return _Cells.of(self.pieces)

    def to_array(self) -> Int64Array:
        """Return the global rows as an array, in order; it takes memory for each of them."""
        parts = [
            np.arange(piece.start, piece.stop) if isinstance(piece, range) else piece.to_array()
            for piece in self.pieces
        ]
        return np.concatenate([np.arange(0), *parts])

    def take[Value: np.generic](self, values: npt.NDArray[Value]) -> npt.NDArray[Value]:
        """Return the values that an array with one for each row of the collection has for these rows, in order."""
        if len(self.pieces) == 1 and isinstance(stretch := self.pieces[0], range):
            return values[stretch.start : stretch.stop]  # not copied
        return np.concatenate([values[:0], *(values[self._to_global(part)] for part in chunks(len(self)))])

    def cyclic(self, start: int, length: int) -> Rows:
        """Return a stretch of these rows, which goes on at the front whenever it reaches the end.

        Parameters
        ----------
        start
            The local row to begin with, modulo the number of rows.
        length
            How many rows to take; more than there are means that rows come again.

        Raises
        ------
        TypeError
            If either is no integer.
        ValueError
            If ``length`` is negative, or there are no rows to take.
        """
        start, length = integer("start", start), integer("length", length, least=0)
        if length and not self.pieces:
            raise ValueError(
                f"No rows can be taken where there are none, got a length of {length}. Look at len(rows) before."
            )
        stretches: list[Sequence[Piece]] = []
        while length > 0:
            start %= len(self)
            times = length // len(self)
            if not start and times * len(self.pieces) > _LISTED:
                stretches.append([Cycle(self, times)])
                length -= times * len(self)
                continue
            stop = min(start + length, len(self))
            stretches += self._stretch(start, stop)
            length -= stop - start
            start = stop
        return Rows._of_joined(_chained(stretches))

    def _stretch(self, start: int, stop: int) -> Iterator[Sequence[Piece]]:
        """The rows at positions ``[start, stop)``, not empty: whole pieces between parts of the first and the last."""
        first, last = bisect_right(self._stops, start), bisect_left(self._stops, stop)
        before_first, before_last = (self._stops[which] - len(self.pieces[which]) for which in (first, last))
        if first == last:
            yield _part(self.pieces[first], start - before_first, stop - before_first)
            return
        yield _part(self.pieces[first], start - before_first, len(self.pieces[first]))
        yield self.pieces[first + 1 : last]
        yield _part(self.pieces[last], 0, stop - before_last)

    def within(self, start: int, stop: int) -> Rows:
        """Return the rows that lie in the half-open range ``[start, stop)`` of global rows, in order.

        Raises
        ------
        TypeError
            If these rows are not in ascending ranges, or a bound is no integer.
        """
        start, stop = integer("start", start), integer("stop", stop)
        pieces: list[Piece] = []
        for piece in self.pieces:
            match piece:
                case range():
                    pieces.append(range(max(piece.start, start), min(piece.stop, stop)))
                case Selected(selection, places):
                    bounds = (min(max(selection.rank(row), places.start), places.stop) for row in (start, stop))
                    pieces.append(Selected(selection, range(*bounds)))
                case _:
                    raise TypeError(f"Only rows in ranges can be narrowed down to [{start}, {stop}), got {self}.")
        return Rows(tuple(pieces))

    def bounds(self) -> tuple[Int64Array, Int64Array]:
        """Return the starts and stops of the ranges of consecutive rows, in order."""
        if not self._runs:
            ranges = [(piece.start, piece.stop) for piece in self.pieces if isinstance(piece, range)]
            starts, stops = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
            return starts, stops
        found = [self.slices_to_global(part[:1], part[-1:] + 1)[:2] for part in chunks(len(self))]
        starts, stops = map(np.concatenate, zip(*found, strict=True))
        apart = starts[1:] != stops[:-1]  # a range may go on in the next chunk
        return starts[np.append(True, apart)], stops[np.append(apart, True)]

    def blocks_first(self) -> Rows:
        """Return the rows with blocks first, so that each of them begins at a multiple of the block size."""
        if not self._runs:
            return self
        return Rows(tuple(sorted(self.pieces, key=lambda piece: isinstance(piece, range | Selected))))

    def to_global(self, local: IntArray) -> Int64Array:
        """Return the global rows of an array of local rows, each within ``[0, len(self))``.

        Raises
        ------
        TypeError
            If they are not integers.
        IndexError
            If one is not among those.
        """
        return self._to_global(integers("Local rows", local, below=len(self)))

    def _to_global(self, positions: Int64Array) -> Int64Array:
        if len(self.pieces) == 1:
            (piece,) = self.pieces
            return positions + piece.start if isinstance(piece, range) else piece.to_global(positions)
        index = self._cells.piece(positions)
        rows = positions + self._cells.offsets[index]
        for which, run in self._runs:
            its = index == which
            rows[its] = run.to_global(rows[its])
        return rows

    def slices_to_global(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the global rows of half-open slices of local rows within ``[0, len(self))``, in order.

        They are the starts and stops of slices of global rows, and for each of these the index of the given slice that
        it is of: a slice is cut where its rows don't follow each other, and left out if it is empty.

        >>> rows = Rows((range(0, 3), range(10, 14)))
        >>> [
        ...     found.tolist()
        ...     for found in rows.slices_to_global(np.array([4, 1]), np.array([6, 5]))
        ... ]
        [[11, 1, 10], [13, 3, 12], [0, 1, 1]]
        """
        starts, stops = _bounds(starts, stops)
        given = np.flatnonzero(starts < stops)
        starts, stops = starts[given], stops[given]
        if starts.size and (starts.min() < 0 or stops.max() > len(self)):
            raise IndexError(
                f"Slices of local rows must be within [0, {len(self)}), got some from [{starts.min()}, {stops.max()})."
            )
        if not (len(self.pieces) == 1 and isinstance(self.pieces[0], range)):
            starts, stops, which = self._cells.cut(starts, stops)
            given = given[which]
        index = self._cells.piece(starts)
        offsets = self._cells.offsets[index]
        starts, stops = starts + offsets, stops + offsets
        if not self._runs:
            return starts, stops, given
        of_ranges = np.flatnonzero(self._cells.is_range[index])
        found = [(starts[of_ranges], stops[of_ranges], of_ranges)]
        for number, run in self._runs:
            its = np.flatnonzero(index == number)
            if len(its):
                run_starts, run_stops, of_these = run.slices_to_global(starts[its], stops[its])
                found.append((run_starts, run_stops, its[of_these]))
        starts, stops, which = map(np.concatenate, zip(*found, strict=True))
        if len(found) > 2 or len(of_ranges):
            order = np.argsort(which, kind="stable")
            starts, stops, which = starts[order], stops[order], which[order]
        return starts, stops, given[which]


#: How many pieces a text shows.
_SHOWN = 8

#: Rows that come again are listed, unless that takes more pieces than this.
_LISTED = 1024

#: About how many bytes a range takes, and a block of a selection.
_RANGE_BYTES, _BLOCK_BYTES = 112, BLOCK // 8 + 16


def _takes_less_as_bits(n_ranges: int, n_blocks: int) -> bool:
    """Whether ascending ranges are kept as a selection; blocks in two ranges count twice."""
    return n_ranges > _LISTED and n_blocks * _BLOCK_BYTES < n_ranges * _RANGE_BYTES


def _pieces(starts: Int64Array, stops: Int64Array) -> Iterable[Piece]:
    """Return ranges that are joined already as pieces: as a selection, if they ascend and it takes less memory."""
    if len(starts) > _LISTED and (starts[1:] > stops[:-1]).all():
        n_blocks = int(((stops - 1) // BLOCK - starts // BLOCK + 1).sum())
        if _takes_less_as_bits(len(starts), n_blocks):
            selection = Selection.of_bounds(starts, stops)
            return [Selected(selection, range(len(selection)))]
    return _ranges(starts, stops)


def _ranges(starts: Int64Array, stops: Int64Array) -> Iterable[range]:
    return map(range, starts.tolist(), stops.tolist())


@dataclass(frozen=True)
class Cycle:
    """A run of rows that come again and again, all of them each time.

    >>> list(Cycle(Rows((range(3, 5),)), 3))
    [3, 4, 3, 4, 3, 4]
    """

    rows: Rows
    """The rows of one time."""
    times: int
    """How many times."""

    @property
    def block_size(self) -> int:
        """Rows of a block: the largest number of which all pieces are whole blocks."""
        return gcd(*(len(piece) if isinstance(piece, range) else piece.block_size for piece in self.rows.pieces))

    def __len__(self) -> int:
        return len(self.rows) * self.times

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(self.rows, self.times))

    def __str__(self) -> str:
        return f"{self.rows} again and again ({self.times} times)"

    def part(self, start: int, stop: int) -> Iterable[Piece]:
        return self.rows.cyclic(start, stop - start).pieces

    def joined(self, following: Run) -> Cycle | None:
        same = isinstance(following, Cycle) and following.rows == self.rows
        return Cycle(self.rows, (len(self) + len(following)) // len(self.rows)) if same else None

    def to_array(self) -> Int64Array:
        return np.tile(self.rows.to_array(), self.times)

    def to_global(self, positions: Int64Array) -> Int64Array:
        return self.rows.to_global(positions % len(self.rows))

    def slices_to_global(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        turns = starts // len(self.rows) * len(self.rows)
        return self.rows.slices_to_global(starts - turns, stops - turns)


class _Cells(NamedTuple):
    """The cells of pieces: a range is one, and so is each block of a run. They are numbered in order."""

    stops: Int64Array
    """For each piece, the local row at which it stops."""
    starts: Int64Array
    """For each piece, the local row at which it starts."""
    offsets: Int64Array
    """For each piece, what takes a local row to its global row, or to its position in the run."""
    sizes: Int64Array
    """For each piece, the rows of one of its cells."""
    first: Int64Array
    """For each piece, the number of its first cell."""
    is_range: npt.NDArray[np.bool_]
    """For each piece, whether it is a range."""

    @classmethod
    def of(cls, pieces: tuple[Piece, ...]) -> _Cells:
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        stops = np.cumsum(lengths)
        starts = stops - lengths
        fronts = np.array([piece.start if isinstance(piece, range) else 0 for piece in pieces], dtype=np.int64)
        sizes = [len(piece) if isinstance(piece, range) else piece.block_size for piece in pieces]
        counts = lengths // np.array(sizes, dtype=np.int64)
        first = np.cumsum(counts) - counts
        is_range = np.array([isinstance(piece, range) for piece in pieces], dtype=np.bool_)
        return cls(stops, starts, fronts - starts, np.array(sizes, dtype=np.int64), first, is_range)

    def piece(self, positions: Int64Array) -> Int64Array:
        """The piece that each local row is in."""
        return np.searchsorted(self.stops, positions, side="right")

    def cut(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Cut slices of local rows, none of them empty, at the cells; return the index of the given slice for each."""
        first, last = self._cell(starts), self._cell(stops - 1)
        counts = last - first + 1
        given = np.repeat(np.arange(len(starts)), counts)
        if len(given) == len(starts):
            return starts, stops, given
        cells = np.arange(len(given)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        piece = np.searchsorted(self.first, cells, side="right") - 1
        fronts = self.starts[piece] + (cells - self.first[piece]) * self.sizes[piece]
        return np.maximum(starts[given], fronts), np.minimum(stops[given], fronts + self.sizes[piece]), given

    def _cell(self, positions: Int64Array) -> Int64Array:
        """The cell that each local row is in."""
        piece = self.piece(positions)
        return self.first[piece] + (positions - self.starts[piece]) // self.sizes[piece]


def _check_piece(piece: object) -> None:
    if not isinstance(piece, range):
        if not hasattr(piece, "block_size"):
            raise TypeError(
                f"Rows are made of ranges, got {piece!r} of type {type(piece).__name__} among them. Make Rows of row "
                "numbers with Rows.of."
            )
        return
    if piece.step != 1:
        raise ValueError(
            f"Rows are ranges with step 1, got {piece!r}. Make Rows of other rows with Rows.of({piece!r})."
        )
    if piece.start < piece.stop and (piece.start < 0 or piece.stop >= BOUND):
        raise ValueError(f"Rows count from 0, and are below 2**63 - 1, got {piece!r}.")


def _check_listed(name: str, listed: Int64Array) -> None:
    """Raise a ValueError unless this is an array of row numbers in one dimension."""
    if listed.ndim != 1:
        raise ValueError(
            f"{name} must have one dimension, got an array of shape {listed.shape}. Flatten it with reshape(-1)."
        )
    if listed.size and listed.min() < 0:
        raise ValueError(f"{name} count from 0, the front of the collection, got {listed.min()}.")
    if listed.size and listed.max() >= BOUND - 1:  # behind it there must be room for a stop
        raise ValueError(f"{name} must be below 2**63 - 1, got {listed.max()}.")


def _bounds(starts: object, stops: object) -> tuple[Int64Array, Int64Array]:
    both = integers("Starts", starts), integers("Stops", stops)
    if both[0].shape != both[1].shape:
        raise ValueError(f"There must be as many stops as starts, got {both[0].size} starts and {both[1].size} stops.")
    return both


def _part(piece: Piece, start: int, stop: int) -> Sequence[Piece]:
    """The rows at positions ``[start, stop)`` of a piece, as pieces."""
    return [piece[start:stop]] if isinstance(piece, range) else list(_joined(piece.part(start, stop)))


def _chained(stretches: Iterable[Sequence[Piece]]) -> list[Piece]:
    """Put stretches of pieces together, each of them joined already: only where two of them meet can there be more."""
    pieces: list[Piece] = []
    for stretch in stretches:
        if stretch:
            pieces[-1:] = _joined([*pieces[-1:], stretch[0]])
            pieces += stretch[1:]
    return pieces


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join each piece to the one before where it continues it."""
    pending: Piece = range(0)
    for piece in pieces:
        if not len(piece):
            continue
        match pending, piece:
            case range(), range() if pending and pending.stop == piece.start:
                joined: Piece | None = range(pending.start, piece.stop)
            case (range(), _) | (_, range()):
                joined = None
            case _:
                joined = pending.joined(piece)
        if joined is None:
            if pending:
                yield pending
            joined = piece
        pending = joined
    if pending:
        yield pending
