"""Masks: the rows to read, before the number of rows of the collection is known.

1. ``resolve_mask`` checks a mask as far as possible without the collection, and fills in open ends of slices.
2. ``Mask.selected`` compares it with the number of rows, which is known later.
3. ``check_names`` compares the index of a pandas Series with the ``obs_names``. Values are always taken by position,
   and annbatch shuffles cells when it writes them, so a Series in a different order would silently select the wrong
   cells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from annbatch_distributed.core.rows import Rows
from annbatch_distributed.core.values import (
    BOUND,
    MOST_LISTED,
    Int64Array,
    IntArray,
    as_array,
    digest,
    integer,
    names_of,
)

if TYPE_CHECKING:
    import pandas as pd


#: Number of names that are compared at a time.
_AT_A_TIME = 1 << 20


class AnyNames(Protocol):
    """Names of cells: an index of pandas, or names that are read when they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice | Int64Array, /) -> pd.Index[Any]: ...


def check_names(what: str, names: pd.Index[Any], cells: Sequence[AnyNames]) -> None:
    """Raise a ValueError unless names are equal to the ``obs_names`` of all datasets, in order.

    Repeated names are compared one by one, too. A different number of names is not checked here.
    """
    if len(names) == sum(map(len, cells)) and (difference := first_difference([names], cells)) is not None:
        raise ValueError(_difference(what, names, cells, *difference))


def first_difference(ours: Sequence[AnyNames], theirs: Sequence[AnyNames]) -> tuple[int, object, object] | None:
    """Return the first row where names of two collections differ, and both names; None if all are equal.

    Each is given as the names of its datasets. They must have as many names.
    """
    # in parts that are within one dataset of each, since joining the names of 10^8 cells takes memory and time
    bounds = [np.cumsum([0, *map(len, names)]).tolist() for names in (ours, theirs)]
    steps = {*bounds[0], *bounds[1], *range(0, bounds[0][-1], _AT_A_TIME)}
    for start, stop in pairwise(sorted(steps)):
        own, expected = (
            _part(names, own_bounds, start, stop) for names, own_bounds in zip((ours, theirs), bounds, strict=True)
        )
        if not own.equals(expected):
            place = int(np.flatnonzero(np.asarray(own, dtype=object) != np.asarray(expected, dtype=object))[0])
            return start + place, own[place], expected[place]
    return None


def _part(names: Sequence[AnyNames], bounds: Sequence[int], start: int, stop: int) -> pd.Index[Any]:
    """Return some names within one dataset; ``bounds`` are the bounds of the datasets."""
    number = bisect_right(bounds, start) - 1
    return names[number][start - bounds[number] : stop - bounds[number]]


def _difference(
    what: str, names: pd.Index[Any], cells: Sequence[AnyNames], row: int, name: object, expected: object
) -> str:
    # joined only for the message
    first, *others = (own[:] for own in cells)
    known = first.append(others)
    foreign = names[~names.isin(known)]
    if len(foreign):
        problem = f"has {len(foreign):,} names that no cell of the collection has, such as {foreign[0]!r}"
    else:
        problem = "has the obs_names of the collection in a different order"
    if known.has_duplicates or names.has_duplicates:
        remedy = f"Names repeat, so create {what} from collection.obs() itself"
    else:
        remedy = f"Align it by name: {what}.reindex(collection.obs().index)"
    by_position = f"{what}.reset_index(drop=True)" if what == "obs" else f"{what}.to_numpy()"
    return (
        f"The index of {what} {problem}: row {row} of the collection is {expected!r}, but row {row} of {what} is "
        f"{name!r}. {remedy}; or, if its values are correct by position, pass {by_position}."
    )


class _Values(Protocol):
    """A NumPy array, a pandas Series, or another object that can be converted to an array."""

    def __array__(self) -> npt.NDArray[Any]: ...


#: Selection of rows: a slice or several, a boolean for each row of the collection, row indices, or ``Rows``.
type AnyMask = slice | Sequence[slice] | Sequence[int] | _Values | Rows

#: Stands for the end of any collection.
_END = BOUND - 2
_EXPECTED = (
    "mask must be a slice, a list of slices, a boolean array with a value for each row, an integer array of row "
    "indices, or Rows"
)


@dataclass(frozen=True)
class Mask:
    """Rows that a mask selects, as far as they are known without the collection."""

    rows: Rows
    """Selected rows, ascending; the last range stops at ``_END`` if the mask has an open end."""
    n_obs: int | None = None
    """Number of values of a boolean mask; None for other masks."""
    is_slices: bool = True
    """True if the mask was passed as slices."""

    @property
    def is_open(self) -> bool:
        """True if the mask extends to the end of the collection."""
        return int(self.rows.stops[-1]) == _END

    def selected(self, n_obs: int) -> Rows:
        """Return the selected rows of a collection of ``n_obs``; a ValueError if the mask extends beyond them.

        >>> resolve_mask([slice(0, 2_000), slice(4_000, None)]).selected(10_000)
        Rows(0:2000, 4000:10000)
        """
        if not n_obs:
            raise ValueError("The collection must have rows, got none. Add datasets to the loader first.")
        if self.n_obs not in (None, n_obs):
            raise ValueError(
                f"A boolean mask must have one value for each of the {n_obs:,} rows of the collection, got "
                f"{self.n_obs:,} values. Create it from the obs of this collection, or check that every dataset has "
                "been added to the loader."
            )
        # rows ascend, so the last range decides
        if self.rows.starts[-1] >= n_obs or not (self.is_open or self.rows.stops[-1] <= n_obs):
            raise ValueError(
                f"mask must lie within the rows of the collection, [0, {n_obs}), got {self.format()}. Pass a smaller "
                "mask, or check that every dataset has been added to the loader."
            )
        return Rows.of_bounds(self.rows.starts, np.minimum(self.rows.stops, n_obs)) if self.is_open else self.rows

    def count(self, n_obs: int) -> int:
        """Return the number of selected rows among the first ``n_obs`` rows."""
        return int((np.minimum(self.rows.stops, n_obs) - np.minimum(self.rows.starts, n_obs)).sum())

    def to_argument(self) -> slice | list[slice] | Rows:
        """Return the mask in a form that a user may pass."""
        slices = self._slices(len(self.rows.starts)) if self.is_slices else []
        return self.rows if not slices else slices[0] if len(slices) == 1 else slices

    def _slices(self, most: int) -> list[slice]:
        ranges = zip(self.rows.starts[:most].tolist(), self.rows.stops[:most].tolist(), strict=True)
        return [slice(start, None if stop == _END else stop) for start, stop in ranges]

    def to_json(self) -> dict[str, Any]:
        """Return JSON that is equal for equal rows only: a few ranges ``[start, stop]``, or a digest of many.

        The last stop is kept apart from the digest, since it is None if the mask has an open end.
        """
        starts, stops = self.rows.starts, self.rows.stops
        last = None if self.is_open else int(stops[-1])
        if len(starts) <= MOST_LISTED:
            ranges = [*zip(starts.tolist(), [*stops[:-1].tolist(), last], strict=True)]
            return {"ranges": [list(bounds) for bounds in ranges]}
        # without the last stop, which depends on whether the number of rows was known when this was written
        return {
            "n_ranges": len(starts),
            "digest": digest(np.ascontiguousarray(starts), np.ascontiguousarray(stops[:-1])),
            "stop": last,
        }

    def format(self) -> str:
        """Return a short description."""
        if not self.is_slices:
            return f"{len(self.rows):,} rows in [{self.rows.starts[0]}, {self.rows.stops[-1]})"
        texts = [_text(part) for part in self._slices(4)]
        return ", ".join([*texts[:3], "..."] if len(texts) > 3 else texts)

    def check_within(self, other: Mask) -> None:
        """Raise a ValueError if it selects rows that another mask doesn't select."""
        starts, stops = self.rows.starts, self.rows.stops
        other_starts, other_stops = other.rows.starts, other.rows.stops
        # without an array if the other mask is one range
        if len(other_starts) == 1 and other_starts[0] <= starts[0] and stops[-1] <= other_stops[0]:
            return
        # for each range of this mask, the last range of the other mask that begins before it: if the other mask is 0:3
        # and 4:8, it is 4:8 for 5:9, which extends beyond the stop 8
        which = np.searchsorted(other_starts, starts, side="right") - 1
        beyond = np.flatnonzero((which < 0) | (stops > other_stops[which]))
        if len(beyond):
            at = beyond[0]
            begins = starts[at] if which[at] < 0 else max(starts[at], other_stops[which[at]])
            part = _text(slice(int(begins), None if stops[at] == _END else int(stops[at])))
            raise ValueError(
                f"mask must lie within the mask of the wrapped sampler, {other.format()}, got {self.format()}, which "
                f"also selects {part}. Pass a mask within it, or give the wrapped sampler a larger mask."
            )


#: Mask that selects all rows of any collection.
ALL = Mask(Rows((range(_END),)))


def open_ended(rows: dict[str, Any], n_obs: int | None) -> dict[str, Any]:
    """Return the JSON of a mask, with an open end if the mask ends at the end of a collection of ``n_obs`` rows.

    >>> open_ended({"ranges": [[0, 10], [50, 100]]}, 100)
    {'ranges': [[0, 10], [50, None]]}
    """
    if rows.get("ranges"):
        *ranges, (start, stop) = rows["ranges"]
        return {"ranges": [*ranges, [start, None if stop == n_obs else stop]]}
    return rows | {"stop": None if rows.get("stop") == n_obs else rows.get("stop")}


def resolve_mask(mask: AnyMask, within: Mask = ALL) -> Mask:
    """Check a mask, and fill in the open ends of its slices.

    ``within`` is a resolved mask that must contain it. An open start or stop takes the start or stop of ``within``, and
    a slice with two open ends selects all of ``within``.

    A TypeError if it isn't a mask; a ValueError if it selects no row, a row twice, rows that no collection has, or rows
    outside of ``within``.

    >>> resolve_mask(slice(16_000)).to_argument()
    slice(0, 16000, None)
    >>> resolve_mask([slice(4_000, None), slice(0, 2_000)]).to_argument()
    [slice(0, 2000, None), slice(4000, None, None)]
    >>> resolve_mask(np.array([True, False, True])).rows
    Rows(0:1, 2:3)
    >>> first_rows = resolve_mask(slice(0, 8_000))
    >>> resolve_mask(slice(4_000, None), within=first_rows).to_argument()
    slice(4000, 8000, None)
    """
    parts = mask if isinstance(mask, list | tuple) else [mask]
    if len(parts) == 1 and isinstance(parts[0], slice) and _is_all(parts[0]):
        return within
    resolved = _resolved(mask, within)
    resolved.check_within(within)
    return resolved


def _is_all(part: slice) -> bool:
    """Return True if a slice selects all rows: ``slice(None)``, or ``slice(0, None)`` as annbatch writes it."""
    # 0 == False and 0 == 0.0, which aren't valid bounds
    defaults = ((part.start, 0), (part.step, 1))
    return part.stop is None and all(
        value is None or (isinstance(value, int | np.integer) and not isinstance(value, bool) and value == default)
        for value, default in defaults
    )


def _resolved(mask: AnyMask, within: Mask) -> Mask:
    match mask:
        case slice():
            return Mask(_of_slices([mask], within))
        case Rows():
            if not len(mask):
                raise ValueError("mask must select at least one row, got empty Rows. Leave mask out to use all rows.")
            # ascending ranges can't repeat a row; other ranges are compared row by row
            is_ascending = bool((mask.starts[1:] >= mask.stops[:-1]).all())
            return Mask(mask if is_ascending else _of_numbers(mask.to_array()), is_slices=False)
        case list() | tuple():
            if not mask:
                raise ValueError(
                    "mask must select at least one row, got an empty list. Leave mask out to use all rows."
                )
            if all(isinstance(part, int | np.integer) and not isinstance(part, bool) for part in mask):
                return Mask(_of_numbers(np.array(mask)), is_slices=False)
            return Mask(_of_slices(mask, within))
        case _ if hasattr(mask, "__array__"):
            return _of_values(cast("_Values", mask))
        case _:
            raise TypeError(f"{_EXPECTED}, got {shortened(mask)}.")


def _of_slices(slices: Sequence[slice], within: Mask) -> Rows:
    first, last = int(within.rows.starts[0]), int(within.rows.stops[-1])
    # sorted, so that only neighbors can overlap
    bounds = sorted(_bounds_of(part, first, last) for part in slices)
    # [(0, 3), (5, 9)] becomes starts 0 5 and stops 3 9
    starts, stops = np.array(bounds, dtype=np.int64).T
    if len(overlap := np.flatnonzero(stops[:-1] > starts[1:])):
        before, after = (_text(slice(*map(int, bounds[overlap[0] + number]))) for number in (0, 1))
        raise ValueError(
            f"The slices of a mask must not overlap, got {before} and {after}. Join them into one slice, so that no "
            "row is read twice."
        )
    return Rows.of_bounds(starts, stops)


def _bounds_of(part: slice, first: int, last: int) -> tuple[int, int]:
    if not isinstance(part, slice):
        remedy = "a numpy.array of booleans" if isinstance(part, bool) else "a numpy.array of row indices"
        if isinstance(part, str):
            remedy = "obs['donor'].isin([...]) for labels of cells, or obs.index.isin([...]) for their names"
        raise TypeError(f"{_EXPECTED}, got a list that contains {shortened(part)}. Pass {remedy}.")
    try:
        start = first if part.start is None else integer("start", part.start)
        stop = last if part.stop is None else integer("stop", part.stop)
        step = 1 if part.step is None else integer("step", part.step)
    except TypeError:
        raise TypeError(f"The bounds of a mask must be integers or None, got {part!r}.") from None
    if step != 1:
        raise ValueError(f"A mask must not have a step, got {part!r}. Pass a list of slices, or Rows.")
    if start < 0 or stop < 0:
        raise ValueError(
            f"The bounds of a mask must be at least 0, got {part!r}. Count from the front of the collection."
        )
    start, stop = min(start, _END), min(stop, _END)
    if start >= stop:
        raise ValueError(f"A mask must select at least one row (start < stop), got {part!r}.")
    return start, stop


def _of_values(mask: _Values) -> Mask:
    """Return the mask of a boolean array, or of row indices."""
    values = _array(mask)
    if values.ndim != 1:
        raise ValueError(f"A mask must have one dimension, got an array of shape {values.shape}.")
    if values.dtype.kind == "b":
        names_of("mask", mask)  # raises if its index numbers the rows in a different order
        rows = Rows.from_mask(values)
        if not len(rows.starts):  # len(rows) would add up all ranges
            raise ValueError(f"mask must select at least one row, got {len(values):,} values that are all False.")
        return Mask(rows, len(values), is_slices=False)
    if values.dtype.kind not in "iu":
        has_nan = values.dtype.kind == "f" and bool(np.isnan(values).any())
        raise TypeError(
            f"{_EXPECTED}, got {shortened(values)} with dtype {values.dtype}{' and NaN' if has_nan else ''}. Compare "
            "its values, as in obs['split'] == 'train' or obs.index.isin(names), or convert whole numbers with "
            "astype(int)."
        )
    return Mask(_of_numbers(values), is_slices=False)


def _array(mask: _Values) -> npt.NDArray[Any]:
    """Return the values of a mask; a ValueError if some are missing."""
    values = cast("Any", mask)
    dtype = getattr(values, "dtype", None)
    missing: Any = 0
    # a missing value is neither True nor False, and NumPy would ignore that it is masked
    if isinstance(mask, np.ma.MaskedArray):
        missing = np.ma.count_masked(mask)
    elif not isinstance(dtype, np.dtype) and str(dtype).startswith("bool"):  # pandas' own dtype, with missing values
        missing = values.isna().sum()
        values = values.fillna(False).astype(bool)
    if missing:
        raise ValueError(
            f"A mask must be True or False for each row, but {missing} of {len(values)} values are missing. Replace "
            "them with fillna(False) or fillna(True)."
        )
    return as_array(values)


def _of_numbers(numbers: IntArray) -> Rows:
    """Return row indices in any order as ascending rows; a ValueError if one repeats."""
    if not len(numbers):
        raise ValueError("mask must select at least one row, got an empty array. Leave mask out to use all rows.")
    # np.unique sorts and removes duplicates: 5 2 5 becomes 2 5, which is shorter
    ascending = np.unique(numbers)
    lowest, highest = int(ascending[0]), int(ascending[-1])
    if lowest < 0:
        raise ValueError(
            f"The rows of a mask must be at least 0, got {lowest}. Count from the front of the collection."
        )
    if highest >= BOUND - 1:
        raise ValueError(f"The rows of a mask must be below 2**63 - 1, got {highest}.")
    if len(ascending) < len(numbers):
        remedy = (
            "If they are flags, one for each row, pass booleans: values == 1."
            if highest <= 1
            else "Pass each row once, for example with numpy.unique."
        )
        raise ValueError(
            f"A mask must not repeat rows: {len(numbers) - len(ascending)} of the {len(numbers)} are duplicates. "
            f"{remedy}"
        )
    return Rows.from_indices(ascending)


def _text(part: slice) -> str:
    return f"[{part.start}, {'end' if part.stop in (None, _END) else part.stop})"
