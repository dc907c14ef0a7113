"""Joining the load requests of lanes that a rank reads side by side.

Batch k of the rank is batch k of each lane, one after the other. A load request of the rank holds one of each lane,
which annbatch then reads at once. Where those hold unequal numbers of batches, the longer ones are cut, and the rest of
them is left for the next load request.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from annbatch_distributed.passes.holes import of_rows
from annbatch_distributed.passes.requests import is_index_array, n_rows_of, narrowed, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from annbatch.types import LoadRequest

__all__ = ["join"]


def join(lanes: Sequence[Iterator[LoadRequest]], *, longest_hole: int = 0) -> Iterator[LoadRequest]:
    """Join the load requests with splits of several lanes, which keep only the keys that this package knows.

    A lane that has fewer batches than others is missing in the last ones. In parts of a request that is cut, holes of
    at most ``longest_hole`` rows are read through.
    """
    # a lane may use the memory of its splits again for its next request, and by then these are joined
    left: list[LoadRequest | None] = [None] * len(lanes)
    while True:
        left = [_next(lane) if request is None else request for lane, request in zip(lanes, left, strict=True)]
        n_batches = min((len(request["splits"]) for request in left if request is not None), default=0)
        if not n_batches:
            return
        taken = []
        for lane, request in enumerate(left):
            if request is None:
                continue
            splits, left[lane] = request["splits"], None
            if len(splits) > n_batches:
                left[lane] = of_rows(narrowed(request, splits[n_batches:]), longest_hole)
                request = of_rows(narrowed(request, splits[:n_batches]), longest_hole)  # noqa: PLW2901 a part of it
            taken.append(request)
        yield _joined(taken)


def _next(lane: Iterator[LoadRequest]) -> LoadRequest | None:
    """Take the next load request that has batches."""
    return next((request for request in lane if request["splits"]), None)


def _joined(requests: Sequence[LoadRequest]) -> LoadRequest:
    """Join load requests of as many batches each."""
    if any(is_index_array(request["requests"]) for request in requests):
        arrays = [rows_of(request["requests"]) for request in requests]
        rows: Any = np.concatenate(arrays)
        n_rows = list(map(len, arrays))
    else:
        slices = [list(request["requests"]) for request in requests]
        rows = list(chain.from_iterable(slices))
        n_rows = list(map(n_rows_of, slices))
    begins = list(accumulate(n_rows, initial=0))
    moved = [[split + begin for split in one["splits"]] for one, begin in zip(requests, begins, strict=False)]
    joined: dict[str, Any] = {"requests": rows, "splits": [*map(np.concatenate, zip(*moved, strict=True))]}
    if any("repeated" in request for request in requests):
        marks = [
            request.get("repeated", np.zeros(length, dtype=np.bool_))
            for request, length in zip(cast("list[Any]", requests), n_rows, strict=True)
        ]
        joined["repeated"] = np.concatenate(marks)
    return cast("LoadRequest", joined)
