"""Tally: which rows were read, and how often, as one number.

Reading row ``i`` adds ``x ** i`` to a sum modulo the prime ``p = 2**61 - 1``, for a fixed ``x``. The sum doesn't depend
on the order, the ranks' sums add up to the job's, and the sum of a range of rows is a geometric series, so that what
was read can be compared with a plan of 10^9 rows without looking at each. Tallies of other rows are other polynomials
in ``x``, of a degree below ``n_obs``, and two of them agree in fewer than ``n_obs`` of the ``p`` places: in one of 10^9
at most, for collections of up to 2 * 10^9 rows, and for rows that were chosen without regard to ``x``. (The comparison
of polynomials by a value: Schwartz, J. ACM 27, 1980; Zippel, EUROSAM 1979.)
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from annbatch_distributed.integers import integer
from annbatch_distributed.rows import Rows
from annbatch_distributed.state import shown

__all__ = ["Tally"]

if TYPE_CHECKING:
    from annbatch_distributed.rows import Int64Array

type Words = npt.NDArray[np.uint64]

_P = (1 << 61) - 1
_LOW_30, _LOW_31 = np.uint64((1 << 30) - 1), np.uint64((1 << 31) - 1)
#: Where the polynomials are compared: an arbitrary number whose powers all differ, up to ``(p - 1) / 2`` of them.
_X = 0x1234_5678_9ABC_DEF1 % _P
_SERIES = pow(_X - 1, -1, _P)
#: A row's power is the product of its digits' powers, which are looked up.
_DIGIT_BITS = 16
_DIGIT = np.uint64((1 << _DIGIT_BITS) - 1)
#: Rows are below that, since the powers come again from there on.
_END = _P // 2
#: How many rows are counted at once: one by one, and as ranges.
_AT_ONCE, _ROWS_OF_RANGES = 1 << 17, 1 << 20


class Tally:
    """Counts rows, so that they can be compared with those that were planned.

    Parameters
    ----------
    n_batches
        How many batches were counted; tallies of the same rows are equal whatever the batches were.
    n_rows
        How many rows, each as often as it was counted.
    value
        What tells other rows apart.
    largest
        How many rows the largest batch had.

    Raises
    ------
    TypeError
        If one of them is not an integer.
    ValueError
        If one is negative, or the value is of no rows.

    Examples
    --------
    >>> import numpy as np
    >>> from annbatch_distributed import Tally
    >>> read, planned = Tally(), Tally()
    >>> for rows in (np.array([3, 0, 1]), np.array([2, 4])):
    ...     read.add(rows)
    >>> planned.add(np.arange(5))
    >>> read == planned
    True
    >>> planned.add(np.array([4]))
    >>> read == planned
    False
    """

    def __init__(self, n_batches: int = 0, n_rows: int = 0, value: int = 0, largest: int = 0) -> None:
        self.n_batches = integer("n_batches of a Tally", n_batches, least=0)
        self.n_rows = integer("n_rows of a Tally", n_rows, least=0)
        self._value = integer("value of a Tally", value, least=0, below=_P)
        self.largest = integer("largest of a Tally", largest, least=0)
        if self._value and not self.n_rows:
            raise ValueError(
                f"A Tally of no rows has the value 0, got {shown(value)}. Make it with Tally(**tally.to_dict())."
            )
        # rows that are still to be counted, together since numpy takes as long for a few as for thousands
        self._pending: Words = np.empty(0, dtype=np.uint64)
        self._n_pending = 0

    @classmethod
    def of_rows(cls, rows: Rows) -> Self:
        """Count global rows that are kept as pieces, without looking at each row of a range."""
        if not isinstance(rows, Rows):
            kind = type(rows).__name__
            raise TypeError(f"rows must be Rows, as a plan has them, got {kind}. Count others with Tally().add(rows).")
        tally = cls()
        for start in range(0, len(rows), _ROWS_OF_RANGES):
            bounds = np.array([start]), np.array([min(start + _ROWS_OF_RANGES, len(rows))])
            starts, stops, _ = rows.slices_to_global(*bounds)
            tally.add_ranges(starts, stops)
        return tally

    def add_ranges(self, starts: Int64Array, stops: Int64Array, *, n_batches: int = 0, largest: int = 0) -> None:
        """Count half-open ranges of rows, of which ``n_batches`` batches consist, the largest of ``largest`` rows."""
        if len(starts):
            _check_rows(starts, stops - 1)
            # a geometric series for each range
            self._value = (self._value + (_sum(_powers(stops)) - _sum(_powers(starts))) * _SERIES) % _P
        self.n_rows += int((stops - starts).sum())
        self.n_batches += n_batches
        self.largest = max(self.largest, largest)

    @property
    def value(self) -> int:
        """What tells other rows apart."""
        if self._n_pending:
            self._value = (self._value + _sum(_powers(self._pending[: self._n_pending]))) % _P
            self._n_pending = 0
        return self._value

    def add(self, rows: npt.ArrayLike) -> None:
        """Count the rows of a batch.

        Parameters
        ----------
        rows
            Global rows, at least 0 and below ``2**60 - 1``, in any order and each as often as it was read:
            ``batch["index"]`` of a loader with ``return_index=True``.

        Raises
        ------
        TypeError
            If they are not integers.
        ValueError
            If one is negative or too large, or if they have more than one dimension. The tally is then as it was.
        """
        found = np.asarray(rows)
        if found.size and found.dtype.kind not in "iu":
            raise TypeError(
                f"Rows must be integers, got {found.dtype}: make the loader with return_index=True, for batch['index']."
            )
        if found.ndim > 1:
            raise ValueError(
                f"Rows must have one dimension, got an array of shape {found.shape}: pass batch['index'] as it is."
            )
        found = found.reshape(-1)
        if found.size:
            _check_rows(found, found)
        for start in range(0, found.size, _AT_ONCE):
            part = found[start : start + _AT_ONCE]
            if self._n_pending + part.size > _AT_ONCE:
                self._value = self.value
            if not self._pending.size:
                self._pending = np.empty(_AT_ONCE, dtype=np.uint64)
            # a copy: whoever has the batch may change it
            self._pending[self._n_pending : self._n_pending + part.size] = part
            self._n_pending += part.size
        self.n_batches += 1
        self.n_rows += found.size
        self.largest = max(self.largest, found.size)

    def to_dict(self) -> dict[str, int]:
        """Return the arguments of a Tally that is equal, as numbers that JSON can hold."""
        return {name: int(getattr(self, name)) for name in ("n_batches", "n_rows", "value", "largest")}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tally):
            return NotImplemented
        return (self.n_rows, self.value) == (other.n_rows, other.value)

    __hash__ = None  # type: ignore[assignment]  # it goes on counting

    def __add__(self, other: Tally) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        n_batches, n_rows = self.n_batches + other.n_batches, self.n_rows + other.n_rows
        return Tally(n_batches, n_rows, (self.value + other.value) % _P, max(self.largest, other.largest))

    def __repr__(self) -> str:
        return ", ".join(f"{name}={number}" for name, number in self.to_dict().items()).join(("Tally(", ")"))


def _check_rows(lowest: npt.NDArray[Any], highest: npt.NDArray[Any]) -> None:
    """Raise unless rows can be told apart."""
    first, last = int(lowest.min()), int(highest.max())
    if first < 0:
        raise ValueError(f"Rows are counted from 0, got {first}.")
    if last >= _END:
        raise ValueError(f"Rows must be below {_END}, got {last}.")


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
