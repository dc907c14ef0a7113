"""The window: the rows to be shared out, from the mask that restricts them.

1. ``resolve_mask`` checks what can be checked without the collection, and fills in what a slice leaves open.
2. ``window`` holds it against the number of rows, which is known later.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from annbatch_distributed.sharding.integers import integer
from annbatch_distributed.sharding.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Mask", "resolve_mask", "window"]

#: What ``resolve_mask`` gives: every slice with an integer start, an integer stop or None, and no step.
type Mask = slice | tuple[slice, ...]


def resolve_mask(mask: slice | Sequence[slice]) -> Mask:
    """Check a mask, a slice of global rows or several that don't overlap, and fill in its open starts.

    A slice becomes a slice; several, in any order, become a tuple of them in ascending order. A TypeError if it is
    neither, or has bounds that are not integers; a ValueError if a slice is empty, reversed, negative or stepped, if
    slices overlap, or if there are none.

    >>> resolve_mask(slice(16_000))
    slice(0, 16000, None)
    >>> resolve_mask([slice(4_000, None), slice(0, 2_000)])
    (slice(0, 2000, None), slice(4000, None, None))
    """
    if isinstance(mask, slice):
        return _resolve_slice(mask)
    if not isinstance(mask, list | tuple):
        raise TypeError(f"mask must be a slice or a list of slices of rows, got {mask!r}.")
    if not mask:
        raise ValueError("mask must hold at least one slice, got an empty list. Leave mask out to use all rows.")
    slices = tuple(sorted((_resolve_slice(part) for part in mask), key=lambda part: part.start))
    for before, after in pairwise(slices):
        if before.stop is None or before.stop > after.start:
            raise ValueError(
                f"The slices of a mask must not overlap, got {_text(before)} and {_text(after)}. "
                "A row in two of them would be read twice in an epoch; join them into one slice."
            )
    return slices


def _resolve_slice(part: slice) -> slice:
    if not isinstance(part, slice):
        raise TypeError(f"mask must be a slice or a list of slices of rows, got {part!r} in it.")
    try:
        start = 0 if part.start is None else integer("start", part.start)
        stop = None if part.stop is None else integer("stop", part.stop)
        step = 1 if part.step is None else integer("step", part.step)
    except TypeError:
        raise TypeError(f"The bounds of a mask must be integers or None, got {part!r}.") from None
    if step != 1:
        raise ValueError(f"A mask must not have a step, got {part!r}. Select stretches of rows with a list of slices.")
    if start < 0 or (stop is not None and stop < 0):
        raise ValueError(
            f"The bounds of a mask must be >= 0, got {part!r}. Rows count from the front of the collection."
        )
    if stop is not None and start >= stop:
        raise ValueError(f"A mask must begin before it ends (start < stop), got {part!r}, which holds no rows.")
    return slice(start, stop)


def window(mask: Mask, n_obs: int) -> Rows:
    """Return the rows that a resolved mask selects of ``n_obs``; a ValueError if it reaches or begins beyond them.

    >>> window((slice(0, 2_000), slice(4_000, None)), 10_000)
    Rows(0:2000, 4000:10000)
    """
    ranges = []
    for part in mask if isinstance(mask, tuple) else (mask,):
        stop = n_obs if part.stop is None else part.stop
        if stop > n_obs or part.start >= stop:
            raise ValueError(
                f"The mask {_text(part)} must lie within the collection's rows [0, {n_obs}). "
                "Give a mask that fits, or check that every dataset has been added to the loader."
            )
        ranges.append(range(part.start, stop))
    return Rows(tuple(ranges))


def _text(part: slice) -> str:
    return f"[{part.start}, {'end' if part.stop is None else part.stop})"
