"""Joining the load requests of virtual ranks that a rank runs side by side.

Batch k of the rank is batch k of each of them, one after the other. A load request of the rank holds one of each
virtual rank, which annbatch then reads at once. Where those hold unequal numbers of batches, more are taken of the
ranks that are behind, until all have as many, so that no rows are read twice; or until a rank has a few, to bound the
memory. Then the load requests of the others are cut, and the rest of them is left for the next one.
"""

from __future__ import annotations

from itertools import accumulate, chain, islice, pairwise, repeat, zip_longest
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from annbatch_distributed.passes.holes import of_rows
from annbatch_distributed.passes.requests import is_index_array, part, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from annbatch.types import LoadRequest

__all__ = ["join"]


#: How many load requests of each rank are joined at most.
_MOST = 4


def join(streams: Sequence[Iterator[LoadRequest]], *, longest_hole: int = 0) -> Iterator[LoadRequest]:
    """Join the load requests with splits of several ranks, which keep only the keys that this package knows.

    A rank that has fewer batches than others is missing in the last ones. Splits must stay as they are when a stream
    goes on. In parts of a request that is cut, holes of at most ``longest_hole`` rows are read through.
    """
    ended = [False] * len(streams)
    left: list[list[LoadRequest]] = [[] for _ in streams]
    layout = _Layout([], [], [])
    while True:
        taken, counts = left, [_n_batches(own) for own in left]
        while behind := _behind(taken, counts, ended):
            for rank in behind:
                request = next(streams[rank], None)
                if request is None:
                    ended[rank] = True
                else:
                    taken[rank].append(request)
                    counts[rank] += len(request["splits"])
        if not any(taken):
            return
        left = [[] for _ in streams]
        if min(counts) < max(counts):
            # ranks that have come to their end have no more to give
            open_counts = [count for count, is_over in zip(counts, ended, strict=True) if not is_over]
            taken, left = _cut(taken, min(open_counts, default=max(counts)), longest_hole)
        joined, layout = _joined(taken, layout)
        yield joined


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


class _Layout:
    """Where the positions of the batches of several ranks are moved to: the same for most load requests of a pass."""

    def __init__(self, lengths: list[int], begins: list[int], n_parts: list[int]) -> None:
        self.lengths, self.begins, self.n_parts = lengths, begins, n_parts
        parts = iter(lengths)
        self.stops = list(accumulate(sum(islice(parts, n_own)) for n_own in n_parts))
        self._bounds = list(pairwise([0, *accumulate(lengths)]))
        self._moved_by = np.repeat(np.array(begins, dtype=np.intp), 0 if self._is_coarse else lengths)

    @property
    def _is_coarse(self) -> bool:
        """Whether parts are large, so that a call of numpy's for each takes less than to go through all rows again."""
        return bool(self.stops) and self.stops[-1] >= 1024 * len(self.lengths)

    def moved(self, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.intp]:
        """Return the positions of all parts, one after the other, each moved on to where its rows begin."""
        if not self._is_coarse:
            positions = np.concatenate([np.arange(0), *parts])
            positions += self._moved_by
            return positions
        positions = np.empty(self.stops[-1], dtype=np.intp)
        for split, begin, (start, stop) in zip(parts, self.begins, self._bounds, strict=True):
            np.add(split, begin, out=positions[start:stop])
        return positions

    def is_of(self, lengths: list[int], begins: list[int], n_parts: list[int]) -> bool:
        """Whether it is that of parts of these lengths, from load requests that begin there."""
        return (self.lengths, self.begins, self.n_parts) == (lengths, begins, n_parts)


def _joined(taken: Sequence[Sequence[LoadRequest]], layout: _Layout) -> tuple[LoadRequest, _Layout]:
    """One load request of those of each rank, and its layout."""
    requests = [request for of_rank in taken for request in of_rank]
    all_rows: list[Any] = [request["requests"] for request in requests]
    if any(map(is_index_array, all_rows)):
        all_rows = [rows_of(rows) for rows in all_rows]
        n_rows = list(map(len, all_rows))
        joined_rows: Any = np.concatenate(all_rows)
    else:
        # arrays of slices, as annbatch's own samplers have them, take longer to go through
        all_rows = [rows.tolist() if isinstance(rows, np.ndarray) else rows for rows in all_rows]
        n_rows = [sum([stretch.stop - stretch.start for stretch in stretches]) for stretches in all_rows]
        joined_rows = list(chain.from_iterable(all_rows))
    # for each rank, the splits of its batches, and where the rows of their load requests begin in the joined one
    n_before = iter([0, *accumulate(n_rows)])
    splits = [list(chain.from_iterable(request["splits"] for request in of_rank)) for of_rank in taken]
    begins = [
        list(
            chain.from_iterable(
                repeat(begin, len(request["splits"])) for request, begin in zip(of_rank, n_before, strict=False)
            )
        )
        for of_rank in taken
    ]
    # by step, and in it by rank
    parts: list[Any]
    if len(set(map(len, splits))) == 1:
        n_parts = [len(splits)] * len(splits[0])
        parts, own_begins = (list(chain.from_iterable(zip(*of_ranks, strict=True))) for of_ranks in (splits, begins))
    else:
        n_parts = [sum(step < len(own) for own in splits) for step in range(max(map(len, splits)))]
        parts, own_begins = (
            [one for one in chain.from_iterable(zip_longest(*of_ranks)) if one is not None]
            for of_ranks in (splits, begins)
        )
    lengths = list(map(len, parts))
    if not layout.is_of(lengths, own_begins, n_parts):
        layout = _Layout(lengths, own_begins, n_parts)
    positions = layout.moved(parts)
    joined: dict[str, Any] = {
        "requests": joined_rows,
        "splits": [positions[start:stop] for start, stop in pairwise([0, *layout.stops])],
    }
    if any("repeated" in request for request in requests):
        marks = [
            request.get("repeated", np.zeros(length, dtype=np.bool_))
            for request, length in zip(cast("list[Any]", requests), n_rows, strict=True)
        ]
        joined["repeated"] = np.concatenate(marks)
    return cast("LoadRequest", joined), layout
