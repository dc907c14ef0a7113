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

#: What ``resolve_mask`` gives: every slice with an integer start, an integer stop or None, and no step.
type Mask = slice | tuple[slice, ...]


def resolve_mask(mask: slice | Sequence[slice]) -> Mask:
    """Check a mask and fill in its open starts.

    Parameters
    ----------
    mask
        A slice of global rows, or several that don't overlap (in any order), such as the folds of a cross-validation.

    Returns
    -------
    A slice for a slice; for several, a tuple of them in ascending order.

    Raises
    ------
    TypeError
        If it is neither, or has bounds that are not integers.
    ValueError
        If a slice is empty, reversed, negative or stepped, if slices overlap, or if there are none.

    Examples
    --------
    >>> resolve_mask(slice(16_000))
    slice(0, 16000, None)
    >>> resolve_mask([slice(4_000, None), slice(0, 2_000)])
    (slice(0, 2000, None), slice(4000, None, None))
    """
    if isinstance(mask, slice):
        return _resolve_slice(mask)
    if not isinstance(mask, list | tuple):
        msg = f"mask must be a slice or a list of slices of rows, got {mask!r}."
        raise TypeError(msg)
    if not mask:
        msg = "mask must hold at least one slice, got an empty list. Leave mask out to use all rows."
        raise ValueError(msg)
    slices = tuple(sorted((_resolve_slice(part) for part in mask), key=lambda part: part.start))
    for before, after in pairwise(slices):
        if before.stop is None or before.stop > after.start:
            msg = (
                f"The slices of a mask must not overlap, got {_text(before)} and {_text(after)}. "
                "A row in two of them would be read twice in an epoch; join them into one slice."
            )
            raise ValueError(msg)
    return slices


def _resolve_slice(part: slice) -> slice:
    if not isinstance(part, slice):
        msg = f"mask must be a slice or a list of slices of rows, got {part!r} in it."
        raise TypeError(msg)
    try:
        start = 0 if part.start is None else integer("start", part.start)
        stop = None if part.stop is None else integer("stop", part.stop)
        step = 1 if part.step is None else integer("step", part.step)
    except TypeError:
        msg = f"The bounds of a mask must be integers or None, got {part!r}."
        raise TypeError(msg) from None
    if step != 1:
        msg = f"A mask must not have a step, got {part!r}. Select stretches of rows with a list of slices."
        raise ValueError(msg)
    if start < 0 or (stop is not None and stop < 0):
        msg = f"The bounds of a mask must be >= 0, got {part!r}. Rows count from the front of the collection."
        raise ValueError(msg)
    if stop is not None and start >= stop:
        msg = f"A mask must begin before it ends (start < stop), got {part!r}, which holds no rows."
        raise ValueError(msg)
    return slice(start, stop)


def window(mask: Mask, n_obs: int) -> Rows:
    """Return the rows of a collection that a mask selects.

    Parameters
    ----------
    mask
        From :func:`resolve_mask`.
    n_obs
        The number of rows of the collection.

    Raises
    ------
    ValueError
        If the mask reaches beyond the collection, or begins there.

    Examples
    --------
    >>> window((slice(0, 2_000), slice(4_000, None)), 10_000)
    Rows(0:2000, 4000:10000)
    """
    ranges = []
    for part in mask if isinstance(mask, tuple) else (mask,):
        stop = n_obs if part.stop is None else part.stop
        if stop > n_obs or part.start >= stop:
            msg = (
                f"The mask {_text(part)} must lie within the collection's rows [0, {n_obs}). "
                "Give a mask that fits, or check that every dataset has been added to the loader."
            )
            raise ValueError(msg)
        ranges.append(range(part.start, stop))
    return Rows(tuple(ranges))


def _text(part: slice) -> str:
    """A mask's slice as the half-open interval that it is."""
    return f"[{part.start}, {'end' if part.stop is None else part.stop})"
