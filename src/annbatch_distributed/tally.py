"""Tally: which rows were read, and how often, as one number.

Reading row ``i`` adds ``x ** i`` to a sum modulo the prime ``p = 2**61 - 1``, for a fixed ``x``. The sum doesn't depend
on the order, those of ranks add up to that of the job, and that of a range of rows is a geometric series, so that what
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from annbatch_distributed.sharding import Rows

type Words = npt.NDArray[np.uint64]

_P = (1 << 61) - 1
_LOW_30, _LOW_31 = np.uint64((1 << 30) - 1), np.uint64((1 << 31) - 1)
#: Where the polynomials are compared: an arbitrary number whose powers all differ, up to ``(p - 1) / 2`` of them.
_X = 0x1234_5678_9ABC_DEF1 % _P
#: A row's power is the product of those of its digits, which are looked up.
_DIGIT_BITS = 16
_DIGIT = np.uint64((1 << _DIGIT_BITS) - 1)
#: How many rows are turned into ranges at once.
_AT_ONCE = 1 << 20


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

    def __init__(self, n_batches: int = 0, n_rows: int = 0, value: int = 0) -> None:
        self.n_batches = n_batches
        self.n_rows = n_rows
        self._value = value
        # counted together, since numpy takes as long for a few rows as for thousands
        self._waiting: list[npt.NDArray[Any]] = []
        self._n_waiting = 0

    @classmethod
    def of_rows(cls, rows: Rows) -> Self:
        """Count rows that are kept as pieces, without looking at each row of a range.

        Parameters
        ----------
        rows
            Global rows.
        """
        tally = cls()
        for start in range(0, len(rows), _AT_ONCE):
            bounds = np.array([start]), np.array([min(start + _AT_ONCE, len(rows))])
            starts, stops, _ = rows.slices_to_global(*bounds)
            # a geometric series for each range
            series = (_sum(_powers(stops)) - _sum(_powers(starts))) * pow(_X - 1, -1, _P)
            tally._value = (tally._value + series) % _P
        tally.n_rows = len(rows)
        return tally

    @property
    def value(self) -> int:
        """What tells other rows apart."""
        if self._waiting:
            self._value = (self._value + _sum(_powers(np.concatenate(self._waiting)))) % _P
            self._waiting, self._n_waiting = [], 0
        return self._value

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
        found = np.asarray(rows).reshape(-1)
        if found.size and found.dtype.kind not in "iu":
            msg = (
                f"Rows must be integers, got {found.dtype}: make the loader with return_index=True, for batch['index']."
            )
            raise TypeError(msg)
        if found.size and found.min() < 0:
            msg = f"Rows are counted from 0, got {found.min()}."
            raise ValueError(msg)
        self.n_batches += 1
        self.n_rows += found.size
        self._n_waiting += found.size
        self._waiting.append(found.astype(np.uint64))  # a copy: whoever has the batch may change it
        if self._n_waiting > _AT_ONCE // 8:
            self._value = self.value

    def to_dict(self) -> dict[str, int]:
        """Return it as numbers that JSON can hold."""
        return {"n_batches": self.n_batches, "n_rows": self.n_rows, "value": self.value}

    @classmethod
    def of_dict(cls, numbers: Mapping[str, int]) -> Self:
        """Read such numbers."""
        return cls(**numbers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tally):
            return NotImplemented
        return (self.n_rows, self.value) == (other.n_rows, other.value)

    __hash__ = None  # type: ignore[assignment]  # it goes on counting

    def __add__(self, other: Tally) -> Tally:
        n_batches, n_rows = self.n_batches + other.n_batches, self.n_rows + other.n_rows
        return Tally(n_batches, n_rows, (self.value + other.value) % _P)

    def __sub__(self, other: Tally) -> Tally:
        n_batches, n_rows = self.n_batches - other.n_batches, self.n_rows - other.n_rows
        return Tally(n_batches, n_rows, (self.value - other.value) % _P)

    def __repr__(self) -> str:
        return f"Tally(n_batches={self.n_batches}, n_rows={self.n_rows}, value={self.value})"


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
