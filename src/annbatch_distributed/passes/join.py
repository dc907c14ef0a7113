"""Joining the load requests of virtual ranks that a rank runs side by side.

Batch k of the rank is batch k of each of them, one after the other. A load request of the rank holds one of each
virtual rank, which annbatch then reads at once; and more of those whose load requests hold fewer batches, until all
have as many, so that no rows are read twice.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from annbatch_distributed.passes.requests import is_index_array, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
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
    requests = [request for of_rank in taken for request in of_rank]
    all_rows: list[Any] = [request["requests"] for request in requests]
    if any(map(is_index_array, all_rows)):
        all_rows = [rows_of(rows) for rows in all_rows]
        lengths = list(map(len, all_rows))
        joined_rows: Any = np.concatenate(all_rows)
    else:
        lengths = [sum(part.stop - part.start for part in parts) for parts in all_rows]
        joined_rows = list(chain.from_iterable(all_rows))
    # where the rows of each load request begin in the joined one
    begins = iter([0, *accumulate(lengths)])
    batches = []
    for of_rank in taken:
        splits = [
            (split, begin) for request, begin in zip(of_rank, begins, strict=False) for split in request["splits"]
        ]
        batches.append(splits)
    joined: dict[str, Any] = {"requests": joined_rows, "splits": _in_turn(batches)}
    if any("repeated" in request for request in requests):
        marks = [
            request.get("repeated", np.zeros(length, dtype=np.bool_))
            for request, length in zip(cast("list[Any]", requests), lengths, strict=True)
        ]
        joined["repeated"] = np.concatenate(marks)
    return cast("LoadRequest", joined)


def _in_turn(batches: Sequence[Sequence[tuple[npt.NDArray[Any], int]]]) -> list[npt.NDArray[Any]]:
    """Join the batches of all ranks: for each of a rank's, its split, and where the rows of its load request begin."""
    steps = [[part for part in parts if part is not None] for parts in zip_longest(*batches)]
    if not steps:
        return []
    lengths = [[len(split) for split, _ in step] for step in steps]
    # all at once: a call of numpy's takes as long as some hundred rows
    positions = np.concatenate([split for step in steps for split, _ in step])
    begins = np.array([begin for step in steps for _, begin in step], dtype=positions.dtype)
    positions += np.repeat(begins, list(chain.from_iterable(lengths)))
    stops = list(accumulate(map(sum, lengths)))
    return [positions[start:stop] for start, stop in pairwise([0, *stops])]
