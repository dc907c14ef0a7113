"""Load requests that read through holes deliver what was asked for, in stretches as few as the holes allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch import Loader
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.passes.holes import LONGEST, are_between, of_ranges, of_rows
from tests.samplers import IndexArrays, batches, request_rows

if TYPE_CHECKING:
    from annbatch.types import LoadRequest


@st.composite
def requests(draw: st.DrawFn) -> LoadRequest:
    """A request for slices or rows in any order, which may come again, with marks or without."""
    parts = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), min_size=1, max_size=8))
    slices: Any = [slice(start, start + length) for start, length in parts]
    listed = request_rows({"requests": slices})
    rows: Any = draw(st.sampled_from([slices, sorted(slices, key=lambda part: part.start)]))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([np.int64, np.uint8]))
        rows = np.array(draw(st.permutations(listed) | st.just(sorted(set(listed)))), dtype=dtype)
    n_rows = len(request_rows({"requests": rows}))
    positions = st.lists(st.integers(0, n_rows - 1), min_size=1, max_size=9)
    splits = [np.array(split) for split in draw(st.lists(positions, max_size=4))]
    marks = np.random.default_rng(draw(st.integers(0, 3))).random(n_rows) < 0.5
    return {"requests": rows, "splits": splits} | draw(st.sampled_from([{}, {"repeated": marks, "note": 1}]))  # type: ignore[return-value]  # keys of ours


def read_through(request: LoadRequest, longest: int) -> LoadRequest:
    """The request as it is made to read through holes."""
    rows: Any = request["requests"]
    if isinstance(rows, np.ndarray):
        return of_rows(request, longest)
    bounds = np.array([(part.start, part.stop) for part in rows], dtype=np.int64)
    starts, stops = bounds[:, 0], bounds[:, 1]
    return of_ranges(request, starts, stops, are_between(starts, stops, longest))


def marked(request: Any) -> list[list[bool]] | None:
    """For each row of each batch, whether it is a repeat."""
    return [request["repeated"][split].tolist() for split in request["splits"]] if "repeated" in request else None


@given(requests(), st.integers(1, 70))
def test_the_batches_stay_and_no_hole_is_longer_than_it_may_be(request: LoadRequest, longest: int) -> None:
    before, listed = batches([request]), request_rows(request)
    found = read_through(request, longest)
    assert batches([found]) == before
    assert marked(found) == marked(request)
    assert {**found, "requests": 0, "splits": 0, "repeated": 0} == {
        **request,
        "requests": 0,
        "splits": 0,
        "repeated": 0,
    }
    if found["splits"] is request["splits"]:
        assert request_rows(found) == listed
        return
    parts = [range(part.start, part.stop) for part in found["requests"]]
    for part in parts:
        asked = sorted({row for row in listed if row in part})
        assert asked[0] == part.start
        assert asked[-1] == part.stop - 1
        assert max(np.diff(asked), default=1) <= longest + 1
    assert {*listed} <= {row for part in parts for row in part}


@given(requests(), st.integers(1, 70))
def test_of_rows_in_ascending_order_no_stretch_is_left_that_could_go_on(request: LoadRequest, longest: int) -> None:
    rows = sorted({*request_rows(request)})
    for asked in (np.array(rows), [slice(row, row + 1) for row in rows]):
        whole: LoadRequest = {"requests": asked, "splits": [np.arange(len(rows))]}
        found = read_through(whole, longest)
        n_far = int((np.diff(rows) > longest + 1).sum())
        has_hole = bool(((np.diff(rows) > 1) & (np.diff(rows) <= longest + 1)).any())
        assert not has_hole or len(found["requests"]) == n_far + 1


def test_what_has_no_hole_stays_as_it_is() -> None:
    for rows in ([slice(100, 164), slice(0, 64), slice(64, 100)], np.arange(5, 70), np.array([3, 500, 501])):
        request: Any = {"requests": rows, "splits": [np.arange(3)]}
        found = read_through(request, LONGEST)
        assert found["splits"] is request["splits"]
        assert request_rows(found) == request_rows(request)


def test_index_arrays_in_any_order_become_stretches() -> None:
    rows = np.random.default_rng(0).permutation(np.arange(0, 1000, 3))
    request: LoadRequest = {"requests": rows, "splits": [np.arange(100), np.arange(100, 300)]}
    found = read_through(request, 2)
    assert found["requests"] == [slice(0, 1000)]
    assert batches([found]) == [rows[:100].tolist(), rows[100:300].tolist()]
    assert len(request_rows(read_through(request, 1))) == len(rows)


@pytest.mark.parametrize("remainder", ["drop", "keep", "exact", "pad"])
@pytest.mark.parametrize("sampler", [RandomSampler(8, 4, 16), SequentialSampler(8, 4, 16), IndexArrays(16)])
def test_what_a_loader_reads_is_the_same_with_holes_and_without(sampler: Any, remainder: Any) -> None:
    chosen = np.random.default_rng(0).random(600) < 0.7
    data = np.arange(600.0)[:, np.newaxis]
    for rank in range(3):
        read = []
        for longest in (0, 1, 64):
            distributed = DistributedSampler(
                sampler, dist_info=Rank(rank, 3), mask=chosen, seed=0, remainder=remainder, read_through=longest
            )
            loader = Loader(batch_sampler=distributed, return_index=True, preload_to_gpu=False)
            loader.add_datasets([data[:250], data[250:]])
            read.append([(batch["index"].tolist(), batch["X"][:, 0].tolist()) for batch in loader])
            assert all(index == values for index, values in read[-1])
        assert read[0] == read[1] == read[2]
        assert all(chosen[row] for index, _ in read[0] for row in index)
