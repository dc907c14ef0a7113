"""Names: whether what was given for each cell, with a name for each value, is in the order of the collection's cells.

A pandas Series has names in its index, and so do the cells of a collection. Values are always taken by position, and
annbatch shuffles cells when it writes them: the same names in another order would select other cells without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

__all__ = ["check_names", "names_of"]


def names_of(what: str, values: object) -> pd.Index[Any] | None:
    """Return the names of values that were given for each cell; None if they are by position, as arrays are.

    A Series with the index 0, 1, 2, ... (also of each data set) is by position. ``what`` is what a message calls it. A
    ValueError if its index numbers rows in another order.
    """
    if not all(hasattr(values, name) for name in ("index", "dtype", "to_numpy")):
        return None
    names: pd.Index[Any] = values.index  # type: ignore[attr-defined]  # a Series
    if names.dtype.kind not in "iuf":
        return names
    numbers = np.asarray(names)
    wrong = np.flatnonzero((numbers != np.append(-1, numbers[:-1]) + 1) & (numbers != 0))
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(
            f"A Series as {what} must have the rows of the collection in their order, and its index, which is compared "
            f"with 0, 1, 2, ... (in each data set), has {numbers[place]} at place {place}. Don't filter, sort or "
            "shuffle it. If the index means something else, pass its values with to_numpy()."
        )
    return None


def check_names(what: str, names: pd.Index[Any], cells: Sequence[pd.Index[Any]]) -> None:
    """Raise a ValueError unless the names of values are those of the cells of all data sets, in their order.

    Names that repeat are compared one by one too. Another number of names is for others to find.
    """
    if len(names) != sum(map(len, cells)):
        return
    first = 0
    for own in cells:
        given = names[first : first + len(own)]
        if not given.equals(own):
            place = int(np.flatnonzero(np.asarray(given, dtype=object) != np.asarray(own, dtype=object))[0])
            raise ValueError(_difference(what, names, cells, first + place, given[place], own[place]))
        first += len(own)


def _difference(
    what: str, names: pd.Index[Any], cells: Sequence[pd.Index[Any]], row: int, given: object, own: object
) -> str:
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
    return (
        f"The values of {what} {problem}: row {row} of the collection is {own!r}, and {what} has {given!r} there. "
        f"{remedy}; or, if they are right by position, pass {what}.to_numpy()."
    )
