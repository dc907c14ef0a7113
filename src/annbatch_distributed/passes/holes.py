"""Holes: rows between those that are asked for, which are read through where that takes less time than to skip them.

annbatch's ``Loader`` reads each run of consecutive rows by itself, and to begin one costs as much as some dozens of
rows. Where rows that are asked for lie close together, a load request asks for the whole stretch, and its splits leave
the holes out: batches have the same rows as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from annbatch.types import LoadRequest

    from annbatch_distributed.rows import Int64Array

__all__ = ["LONGEST", "are_between", "of_ranges", "of_rows"]

#: How many rows a hole has at most that is read through, if users don't say otherwise: see benchmarks/holes.py.
LONGEST = 64


def are_between(starts: Int64Array, stops: Int64Array, longest: int) -> npt.NDArray[np.bool_]:
    """For each range of rows but the first one, whether a hole of at most ``longest`` rows lies before it."""
    gaps = starts[1:] - stops[:-1]
    return (gaps > 0) & (gaps <= longest)


def of_ranges(
    request: LoadRequest, starts: Int64Array, stops: Int64Array, are_read: npt.NDArray[np.bool_]
) -> LoadRequest:
    """Return a request with splits that asks for ranges of rows, and for the holes between that are to be read."""
    if not are_read.any():
        return {**request, "requests": list(map(slice, starts.tolist(), stops.tolist()))}
    first = np.append(True, ~are_read & (starts[1:] != stops[:-1]))
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    places = np.repeat(_places(starts, stops, first) - before, lengths)
    places += np.arange(len(places))
    return _stretched(request, starts[first], stops[np.append(first[1:], True)], places)


def of_rows(request: LoadRequest, longest: int) -> LoadRequest:
    """Return a request whose rows are an index array as one that reads through holes of at most ``longest`` rows.

    The rows are sorted, since what is read one after the other should lie so.
    """
    rows: Any = request["requests"]
    if not longest:
        return request
    order = np.argsort(rows, kind="stable")
    ascending = rows[order].astype(np.int64, copy=False)
    steps = np.diff(ascending)
    if "repeated" in request and (steps == 0).any():
        return request  # a row that is a repeat, and isn't: it takes two to say so
    if ((steps == 1) | (steps > longest + 1)).all() and (order[1:] > order[:-1]).all():
        return request
    first = np.append(True, steps > longest + 1)
    places = np.empty(len(rows), dtype=np.intp)
    places[order] = _places(ascending, ascending + 1, first)
    return _stretched(request, ascending[first], ascending[np.append(first[1:], True)] + 1, places)


def _places(starts: Int64Array, stops: Int64Array, first: npt.NDArray[np.bool_]) -> Int64Array:
    """For ascending ranges, where each begins in stretches that are read one after the other.

    ``first`` says which ranges begin a stretch.
    """
    lengths = stops[np.append(first[1:], True)] - starts[first]
    which = np.cumsum(first) - 1
    places: Int64Array = starts - (starts[first] - (np.cumsum(lengths) - lengths))[which]
    return places


def _stretched(request: LoadRequest, starts: Int64Array, stops: Int64Array, places: npt.NDArray[Any]) -> LoadRequest:
    """A request for some stretches, with the rows of the given one at places in them."""
    found: dict[str, Any] = {
        **request,
        "requests": list(map(slice, starts.tolist(), stops.tolist())),
        "splits": [places[split] for split in request["splits"]],
    }
    if "repeated" in found:
        found["repeated"] = np.zeros((stops - starts).sum(), dtype=np.bool_)
        found["repeated"][places] = request["repeated"]  # type: ignore[typeddict-item]  # a key of ours
    return cast("LoadRequest", found)
