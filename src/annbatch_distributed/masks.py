"""Masks: the rows to be shared out, before the number of rows of the collection is known.

1. ``resolve_mask`` checks what can be checked without the collection, and fills in what a slice leaves open.
2. ``Mask.window`` compares it with the number of rows, which is known later.
3. ``check_names`` compares the index of a pandas Series with the names of the cells. Values are always taken by
   position, and annbatch shuffles cells when it writes them: names in another order would silently select other cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from annbatch_distributed.rows import BOUND, IntArray, Rows, integer, names_of

if TYPE_CHECKING:
    import pandas as pd


def check_names(what: str, names: pd.Index[Any], cells: Sequence[pd.Index[Any]]) -> None:
    """Raise a ValueError unless the names of values are those of the cells of all data sets, in their order.

    Names that repeat are compared one by one too. Another number of names is for others to find.
    """
    if len(names) == sum(map(len, cells)) and (found := first_difference(names, cells)) is not None:
        raise ValueError(_difference(what, names, cells, *found))


def first_difference(names: pd.Index[Any], cells: Sequence[pd.Index[Any]]) -> tuple[int, object, object] | None:
    """Return the first row where names differ from the datasets' names, and both names; None if none does."""
    # by dataset, since to join the names of 10^8 cells takes memory and time
    first = 0
    for own in cells:
        given = names[first : first + len(own)]
        if not given.equals(own):
            place = int(np.flatnonzero(np.asarray(given, dtype=object) != np.asarray(own, dtype=object))[0])
            return first + place, given[place], own[place]
        first += len(own)
    return None


def _difference(
    what: str, names: pd.Index[Any], cells: Sequence[pd.Index[Any]], row: int, given: object, own: object
) -> str:
    # joined only here, where there is a difference to explain
    known = cells[0].append(list(cells[1:]))
    foreign = names[~names.isin(known)]
    if len(foreign):
        problem = f"have {len(foreign):,} names that no cell of the collection has, {foreign[0]!r} first"
    else:
        problem = "have the names of the collection's cells in another order"
    if known.has_duplicates or names.has_duplicates:
        remedy = f"Names repeat, so make {what} of collection.obs() itself"
    else:
        remedy = f"Take them by name: {what}.reindex(collection.obs().index)"
    by_position = f"{what}.reset_index(drop=True)" if what == "obs" else f"{what}.to_numpy()"
    return (
        f"The values of {what} {problem}: row {row} of the collection is {own!r}, and {what} has {given!r} there. "
        f"{remedy}; or, if they are right by position, pass {by_position}."
    )


class _Values(Protocol):
    """A numpy array, a pandas Series, or what else can be turned into an array."""

    def __array__(self) -> npt.NDArray[Any]: ...


#: What selects rows: a slice or several, a boolean for each row of the collection, the numbers of rows, or ``Rows``.
type AnyMask = slice | Sequence[slice] | _Values | Rows

#: Stands for the end of any collection.
_END = BOUND - 2
_EXPECTED = (
    "mask must be a slice or a list of slices of rows, a boolean array with a value for each row, an integer array of "
    "rows, or Rows"
)


@dataclass(frozen=True)
class Mask:
    """The rows that a mask selects, as far as that is known without the collection."""

    rows: Rows
    """Ascending; the last range may stop at what stands for the end of the collection."""
    n_obs: int | None = None
    """Of how many rows it says whether it selects them, if it says it of each."""
    is_slices: bool = True
    """Whether it was given as slices."""

    @property
    def is_open(self) -> bool:
        """Whether it goes on to the end of the collection."""
        return int(self.rows.stops[-1]) == _END

    def window(self, n_obs: int) -> Rows:
        """Return the rows that it selects of ``n_obs``; a ValueError if it reaches or begins beyond them.

        >>> resolve_mask([slice(0, 2_000), slice(4_000, None)]).window(10_000)
        Rows(0:2000, 4000:10000)
        """
        if self.n_obs not in (None, n_obs):
            raise ValueError(
                f"The mask has {self.n_obs:,} values, one for each row, and the collection has {n_obs:,} rows. Make it "
                "of the obs of this collection, or check that every dataset has been added to the loader."
            )
        # the rows ascend, so the last range decides
        if self.rows.starts[-1] >= n_obs or not (self.is_open or self.rows.stops[-1] <= n_obs):
            raise ValueError(
                f"The mask {self.format()} must lie within the collection's rows [0, {n_obs}). "
                "Give a mask that fits, or check that every dataset has been added to the loader."
            )
        return Rows.of_bounds(self.rows.starts, np.minimum(self.rows.stops, n_obs)) if self.is_open else self.rows

    def given(self) -> slice | list[slice] | Rows:
        """Return it as a user may have given it."""
        slices = self._slices(len(self.rows.starts)) if self.is_slices else []
        return self.rows if not slices else slices[0] if len(slices) == 1 else slices

    def _slices(self, most: int) -> list[slice]:
        ranges = zip(self.rows.starts[:most].tolist(), self.rows.stops[:most].tolist(), strict=True)
        return [slice(start, None if stop == _END else stop) for start, stop in ranges]

    def to_json(self) -> dict[str, Any]:
        """Return what is equal for equal rows only: few ranges ``[start, stop]``, or a digest of many.

        The last stop is told apart, as it is open (None) where the mask is.
        """
        starts, stops = self.rows.starts, self.rows.stops
        last = None if self.is_open else int(stops[-1])
        if len(starts) <= _LISTED:
            ranges = [*zip(starts.tolist(), [*stops[:-1].tolist(), last], strict=True)]
            return {"ranges": [list(bounds) for bounds in ranges]}
        # without the last stop, which depends on whether the number of rows was known when this was written
        digest = blake2b(starts.tobytes() + stops[:-1].tobytes(), digest_size=16).hexdigest()
        return {"n_ranges": len(starts), "digest": digest, "stop": last}

    def format(self) -> str:
        """Return what it looks like, in a few words."""
        if not self.is_slices:
            return f"of {len(self.rows):,} rows in [{self.rows.starts[0]}, {self.rows.stops[-1]})"
        texts = [_text(part) for part in self._slices(4)]
        return ", ".join([*texts[:3], "..."] if len(texts) > 3 else texts)

    def check_within(self, other: Mask) -> None:
        """Raise a ValueError if it has rows that are not within another mask."""
        (starts, stops), (own_starts, own_stops) = ((mask.rows.starts, mask.rows.stops) for mask in (self, other))
        # for each range of this mask, the last range of the other one that begins before it: of 0:3 and 4:8, that is
        # 4:8 for 5:9, which goes beyond its stop 8
        which = np.searchsorted(own_starts, starts, side="right") - 1
        beyond = np.flatnonzero((which < 0) | (stops > own_stops[which]))
        if len(beyond):
            at = beyond[0]
            begins = starts[at] if which[at] < 0 else max(starts[at], own_stops[which[at]])
            part = _text(slice(int(begins), None if stops[at] == _END else int(stops[at])))
            raise ValueError(
                f"The mask {self.format()} reaches beyond {other.format()}, the mask of the wrapped sampler: rows "
                f"in {part} are not within it. What that one leaves out is held out. Pass a mask that narrows it down, "
                "or give the wrapped sampler a wider one."
            )


#: Largest number of ranges that are listed one by one.
_LISTED = 16
#: Selects all rows of any collection.
ALL = Mask(Rows((range(_END),)))


def open_ended(rows: dict[str, Any], n_obs: int | None) -> dict[str, Any]:
    """Return the rows of a mask as JSON, with an open end if they end where a collection of ``n_obs`` rows does.

    >>> open_ended({"ranges": [[0, 10], [50, 100]]}, 100)
    {'ranges': [[0, 10], [50, None]]}
    """
    if rows.get("ranges"):
        *ranges, (start, stop) = rows["ranges"]
        return {"ranges": [*ranges, [start, None if stop == n_obs else stop]]}
    return rows | {"stop": None if rows.get("stop") == n_obs else rows.get("stop")}


def resolve_mask(mask: AnyMask, within: Mask = ALL) -> Mask:
    """Check a mask, and fill in what its slices leave open.

    ``within`` is a resolved mask that it may narrow down and not reach beyond. An open start or stop is that of
    ``within``, and all that is open selects all of it.

    A TypeError if it is no mask; a ValueError if it selects no row, rows that no collection has, or a row twice, or if
    it reaches beyond ``within``.

    >>> resolve_mask(slice(16_000)).given()
    slice(0, 16000, None)
    >>> resolve_mask([slice(4_000, None), slice(0, 2_000)]).given()
    [slice(0, 2000, None), slice(4000, None, None)]
    >>> resolve_mask(np.array([True, False, True])).rows
    Rows(0:1, 2:3)
    >>> resolve_mask(slice(4_000, None), within=resolve_mask(slice(0, 8_000))).given()
    slice(4000, 8000, None)
    """
    parts = mask if isinstance(mask, list | tuple) else [mask]
    if len(parts) == 1 and isinstance(parts[0], slice) and _is_all(parts[0]):
        return within
    resolved = _resolved(mask, within)
    resolved.check_within(within)
    return resolved


def _is_all(part: slice) -> bool:
    """Whether a slice is open at both ends, as annbatch writes it too."""
    # 0 == False and 0 == 0.0, which are no bounds of rows
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
                raise ValueError("mask must select at least one row, got Rows without any.")
            # ascending ranges can't have a row twice; others are compared row by row
            is_ascending = bool((mask.starts[1:] >= mask.stops[:-1]).all())
            return Mask(mask if is_ascending else _of_numbers(mask.to_array()), is_slices=False)
        case list() | tuple():
            if not mask:
                raise ValueError(
                    "mask must hold at least one slice, got an empty list. Leave mask out to use all rows."
                )
            return Mask(_of_slices(mask, within))
        case _ if hasattr(mask, "__array__"):
            return _of_values(cast("_Values", mask))
        case _:
            raise TypeError(f"{_EXPECTED}, got {shortened(mask)}.")


def _of_slices(slices: Sequence[slice], within: Mask) -> Rows:
    first, last = int(within.rows.starts[0]), int(within.rows.stops[-1])
    # ascending, so that only neighbours can overlap
    bounds = sorted(_bounds_of(part, first, last) for part in slices)
    # [(0, 3), (5, 9)] becomes starts 0 5 and stops 3 9
    starts, stops = np.array(bounds, dtype=np.int64).T
    if len(overlap := np.flatnonzero(stops[:-1] > starts[1:])):
        before, after = (_text(slice(*map(int, bounds[overlap[0] + number]))) for number in (0, 1))
        raise ValueError(
            f"The slices of a mask must not overlap, got {before} and {after}. "
            "A row in two of them would be read twice in an epoch; join them into one slice."
        )
    return Rows.of_bounds(starts, stops)


def _bounds_of(part: slice, first: int, last: int) -> tuple[int, int]:
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
    if start < 0 or stop < 0:
        raise ValueError(
            f"The bounds of a mask must be >= 0, got {part!r}. Rows count from the front of the collection."
        )
    start, stop = min(start, _END), min(stop, _END)
    if start >= stop:
        raise ValueError(f"A mask must begin before it ends (start < stop), got {part!r}, which holds no rows.")
    return start, stop


def _of_values(mask: _Values) -> Mask:
    """The mask of a boolean for each row, or of the numbers of rows."""
    values = _array(mask)
    if values.ndim != 1:
        raise ValueError(f"A mask must have one dimension, got an array of shape {values.shape}.")
    if values.dtype.kind == "b":
        names_of("mask", mask)  # raises if its index numbers the rows in another order
        rows = Rows.where(values)
        if not len(rows):
            raise ValueError(f"mask must select at least one row, got {len(values):,} values that are all False.")
        return Mask(rows, len(values), is_slices=False)
    if values.dtype.kind not in "iu":
        has_nan = values.dtype.kind == "f" and bool(np.isnan(values).any())
        raise TypeError(
            f"{_EXPECTED}, got {shortened(mask)}, which has values of {values.dtype}"
            f"{', NaN among them' if has_nan else ''}. Compare them, as obs['split'] == 'train' does, or convert whole "
            "numbers of rows with astype(int)."
        )
    return Mask(_of_numbers(values), is_slices=False)


def _array(mask: _Values) -> npt.NDArray[Any]:
    """The values of a mask; a ValueError if some are missing."""
    values = cast("Any", mask)
    dtype = getattr(values, "dtype", None)
    missing: Any = 0
    # a missing value is neither True nor False, and numpy would take what is beneath it
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
    # sorted, and each once: a row that repeats shows in the length
    ascending = np.unique(numbers)
    lowest, highest = int(ascending[0]), int(ascending[-1])
    if lowest < 0:
        raise ValueError(f"The rows of a mask count from 0, the front of the collection, got {lowest}.")
    if highest >= BOUND - 1:
        raise ValueError(f"The rows of a mask must be below 2**63 - 1, got {highest}.")
    if len(ascending) < len(numbers):
        way_out = (
            "If they are flags, one for each row, pass them as booleans: values == 1."
            if highest <= 1
            else "A row would be read twice in an epoch; pass each of them once."
        )
        raise ValueError(
            f"The rows of a mask must be different ones, got {len(numbers)} of which {len(numbers) - len(ascending)} "
            f"come again. {way_out}"
        )
    return Rows.of(ascending)


def _text(part: slice) -> str:
    return f"[{part.start}, {'end' if part.stop in (None, _END) else part.stop})"
