"""Rows: global rows in some order, as two arrays of where ranges start and stop.

A window, a shard, the rows lost in an epoch: all are rows in some order. Position ``p`` of ``Rows`` (a *local* row) is
its ``p``-th row (a *global* row). Every operation costs in the number of ranges, never in the rows.

Integers from users are checked here too: Python and numpy accept a bool as an integer, truncate a float, and wrap a
large unsigned number to a negative one. As rows, those would silently be different rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from numbers import Integral
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

type IntArray = npt.NDArray[np.integer[Any]]
type Int64Array = npt.NDArray[np.int64]


#: Rows are counted in words of 64 bits, one of them for the sign.
BOUND = 2**63


def plural(number: int, noun: str) -> str:
    """Return a number of things in words: ``1 row``, ``10,906 rows``, ``2 batches``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def integer(name: str, value: object, *, least: int | None = None, below: int | None = None) -> int:
    """Return an integer of any type as Python's; a bool is none. ``name`` is what a message calls it.

    A TypeError if it is no integer; a ValueError if it is below ``least``, or not ``below``.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {shortened(value)} of type {type(value).__name__}.")
    number = int(value)
    if (least is not None and number < least) or (below is not None and number >= below):
        # an integer of thousands of digits has no text in Python
        got = number if abs(number) < 2**128 else f"an integer of {number.bit_length()} bits"
        raise ValueError(f"{name} must be at least {least}{'' if below is None else f' and below {below}'}, got {got}.")
    return number


def integers(name: str, values: object, *, below: int | None = None) -> Int64Array:
    """Return integers in an array, a list, a range or a pandas Series as an array of 64 bits of the same shape.

    ``name`` is the beginning of messages. A TypeError if they are not integers (an empty array may be of any type), a
    ValueError if 64 bits don't hold them, an IndexError if they are not all within ``[0, below)``.
    """
    if not (isinstance(values, list | tuple | range) or hasattr(values, "__array__")):
        raise TypeError(_no_array(name, values))
    try:
        array: npt.NDArray[Any] = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise TypeError(_no_array(name, values)) from None
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind == "b":
        raise TypeError(f"{name} must be integers, got bool. For the rows of a boolean mask, see Rows.where(mask).")
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must be integers, got {array.dtype}. If they are whole numbers, convert them with astype(int)."
        )
    if below is not None and not 0 <= int(array.min()) <= int(array.max()) < below:
        raise IndexError(f"{name} must be in [0, {below}), got {array.min()} to {array.max()}.")
    if array.dtype == np.uint64 and int(array.max()) >= BOUND:
        raise ValueError(f"{name} must be below 2**63, got {array.max()}.")
    return array.astype(np.int64, copy=False)


def _no_array(name: str, values: object) -> str:
    return f"{name} must be integers in a list or an array, got {shortened(values)} of type {type(values).__name__}."


#: How many ranges a text shows, and how many rows are worked out at once.
_SHOWN, _AT_ONCE = 8, 1 << 20


class Rows:
    """Global rows in the order of their local positions.

    Parameters
    ----------
    ranges
        Half-open ranges of global rows with step 1, in order. Rows may go down from one range to the next, and a row
        may be in several of them. Ranges that continue each other are joined, empty ones left out.

    Raises
    ------
    TypeError
        If they are something else.
    ValueError
        If a range has another step, or holds what is no number of a row: one below 0, or ``2**63 - 1`` and more.

    Examples
    --------
    >>> window = Rows((range(0, 3), range(10, 14)))
    >>> len(window), list(window)
    (7, [0, 1, 2, 10, 11, 12, 13])
    >>> window.cyclic(5, 4)
    Rows(12:14, 0:2)
    >>> window.starts, window.stops
    (array([ 0, 10]), array([ 3, 14]))
    """

    starts: Int64Array
    """Where each range starts."""
    stops: Int64Array
    """Where each range stops."""

    def __init__(self, ranges: tuple[range, ...] | list[range] = ()) -> None:
        ranges = _checked_ranges(ranges)
        starts, stops = ([part.start for part in ranges], [part.stop for part in ranges])
        self._set(np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64))

    def _set(self, starts: Int64Array, stops: Int64Array) -> None:
        # leave out empty ranges, and join those that continue each other: 0:3, 3:5, 9:9 is 0:5
        some = starts < stops
        if not some.all():
            starts, stops = starts[some], stops[some]
        apart = starts[1:] != stops[:-1]
        if not apart.all():
            starts, stops = starts[np.append(True, apart)], stops[np.append(apart, True)]
        self.starts, self.stops = starts.view(), stops.view()
        self.starts.flags.writeable = self.stops.flags.writeable = False

    @classmethod
    def of_bounds(cls, starts: Int64Array, stops: Int64Array) -> Self:
        """Return the rows of half-open ranges, in order; the bounds are known to be rows, and stay as they are.

        >>> Rows.of_bounds(np.array([4, 7, 9, 3]), np.array([7, 8, 9, 5]))
        Rows(4:8, 3:5)
        """
        rows = object.__new__(cls)
        rows._set(starts, stops)
        return rows

    @classmethod
    def of(cls, rows: npt.ArrayLike | range) -> Self:
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
        if listed.ndim != 1:
            raise ValueError(f"Rows must have one dimension, got shape {listed.shape}. Flatten them with reshape(-1).")
        if listed.size and listed.min() < 0:
            raise ValueError(f"Rows count from 0, the front of the collection, got {listed.min()}.")
        if listed.size and listed.max() >= BOUND - 1:  # behind it there must be room for a stop
            raise ValueError(f"Rows must be below 2**63 - 1, got {listed.max()}.")
        return cls.of_bounds(*runs(listed))

    @classmethod
    def where(cls, flags: npt.ArrayLike) -> Self:
        """Return the rows whose flag is set, in ascending order.

        Parameters
        ----------
        flags
            A boolean array of one dimension with a value for each row of the collection. 10^8 of them take 24 bytes for
            each range of rows: 220 MB where one in ten is left out at random.

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
        # 0 1 1 0 1 changes at 1, 3, 4 and 5: starts 1, 4 and stops 3, 5
        edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
        return cls.of_bounds(edges[::2].copy(), edges[1::2].copy())

    @cached_property
    def _ends(self) -> Int64Array:
        """The local row at which each range stops."""
        return np.cumsum(self.stops - self.starts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self.starts) else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(range, self.starts.tolist(), self.stops.tolist()))

    def __add__(self, other: Rows) -> Rows:
        if not isinstance(other, Rows):
            raise TypeError(f"Only Rows can be put behind Rows, got {other!r}. Make Rows of row numbers with Rows.of.")
        return Rows.of_bounds(np.append(self.starts, other.starts), np.append(self.stops, other.stops))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.stops, other.stops)

    def __hash__(self) -> int:
        return hash((len(self.starts), *self.starts[:1].tolist(), *self.stops[-1:].tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows.of_bounds, (self.starts, self.stops)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes

    def __repr__(self) -> str:
        return f"Rows({self})"

    def __str__(self) -> str:
        return self.format(_SHOWN)

    def format(self, most: int) -> str:
        """Return the rows as a text: at most so many ranges, or how many rows there are between which."""
        if len(self.starts) > most:
            return f"{len(self)} of {self.starts.min()}:{self.stops.max()}"
        ranges = zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        return ", ".join(f"{start}:{stop}" for start, stop in ranges) or "none"

    @property
    def is_stretch(self) -> bool:
        """Whether these are consecutive rows, or none."""
        return len(self.starts) < 2

    def to_array(self) -> Int64Array:
        """Return the global rows as an array, in order; it takes memory for each of them."""
        return np.concatenate([np.arange(0), *self.arrays()])

    def arrays(self) -> Iterator[Int64Array]:
        """Return the global rows in arrays of a bounded length, in order."""
        for start in range(0, len(self), _AT_ONCE):
            part = self.cut(start, min(start + _AT_ONCE, len(self)))
            yield expand(part.starts, part.stops)

    def mixed_sum(self) -> int:
        """Return the :func:`mixed_sum` of these rows, which takes 10 to 15 ns for each."""
        return sum(map(mixed_sum, self.arrays())) % 2**64

    def take[Value: np.generic](self, values: npt.NDArray[Value]) -> npt.NDArray[Value]:
        """Return the values that an array with one for each row of the collection has for these rows, in order."""
        if len(self.starts) == 1:
            return values[self.starts[0] : self.stops[0]]  # not copied
        return np.concatenate([values[:0], *(values[rows] for rows in self.arrays())])

    def cut(self, start: int, stop: int) -> Rows:
        """Return the rows at positions ``[start, stop)``, which are within ``[0, len(self)]``."""
        if start >= stop:
            return Rows()
        # ranges 0:3 and 10:14 end at local 3 and 7: local 2:5 lies in ranges 0 and 1
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
        starts, stops = self.starts[first : last + 1].copy(), self.stops[first : last + 1].copy()
        # from the ends, while those are the own ones of the range
        starts[0] = stops[0] - (int(self._ends[first]) - start)
        stops[-1] -= int(self._ends[last]) - stop
        return Rows.of_bounds(starts, stops)

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
        if not length:
            return Rows()
        if not len(self):
            raise ValueError(
                f"No rows can be taken where there are none, got a length of {length}. Look at len(rows) before."
            )
        start %= len(self)
        if start + length <= len(self):
            return self.cut(start, start + length)
        # the end of the rows, all of them some times over, and a part from the front
        times, left = divmod(length - (len(self) - start), len(self))
        parts = [self.cut(start, len(self)), *[self] * times, self.cut(0, left)]
        return Rows.of_bounds(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "stops"))
        )

    def within(self, start: int, stop: int) -> Rows:
        """Return the rows that lie in the half-open range ``[start, stop)`` of global rows, in order.

        >>> Rows((range(0, 3), range(10, 14))).within(2, 12)
        Rows(2:3, 10:12)
        """
        return Rows.of_bounds(np.maximum(self.starts, start), np.minimum(self.stops, stop))

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
        # the first one is all of them where rows are consecutive, which takes less time to see
        which = 0 if len(self.starts) == 1 else np.searchsorted(self._ends, positions, side="right")
        # range 10:14 ends at local 7, so local 5 is global 5 + (14 - 7) = 12
        rows: Int64Array = positions + (self.stops[which] - self._ends[which])
        return rows

    def slices_to_global(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the global rows of half-open slices of local rows within ``[0, len(self))``, in order.

        They are the starts and stops of slices of global rows, and for each of these the index of the given slice that
        it is of: a slice is cut where its rows don't follow each other, and left out if it is empty.

        >>> rows = Rows((range(0, 3), range(10, 14)))
        >>> [
        ...     bounds.tolist()
        ...     for bounds in rows.slices_to_global(np.array([4, 1]), np.array([6, 5]))
        ... ]
        [[11, 1, 10], [13, 3, 12], [0, 1, 1]]
        """
        given = np.flatnonzero(starts < stops)
        starts, stops = starts[given], stops[given]
        if len(given) and (starts.min() < 0 or stops.max() > len(self)):
            raise IndexError(
                f"Slices of local rows must be within [0, {len(self)}), got some from [{starts.min()}, {stops.max()})."
            )
        if len(self.starts) == 1:
            return starts + self.starts[0], stops + self.starts[0], given
        # the first and the last range that each slice touches: (slices,)
        first, last = np.searchsorted(self._ends, [starts, stops - 1], side="right")
        # a piece for each range that a slice touches: (pieces,). In the example, local 1:5 touches ranges 0 and 1,
        # which end at 3 and 7: local 1:3 and 3:5, shifted by 0 and 7 to global 1:3 and 10:12
        which, ranges = np.repeat(np.arange(len(first)), last + 1 - first), expand(first, last + 1)
        ends = self._ends[ranges]
        shifts = self.stops[ranges] - ends
        starts = np.maximum(starts[which] + shifts, self.starts[ranges])
        stops = np.minimum(stops[which], ends) + shifts
        return starts, stops, given[which]


def expand(starts: Int64Array, stops: Int64Array) -> Int64Array:
    """Return every integer of half-open ranges, in order.

    >>> expand(np.array([4, 0]), np.array([7, 2]))
    array([4, 5, 6, 0, 1])
    """
    lengths = stops - starts
    # ranges 4:7 and 0:2 begin at places 0 and 3, so their integers are the places 0 1 2 3 4 plus 4 4 4 -3 -3
    values: Int64Array = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    values += np.arange(len(values))  # in place, as there may be very many
    return values


def runs(numbers: IntArray) -> tuple[Int64Array, Int64Array]:
    """Return the starts and stops of the ranges of consecutive integers, in order: the inverse of :func:`expand`.

    >>> [bounds.tolist() for bounds in runs(np.array([4, 5, 6, 0, 1, 9]))]
    [[4, 0, 9], [7, 2, 10]]
    """
    wide: Int64Array = numbers.astype(np.int64, copy=False)
    # places 0, 3, 5 have another number than the one before plus 1; 3, 2 and 1 numbers lie between
    first = np.flatnonzero(np.diff(wide, prepend=wide[:1] - 2) != 1)
    return wide[first], wide[first] + np.diff(first, append=len(wide))


def mixed_sum(rows: IntArray) -> int:
    """Return the sum of rows modulo 2**64, each mixed by splitmix64, so that other rows have another sum.

    It depends neither on the order of the rows nor on how they are cut into arrays whose sums are added.
    """
    # constants and shifts of splitmix64 (Steele, Lea and Flood, 2014)
    mixed: npt.NDArray[np.uint64] = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum())


def _checked_ranges(ranges: object) -> list[range]:
    if not isinstance(ranges, tuple | list) or not all(isinstance(part, range) for part in ranges):
        raise TypeError(
            f"Rows takes a tuple of ranges, such as Rows((range(5),)), got {shortened(ranges)}. Make Rows of row "
            "numbers with Rows.of."
        )
    for part in ranges:
        if part.step != 1:
            raise ValueError(f"Rows are ranges with step 1, got {part}. Make Rows of other rows with Rows.of({part}).")
        if part and (part.start < 0 or part.stop >= BOUND):
            raise ValueError(f"Rows count from 0, and are below 2**63 - 1, got {part}.")
    return [part for part in ranges if part]


def cut_at_multiples(rows: Rows, size: int) -> tuple[Int64Array, Int64Array]:
    """Return the starts and stops of rows whose ranges are cut at the multiples of a size.

    >>> cut_at_multiples(Rows((range(5, 13), range(20, 22))), 4)
    (array([ 5,  8, 12, 20]), array([ 8, 12, 13, 22]))
    """
    first, stop = rows.starts // size, (rows.stops - 1) // size + 1
    # multiples below each part: 5:13 and 20:22 have parts from 4, 8, 12 and 20 on, and keep their own ends
    starts = expand(first, stop)
    starts *= size  # in place, as there may be very many
    stops = starts + size
    ends = np.cumsum(stop - first)
    starts[ends - (stop - first)], stops[ends - 1] = rows.starts, rows.stops
    return starts, stops


def whole_chunks_first(rows: Rows, size: int, *, after: int = 0) -> Rows:
    """Return rows with whole chunks first, which begin at multiples of a size, and the ragged ends of ranges after.

    A store is written in chunks, and a read that begins within one decodes one more. Local rows ``[k * size, (k + 1) *
    size)`` begin at a multiple of it then, but for the last few. ``after`` is how many local rows come before these; if
    they are no multiple of the size, some of the ragged ones come first.

    >>> whole_chunks_first(Rows((range(5, 30), range(41, 44))), 8)
    Rows(8:24, 5:8, 24:30, 41:44)
    >>> whole_chunks_first(Rows((range(5, 30),)), 8, after=6)
    Rows(5:7, 8:24, 7:8, 24:30)
    """
    # of 5:30 in chunks of 8, whole ones are 8:24; of 41:44 none are, and all of it is ragged: 44:44
    first, last = -(-rows.starts // size) * size, rows.stops // size * size
    first, last = np.where(first < last, [first, last], [rows.stops, rows.stops])
    # (2, ranges, 2): starts and stops of the part before and of the part after the whole chunks of each range
    ragged_bounds = np.stack([[rows.starts, last], [first, rows.stops]]).transpose(0, 2, 1).reshape(2, -1)
    whole, ragged = Rows.of_bounds(first, last), Rows.of_bounds(*ragged_bounds)
    n_before = -after % size if len(whole) else 0
    if n_before > len(ragged):
        whole, ragged = whole.cut(0, len(whole) - size), ragged + whole.cut(len(whole) - size, len(whole))
    return ragged.cut(0, n_before) + whole + ragged.cut(n_before, len(ragged))


def names_of(what: str, values: object) -> pd.Index[Any] | None:
    """Return the names of values that were given for each cell; None if they are by position, as arrays are.

    A Series with the index 0, 1, 2, ... (also of each data set) is by position. ``what`` is what a message calls it. A
    ValueError if its index numbers rows in another order.
    """
    if not all(hasattr(values, name) for name in ("index", "dtype", "to_numpy")):
        return None
    names: pd.Index[Any] = values.index  # type: ignore[attr-defined]  # a Series
    if names.dtype.kind not in "iuf":
        return names
    numbers = np.asarray(names)
    wrong = np.flatnonzero((numbers != np.append(-1, numbers[:-1]) + 1) & (numbers != 0))
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(
            f"A Series as {what} must have the rows of the collection in their order, and its index, which is compared "
            f"with 0, 1, 2, ... (in each data set), has {numbers[place]} at place {place}. Don't filter, sort or "
            "shuffle it. If the index means something else, pass its values with to_numpy()."
        )
    return None
