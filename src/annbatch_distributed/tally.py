"""Tally: which rows were read, and how often, in a few bytes.

Reading row ``i`` adds ``x ** i`` to a sum modulo the prime ``p = 2**61 - 1``, for a fixed ``x``. The sum doesn't depend
on the order, those of ranks add up to that of the job, and that of a range of rows is a geometric series, so that what
was read can be compared with a plan of 10^9 rows in no time. Tallies of other rows are other polynomials in ``x``, of a
degree below ``n_obs``. Two of them agree in fewer than ``n_obs`` of the ``p`` places: of 10^9 places, one at most for
collections of up to 2 * 10^9 rows. (The comparison of polynomials by a value: Schwartz, J. ACM 27, 1980; Zippel,
EUROSAM 1979.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from annbatch_distributed.sharding.rows import Int64Array, Rows

type Words = npt.NDArray[np.uint64]

_P = (1 << 61) - 1
_LOW_30, _LOW_31 = np.uint64((1 << 30) - 1), np.uint64((1 << 31) - 1)
#: Where the polynomials are compared: any number would do that has nothing to do with rows.
_X = 0x1234_5678_9ABC_DEF1 % _P
#: A row's power is the product of those of its digits, which are looked up.
_DIGIT_BITS = 16
_DIGIT = np.uint64((1 << _DIGIT_BITS) - 1)
#: How many rows are turned into ranges at once.
_AT_ONCE = 1 << 20


@dataclass
class Tally:
    """Counts rows, so that they can be compared with those that were planned.

    Examples
    --------
    >>> import numpy as np
    >>> from annbatch_distributed import Tally
    >>> read = Tally()
    >>> for rows in (np.array([3, 0, 1]), np.array([2, 4])):
    ...     read.add(rows)
    >>> read == Tally.of([range(0, 5)])
    True
    >>> read == Tally.of([range(0, 4), range(3, 4)])
    False
    """

    n_batches: int = field(default=0, compare=False)
    """How many batches were added; tallies of the same rows are equal whatever the batches were."""
    n_rows: int = 0
    """How many rows, each as often as it was added."""
    value: int = 0
    """What tells other rows apart."""

    @classmethod
    def of(cls, pieces: Iterable[range]) -> Self:
        """Count ranges of rows with step 1, without looking at each row.

        Parameters
        ----------
        pieces
            Half-open ranges of global rows.
        """
        bounds = [(piece.start, piece.stop) for piece in pieces if piece]
        starts, stops = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
        tally = cls()
        tally.add_ranges(starts, stops)
        return tally

    @classmethod
    def of_rows(cls, rows: Rows) -> Self:
        """Count rows that are kept as pieces."""
        tally = cls()
        for start in range(0, len(rows), _AT_ONCE):
            bounds = np.array([start]), np.array([min(start + _AT_ONCE, len(rows))])
            starts, stops, _ = rows.slices_to_global(*bounds)
            tally.add_ranges(starts, stops)
        return tally

    def add(self, rows: npt.ArrayLike) -> None:
        """Count the rows of a batch.

        Parameters
        ----------
        rows
            Global rows, at least 0, in any order and each as often as it was read: ``batch["index"]`` of a loader with
            ``return_index=True``.

        Raises
        ------
        TypeError
            If they are not integers.
        ValueError
            If one is negative.
        """
        found = np.asarray(rows)
        if found.dtype.kind not in "iu":
            msg = (
                f"Rows must be integers, got {found.dtype}: make the loader with return_index=True, for batch['index']."
            )
            raise TypeError(msg)
        if found.size and found.min() < 0:
            msg = f"Rows are counted from 0, got {found.min()}."
            raise ValueError(msg)
        self.n_batches += 1
        self.n_rows += found.size
        self.value = (self.value + _sum(_powers(found.reshape(-1)))) % _P

    def add_ranges(self, starts: Int64Array, stops: Int64Array) -> None:
        """Count half-open ranges of rows."""
        self.n_rows += int((stops - starts).sum())
        # a geometric series for each of them
        series = (_sum(_powers(stops)) - _sum(_powers(starts))) * pow(_X - 1, -1, _P)
        self.value = (self.value + series) % _P

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.n_batches + other.n_batches, self.n_rows + other.n_rows, (self.value + other.value) % _P)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.n_batches - other.n_batches, self.n_rows - other.n_rows, (self.value - other.value) % _P)


def _powers(rows: npt.NDArray[Any]) -> Words:
    """Return ``_X ** row`` modulo ``_P`` for each row."""
    digits = rows.astype(np.uint64)
    powers: Words = _table(0)[digits & _DIGIT]
    for place in range(1, -(-int(digits.max(initial=0)).bit_length() // _DIGIT_BITS)):
        powers = _product(powers, _table(place)[(digits >> (place * _DIGIT_BITS)) & _DIGIT])
    return powers


@cache
def _table(place: int) -> Words:
    """Return the powers of ``_X`` for each value of a digit."""
    table: Words = np.ones(1, dtype=np.uint64)
    for bit in range(_DIGIT_BITS):
        table = np.concatenate([table, _product(table, np.uint64(pow(_X, 1 << (place * _DIGIT_BITS + bit), _P)))])
    return table


def _product(left: Words, right: Words | np.uint64) -> Words:
    """Return products modulo ``_P``, in words of 64 bits: both are cut into halves, and ``2**61`` is 1."""
    left_high, left_low, right_high, right_low = left >> 31, left & _LOW_31, right >> 31, right & _LOW_31
    middle = left_high * right_low + left_low * right_high
    total = (left_high * right_high << 1) + (middle >> 30) + ((middle & _LOW_30) << 31) + left_low * right_low
    total = (total & _P) + (total >> 61)
    reduced: Words = np.where(total >= _P, total - _P, total)
    return reduced


def _sum(words: Words) -> int:
    """Return the sum of numbers below ``_P``, of up to ``2**33`` of them."""
    return ((int((words >> 31).sum()) << 31) + int((words & _LOW_31).sum())) % _P
