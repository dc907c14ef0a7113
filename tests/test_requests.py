"""Streams of load requests, step by step."""

# What mypy is told to ignore: annbatch's LoadRequest doesn't declare the keys that samplers may add to it.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.requests import complete, fit, mark_repeats, translate
from annbatch_distributed.sharding import Rows
from tests.samplers import batches, flat, request_rows

if TYPE_CHECKING:
    from annbatch.types import LoadRequest

ROWS = Rows((range(10, 14), range(20, 26)))


def cut(sizes: list[int]) -> LoadRequest:
    """A request with batches of these sizes."""
    return {"requests": [slice(0, sum(sizes))], "splits": np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])}


def batch_sizes(requests: Any) -> list[list[int]]:
    return [[len(split) for split in request["splits"]] for request in requests]


@pytest.mark.parametrize(
    "rows", [np.arange(30, 41), [slice(0, 4), slice(9, 16)], np.array([slice(0, 4), slice(9, 16)])]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_splits_that_are_left_out_are_all_rows_cut_to_batches(rows: Any, shuffle: bool) -> None:
    given_request: LoadRequest = {"requests": rows}
    rng = np.random.default_rng(0)
    [request] = complete([given_request], batch_size=4, shuffle=shuffle, rng=rng, name="It")
    assert batch_sizes([request]) == [[4, 4, 3]]
    read = flat(batches([request]))
    assert sorted(read) == sorted(request_rows(given_request))
    assert (read == request_rows(given_request)) is not shuffle
    assert "splits" not in given_request


def test_splits_that_are_there_stay() -> None:
    request = cut([3, 1])
    [completed] = complete([request], batch_size=2, shuffle=True, rng=np.random.default_rng(0), name="It")
    assert completed is request


def test_without_splits_and_batch_size_there_is_nothing_to_cut_to() -> None:
    with pytest.raises(ValueError, match="It yields load requests without splits, so it must have a batch_size"):
        list(complete([{"requests": []}], batch_size=None, shuffle=True, rng=np.random.default_rng(0), name="It"))


@pytest.mark.parametrize(("planned", "expected"), [(5, [[4, 4], [4, 4, 3]]), (6, [[4, 4], [4, 2, 2, 3]])])
def test_a_missing_batch_comes_from_halving_the_largest_of_the_last_request(
    planned: int, expected: list[list[int]]
) -> None:
    given_requests = [cut([4, 4]), cut([4, 4, 3])]
    fitted = list(fit(given_requests, natural=5, planned=planned, name="It"))
    assert batch_sizes(fitted) == expected
    assert flat(batches(fitted)) == flat(batches(given_requests))
    assert batch_sizes(given_requests) == [[4, 4], [4, 4, 3]]


def test_a_request_without_batches_after_the_last_one_is_passed_on() -> None:
    empty: LoadRequest = {"requests": [slice(0, 2)], "splits": []}
    assert batch_sizes(fit([cut([4]), empty], natural=1, planned=2, name="It")) == [[2, 2], []]


def test_single_rows_cannot_be_halved() -> None:
    with pytest.raises(RuntimeError, match="It ended on batches of a single row"):
        list(fit([cut([1, 1])], natural=2, planned=3, name="It"))


@pytest.mark.parametrize(
    ("natural", "message"),
    [(3, r"It promised 3 batches \(n_batches\) and yielded only 2"), (1, "It promised 1 batches .* yielded 2 or more")],
)
def test_a_broken_promise_is_an_error_that_names_the_sampler(natural: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        list(fit([cut([4, 4])], natural=natural, planned=natural, name="It"))


@given(st.data())
def test_translated_rows_are_the_shards(data: st.DataObject) -> None:
    rows = list(ROWS)
    if data.draw(st.booleans(), label="index array"):
        requests: Any = np.array(data.draw(st.lists(st.integers(0, 9), max_size=6)), dtype=np.int32)
    else:
        bounds = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(lambda pair: slice(*sorted(pair)))
        requests = data.draw(st.lists(bounds, max_size=4))
    request: LoadRequest = {"requests": requests, "splits": []}
    [translated] = translate(mark_repeats([request], first=8), ROWS, name="It")
    local = request_rows(request)
    assert request_rows(translated) == [rows[position] for position in local]
    assert translated["repeated"].tolist() == [position >= 8 for position in local]  # type: ignore[typeddict-item]  # extra
    assert request["requests"] is requests


bounds = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(lambda pair: slice(*pair))


@given(st.lists(st.lists(bounds, max_size=4) | st.just(np.array([7, 2])), max_size=8))
def test_requests_translated_ahead_are_those_translated_one_by_one(several: list[Any]) -> None:
    requests: list[LoadRequest] = [{"requests": one, "splits": [np.arange(2)]} for one in several]
    one_by_one = [list(translate([request], ROWS, name="It")) for request in requests]
    ahead = list(translate(requests, ROWS, name="It", ahead=True))
    assert [request_rows(request) for request in ahead] == [request_rows(request) for [request] in one_by_one]


def test_a_sampler_is_run_ahead_by_no_more_than_some_rows_and_only_if_it_may_be() -> None:
    taken = []

    def requests() -> Any:
        for number in range(5_000):
            taken.append(number)
            yield {"requests": [slice(0, 10)], "splits": [np.arange(1000)]}

    next(translate(requests(), ROWS, name="It"))
    assert len(taken) == 1
    next(translate(requests(), ROWS, name="It", ahead=True))
    assert 1_000 < len(taken) < 1_100


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32])
@pytest.mark.parametrize("offset", [200, 60_000, 4 * 10**9])
def test_an_index_array_of_any_type_is_translated_to_rows_that_this_type_does_not_hold(dtype: Any, offset: int) -> None:
    request: LoadRequest = {"requests": np.arange(100, dtype=dtype), "splits": []}
    [translated] = translate([request], Rows((range(offset, offset + 100),)), name="It")
    assert request_rows(translated) == list(range(offset, offset + 100))


@pytest.mark.parametrize("requests", [[1, 2, 3], np.array([0.5])])
def test_what_is_neither_slices_nor_integers_is_a_type_error_that_names_the_sampler(requests: Any) -> None:
    with pytest.raises(TypeError, match="The requests of It must be slices or an integer array of rows, got"):
        list(translate([{"requests": requests, "splits": []}], ROWS, name="It"))


def test_without_splits_and_shuffle_nothing_says_whether_to_shuffle() -> None:
    with pytest.raises(ValueError, match="so shuffle must be True or False, and is None"):
        list(complete([{"requests": []}], batch_size=2, shuffle=None, rng=np.random.default_rng(0), name="It"))


def test_a_request_for_no_rows_has_no_batches() -> None:
    [request] = complete([{"requests": []}], batch_size=2, shuffle=False, rng=np.random.default_rng(0), name="It")
    assert request["splits"] == []


def test_other_keys_are_passed_on_and_repeats_marked_before_stay_marked() -> None:
    request: Any = {
        "requests": [slice(6, 10)],
        "splits": [],
        "note": 1,
        "repeated": np.array([True, False, False, True]),
    }
    [translated] = mark_repeats(translate([request], ROWS, name="It"), first=24)
    assert translated["note"] == 1  # type: ignore[typeddict-item]  # not in LoadRequest
    assert translated["repeated"].tolist() == [True, False, True, True]  # type: ignore[typeddict-item]  # extra
    [unmarked] = translate([request], ROWS, name="It")
    assert unmarked["repeated"] is request["repeated"]  # type: ignore[typeddict-item]  # not in LoadRequest


@pytest.mark.parametrize(
    "requests",
    [[slice(8, 11)], [slice(0, 2), slice(-1, 3)], np.array([0, 10]), np.array([-1]), np.array([slice(3, 99)])],
)
@pytest.mark.parametrize("rows", [ROWS, Rows((range(50, 60),))])
def test_rows_outside_the_shard_are_an_error_that_names_the_sampler(requests: Any, rows: Rows) -> None:
    request: LoadRequest = {"requests": requests, "splits": []}
    with pytest.raises(RuntimeError, match=r"It was given the rows \[0, 10\) and asked for rows from \["):
        list(translate([request], rows, name="It"))
