"""Joining the load requests of virtual ranks that a rank runs side by side.

Batch k of the rank is batch k of each of them, one after the other. A load request of the rank holds one of each
virtual rank, which annbatch then reads at once. Where those hold unequal numbers of batches, more are taken of the
ranks that are behind, until all have as many, so that no rows are read twice; or until a rank has a few, to bound the
memory. Then the load requests of the others are cut, and the rest of them is left for the next one.
"""

from __future__ import annotations

from itertools import accumulate, chain, zip_longest
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from annbatch_distributed.passes.holes import of_rows
from annbatch_distributed.passes.requests import is_index_array, n_rows_of, part, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from annbatch.types import LoadRequest

__all__ = ["join"]


#: How many load requests of each rank are joined at most.
_MOST = 4


def join(streams: Sequence[Iterator[LoadRequest]], *, longest_hole: int = 0) -> Iterator[LoadRequest]:
    """Join the load requests with splits of several ranks, which keep only the keys that this package knows.

    A rank that has fewer batches than others is missing in the last ones. A stream may use the memory of its splits
    again for its next request. In parts of a request that is cut, holes of at most ``longest_hole`` rows are read
    through.
    """
    ended = [False] * len(streams)
    left: list[list[LoadRequest]] = [[] for _ in streams]
    n_batches = batch_size = 0
    while True:
        if not any(left):
            left, joined = _taken_in_line(streams, n_batches, batch_size)
            if joined is not None:
                left = [[] for _ in streams]
                yield joined
                continue
        taken, counts = left, [_n_batches(own) for own in left]
        while behind := _behind(taken, counts, ended):
            for rank in behind:
                request = next(streams[rank], None)
                if request is None:
                    ended[rank] = True
                else:
                    taken[rank].append(_kept(request))
                    counts[rank] += len(request["splits"])
        if not any(taken):
            return
        left = [[] for _ in streams]
        if min(counts) < max(counts):
            # ranks that have come to their end have no more to give
            open_counts = [count for count, is_over in zip(counts, ended, strict=True) if not is_over]
            taken, left = _cut(taken, min(open_counts, default=max(counts)), longest_hole)
        first = next(chain.from_iterable(taken))["splits"]
        n_batches, batch_size = len(first), len(first[0]) if first else 0
        yield _joined(taken)


def _n_batches(requests: Sequence[LoadRequest]) -> int:
    return sum(len(request["splits"]) for request in requests)


def _behind(taken: Sequence[Sequence[LoadRequest]], counts: Sequence[int], ended: Sequence[bool]) -> list[int]:
    """The ranks of which more is to be taken: those with fewer batches than others, as long as none has too much."""
    most = max(counts)
    if 0 < most == min(counts):
        return []
    behind = [rank for rank, n_batches in enumerate(counts) if not ended[rank] and n_batches < max(most, 1)]
    is_enough = all(counts[rank] > 0 and len(taken[rank]) >= _MOST for rank in behind)
    return [] if is_enough else [rank for rank in behind if not counts[rank] or len(taken[rank]) < _MOST]


def _cut(
    taken: Sequence[list[LoadRequest]], n_batches: int, longest_hole: int
) -> tuple[list[list[LoadRequest]], list[list[LoadRequest]]]:
    """Divide the load requests of each rank: those with its first batches, and those with the others."""
    now: list[list[LoadRequest]] = []
    later: list[list[LoadRequest]] = []
    for own in taken:
        first: list[LoadRequest] = []
        rest: list[LoadRequest] = []
        n_left = n_batches
        for request in own:
            n_here = len(request["splits"])
            if n_here <= n_left:
                first.append(request)
            elif not n_left:
                rest.append(request)
            else:
                first.append(of_rows(part(request, range(n_left)), longest_hole))
                rest.append(of_rows(part(request, range(n_left, n_here)), longest_hole))
            n_left = max(0, n_left - n_here)
        now.append(first)
        later.append(rest)
    return now, later


def _taken_in_line(
    streams: Sequence[Iterator[LoadRequest]], n_batches: int, batch_size: int
) -> tuple[list[list[LoadRequest]], LoadRequest | None]:
    """Take a load request of each rank, and join them if each has ``n_batches`` of ``batch_size`` rows in slices.

    Most of a pass is like this. Each is joined as soon as it is taken, while its positions are in the processor's
    cache: that takes half the time.
    """
    taken: list[list[LoadRequest]] = []
    stretches: list[slice] = []
    begins: list[int] = []
    sizes, n_rows, is_in_line = [batch_size] * n_batches, 0, n_batches > 0
    is_coarse = batch_size >= _COARSE
    positions = np.empty((n_batches, len(streams), batch_size), dtype=np.intp)
    for rank, stream in enumerate(streams):
        request = next(stream, None)
        taken.append([] if request is None else [request])
        if not is_in_line or request is None or "repeated" in request or is_index_array(request["requests"]):
            is_in_line = False
            continue
        splits = request["splits"]
        if list(map(len, splits)) != sizes:
            is_in_line = False
            continue
        if is_coarse:
            for split, place in zip(splits, positions[:, rank], strict=True):
                np.add(split, n_rows, out=place)
        own = _slices(request)
        stretches += own
        begins.append(n_rows)
        n_rows += n_rows_of(own)
    if not is_in_line:
        return [list(map(_kept, own)) for own in taken], None
    if not is_coarse:
        every = [own[0]["splits"] for own in taken]
        np.concatenate(list(chain.from_iterable(zip(*every, strict=True))), out=positions.reshape(-1))
        positions += np.array(begins)[:, np.newaxis]
    return taken, {"requests": stretches, "splits": list(positions.reshape(n_batches, -1))}


#: How many rows a batch has at least to be moved by a call of numpy's for each, and not by one for several.
_COARSE = 1024


def _kept(request: LoadRequest) -> LoadRequest:
    """A request that stays as it is when its stream goes on."""
    return {**request, "splits": [split.copy() for split in request["splits"]]}


def _joined(taken: Sequence[Sequence[LoadRequest]]) -> LoadRequest:
    """One load request of those of each rank, whatever they are like."""
    requests = [request for own in taken for request in own]
    if any(is_index_array(request["requests"]) for request in requests):
        arrays = [rows_of(request["requests"]) for request in requests]
        rows: Any = np.concatenate(arrays)
        n_rows = list(map(len, arrays))
    else:
        slices = list(map(_slices, requests))
        rows = list(chain.from_iterable(slices))
        n_rows = list(map(n_rows_of, slices))
    begins = iter(accumulate(n_rows, initial=0))
    moved = [
        [split + begin for request, begin in zip(own, begins, strict=False) for split in request["splits"]]
        for own in taken
    ]
    steps = zip_longest(*moved)
    splits = [np.concatenate([part for part in step if part is not None]) for step in steps]
    joined: dict[str, Any] = {"requests": rows, "splits": splits}
    if any("repeated" in request for request in requests):
        marks = [
            request.get("repeated", np.zeros(length, dtype=np.bool_))
            for request, length in zip(cast("list[Any]", requests), n_rows, strict=True)
        ]
        joined["repeated"] = np.concatenate(marks)
    return cast("LoadRequest", joined)


def _slices(request: LoadRequest) -> list[slice]:
    slices: Any = request["requests"]
    # arrays of slices, as annbatch's own samplers have them, take longer to go through
    found: list[slice] = slices.tolist() if isinstance(slices, np.ndarray) else slices
    return found
