"""Load-request streams: from what a sampler yields on local rows to what the loader is to read.

Each step is a generator over load requests, and they are put together in this order:

1. ``complete`` adds the splits that a sampler left out.
2. ``fit`` holds the stream to the number of batches that was planned.
3. ``select`` leaves out what is done, if an epoch is resumed, and what other workers of a ``DataLoader`` have.
4. ``mark_repeats`` says which rows are repeats, if the policy repeats any.
5. ``translate`` turns local rows into global ones.

annbatch's ``LoadRequest`` is a dict of ``requests`` (slices or an integer array of rows) and ``splits`` (for each
batch, positions in the rows of the requests). Other keys are passed on. None of the steps changes a request that it is
given.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from annbatch_distributed.dealing import contains

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt
    from annbatch.types import LoadRequest

    from annbatch_distributed.dealing import Hand
    from annbatch_distributed.sharding import Rows
    from annbatch_distributed.sharding.rows import Int64Array


def complete(
    requests: Iterable[LoadRequest],
    *,
    batch_size: int | None,
    shuffle: bool | None,
    rng: np.random.Generator,
    name: str,
) -> Iterator[LoadRequest]:
    """Add the splits that load requests leave out: all their rows, shuffled or not, cut to batches.

    annbatch does the same, but shuffles with numpy's global random state, and not for index arrays.

    Parameters
    ----------
    requests
        What the sampler yields.
    batch_size, shuffle
        The sampler's own.
    rng
        Shuffles the rows of a request.
    name
        The sampler's, for messages.
    """
    for request in requests:
        if "splits" in request:
            yield request
            continue
        if batch_size is None:
            msg = f"{name} yields load requests without splits, so it must have a batch_size, which is None."
            raise ValueError(msg)
        if shuffle is None:
            msg = f"{name} yields load requests without splits, so shuffle must be True or False, and is None."
            raise ValueError(msg)
        n_rows = len(_positions(request["requests"]))
        positions = rng.permutation(n_rows) if shuffle else np.arange(n_rows)
        splits = [positions[start : start + batch_size] for start in range(0, n_rows, batch_size)]
        yield {**request, "splits": splits}


def fit(requests: Iterable[LoadRequest], *, natural: int, planned: int, name: str) -> Iterator[LoadRequest]:
    """Hold a stream to the batches that were planned: count them, and cut one in two if one is missing.

    Parameters
    ----------
    requests
        Load requests with splits.
    natural
        How many batches the sampler promised.
    planned
        How many there are to be: as many, or one more. That one comes from halving the largest batch of the request
        that holds the last one: every batch stays part of one of the sampler's own, none is empty and none grows.
    name
        The sampler's, for messages.

    Raises
    ------
    RuntimeError
        If the sampler yields fewer or more batches than it promised.
    """
    done, missing = 0, planned > natural
    for request in requests:
        done += len(request["splits"])
        if done > natural:
            msg = f"{name} promised {natural} batches (n_batches) and yielded {done} or more. {_BROKEN_PROMISE}"
            raise RuntimeError(msg)
        if missing and done == natural:
            yield {**request, "splits": _halved(request["splits"], name)}
            missing = False
        else:
            yield request
    if done < natural:
        msg = f"{name} promised {natural} batches (n_batches) and yielded only {done}. {_BROKEN_PROMISE}"
        raise RuntimeError(msg)


_BROKEN_PROMISE = (
    "Ranks that yield different numbers of batches wait for each other for ever, so its n_batches(n_obs) must be what "
    "it yields for n_obs rows."
)


def _halved(splits: list[npt.NDArray[Any]], name: str) -> list[npt.NDArray[Any]]:
    # the last of the largest, so that the batches before it stay in their places
    index = max(range(len(splits)), key=lambda i: (len(splits[i]), i))
    if len(splits[index]) < 2:
        msg = (
            f"{name} ended on batches of a single row, although all of its batches must be full for its number of rows "
            "and batches (n_batches) to fit together. They can't be cut to make one batch more."
        )
        raise RuntimeError(msg)
    return [*splits[:index], *np.array_split(splits[index], 2), *splits[index + 1 :]]


def select(requests: Iterable[LoadRequest], hand: Hand) -> Iterator[LoadRequest]:
    """Keep some of the batches: those that are left of a pass, or those of one ``DataLoader`` worker.

    Where batches of a request are done, only the rows that the others need are read. Where they are another worker's,
    all rows are read, unless every batch is a stretch of rows: to read single rows takes far longer than it saves.

    Parameters
    ----------
    requests
        Load requests with splits.
    hand
        Which batches are left, and which of them to keep.
    """
    n_before = 0
    last, end = (max((part[-1] for part in numbers), default=-1) for numbers in (hand.own, hand.left))
    for request in requests:
        n_here = len(request["splits"])
        numbers = range(n_before, n_before + n_here)
        n_before += n_here
        kept = [index for index, number in enumerate(numbers) if contains(hand.own, number)]
        if len(kept) == n_here:
            yield request
        elif kept:
            are_left = all(contains(hand.left, number) for number in numbers)
            yield _part(request, kept, whole_unless_stretches=are_left)
        if last < n_before and last < end:  # whoever has the last batch sees whether the sampler keeps its promise
            return


def _part(request: LoadRequest, kept: list[int], *, whole_unless_stretches: bool) -> LoadRequest:
    """A request with some of its batches, and an index array of the rows that they need."""
    splits = [request["splits"][index] for index in kept]
    positions = _positions(request["requests"])
    due = np.unique(np.concatenate(splits))
    if whole_unless_stretches and np.count_nonzero(np.diff(due) != 1) >= len(kept):
        return {**request, "splits": splits}
    part: Any = {
        **request,
        "requests": positions[due],
        "splits": [np.searchsorted(due, split) for split in splits],
    }
    if "repeated" in part:
        part["repeated"] = part["repeated"][due]
    return cast("LoadRequest", part)


def mark_repeats(requests: Iterable[LoadRequest], first: int) -> Iterator[LoadRequest]:
    """Add the key ``repeated`` to every request: a boolean array, for each of its rows whether it is a repeat.

    Parameters
    ----------
    requests
        Load requests.
    first
        Rows from this one on are repeats.
    """
    for request in requests:
        repeated = _positions(request["requests"]) >= first
        # a wrapper that is wrapped again has marked its own
        before: Any = request.get("repeated", False)
        yield cast("LoadRequest", {**request, "repeated": before | repeated})


def translate(requests: Iterable[LoadRequest], rows: Rows, *, name: str, ahead: bool = False) -> Iterator[LoadRequest]:
    """Turn the local rows of load requests into global rows. Splits index a request's rows, so that they stay.

    Parameters
    ----------
    requests
        Load requests for local rows ``[0, len(rows))``.
    rows
        Which global rows they are.
    name
        The sampler's, for messages.
    ahead
        Whether the sampler may be run ahead, so that several requests are turned at once: what that costs is mostly the
        same for one and for many. It may not if it uses what it has yielded again.

    Raises
    ------
    RuntimeError
        If a request reaches beyond the local rows.
    """
    for group in _groups(requests) if ahead else ([request] for request in requests):
        of_slices = [request for request in group if not _is_index_array(request["requests"])]
        slices = _slices_to_global(of_slices, rows, name)
        for request in group:
            local = request["requests"]
            translated = _array_to_global(local, rows, name) if _is_index_array(local) else next(slices)
            yield {**request, "requests": translated}


#: How many slices make it worth while, and of how many rows the splits may be held: they take 8 MiB.
_SLICES_AT_ONCE, _ROWS_AT_ONCE = 1 << 11, 1 << 20


def _groups(requests: Iterable[LoadRequest]) -> Iterator[list[LoadRequest]]:
    """Put requests together until they are enough."""
    group: list[LoadRequest] = []
    n_slices = n_rows = 0
    for request in requests:
        group.append(request)
        n_slices += len(request["requests"])
        n_rows += sum(map(len, request["splits"]))
        if n_slices >= _SLICES_AT_ONCE or n_rows >= _ROWS_AT_ONCE:
            yield group
            group, n_slices, n_rows = [], 0, 0
    if group:
        yield group


def _slices_to_global(group: list[LoadRequest], rows: Rows, name: str) -> Iterator[list[slice]]:
    """Translate requests of slices: for each of them, slices of global rows."""
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
            msg = f"The requests of {name} must be slices or an integer array of rows, got {local!r}."
            raise TypeError(msg) from error
        ends.append(len(starts))
    if min(starts, default=0) < 0 or max(stops, default=0) > len(rows):
        for start, end in pairwise([0, *ends]):
            _check_bounds(min(starts[start:end], default=0), max(stops[start:end], default=0), rows, name)
    bounds = np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)
    global_starts, global_stops, whose = rows.slices_to_global(*bounds)
    ends = np.searchsorted(whose, ends).tolist()  # some were cut, and empty ones left out
    starts, stops = global_starts.tolist(), global_stops.tolist()
    return (list(map(slice, starts[start:end], stops[start:end])) for start, end in pairwise([0, *ends]))


def _array_to_global(local: npt.NDArray[np.integer[Any]], rows: Rows, name: str) -> npt.NDArray[np.int64]:
    """Translate a request that is an index array."""
    if len(local):
        _check_bounds(int(local.min()), int(local.max()) + 1, rows, name)
    return rows.to_global(local)


def _check_bounds(lowest: int, highest: int, rows: Rows, name: str) -> None:
    """Raise if local rows in ``[lowest, highest)`` are not all there."""
    if lowest < 0 or highest > len(rows):
        msg = (
            f"{name} was given the rows [0, {len(rows)}) and asked for rows from [{lowest}, {highest}). A sampler "
            "must stay within the n_obs that sample(n_obs) gets. If it holds something for each row of the "
            "collection, register a function for its type with annbatch_distributed.localize.localize."
        )
        raise RuntimeError(msg)


def bounds_of(request: LoadRequest, splits: list[npt.NDArray[Any]], *, once: bool) -> tuple[Int64Array, Int64Array]:
    """Return the bounds of stretches of rows that some of a request's splits consist of, repeats left out.

    Parameters
    ----------
    request
        A load request.
    splits
        Those of its splits that count.
    once
        Whether no row of the request is in its splits more than once.
    """
    requests = request["requests"]
    repeated: Any = request.get("repeated")
    if once and not _is_index_array(requests) and repeated is None:
        starts = np.array([part.start for part in requests], dtype=np.int64)
        stops = np.array([part.stop for part in requests], dtype=np.int64)
        if sum(map(len, splits)) == (stops - starts).sum():  # all of them
            return starts, stops
    positions = np.concatenate(splits)
    if repeated is not None:
        positions = positions[~repeated[positions]]
    chosen = np.unique(_positions(requests)[positions]).astype(np.int64)
    if not len(chosen):
        return chosen, chosen
    gaps = np.flatnonzero(np.diff(chosen) > 1)
    return chosen[np.append(0, gaps + 1)], chosen[np.append(gaps, -1)] + 1


# What a request holds: an integer array of rows, or slices in a list or (annbatch's own samplers) in an object array.
type _Requests = list[slice] | npt.NDArray[Any]


def batches_of(request: LoadRequest) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Return the rows of each batch of a load request that has splits."""
    rows = _positions(request["requests"])
    return (rows[split] for split in request["splits"])


def _is_index_array(requests: _Requests) -> TypeGuard[npt.NDArray[np.integer[Any]]]:
    return isinstance(requests, np.ndarray) and requests.dtype.kind in "iu"


def _positions(requests: _Requests) -> npt.NDArray[np.integer[Any]]:
    """Every row of a request, in order."""
    if _is_index_array(requests):
        return requests
    return np.concatenate([np.arange(part.start, part.stop) for part in requests] or [np.arange(0)])
