"""Joining the load requests of virtual ranks that a rank runs side by side.

Batch k of the rank is batch k of each of them, one after the other. A load request of the rank holds one of each
virtual rank, which annbatch then reads at once; and more of those whose load requests hold fewer batches, until all
have as many, so that no rows are read twice.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from annbatch_distributed.passes.requests import is_index_array, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from annbatch.types import LoadRequest

__all__ = ["join"]


def join(streams: Sequence[Iterator[LoadRequest]]) -> Iterator[LoadRequest]:
    """Join the load requests with splits of several ranks, which keep only the keys that this package knows.

    A rank that has fewer batches than others is missing in the last ones.
    """
    ended = [False] * len(streams)
    while True:
        taken: list[list[LoadRequest]] = [[] for _ in streams]
        counts = [0] * len(streams)
        behind = list(range(len(streams)))
        while behind:
            for rank in behind:
                request = next(streams[rank], None)
                if request is None:
                    ended[rank] = True
                else:
                    taken[rank].append(request)
                    counts[rank] += len(request["splits"])
            most = max(counts)
            behind = [rank for rank, n_batches in enumerate(counts) if not ended[rank] and n_batches < max(most, 1)]
        if not any(taken):
            return
        yield _joined(taken)


def _joined(taken: Sequence[Sequence[LoadRequest]]) -> LoadRequest:
    """One load request of those of each rank."""
    batches: list[list[Any]] = []
    requests: list[Any] = []
    marks: list[Any] = []
    n_before = 0
    for of_rank in taken:
        own = []
        for request in of_rank:
            rows = request["requests"]
            n_rows = len(rows) if is_index_array(rows) else sum(part.stop - part.start for part in rows)
            own += [split + n_before for split in request["splits"]]
            requests.append(rows)
            marks.append(cast("Any", request).get("repeated", np.zeros(n_rows, dtype=np.bool_)))
            n_before += n_rows
        batches.append(own)
    joined: dict[str, Any] = {"splits": [_concatenated(parts) for parts in zip_longest(*batches)]}
    if any(map(is_index_array, requests)):
        joined["requests"] = np.concatenate([rows_of(rows) for rows in requests])
    else:
        joined["requests"] = [part for rows in requests for part in rows]
    if any("repeated" in request for of_rank in taken for request in of_rank):
        joined["repeated"] = np.concatenate(marks)
    return cast("LoadRequest", joined)


def _concatenated(parts: Sequence[Any]) -> Any:  # noqa: ANN401 arrays of integers
    return np.concatenate([part for part in parts if part is not None])
