"""The window: the rows to be shared out, from the mask that restricts them.

1. ``resolve_mask`` checks what can be checked without the collection, and fills in what a slice leaves open.
2. ``window`` holds it against the number of rows, which is known later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from annbatch_distributed.sharding.integers import BOUND, integer
from annbatch_distributed.sharding.names import names_of
from annbatch_distributed.sharding.rows import Rows
from annbatch_distributed.sharding.selection import Selected

if TYPE_CHECKING:
    import numpy.typing as npt

    from annbatch_distributed.sharding.rows import Int64Array, IntArray

__all__ = [
    "AnyMask",
    "Mask",
    "RowMask",
    "given_mask",
    "mask_text",
    "resolve_mask",
    "window",
]


class _Values(Protocol):
    """A numpy array, a pandas Series, or what else can be turned into an array."""

    def __array__(self) -> npt.NDArray[Any]: ...


#: What selects rows: a slice or several, a boolean for each row of the collection, the numbers of rows, or ``Rows``.
type AnyMask = slice | Sequence[slice] | _Values | Rows


@dataclass(frozen=True)
class RowMask:
    """A mask that was given row by row."""

    rows: Rows
    """The rows that it selects, ascending."""
    n_obs: int | None = None
    """Of how many rows it says whether it selects them, if it says it of each."""


#: What ``resolve_mask`` gives: slices have an integer start, an integer stop or None, and no step.
type Mask = slice | tuple[slice, ...] | RowMask

_ALL = slice(0, None)
#: Stands for the end of any collection.
_END = BOUND - 2
_EXPECTED = (
    "mask must be a slice or a list of slices of rows, a boolean array with a value for each row, an integer array of "
    "rows, or Rows"
)


def resolve_mask(mask: AnyMask, within: Mask = _ALL) -> Mask:
    """Check a mask, and fill in what its slices leave open.

    ``within`` is a resolved mask that it may narrow down and not reach beyond. An open start or stop is that of
    ``within``, and all that is open selects all of it.

    A TypeError if it is no mask; a ValueError if it selects no row, rows that no collection has, or a row twice, or if
    it reaches beyond ``within``.

    >>> resolve_mask(slice(16_000))
    slice(0, 16000, None)
    >>> resolve_mask([slice(4_000, None), slice(0, 2_000)])
    (slice(0, 2000, None), slice(4000, None, None))
    >>> resolve_mask(np.array([True, False, True])).rows
    Rows(0:1, 2:3)
    >>> resolve_mask(slice(4_000, None), within=slice(0, 8_000))
    slice(4000, 8000, None)
    """
    parts = mask if isinstance(mask, list | tuple) else [mask]
    if len(parts) == 1 and isinstance(parts[0], slice) and _is_all(parts[0]):
        return within
    resolved = _resolved(mask, *_ends(within))
    if within != _ALL:
        _check_within(resolved, within)
    return resolved


def _is_all(part: slice) -> bool:
    """Whether a slice is open at both ends, as annbatch writes it too."""
    defaults = ((part.start, 0), (part.step, 1))
    return part.stop is None and all(
        value is None or (isinstance(value, int | np.integer) and not isinstance(value, bool) and value == default)
        for value, default in defaults
    )


def _resolved(mask: AnyMask, first: int, stop: int | None) -> Mask:
    match mask:
        case slice():
            return _resolve_slice(mask, first, stop)
        case Rows():
            return RowMask(_ascending(mask))
        case list() | tuple():
            return _resolve_slices(mask, first, stop)
        case _ if hasattr(mask, "__array__"):
            return _resolve_values(cast("_Values", mask))
        case _:
            raise TypeError(f"{_EXPECTED}, got {shortened(mask)}.")


def _resolve_slices(mask: Sequence[slice], first: int, stop: int | None) -> tuple[slice, ...]:
    if not mask:
        raise ValueError("mask must hold at least one slice, got an empty list. Leave mask out to use all rows.")
    slices = tuple(sorted((_resolve_slice(part, first, stop) for part in mask), key=lambda part: part.start))
    for before, after in pairwise(slices):
        if before.stop is None or before.stop > after.start:
            raise ValueError(
                f"The slices of a mask must not overlap, got {_text(before)} and {_text(after)}. "
                "A row in two of them would be read twice in an epoch; join them into one slice."
            )
    return slices


def _resolve_slice(part: slice, first: int, last: int | None) -> slice:
    if not isinstance(part, slice):
        way_out = "numpy.array of booleans" if isinstance(part, bool) else "numpy.array of row numbers"
        raise TypeError(f"{_EXPECTED}, got a list with {shortened(part)} in it. Pass a {way_out}.")
    try:
        start = first if part.start is None else integer("start", part.start)
        stop = last if part.stop is None else integer("stop", part.stop)
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


def _resolve_values(mask: _Values) -> RowMask:
    """The mask of a boolean for each row, or of the numbers of rows."""
    values = _array(mask)
    if values.ndim != 1:
        raise ValueError(f"A mask must have one dimension, got an array of shape {values.shape}.")
    if values.dtype.kind == "b":
        names_of("mask", mask)  # raises if its index numbers the rows in another order
        rows = Rows.where(values)
        if not rows:
            raise ValueError(f"mask must select at least one row, got {len(values)} values that are all False.")
        return RowMask(rows, len(values))
    if values.dtype.kind not in "iu":
        has_nan = values.dtype.kind == "f" and bool(np.isnan(values).any())
        raise TypeError(
            f"{_EXPECTED}, got {shortened(mask)}, which has values of {values.dtype}"
            f"{', NaN among them' if has_nan else ''}. Compare them, as obs['split'] == 'train' does, or convert whole "
            "numbers of rows with astype(int)."
        )
    return RowMask(_of_numbers(values))


def _array(mask: _Values) -> npt.NDArray[Any]:
    """The values of a mask; a ValueError if some are missing."""
    values = cast("Any", mask)
    dtype = getattr(values, "dtype", None)
    missing: Any = 0
    if isinstance(mask, np.ma.MaskedArray):
        missing = np.ma.count_masked(mask)
    elif not isinstance(dtype, np.dtype) and str(dtype).startswith("bool"):  # pandas' own, with a third value
        missing = values.isna().sum()
        values = values.fillna(False).astype(bool)
    if missing:
        raise ValueError(
            f"A mask must be True or False for each row, got {missing} missing values among {len(values)}. Say what "
            "they mean with fillna(False) or fillna(True)."
        )
    return np.asarray(values)


def _of_numbers(numbers: IntArray) -> Rows:
    """Ascending rows of numbers in any order, each of them once."""
    if not len(numbers):
        raise ValueError("mask must select at least one row, got an array of none.")
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < 0:
        raise ValueError(f"The rows of a mask count from 0, the front of the collection, got {lowest}.")
    if highest >= BOUND - 1:
        raise ValueError(f"The rows of a mask must be below 2**63 - 1, got {highest}.")
    if highest < 64 * len(numbers):
        flags = np.zeros(highest + 1, dtype=np.bool_)
        for start in range(0, len(numbers), 1 << 20):  # numpy makes indices of 64 bits of others
            flags[numbers[start : start + (1 << 20)]] = True
        n_different, rows = int(np.count_nonzero(flags)), Rows.where(flags)
    else:
        ascending = np.sort(numbers)
        different = ascending[np.append(True, ascending[1:] != ascending[:-1])]
        n_different, rows = len(different), Rows.of(different)
    if n_different < len(numbers):
        way_out = (
            "If they are flags, one for each row, pass them as booleans: values == 1."
            if highest <= 1
            else "A row would be read twice in an epoch; pass each of them once."
        )
        raise ValueError(
            f"The rows of a mask must be different ones, got {len(numbers)} of which {len(numbers) - n_different} come "
            f"again. {way_out}"
        )
    return rows


def _ascending(rows: Rows) -> Rows:
    if not rows:
        raise ValueError("mask must select at least one row, got Rows without any.")
    match rows.pieces:
        case (range(),):
            return rows
        case (Selected(selection, places),):  # of nothing but these rows, as all that is made of it takes it to be
            own = selection.at(places)
            return Rows((Selected(own, range(len(own))),))
    if all(isinstance(piece, range | Selected) for piece in rows.pieces):
        starts, stops = rows.bounds()
        if (starts[1:] >= stops[:-1]).all():
            return Rows.of_bounds(starts, stops)
    return _of_numbers(rows.to_array())


def _ends(mask: Mask) -> tuple[int, int | None]:
    """Where a mask begins, and where it ends; None if that is the end of the collection."""
    match mask:
        case slice():
            return mask.start, mask.stop
        case RowMask(rows):
            first, last = rows.to_global(np.array([0, len(rows) - 1])).tolist()
            return first, last + 1
        case _:
            return mask[0].start, mask[-1].stop


def _bounds(mask: Mask) -> tuple[Int64Array, Int64Array]:
    """The starts and stops of the ranges of a mask, ascending, of which none goes on where another ends."""
    if isinstance(mask, RowMask):
        return mask.rows.bounds()
    parts = mask if isinstance(mask, tuple) else (mask,)
    starts = [min(part.start, _END - 1) for part in parts]
    stops = [_END if part.stop is None else min(part.stop, _END) for part in parts]
    return Rows.of_bounds(np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)).bounds()


def _check_within(mask: Mask, within: Mask) -> None:
    """Raise a ValueError if a mask has rows that are not within another one."""
    (first, stop), (own_first, own_stop) = _ends(mask), _ends(within)
    is_between = own_first <= first and (own_stop is None or (stop is not None and stop <= own_stop))
    match mask, within:
        case _, slice() | RowMask(Rows((range(),))) if is_between:
            return
        case RowMask(Rows((Selected(selection),))), RowMask(Rows((Selected(own),))) if not len(selection.without(own)):
            return
    (starts, stops), (own_starts, own_stops) = _bounds(mask), _bounds(within)
    which = np.searchsorted(own_starts, starts, side="right") - 1
    beyond = np.flatnonzero((which < 0) | (stops > own_stops[which]))
    if len(beyond):
        at = beyond[0]
        begins = starts[at] if which[at] < 0 else max(starts[at], own_stops[which[at]])
        part = _text(slice(int(begins), None if stops[at] == _END else int(stops[at])))
        raise ValueError(
            f"The mask {_shown(mask)} reaches beyond {_shown(within)}, the mask of the wrapped sampler: rows in {part} "
            "are not within it. What that one leaves out is held out. Pass a mask that narrows it down, or give the "
            "wrapped sampler a wider one."
        )


def window(mask: Mask, n_obs: int) -> Rows:
    """Return the rows that a resolved mask selects of ``n_obs``; a ValueError if it reaches or begins beyond them.

    >>> window((slice(0, 2_000), slice(4_000, None)), 10_000)
    Rows(0:2000, 4000:10000)
    """
    if isinstance(mask, RowMask):
        if mask.n_obs not in (None, n_obs):
            raise ValueError(
                f"The mask has {mask.n_obs} values, one for each row, and the collection has {n_obs} rows. Make it of "
                "the obs of this collection, or check that every dataset has been added to the loader."
            )
        stop = _ends(mask)[1]
        if stop is not None and stop > n_obs:
            raise _misfit(_shown(mask), n_obs)
        return mask.rows
    parts = mask if isinstance(mask, tuple) else (mask,)
    last = n_obs if parts[-1].stop is None else parts[-1].stop
    if last > n_obs or parts[-1].start >= last:
        raise _misfit(next(_text(part) for part in parts if max(part.start + 1, part.stop or 0) > n_obs), n_obs)
    if len(parts) == 1:
        return Rows((range(parts[0].start, last),))
    starts, stops = [part.start for part in parts], [*(part.stop for part in parts[:-1]), last]
    return Rows.of_bounds(np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64))


def _misfit(shown: str, n_obs: int) -> ValueError:
    return ValueError(
        f"The mask {shown} must lie within the collection's rows [0, {n_obs}). "
        "Give a mask that fits, or check that every dataset has been added to the loader."
    )


def given_mask(mask: Mask) -> slice | list[slice] | Rows:
    """Return a resolved mask as a user may have given it."""
    match mask:
        case RowMask(rows):
            return rows
        case tuple():
            return list(mask)
        case _:
            return mask


def mask_text(mask: Mask) -> str:
    """Return a text that is the same for the same rows and another one for others: ranges, or a digest of very many."""
    match mask:
        case tuple() if len(mask) > 1 and mask[-1].stop is not None:
            return mask_text(RowMask(window(mask, mask[-1].stop)))
        case RowMask(Rows((Selected(selection, places) as piece,))):
            return f"{piece}, digest {selection.at(places).digest}"
        case RowMask(rows):
            return ", ".join(f"{piece.start}:{piece.stop}" for piece in rows.pieces if isinstance(piece, range))
        case _:
            parts = mask if isinstance(mask, tuple) else (mask,)
    return ", ".join(f"{part.start}:{'' if part.stop is None else part.stop}" for part in parts)


def _shown(mask: Mask) -> str:
    """What a mask looks like, in a few words."""
    if isinstance(mask, RowMask):
        return f"of {len(mask.rows)} rows ({mask.rows.in_short(3)})"
    parts = mask if isinstance(mask, tuple) else (mask,)
    return ", ".join([*map(_text, parts[:3]), "..."] if len(parts) > 3 else map(_text, parts))


def _text(part: slice) -> str:
    return f"[{part.start}, {'end' if part.stop is None else part.stop})"
