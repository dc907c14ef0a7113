"""Rows: row indices in some order, stored as the starts and stops of ranges.

The selected rows, a shard and the rows dropped in an epoch are all ``Rows``. Local row ``p`` is the ``p``-th of them,
which is a global row of the collection. The cost of an operation depends on the number of ranges, not of rows, unless
it returns an array of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from reprlib import repr as shortened
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from annbatch_distributed.core.values import BOUND, Int64Array, IntArray, integer, integers, names_of

#: Number of ranges that are formatted.
_SHOWN = 8
#: Number of rows that are computed at a time: 2 MB, which stay in the cache of a core. 2**20 rows take twice as long.
_AT_ONCE = 1 << 18


class Rows:
    """Row indices of a collection in some order, stored as ranges.

    Local row ``p`` is the ``p``-th of them, and is a global row of the collection.

    Parameters
    ----------
    ranges
        Half-open ranges of global rows with step 1, in any order. A row may be in several ranges. Ranges that continue
        each other are joined, and empty ranges are removed.

    Raises
    ------
    TypeError
        If ``ranges`` is not a tuple or list of ranges.
    ValueError
        If a range has a step other than 1, or a row is not within ``[0, 2**63 - 1)``.

    See Also
    --------
    Rows.from_indices : Create rows from an array of row indices.
    Rows.from_mask : Create rows from a boolean array.

    Examples
    --------
    >>> from annbatch_distributed import Rows
    >>> rows = Rows((range(0, 3), range(10, 14)))
    >>> len(rows), list(rows)
    (7, [0, 1, 2, 10, 11, 12, 13])
    >>> rows.cyclic(5, 4)
    Rows(12:14, 0:2)
    >>> rows.starts, rows.stops
    (array([ 0, 10]), array([ 3, 14]))
    """

    starts: Int64Array
    """Start of each range, of shape ``(n_ranges,)``."""
    stops: Int64Array
    """Stop of each range, of shape ``(n_ranges,)``."""

    def __init__(self, ranges: tuple[range, ...] | list[range] = ()) -> None:
        ranges = _checked_ranges(ranges)
        starts, stops = ([part.start for part in ranges], [part.stop for part in ranges])
        self._set(np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64))

    def _set(self, starts: Int64Array, stops: Int64Array) -> None:
        # remove empty ranges, and join ranges that continue each other: 0:3, 3:5, 9:9 is 0:5
        is_filled = starts < stops
        if not is_filled.all():
            starts, stops = starts[is_filled], stops[is_filled]
        # between 0:3, 3:5, 7:8: False and True, so ranges start at 0 and 7, and stop at 5 and 8
        is_gap = starts[1:] != stops[:-1]
        if not is_gap.all():
            starts, stops = starts[np.append(True, is_gap)], stops[np.append(is_gap, True)]
        self.starts, self.stops = starts.view(), stops.view()
        self.starts.flags.writeable = self.stops.flags.writeable = False

    @classmethod
    def of_bounds(cls, starts: Int64Array, stops: Int64Array) -> Self:
        """Return the rows of half-open ranges, in order. The bounds aren't checked, and the arrays aren't copied.

        >>> Rows.of_bounds(np.array([4, 7, 9, 3]), np.array([7, 8, 9, 5]))
        Rows(4:8, 3:5)
        """
        rows = object.__new__(cls)
        rows._set(starts, stops)
        return rows

    @classmethod
    def from_indices(cls, rows: npt.ArrayLike | range) -> Self:
        """Create rows from row indices.

        Parameters
        ----------
        rows
            Integers within ``[0, 2**63 - 1)``, in order, of shape ``(n_rows,)``.

        Returns
        -------
        Rows
            The same rows; consecutive ones are stored as a range.

        Raises
        ------
        TypeError
            If ``rows`` are not integers.
        ValueError
            If a row is out of bounds, or ``rows`` has more than one dimension.

        See Also
        --------
        from_mask : Create rows from a boolean array.

        Examples
        --------
        >>> Rows.from_indices([4, 5, 6, 2, 9])
        Rows(4:7, 2:3, 9:10)
        """
        listed = integers("Rows", rows)
        if listed.ndim != 1:
            raise ValueError(f"Rows must have one dimension, got shape {listed.shape}. Flatten them with reshape(-1).")
        if listed.size and listed.min() < 0:
            raise ValueError(f"Rows must be at least 0, got {listed.min()}. Count from the front of the collection.")
        if listed.size and listed.max() >= BOUND - 1:  # the stop after it must fit as well
            raise ValueError(f"Rows must be below 2**63 - 1, got {listed.max()}.")
        return cls.of_bounds(*runs(listed))

    @classmethod
    def from_mask(cls, flags: npt.ArrayLike) -> Self:
        """Create rows from a boolean array.

        Parameters
        ----------
        flags
            Boolean array of shape ``(n_obs,)``.

        Returns
        -------
        Rows
            The rows for which ``flags`` is True, in ascending order. They take 24 bytes per range: 210 MB for 10^8
            rows of which a random 90% are True, and 240 MB while they are made.

        Raises
        ------
        TypeError
            If ``flags`` is not a boolean array of one dimension, or is a Series with named rows. Pass such a Series
            directly as a mask.
        ValueError
            If ``flags`` is a Series whose integer index is not 0, 1, 2, ...

        Examples
        --------
        >>> Rows.from_mask(np.array([False, True, True, False, True]))
        Rows(1:3, 4:5)
        """
        values, flags = flags, np.asarray(flags)
        if flags.dtype != np.bool_ or flags.ndim != 1:
            raise TypeError(
                f"flags must be a boolean array of one dimension, got {shortened(values)}. For row indices, use "
                "Rows.from_indices."
            )
        if (names := names_of("flags", values)) is not None:
            raise TypeError(
                f"flags must not have names, got a Series with the index {shortened(list(names[:3]))}, which can't be "
                "compared with the obs_names of a collection here. Pass the Series itself as mask; or, if it is "
                "correct by position, flags.to_numpy()."
            )
        # flags 0 1 1 0 1 rise at 1 and 4, which are starts, and fall after 2 and 4, so that stops are 3 and 5. To save
        # memory, one array marks the starts and then the stops
        is_edge = flags.copy()
        np.greater(flags[1:], flags[:-1], out=is_edge[1:])
        starts = np.flatnonzero(is_edge)
        is_edge[-1:] = flags[-1:]
        np.greater(flags[:-1], flags[1:], out=is_edge[:-1])
        stops = np.flatnonzero(is_edge)
        del is_edge
        stops += 1
        return cls.of_bounds(starts, stops)

    @cached_property
    def _ends(self) -> Int64Array:
        """Local row at which each range stops: ranges 0:3 and 10:14 stop at 3 and 7."""
        lengths = self.stops - self.starts
        return np.cumsum(lengths, out=lengths)  # in place: filling new memory takes longer than adding up

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self.starts) else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(range, self.starts.tolist(), self.stops.tolist()))

    def __add__(self, other: Rows) -> Rows:
        if not isinstance(other, Rows):
            raise TypeError(
                f"Only Rows can be added to Rows, got {other!r}. Convert row indices with Rows.from_indices."
            )
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
        """Format up to ``most`` ranges, or else the number of rows and their span."""
        if len(self.starts) > most:
            return f"{len(self)} of {self.starts.min()}:{self.stops.max()}"
        ranges = zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        return ", ".join(f"{start}:{stop}" for start, stop in ranges) or "none"

    @property
    def is_contiguous(self) -> bool:
        """True if these are consecutive rows, or none."""
        return len(self.starts) < 2

    def to_array(self) -> Int64Array:
        """Return the global rows as an array.

        Returns
        -------
        numpy.ndarray
            int64 array of shape ``(len(self),)``, in order; 8 bytes per row.

        Examples
        --------
        >>> Rows((range(10, 13), range(0, 2))).to_array()
        array([10, 11, 12,  0,  1])
        """
        return np.concatenate([np.arange(0), *self.arrays()])

    def arrays(self) -> Iterator[Int64Array]:
        """Yield the global rows in arrays of a bounded length, in order."""
        for start in range(0, len(self), _AT_ONCE):
            part = self.cut(start, min(start + _AT_ONCE, len(self)))
            yield expand(part.starts, part.stops)

    def hash_sum(self) -> int:
        """Return the :func:`hash_sum` of these rows, in 7 to 16 ns per row."""
        return sum(map(hash_sum, self.arrays())) % 2**64

    def take[Value: np.generic](self, values: npt.NDArray[Value]) -> npt.NDArray[Value]:
        """Return the values of these rows, in order, from an array with a value for each row of the collection."""
        if len(self.starts) == 1:
            return values[self.starts[0] : self.stops[0]]  # not copied
        return np.concatenate([values[:0], *(values[rows] for rows in self.arrays())])

    def cut(self, start: int, stop: int) -> Rows:
        """Return the local rows ``[start, stop)``, which are within ``[0, len(self)]``."""
        if start >= stop:
            return Rows()
        # ranges 0:3 and 10:14 end at local 3 and 7: local 2:5 lies in ranges 0 and 1
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
        starts, stops = self.starts[first : last + 1].copy(), self.stops[first : last + 1].copy()
        # local 2:5 leaves out 2 rows of the first range, which starts at 3 - (3 - 2) = 2, and 2 of the last one, which
        # stops at 14 - (7 - 5) = 12. The start goes first, since both may be the same range
        starts[0] = stops[0] - (int(self._ends[first]) - start)
        stops[-1] -= int(self._ends[last]) - stop
        return Rows.of_bounds(starts, stops)

    def cyclic(self, start: int, length: int) -> Rows:
        """Return consecutive local rows, continuing at the front after the end.

        Parameters
        ----------
        start
            First local row, modulo the number of rows.
        length
            Number of rows to return. Rows repeat if it is larger than ``len(self)``.

        Returns
        -------
        Rows
            ``length`` rows.

        Raises
        ------
        TypeError
            If an argument is not an integer.
        ValueError
            If ``length`` is negative, or positive although these rows are empty.

        Examples
        --------
        >>> Rows((range(0, 3), range(10, 14))).cyclic(5, 4)
        Rows(12:14, 0:2)
        """
        start, length = integer("start", start), integer("length", length, least=0)
        if not length:
            return Rows()
        if not len(self):
            raise ValueError(f"length must be 0 because these Rows are empty, got {length}. Check len(rows) first.")
        start %= len(self)
        if start + length <= len(self):
            return self.cut(start, start + length)
        # the end of the rows, all rows a number of times, and a part from the front: of 7 rows, 20 from local 5 are
        # 5:7, twice 0:7, and 0:4
        times, left = divmod(length - (len(self) - start), len(self))
        parts = [self.cut(start, len(self)), *[self] * times, self.cut(0, left)]
        return Rows.of_bounds(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "stops"))
        )

    def within(self, start: int, stop: int) -> Rows:
        """Return the rows that are in a half-open range of global rows.

        Parameters
        ----------
        start
            First global row of the range.
        stop
            End of the range, exclusive.

        Returns
        -------
        Rows
            These rows within ``[start, stop)``, in the same order.

        Examples
        --------
        >>> Rows((range(0, 3), range(10, 14))).within(2, 12)
        Rows(2:3, 10:12)
        """
        start, stop = integer("start", start), integer("stop", stop)
        return Rows.of_bounds(np.maximum(self.starts, start), np.minimum(self.stops, stop))

    def to_global(self, local: IntArray) -> Int64Array:
        """Convert local rows to global rows.

        Parameters
        ----------
        local
            Integer array of local rows within ``[0, len(self))``, of any shape.

        Returns
        -------
        numpy.ndarray
            int64 array of global rows, of the same shape.

        Raises
        ------
        TypeError
            If the local rows are not integers.
        IndexError
            If a local row is out of bounds.

        Examples
        --------
        >>> Rows((range(0, 3), range(10, 14))).to_global([0, 3, 6])
        array([ 0, 10, 13])
        """
        return self._to_global(integers("Local rows", local, below=len(self)))

    def _to_global(self, positions: Int64Array) -> Int64Array:
        return placed(positions, self.stops, self._ends)

    def slices_to_global(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Convert half-open slices of local rows to slices of global rows, in order.

        Returns the starts and stops of the global slices, and the index of the local slice of each. A local slice
        becomes several global ones if its global rows aren't consecutive, and none if it is empty.

        >>> rows = Rows((range(0, 3), range(10, 14)))
        >>> [
        ...     bounds.tolist()
        ...     for bounds in rows.slices_to_global(np.array([4, 1]), np.array([6, 5]))
        ... ]
        [[11, 1, 10], [13, 3, 12], [0, 1, 1]]
        """
        filled = np.flatnonzero(starts < stops)
        starts, stops = starts[filled], stops[filled]
        if len(filled) and (starts.min() < 0 or stops.max() > len(self)):
            raise IndexError(
                f"Slices of local rows must be within [0, {len(self)}), got slices of [{starts.min()}, {stops.max()})."
            )
        if len(self.starts) == 1:
            return starts + self.starts[0], stops + self.starts[0], filled
        # the first and the last range that each slice touches: (slices,)
        first, last = np.searchsorted(self._ends, [starts, stops - 1], side="right")
        # a piece for each range that a slice touches: (pieces,). In the example, local 1:5 touches ranges 0 and 1,
        # which end at 3 and 7: local 1:3 and 3:5, shifted by 0 and 7 to global 1:3 and 10:12
        which, ranges = np.repeat(np.arange(len(first)), last + 1 - first), expand(first, last + 1)
        ends = self._ends[ranges]
        shifts = self.stops[ranges] - ends
        starts = np.maximum(starts[which] + shifts, self.starts[ranges])
        stops = np.minimum(stops[which], ends) + shifts
        return starts, stops, filled[which]


@dataclass(frozen=True)
class Order:
    """Rows in a different order. Only the parts that are requested are expanded."""

    rows: Rows
    """Rows in their own order."""
    places: Rows
    """Local rows of ``rows``, in this order."""

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """Return the own order of rows."""
        return cls(rows, Rows((range(len(rows)),)))

    def __len__(self) -> int:
        return len(self.places)

    def cut(self, start: int, stop: int) -> Rows:
        """Return the rows at positions ``[start, stop)`` of the order, which are within ``[0, len(self)]``.

        >>> Order(
        ...     Rows((range(0, 3), range(10, 14))), Rows((range(2, 5), range(0, 2)))
        ... ).cut(1, 4)
        Rows(10:12, 0:1)
        """
        return self._at(self.places.cut(start, stop))

    def cyclic(self, start: int, length: int) -> Rows:
        """Return consecutive rows of the order, continuing at the front after the end."""
        return self._at(self.places.cyclic(start, length))

    def to_global(self, positions: IntArray) -> Int64Array:
        """Return the rows at some positions of the order."""
        return self.rows.to_global(self.places.to_global(positions))

    def to_rows(self) -> Rows:
        """Return all rows in this order."""
        is_own = self.places.is_contiguous and len(self) == len(self.rows)
        return self.rows if is_own else self._at(self.places)

    def _at(self, places: Rows) -> Rows:
        starts, stops, _ = self.rows.slices_to_global(places.starts, places.stops)
        return Rows.of_bounds(starts, stops)


def placed(positions: IntArray, stops: Int64Array, ends: Int64Array) -> Int64Array:
    """Return the rows at some positions of ranges that stop at rows ``stops``, and at positions ``ends``.

    >>> placed(np.array([0, 3, 5]), stops=np.array([3, 14]), ends=np.array([3, 7]))
    array([ 0, 10, 12])
    """
    # the index of each position's range, without a search if there is only one range: 0 1 1
    which: Any = 0 if len(ends) == 1 else np.searchsorted(ends, positions, side="right")
    # range 10:14 ends at position 7, so position 5 is row 5 + (14 - 7) = 12
    rows: Int64Array = positions + (stops[which] - ends[which])
    return rows


def expand(starts: Int64Array, stops: Int64Array) -> Int64Array:
    """Return every integer of half-open ranges, in order.

    >>> expand(np.array([4, 0]), np.array([7, 2]))
    array([4, 5, 6, 0, 1])
    """
    lengths = stops - starts
    # ranges 4:7 and 0:2 begin at places 0 and 3, so their integers are the places 0 1 2 3 4 plus 4 4 4 -3 -3
    values: Int64Array = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    values += np.arange(len(values))  # in place, to save memory
    return values


def runs(numbers: IntArray) -> tuple[Int64Array, Int64Array]:
    """Return the starts and stops of the ranges of consecutive integers, in order: the inverse of :func:`expand`.

    >>> [bounds.tolist() for bounds in runs(np.array([4, 5, 6, 0, 1, 9]))]
    [[4, 0, 9], [7, 2, 10]]
    """
    wide: Int64Array = numbers.astype(np.int64, copy=False)
    # 4 5 6 0 1 9: places 0, 3, 5 don't continue the number before; the runs have 3, 2 and 1 numbers
    first = np.flatnonzero(np.diff(wide, prepend=wide[:1] - 2) != 1)
    return wide[first], wide[first] + np.diff(first, append=len(wide))


def hashes(numbers: IntArray) -> npt.NDArray[np.uint64]:
    """Return 64 random bits for each integer: a bijection, so different integers have different bits."""
    # constants and shifts of splitmix64 (Steele, Lea and Flood, 2014)
    bits: npt.NDArray[np.uint64] = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def hash_sum(rows: IntArray) -> int:
    """Return a checksum of rows: the sum, modulo 2**64, of their random bits.

    It doesn't depend on the order of the rows, and the sums of several arrays add up to the sum of all their rows.
    """
    return int(hashes(rows).sum())


def _checked_ranges(ranges: object) -> list[range]:
    if not isinstance(ranges, tuple | list) or not all(isinstance(part, range) for part in ranges):
        raise TypeError(
            f"ranges must be a tuple of ranges, got {shortened(ranges)}. Pass Rows((range(5),)), for example, or "
            "convert row indices with Rows.from_indices."
        )
    for part in ranges:
        if part.step != 1:
            raise ValueError(f"The ranges of Rows must have step 1, got {part}. Pass Rows.from_indices({part}).")
        if part and (part.start < 0 or part.stop >= BOUND):
            raise ValueError(f"Rows must be at least 0 and below 2**63 - 1, got {part}.")
    return [part for part in ranges if part]


def block_bounds(rows: Rows, size: int) -> Int64Array:
    """Return the local row at which each block begins, and the number of rows.

    Blocks end at the multiples of a size. Rows of a block that follow each other are together, also if other rows of
    the block are missing between them.

    >>> block_bounds(Rows((range(5, 13), range(14, 15), range(20, 22))), 4)
    array([ 0,  3,  7,  9, 11])
    """
    bounds, before = [np.arange(0)], -1
    # some ranges at a time, since a random mask has millions of ranges, and far fewer blocks
    for at in range(0, len(rows.starts), _AT_ONCE):
        starts, stops, ends = (array[at : at + _AT_ONCE] for array in (rows.starts, rows.stops, rows._ends))
        # 5:13, 14:15 and 20:22 in blocks of 4 touch blocks 1:4, 3:4 and 5:6. Block 3 has begun before 14:15, so blocks
        # 1:4, 4:4 and 5:6 begin there
        first, stop = starts // size, (stops - 1) // size + 1
        before, befores = int(stop[-1]) - 1, np.append(before, stop[:-1] - 1)
        first += first == befores
        begins = np.flatnonzero(first < stop)
        first, lengths = first[begins], (stop - first)[begins]
        # blocks 1 2 3 5 begin at 4 8 12 20, but ranges at 5 and 20: 5 8 12 20. They are local rows 0 3 7 9
        blocks = expand(first, first + lengths)
        blocks *= size  # in place, to save memory
        firsts = np.cumsum(lengths) - lengths
        blocks[firsts] = np.maximum(blocks[firsts], starts[begins])
        shifts = (ends - stops)[begins]
        blocks += shifts if len(shifts) == 1 else np.repeat(shifts, lengths)
        bounds.append(blocks)
    return np.concatenate([*bounds, [len(rows)]])


def whole_chunks_first(rows: Rows, size: int, *, after: int = 0) -> Rows:
    """Reorder rows: whole chunks first, which begin at multiples of a size, then the ragged ends of ranges.

    zarr stores rows in chunks, and a read that begins within a chunk decodes one chunk more. After the reordering,
    local rows ``[k * size, (k + 1) * size)`` begin at a multiple of ``size``, except the last few. ``after`` is the
    number of local rows before these rows; if it isn't a multiple of ``size``, some ragged rows come first.

    >>> whole_chunks_first(Rows((range(5, 30), range(41, 44))), 8)
    Rows(8:24, 5:8, 24:30, 41:44)
    >>> whole_chunks_first(Rows((range(5, 30),)), 8, after=6)
    Rows(5:7, 8:24, 7:8, 24:30)
    """
    # (ranges,): the whole chunks of 5:30 in chunks of 8 are 8:24. 41:44 has none, written as 48:40
    first, last = -(-rows.starts // size) * size, rows.stops // size * size
    # 44:44 instead of 48:40, so that all of 41:44 is before its whole chunks
    has_whole = first < last
    first, last = np.where(has_whole, first, rows.stops), np.where(has_whole, last, rows.stops)
    whole = Rows.of_bounds(first, last)
    # (ranges, 2): the ragged parts before and after the whole chunks of each range: 5:8 24:30 and 41:44 44:44
    ragged_starts, ragged_stops = np.stack([rows.starts, last], axis=1), np.stack([first, rows.stops], axis=1)
    ragged = Rows.of_bounds(ragged_starts.ravel(), ragged_stops.ravel())
    # after 6 local rows, 2 ragged rows come first, so that whole chunks begin at local 8
    n_before = -after % size if len(whole) else 0
    if n_before > len(ragged):  # the last whole chunk becomes ragged
        n_whole = len(whole) - size
        ragged, whole = ragged + whole.cut(n_whole, len(whole)), whole.cut(0, n_whole)
    return ragged.cut(0, n_before) + whole + ragged.cut(n_before, len(ragged))
