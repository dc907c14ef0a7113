"""Integers: whether what was passed as one, or as an array of them, is that.

Python and numpy take a bool for an integer, cut a float off to one, and count a large unsigned number as a negative
one. As a number of rows, or as rows, that would be another one without a word.
"""

from __future__ import annotations

from numbers import Integral
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    type Int64Array = npt.NDArray[np.int64]

__all__ = ["BOUND", "counted", "integer", "integers"]

#: Rows are counted in words of 64 bits, one of them for the sign.
BOUND = 2**63


def counted(number: int, noun: str) -> str:
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
