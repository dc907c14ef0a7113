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

#: Rows are counted in words of 64 bits, one of them for the sign.
BOUND = 2**63


def integer(name: str, value: object, *, least: int | None = None, below: int | None = None) -> int:
    """Return an integer of any type as Python's.

    Parameters
    ----------
    name
        What it is called, for the message.
    value
        Whatever was passed.
    least
        What it must be at least; None if it may be any.
    below
        What it must be below, besides; None if it may be any.

    Raises
    ------
    TypeError
        If it is no integer; a bool isn't.
    ValueError
        If it is too small or too large.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        msg = f"{name} must be an integer, got {shortened(value)} of type {type(value).__name__}."
        raise TypeError(msg)
    number = int(value)
    if (least is not None and number < least) or (below is not None and number >= below):
        # an integer of thousands of digits has no text in Python
        got = number if abs(number) < 2**128 else f"an integer of {number.bit_length()} bits"
        msg = f"{name} must be at least {least}{'' if below is None else f' and below {below}'}, got {got}."
        raise ValueError(msg)
    return number


def integers(name: str, values: object, *, below: int | None = None) -> Int64Array:
    """Return integers of any type in an array of any shape, as words that hold them when they are moved too.

    Parameters
    ----------
    name
        What they are called, for the message, as the beginning of a sentence.
    values
        Whatever was passed: an array, a list, a range, a pandas Series.
    below
        Where they are positions, how many there are; None if they may be anything that 64 bits hold.

    Raises
    ------
    TypeError
        If they are not integers. An empty array may be of any type.
    ValueError
        If 64 bits don't hold them.
    IndexError
        If they are not all within ``[0, below)``.
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
        msg = f"{name} must be integers, got bool. For those of a boolean mask, pass numpy.flatnonzero(mask)."
        raise TypeError(msg)
    if array.dtype.kind not in "iu":
        msg = f"{name} must be integers, got {array.dtype}. If they are whole numbers, convert them with astype(int)."
        raise TypeError(msg)
    if below is not None and not 0 <= int(array.min()) <= int(array.max()) < below:
        msg = f"{name} must be in [0, {below}), got {array.min()} to {array.max()}."
        raise IndexError(msg)
    if array.dtype == np.uint64 and int(array.max()) >= BOUND:
        msg = f"{name} must be below 2**63, got {array.max()}."
        raise ValueError(msg)
    return array.astype(np.int64, copy=False)


def _no_array(name: str, values: object) -> str:
    return f"{name} must be integers in a list or an array, got {shortened(values)} of type {type(values).__name__}."
