"""Load requests: the rows to read at once, and the positions in these rows for each batch (its splits).

annbatch's form is a dict of ``requests`` (slices or an integer array of rows) and ``splits`` (an array of positions per
batch). Between a sampler and the loader it is a :class:`Request`. It isn't built on ``Rows``, which join neighboring
ranges: load requests would then differ from annbatch's.

annbatch reads each range of consecutive rows separately, and starting a read costs about the same as reading some
dozens of rows. Short gaps between rows are therefore read too, but no split points to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from annbatch.types import LoadRequest

from annbatch_distributed.core.rows import expand, placed, runs
from annbatch_distributed.core.values import Int64Array

type Split = npt.NDArray[np.integer[Any]]
type Flags = npt.NDArray[np.bool_]
type Marks = dict[str, npt.NDArray[Any]]

#: Default for the largest gap between rows that is read as well, in rows: see benchmarks/gaps.py.
MAX_GAP = 64


class Request(NamedTuple):
    """Load request of local or of global rows, or of units."""

    starts: Int64Array
    """Start of each range of rows, in the order of reading."""
    stops: Int64Array
    """Stop of each range."""
    splits: Sequence[Split]
    """For each batch, positions in the rows of the ranges."""
    are_repeats: Flags | None = None
    """For each row, True if it is a repeat; None if no row is known to be one."""
    is_narrowed: bool = False
    """True if the ranges are rows within chunks, so that short gaps may be read. Gaps between whole chunks are not."""
    marks_of: Sequence[Marks] = ()
    """Arrays about the rows of each batch, by name, if the sampler samples other units than rows."""

    @property
    def n_rows(self) -> int:
        """Number of rows that are read."""
        return int((self.stops - self.starts).sum())

    def rows(self) -> Int64Array:
        """Return all rows that are read, in order."""
        return expand(self.starts, self.stops)

    def rows_at(self, positions: Split) -> Int64Array:
        """Return the rows at some positions, such as a split."""
        return placed(positions, self.stops, np.cumsum(self.stops - self.starts))

    def narrowed(self, splits: Sequence[Split]) -> Request:
        """Return a load request for some batches of this one, or parts of them, with only the rows that they need."""
        # of rows 0:10, splits [1 2] and [7] need positions 1 2 7, which become 0 1 2: splits [0 1] and [2]
        positions = np.unique(np.concatenate(splits))
        starts, stops = runs(self.rows()[positions])
        are_repeats = None if self.are_repeats is None else self.are_repeats[positions]
        return Request(starts, stops, [np.searchsorted(positions, split) for split in splits], are_repeats, True)

    def with_gaps(self, longest: int, *, where: Flags | None = None) -> Request:
        """Return a load request for the same batches that also reads gaps of at most ``longest`` rows.

        ``where`` is True for each range, except the first, if the gap before it may be read; None allows all. If any
        gap is read, ranges that continue each other are joined as well.
        """
        gaps = self.starts[1:] - self.stops[:-1]
        are_read = (gaps > 0) & (gaps <= longest)
        if where is not None:
            are_read &= where
        if not are_read.any():
            return self
        # Ranges 4:6, 9:12 and 30:31, where the gap before 9 is read: joined ranges 4:12 and 30:31 of lengths 8 and 1.
        starts, stops = self.starts, self.stops
        is_first = np.append(True, ~are_read & (gaps != 0))  # 1 0 1
        joined_starts = starts[is_first]
        joined_stops = stops[np.append(is_first[1:], True)]
        lengths = joined_stops - joined_starts
        # the joined ranges begin at positions 0 and 8 of the rows that are read
        joined_at = np.cumsum(lengths) - lengths
        # the ranges begin at rows 4 9 30, which are at positions 0 5 8
        of_joined = np.cumsum(is_first) - 1  # 0 0 1
        at = joined_at[of_joined] + starts - joined_starts[of_joined]
        # the positions of all rows of the ranges, which translate the positions of splits: 0 1 5 6 7 8
        positions = expand(at, at + stops - starts)
        are_repeats = self.are_repeats
        if are_repeats is not None:
            are_repeats = np.zeros(lengths.sum(), dtype=np.bool_)
            are_repeats[positions] = self.are_repeats
        splits = [positions[split] for split in self.splits]
        return Request(joined_starts, joined_stops, splits, are_repeats, self.is_narrowed, self.marks_of)

    def to_annbatch(self) -> LoadRequest:
        """Return annbatch's form of a load request, with additional keys.

        ``repeated`` is True for each row that is a repeat, if that is known. For other units than rows, the keys of
        :meth:`marks` are lists of arrays, one per batch, since a row can belong to several units of a load request.
        """
        request: dict[str, Any] = {
            "requests": list(map(slice, self.starts.tolist(), self.stops.tolist())),
            "splits": list(self.splits),
        }
        if self.are_repeats is not None:
            request["repeated"] = self.are_repeats
        for name in self.marks_of[0] if self.marks_of else ():
            request[name] = [marks[name] for marks in self.marks_of]
        return cast("LoadRequest", request)

    def marks(self) -> Sequence[Marks]:
        """Return the additional arrays of each batch, by name, such as ``repeated``."""
        if self.marks_of:
            return self.marks_of
        return [{} if self.are_repeats is None else {"repeated": self.are_repeats[split]} for split in self.splits]


def concatenated(requests: Sequence[Request]) -> Request:
    """Join load requests batch by batch: batch k has the rows of batch k of each of them."""
    # requests of 3 and 5 rows begin at positions 0 and 3 of the joined one: splits [0 2] and [1] become [0 2 4]
    offsets = np.cumsum([0, *(request.n_rows for request in requests)]).tolist()
    moved = [[split + offset for split in request.splits] for request, offset in zip(requests, offsets, strict=False)]
    are_repeats = None
    if any(request.are_repeats is not None for request in requests):
        are_repeats = np.concatenate(
            [
                np.zeros(request.n_rows, dtype=np.bool_) if request.are_repeats is None else request.are_repeats
                for request in requests
            ]
        )
    return Request(
        np.concatenate([request.starts for request in requests]),
        np.concatenate([request.stops for request in requests]),
        [np.concatenate(splits) for splits in zip(*moved, strict=True)],
        are_repeats,
    )
