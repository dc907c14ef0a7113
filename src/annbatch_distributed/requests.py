"""Load requests: which rows are read at once, as ranges, and which of them each batch has.

annbatch's own form is a dict of ``requests`` (slices or an integer array of rows) and ``splits`` (for each batch,
positions in the rows of the requests). Between a sampler and the loader, load requests are ``Request`` here.

annbatch's ``Loader`` reads each run of consecutive rows by itself, and to begin one costs as much as some dozens of
rows. Where rows that are asked for lie close together, a request asks for the whole stretch, and its splits leave the
holes between them out: batches have the same rows as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from annbatch.types import LoadRequest

    from annbatch_distributed.rows import Int64Array

__all__ = ["LONGEST_HOLE", "Request", "bounds_of", "concatenated", "rows_of"]

type Split = npt.NDArray[np.integer[Any]]
type Flags = npt.NDArray[np.bool_]

#: How many rows a hole has at most that is read through, if users don't say otherwise: see benchmarks/holes.py.
LONGEST_HOLE = 64


class Request(NamedTuple):
    """A load request of local or of global rows."""

    starts: Int64Array
    """Where each range of rows starts, in the order in which they are read."""
    stops: Int64Array
    """Where each stops."""
    splits: Sequence[Split]
    """For each batch, positions in the rows of the ranges."""
    are_repeats: Flags | None = None
    """For each row, whether it is a repeat; None if none is known to be one."""
    is_narrowed: bool = False
    """Whether no other load request of the sampler reads what lies between the ranges."""

    def rows(self) -> Int64Array:
        """Return every row that is read, in order."""
        return rows_of(self.starts, self.stops)

    def narrowed(self, splits: Sequence[Split]) -> Request:
        """Return a load request with some batches of this one, or parts of them, that reads only the rows they need."""
        positions = np.unique(np.concatenate(splits))
        starts, stops = bounds_of(self.rows()[positions])
        are_repeats = None if self.are_repeats is None else self.are_repeats[positions]
        return Request(starts, stops, [np.searchsorted(positions, split) for split in splits], are_repeats, True)

    def read_through(self, are_read: Flags) -> Request:
        """Return a load request for the same batches that reads some holes as well.

        ``are_read`` says, for each range but the first, whether the hole before it is read; ranges that continue each
        other are joined then.
        """
        if not are_read.any():
            return self
        starts, stops = self.starts, self.stops
        is_first = np.append(True, ~are_read & (starts[1:] != stops[:-1]))
        lengths = stops - starts
        stretch_starts, stretch_stops = starts[is_first], stops[np.append(is_first[1:], True)]
        stretch_lengths = stretch_stops - stretch_starts
        # where each range begins in what is read, and with that each of its rows
        places = starts - (stretch_starts - (np.cumsum(stretch_lengths) - stretch_lengths))[np.cumsum(is_first) - 1]
        places = np.repeat(places - (np.cumsum(lengths) - lengths), lengths)
        places += np.arange(len(places))
        are_repeats = self.are_repeats
        if are_repeats is not None:
            are_repeats = np.zeros(stretch_lengths.sum(), dtype=np.bool_)
            are_repeats[places] = self.are_repeats
        splits = [places[split] for split in self.splits]
        return Request(stretch_starts, stretch_stops, splits, are_repeats, self.is_narrowed)

    def to_annbatch(self) -> LoadRequest:
        """Return it as annbatch's ``Loader`` takes it, with a key ``repeated`` where it is known which rows are."""
        request: dict[str, Any] = {
            "requests": list(map(slice, self.starts.tolist(), self.stops.tolist())),
            "splits": list(self.splits),
        }
        if self.are_repeats is not None:
            request["repeated"] = self.are_repeats
        return cast("LoadRequest", request)


def concatenated(requests: Sequence[Request]) -> Request:
    """Return a load request that has batch k of each of some others, one after the other, as its batch k."""
    lengths = [int((request.stops - request.starts).sum()) for request in requests]
    offsets = np.cumsum([0, *lengths]).tolist()
    moved = [[split + offset for split in request.splits] for request, offset in zip(requests, offsets, strict=False)]
    are_repeats = None
    if any(request.are_repeats is not None for request in requests):
        are_repeats = np.concatenate(
            [
                np.zeros(length, dtype=np.bool_) if request.are_repeats is None else request.are_repeats
                for request, length in zip(requests, lengths, strict=True)
            ]
        )
    return Request(
        np.concatenate([request.starts for request in requests]),
        np.concatenate([request.stops for request in requests]),
        [np.concatenate(splits) for splits in zip(*moved, strict=True)],
        are_repeats,
    )


def bounds_of(rows: npt.NDArray[np.integer[Any]]) -> tuple[Int64Array, Int64Array]:
    """Return the starts and stops of the ranges of consecutive rows that some rows are, in order.

    >>> [bounds.tolist() for bounds in bounds_of(np.array([4, 5, 6, 0, 1, 9]))]
    [[4, 0, 9], [7, 2, 10]]
    """
    wide: Int64Array = rows.astype(np.int64, copy=False)
    first = np.flatnonzero(np.append(True, np.diff(wide) != 1))[: len(wide)]
    return wide[first], wide[first] + np.diff(first, append=len(rows))


def rows_of(starts: Iterable[int], stops: Iterable[int]) -> Int64Array:
    """Return every row of some half-open ranges, in order."""
    starts, lengths = np.asarray(starts), np.asarray(stops) - starts
    rows = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    rows += np.arange(len(rows))
    return rows
