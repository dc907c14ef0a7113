"""Load-request streams: from what a sampler yields on local rows to what the loader is to read.

Each step is a generator over load requests, and they are put together in this order:

1. ``check`` refuses load requests that can't be read, or would be misread.
2. ``add_missing_splits`` adds the splits that a sampler left out.
3. ``enforce_n_batches`` makes the number of batches the planned one.
4. ``select`` leaves out the batches that are not in a lane, and ``share`` takes a part of one that lanes share.
5. ``mark_repeats`` says which rows are repeats, if the policy repeats any.
6. ``translate`` turns local rows into global ones, and has :mod:`holes` between rows that lie close together read too.

The first two are for samplers that aren't annbatch's own, whose load requests are right by construction. In every
step, ``name`` is the sampler's, for messages.

annbatch's ``LoadRequest`` is a dict of ``requests`` (slices or an integer array of rows) and ``splits`` (for each
batch, positions in the rows of the requests). Other keys are passed on. None of the steps changes a request that it is
given.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from annbatch_distributed.passes import holes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt
    from annbatch.types import LoadRequest

    from annbatch_distributed.lanes import Numbers, SharedStep
    from annbatch_distributed.rows import Int64Array, Rows


__all__ = [
    "add_missing_splits",
    "aligned",
    "batches_of",
    "bounds_of_slices",
    "check",
    "enforce_n_batches",
    "is_index_array",
    "mark_repeats",
    "n_rows_of",
    "narrowed",
    "rows_of",
    "select",
    "share",
    "translate",
]

# What a request holds: an integer array of rows, or slices in a list or (annbatch's own samplers) in an object array.
type _Requests = list[slice] | npt.NDArray[Any]


def check(requests: Iterable[object], *, n_rows: int, name: str) -> Iterator[LoadRequest]:
    """Refuse load requests that annbatch's ``Loader`` can't read, or would read as something else without an error.

    The sampler has the local rows ``[0, n_rows)``. The splits of the load requests that come out are arrays. A
    TypeError or a RuntimeError says what a load request should have been, or that too many of them have no batches.
    """
    n_idle = 0
    for request in requests:
        if not isinstance(request, Mapping) or "requests" not in request:
            raise TypeError(f"{name} must yield load requests, dicts with 'requests' and 'splits', got {request!r}.")
        n_here = _n_checked_rows(request["requests"], n_rows, name)
        if not n_here:
            raise RuntimeError(
                f"{name} yielded a load request for no rows, which annbatch's Loader can't read. Leave it out."
            )
        if "splits" not in request:
            yield cast("LoadRequest", request)
            continue
        splits = _checked_splits(request["splits"], n_here, name)
        n_idle += 0 if splits else n_here
        if n_idle > n_rows:
            raise RuntimeError(
                f"{name} asked for {n_idle} rows in load requests without batches, and has only {n_rows} rows. Leave "
                "out load requests that have no batches."
            )
        yield cast("LoadRequest", {**request, "splits": splits})


def _n_checked_rows(local: object, n_rows: int, name: str) -> int:
    """Return the number of rows of a load request that is right."""
    if isinstance(local, np.ndarray) and local.dtype != object:
        if local.ndim != 1 or not is_index_array(local):
            what = f"an array of {local.dtype} in {local.ndim} dimensions"
            raise TypeError(f"{_EXPECTED_ROWS.format(name)} {what}.")
        if len(local):
            _check_bounds(int(local.min()), int(local.max()) + 1, n_rows, name)
        return len(local)
    if isinstance(local, np.ndarray):
        local = local.tolist()
    if not isinstance(local, list | tuple) or not set(map(type, local)) <= {slice}:
        raise TypeError(f"{_EXPECTED_ROWS.format(name)} {local!r}.")
    starts, stops = (np.array(bounds) for bounds in ([part.start for part in local], [part.stop for part in local]))
    if local and not (is_index_array(starts) and is_index_array(stops)):
        raise TypeError(
            f"{_EXPECTED_ROWS.format(name)} {_first(local, _has_other_bounds)!r}. Bounds must be integers of 64 bits."
        )
    if not {part.step for part in local} <= {None, 1}:
        part = _first(local, lambda part: part.step not in (None, 1))
        raise RuntimeError(
            f"{name} asked for {part!r}, and annbatch's Loader would leave out its step. Yield an array of rows."
        )
    if (starts > stops).any():
        part = _first(local, lambda part: part.start > part.stop)
        raise RuntimeError(
            f"{name} asked for {part!r}, which stops before it starts. Yield an array of rows to reverse them."
        )
    if local:
        _check_bounds(int(starts.min()), int(stops.max()), n_rows, name)
    return int((stops - starts).sum())


_EXPECTED_ROWS = "The requests of {} must be slices or an integer array of rows, got"


def _has_other_bounds(part: slice) -> bool:
    return not all(isinstance(bound, int | np.integer) for bound in (part.start, part.stop))


def _first(parts: list[slice] | tuple[slice, ...], is_wrong: Callable[[slice], bool]) -> slice:
    return next(filter(is_wrong, parts), parts[0])


def _checked_splits(splits: object, n_rows: int, name: str) -> list[npt.NDArray[Any]]:
    """Return the splits of a load request of ``n_rows`` rows as arrays."""
    if not isinstance(splits, list | tuple | np.ndarray):
        raise TypeError(f"{_EXPECTED_SPLITS.format(name)} {splits!r}.")
    arrays = []
    for split in splits:
        array = split if isinstance(split, np.ndarray) else _as_array(split)
        if array.ndim == 1 and not len(array):
            raise RuntimeError(
                f"{name} yielded a batch without rows. Mend the sampler: leave out splits that are empty."
            )
        if array.ndim != 1 or not is_index_array(array):
            what = f"one of {array.dtype} in {array.ndim} dimensions"
            raise TypeError(f"{_EXPECTED_SPLITS.format(name)} {what}. Of a boolean array, use np.flatnonzero.")
        arrays.append(array.astype(np.intp, copy=False))
    if arrays:
        positions = np.concatenate(arrays)
        lowest, highest = int(positions.min()), int(positions.max())
        if lowest < 0 or highest >= n_rows:
            raise RuntimeError(
                f"The splits of {name} must be positions in [0, {n_rows}), the rows of their load request, got "
                f"positions from {lowest} to {highest}. Positions count from 0, in the order of the request."
            )
    return arrays


_EXPECTED_SPLITS = "The splits of {} must be a list of integer arrays, one for each batch, got"


def _as_array(split: object) -> npt.NDArray[Any]:
    try:
        return np.asarray(split)
    except ValueError:  # a list of lists of different lengths
        return np.empty((), dtype=object)


def add_missing_splits(
    requests: Iterable[LoadRequest],
    *,
    batch_size: int | None,
    shuffle: bool | None,
    rng: np.random.Generator,
    name: str,
) -> Iterator[LoadRequest]:
    """Give load requests without splits their rows in the sampler's ``batch_size``, shuffled by ``rng`` if it does.

    annbatch does the same, but shuffles with numpy's global random state, and not for index arrays.
    """
    for request in requests:
        if "splits" in request:
            yield request
            continue
        if batch_size is None:
            raise ValueError(
                f"{name} yields load requests without splits, so it must have a batch_size, which is None."
            )
        if shuffle is None:
            raise ValueError(
                f"{name} yields load requests without splits, so shuffle must be True or False, and is None."
            )
        n_rows = len(rows_of(request["requests"]))
        positions = rng.permutation(n_rows) if shuffle else np.arange(n_rows)
        splits = [positions[start : start + batch_size] for start in range(0, n_rows, batch_size)]
        yield {**request, "splits": splits}


def enforce_n_batches(
    requests: Iterable[LoadRequest], *, promised: int, planned: int, name: str
) -> Iterator[LoadRequest]:
    """Raise a RuntimeError unless there are as many batches as the sampler promised; add one more if it is planned.

    That one comes from halving the largest batch of the request that holds the last one: every batch stays part of one
    of the sampler's own, none is empty and none grows.
    """
    done, missing = 0, planned > promised
    for request in requests:
        done += len(request["splits"])
        if done > promised:
            raise RuntimeError(
                f"{name} promised {promised} batches (n_batches) and yielded {done} or more. {_BROKEN_PROMISE}"
            )
        if missing and done == promised:
            yield {**request, "splits": _halved(request["splits"], name)}
            missing = False
        else:
            yield request
    if done < promised:
        raise RuntimeError(f"{name} promised {promised} batches (n_batches) and yielded only {done}. {_BROKEN_PROMISE}")


_BROKEN_PROMISE = (
    "Ranks that yield different numbers of batches wait for each other for ever, so its n_batches(n_obs) must be what "
    "it yields for n_obs rows."
)


def _halved(splits: list[npt.NDArray[Any]], name: str) -> list[npt.NDArray[Any]]:
    # the last of the largest, so that the batches before it stay in their places
    index = max(range(len(splits)), key=lambda i: (len(splits[i]), i))
    if len(splits[index]) < 2:
        raise RuntimeError(
            f"{name} ended on batches of a single row, although all of its batches must be full for its number of rows "
            "and batches (n_batches) to fit together. They can't be cut to make one batch more."
        )
    return [*splits[:index], *np.array_split(splits[index], 2), *splits[index + 1 :]]


def select(requests: Iterable[LoadRequest], numbers: Numbers, n_batches: int) -> Iterator[LoadRequest]:
    """Keep the batches of some numbers, which ascend, of ``n_batches``, and the rows that they need."""
    wanted = iter(numbers)
    part, n_before = next(wanted), 0
    for request in requests:
        n_here = len(request["splits"])
        kept: list[int] = []
        while part and part.start < n_before + n_here:
            here = range(part.start, min(part.stop, n_before + n_here), part.step)
            kept += range(here.start - n_before, here.stop - n_before, here.step)
            part = part[len(here) :] or next(wanted, range(0))
        if len(kept) == n_here:
            yield request
        elif kept:
            yield narrowed(request, [request["splits"][index] for index in kept])
        n_before += n_here
        # whoever has the last batch sees whether the sampler keeps its promise
        if not part and numbers[-1][-1] < n_batches - 1:
            return


def share(requests: Iterable[LoadRequest], step: SharedStep) -> Iterator[LoadRequest]:
    """Keep the part of the one batch that a lane shares with others, or mark it as a repeat."""
    for request in requests:
        (split,) = request["splits"]
        found: Any = narrowed(request, [np.array_split(split, step.n_parts)[step.part]])
        if step.is_repeat:
            found["repeated"] = np.ones(len(found["requests"]), dtype=np.bool_)
        yield found


def narrowed(request: LoadRequest, splits: Sequence[npt.NDArray[Any]]) -> LoadRequest:
    """Return a request with some splits of it, or parts of them, and an index array of the rows that they need."""
    positions = rows_of(request["requests"])
    due = np.unique(np.concatenate(splits))
    found: Any = {
        **request,
        "requests": positions[due],
        "splits": [np.searchsorted(due, split) for split in splits],
    }
    if "repeated" in found:
        found["repeated"] = found["repeated"][due]
    return cast("LoadRequest", found)


def mark_repeats(requests: Iterable[LoadRequest], first: int) -> Iterator[LoadRequest]:
    """Add ``repeated`` to every request: for each of its rows, whether it is ``first`` or beyond, and so a repeat."""
    for request in requests:
        repeated = rows_of(request["requests"]) >= first
        yield cast("LoadRequest", {**request, "repeated": repeated})


def aligned(requests: Iterable[LoadRequest], *, chunk_size: int, n_rows: int) -> Iterator[LoadRequest]:
    """Have whole chunks of annbatch's ``RandomSampler`` begin at multiples of their size, and the last one be ragged.

    It makes any of the chunks the ragged one, and those beyond it begin earlier. Which chunk is read when stays.
    """
    for request in requests:
        slices: Any = request["requests"]
        starts, stops = (np.array(bounds) for bounds in zip(*((one.start, one.stop) for one in slices), strict=True))
        lengths = stops - starts
        starts = np.where(lengths < chunk_size, n_rows - n_rows % chunk_size, starts // chunk_size * chunk_size)
        yield {**request, "requests": list(map(slice, starts.tolist(), (starts + lengths).tolist()))}


def translate(
    requests: Iterable[LoadRequest], rows: Rows, *, name: str, rows_ahead: int = 0, longest_hole: int = 0
) -> Iterator[LoadRequest]:
    """Turn local rows ``[0, len(rows))`` of load requests with splits into global rows.

    Splits index a request's rows, so that they stay, unless there are holes to be read through, see :mod:`holes`.

    annbatch's own samplers are run ahead, so that several requests of ``rows_ahead`` rows are turned at once: that
    costs mostly the same for one and for many. What lies between two of their slices is read by another one. A
    RuntimeError if a request reaches beyond the local rows.
    """
    for group in _groups(requests, rows_ahead) if rows_ahead else ([request] for request in requests):
        of_slices = [request for request in group if not is_index_array(request["requests"])]
        ranges = _slices_to_global(of_slices, rows, name)
        for request in group:
            local = request["requests"]
            if not is_index_array(local):
                starts, stops, follows = next(ranges)
                are_read = holes.are_between(starts, stops, longest_hole)
                if rows_ahead:
                    are_read &= follows[1:]
                yield holes.of_ranges(request, starts, stops, are_read)
                continue
            if len(local):
                _check_bounds(int(local.min()), int(local.max()) + 1, len(rows), name)
            yield holes.of_rows({**request, "requests": rows.to_global(local)}, longest_hole)


#: How many slices make it worth while.
_SLICES_AT_ONCE = 1 << 11


def _groups(requests: Iterable[LoadRequest], rows_at_once: int) -> Iterator[list[LoadRequest]]:
    """Put requests together until they are enough."""
    group: list[LoadRequest] = []
    n_slices = n_rows = 0
    for request in requests:
        group.append(request)
        n_slices += len(request["requests"])
        n_rows += sum(map(len, request["splits"]))
        if n_slices >= _SLICES_AT_ONCE or n_rows >= rows_at_once:
            yield group
            group, n_slices, n_rows = [], 0, 0
    if group:
        yield group


def _slices_to_global(
    group: list[LoadRequest], rows: Rows, name: str
) -> Iterator[tuple[Int64Array, Int64Array, npt.NDArray[np.bool_]]]:
    """Yield for each request the starts and stops of global ranges, and which begin where the local one before ends."""
    starts: list[int] = []
    stops: list[int] = []
    ends = []
    for request in group:
        local = request["requests"]
        if isinstance(local, np.ndarray):
            local = local.tolist()  # takes less time to go through
        try:
            starts += [part.start for part in local]
            stops += [part.stop for part in local]
        except AttributeError as error:
            raise TypeError(f"{_EXPECTED_ROWS.format(name)} {local!r}.") from error
        ends.append(len(starts))
    if min(starts, default=0) < 0 or max(stops, default=0) > len(rows):
        for start, end in pairwise([0, *ends]):
            _check_bounds(min(starts[start:end], default=0), max(stops[start:end], default=0), len(rows), name)
    bounds = np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)
    global_starts, global_stops, given = rows.slices_to_global(*bounds)
    ends = np.searchsorted(given, ends).tolist()  # some were cut, and empty ones left out
    is_next = np.append(False, bounds[0][1:] == bounds[1][:-1])
    follows = np.append(False, given[1:] == given[:-1]) | is_next[given] if len(given) else is_next[:0]
    found = global_starts, global_stops, follows
    return (tuple(each[start:end] for each in found) for start, end in pairwise([0, *ends]))  # type: ignore[misc]  # three


def _check_bounds(lowest: int, highest: int, n_rows: int, name: str) -> None:
    if lowest < 0 or highest > n_rows:
        raise RuntimeError(
            f"{name} was given the rows [0, {n_rows}) and asked for rows from [{lowest}, {highest}). A sampler "
            "must stay within the n_obs that sample(n_obs) gets. If it holds something for each row of the "
            "collection, register a function for its type with annbatch_distributed.passes.localize."
        )


def batches_of(request: LoadRequest) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Return the rows of each batch of a load request that has splits."""
    rows = rows_of(request["requests"])
    return (rows[split] for split in request["splits"])


def is_index_array(requests: _Requests) -> TypeGuard[npt.NDArray[np.integer[Any]]]:
    """Whether the requests of a load request are an array of rows, and not slices."""
    return isinstance(requests, np.ndarray) and requests.dtype.kind in "iu"


def n_rows_of(slices: list[slice] | npt.NDArray[Any]) -> int:
    """Return how many rows the slices of a load request have."""
    return sum([part.stop - part.start for part in slices])


def bounds_of_slices(requests: _Requests) -> tuple[Int64Array, Int64Array] | None:
    """Return the starts and stops of the slices of a load request; None if its rows are an index array."""
    if is_index_array(requests):
        return None
    return np.array([part.start for part in requests]), np.array([part.stop for part in requests])


def rows_of(requests: _Requests) -> npt.NDArray[np.integer[Any]]:
    """Return every row of the requests of a load request, in order."""
    if is_index_array(requests):
        return requests
    return np.concatenate([np.arange(part.start, part.stop) for part in requests] or [np.arange(0)])
