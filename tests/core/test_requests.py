"""Load requests keep their batches when the ranges to read change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.core.request import MAX_GAP, Request, concatenated
from annbatch_distributed.core.rows import expand, runs
from annbatch_distributed.core.units import EpochUnits, UnitRows
from tests.samplers import batches, flat, repeats

if TYPE_CHECKING:
    from annbatch_distributed.core.values import Int64Array


@st.composite
def requests(draw: st.DrawFn, n_batches: int | None = None) -> Request:
    """A request for ranges in any order, which may repeat, with or without marks."""
    parts = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), min_size=1, max_size=8))
    starts, lengths = np.array(draw(st.sampled_from([parts, sorted(parts)])), dtype=np.int64).T
    n_rows = int(lengths.sum())
    split = st.lists(st.integers(0, n_rows - 1), min_size=1, max_size=9).map(np.array)
    splits = draw(st.lists(split, min_size=n_batches or 1, max_size=n_batches or 4))
    marks = np.random.default_rng(draw(st.integers(0, 3))).random(n_rows) < 0.5
    return Request(starts, starts + lengths, splits, draw(st.sampled_from([None, marks])))


def batches_of(request: Request) -> list[tuple[list[int], list[bool]]]:
    """The rows of each batch, and the marks of repeated rows."""
    load_request = request.to_annbatch()
    marks = repeats([load_request]) if "repeated" in load_request else [[False] * len(s) for s in request.splits]
    return list(zip(batches([load_request]), marks, strict=True))


@given(requests())
def test_rows_at_positions_match_the_request(request_: Request) -> None:
    """Rows at positions are found without listing every row of a request."""
    for split in request_.splits:
        assert request_.rows_at(split).tolist() == request_.rows()[split].tolist()


@given(requests(), st.integers(1, 70))
def test_reading_gaps_keeps_the_batches(request_: Request, longest: int) -> None:
    """Reading gaps keeps the batches, and joins all ranges that have a short gap between them."""
    through = request_.with_gaps(longest)
    assert batches_of(through) == batches_of(request_)
    read, n_ranges = list[int](), 0
    for start, stop in zip(request_.starts.tolist(), request_.stops.tolist(), strict=True):
        is_near = bool(read) and 0 <= start - read[-1] - 1 <= longest
        read += range(read[-1] + 1, start) if is_near else ()
        n_ranges += not is_near
        read += range(start, stop)
    assert through.rows().tolist() == read
    assert len(through.starts) == n_ranges if len(read) > len(request_.rows()) else through is request_


@given(requests(), st.integers(1, 70), st.data())
def test_only_allowed_gaps_are_read(request_: Request, longest: int, data: st.DataObject) -> None:
    """Gaps that may not be read stay gaps."""
    where = np.array([data.draw(st.booleans()) for _ in request_.starts[1:]], dtype=bool)
    through = request_.with_gaps(longest, where=where)
    assert batches_of(through) == batches_of(request_)
    gaps = zip(request_.stops[:-1].tolist(), request_.starts[1:].tolist(), where.tolist(), strict=True)
    lengths = [after - before for before, after, is_allowed in gaps if is_allowed and 0 < after - before <= longest]
    assert through.n_rows == len(request_.rows()) + sum(lengths)


@given(requests(), st.data())
def test_narrowed_request_reads_only_needed_rows(request_: Request, data: st.DataObject) -> None:
    """A narrowed request has the selected batches, and reads only their rows, in order."""
    selection = data.draw(st.lists(st.sampled_from(range(len(request_.splits))), min_size=1, unique=True))
    narrowed = request_.narrowed([request_.splits[index] for index in selection])
    assert batches_of(narrowed) == [batches_of(request_)[index] for index in selection]
    needed = sorted({int(place) for index in selection for place in request_.splits[index]})
    assert narrowed.rows().tolist() == request_.rows()[needed].tolist()


@given(st.lists(requests(n_batches=2), min_size=1, max_size=3))
def test_requests_are_joined_batch_by_batch(several: list[Request]) -> None:
    apart = [batches_of(request) for request in several]
    joined = batches_of(concatenated(several))
    for k in (0, 1):
        assert joined[k] == (flat(each[k][0] for each in apart), flat(each[k][1] for each in apart))


@given(st.lists(st.integers(0, 9), max_size=12))
def test_ranges_expand_to_the_same_rows(rows: list[int]) -> None:
    """Rows become ranges that can't be joined further, and expand to the same rows."""
    starts, stops = runs(np.array(rows, dtype=np.uint8))
    assert expand(starts, stops).tolist() == rows
    assert (starts[1:] != stops[:-1]).all()


class Pairs(EpochUnits):
    """Units of two rows: unit k has rows 3k and 3k + 1, of which the second is marked as repeated."""

    def __len__(self) -> int:
        return 20

    def rows_of(self, numbers: Int64Array, *, first: int = 0) -> UnitRows:
        rows = np.ravel(3 * numbers[:, None] + np.arange(2))
        marks = {"repeated": np.tile([False, True], len(numbers))}
        return UnitRows(rows, np.repeat(np.arange(len(numbers)), 2), marks)


@pytest.mark.parametrize(("longest", "n_ranges"), [(0, 3), (1, 1)])
def test_rows_of_units_keep_marks_across_gaps(longest: int, n_ranges: int) -> None:
    """A row is marked as repeated if its unit is or if the unit repeats the row, also if short gaps are read."""
    units = Request(np.array([4]), np.array([7]), [np.array([2, 0]), np.array([1])], np.array([False, True, True]))
    read = Pairs().to_rows(units, max_gap=longest)
    assert len(read.starts) == n_ranges
    assert batches_of(read._replace(marks_of=())) == [([18, 19, 12, 13], [False] * 4), ([15, 16], [False] * 2)]
    assert [marks["repeated"].tolist() for marks in read.marks()] == [[True, True, False, True], [True, True]]


def test_resumed_request_reads_short_gaps() -> None:
    """The rest of a load request is read in one range for each chunk, not row by row."""
    before, after = (DistributedSampler(RandomSampler(16, 1, 4), dist_info=Rank(0, 1), seed=0) for _ in range(2))
    (whole, *_) = before.sample(64)
    after.load_state_dict(before.state_dict(batches_done=1))
    (rest, *_) = after.sample(64)
    assert [len(request["requests"]) for request in (whole, rest)] == [1, 1]
    assert len(rest["splits"]) == 3


def test_max_gap_matches_the_documentation() -> None:
    """`max_gap` defaults to the number in its docstring."""
    assert f"(default {MAX_GAP})" in str(DistributedSampler.__doc__)
