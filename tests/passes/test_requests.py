"""Streams of load requests, step by step."""

# What mypy is told to ignore: annbatch's LoadRequest doesn't declare the keys that samplers may add to it.

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
from annbatch import Loader
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.passes.requests import add_missing_splits, check, enforce_n_batches, mark_repeats, translate
from annbatch_distributed.rows import Rows
from tests.samplers import MaskBlind, batches, flat, job, request_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    [request] = add_missing_splits([given_request], batch_size=4, shuffle=shuffle, rng=rng, name="It")
    assert batch_sizes([request]) == [[4, 4, 3]]
    read = flat(batches([request]))
    assert sorted(read) == sorted(request_rows(given_request))
    assert (read == request_rows(given_request)) is not shuffle
    assert "splits" not in given_request


def test_without_splits_and_batch_size_there_is_nothing_to_cut_to() -> None:
    with pytest.raises(ValueError, match="It yields load requests without splits, so it must have a batch_size"):
        list(
            add_missing_splits(
                [{"requests": []}], batch_size=None, shuffle=True, rng=np.random.default_rng(0), name="It"
            )
        )


@pytest.mark.parametrize(("planned", "expected"), [(5, [[4, 4], [4, 4, 3]]), (6, [[4, 4], [4, 2, 2, 3]])])
def test_a_missing_batch_comes_from_halving_the_largest_of_the_last_request(
    planned: int, expected: list[list[int]]
) -> None:
    given_requests = [cut([4, 4]), cut([4, 4, 3])]
    fitted = list(enforce_n_batches(given_requests, promised=5, planned=planned, name="It"))
    assert batch_sizes(fitted) == expected
    assert flat(batches(fitted)) == flat(batches(given_requests))
    assert batch_sizes(given_requests) == [[4, 4], [4, 4, 3]]


def test_a_request_without_batches_after_the_last_one_is_passed_on() -> None:
    empty: LoadRequest = {"requests": [slice(0, 2)], "splits": []}
    assert batch_sizes(enforce_n_batches([cut([4]), empty], promised=1, planned=2, name="It")) == [[2, 2], []]


def test_single_rows_cannot_be_halved() -> None:
    with pytest.raises(RuntimeError, match="It ended on batches of a single row"):
        list(enforce_n_batches([cut([1, 1])], promised=2, planned=3, name="It"))


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
    assert translated["repeated"].tolist() == [position >= 8 for position in local]  # type: ignore[typeddict-item]  # a key of a user's own
    assert request["requests"] is requests


bounds = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(lambda pair: slice(*pair))


@given(st.lists(st.lists(bounds, max_size=4) | st.just(np.array([7, 2])), max_size=8))
def test_requests_translated_ahead_are_those_translated_one_by_one(several: list[Any]) -> None:
    requests: list[LoadRequest] = [{"requests": one, "splits": [np.arange(2)]} for one in several]
    one_by_one = [list(translate([request], ROWS, name="It")) for request in requests]
    ahead = list(translate(requests, ROWS, name="It", rows_ahead=1 << 20))
    assert [request_rows(request) for request in ahead] == [request_rows(request) for [request] in one_by_one]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32])
@pytest.mark.parametrize("offset", [200, 60_000, 4 * 10**9])
def test_an_index_array_of_any_type_is_translated_to_rows_that_this_type_does_not_hold(dtype: Any, offset: int) -> None:
    request: LoadRequest = {"requests": np.arange(100, dtype=dtype), "splits": []}
    [translated] = translate([request], Rows((range(offset, offset + 100),)), name="It")
    assert request_rows(translated) == list(range(offset, offset + 100))


def test_without_splits_and_shuffle_nothing_says_whether_to_shuffle() -> None:
    with pytest.raises(ValueError, match="so shuffle must be True or False, and is None"):
        list(
            add_missing_splits([{"requests": []}], batch_size=2, shuffle=None, rng=np.random.default_rng(0), name="It")
        )


def test_a_request_for_no_rows_has_no_batches() -> None:
    [request] = add_missing_splits(
        [{"requests": []}], batch_size=2, shuffle=False, rng=np.random.default_rng(0), name="It"
    )
    assert request["splits"] == []


def test_other_keys_are_passed_on() -> None:
    request: Any = {"requests": [slice(6, 10)], "splits": [], "note": 1}
    [translated] = mark_repeats(translate([request], ROWS, name="It"), first=24)
    assert translated["note"] == 1  # type: ignore[typeddict-item]  # a key of a user's own, not in LoadRequest
    assert translated["repeated"].tolist() == [False, False, True, True]  # type: ignore[typeddict-item]  # a key of ours


class Yielding(MaskBlind):
    """Yields what it is given, as one batch or as many as it is given."""

    def __init__(self, *requests: Any, n_batches: Any = 1) -> None:
        super().__init__(batch_size=20)
        self.requests, self.count = requests, n_batches

    def n_batches(self, n_obs: int) -> int:
        return int(self.count)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        yield from self.requests


def read_alone(sampler: MaskBlind) -> list[list[int]]:
    """The rows of each batch that annbatch's Loader yields of 20 rows."""
    data = ad.AnnData(np.arange(20.0, dtype="float32").reshape(-1, 1))
    loader = Loader(batch_sampler=sampler, return_index=True, preload_to_gpu=False).add_adata(data)
    return [batch["index"].tolist() for batch in loader]


ROWS_10, TEN = [slice(5, 15)], [np.arange(10)]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"requests": [slice(5, 9), slice(0, 2)], "splits": [np.array([5, 0]), np.array([1])]}, [[1, 5], [6]]),
        ({"requests": (slice(5, 9), slice(3, 3)), "splits": [np.arange(4)]}, [[5, 6, 7, 8]]),
        ({"requests": np.array([slice(5, 9)]), "splits": (np.arange(4, dtype=np.uint64),)}, [[5, 6, 7, 8]]),
        ({"requests": [slice(np.int64(5), np.uint8(9), 1)], "splits": [[0, 3]]}, [[5, 8]]),
        ({"requests": np.array([7, 3], dtype=np.uint16), "splits": [np.array([1], dtype=np.int8)]}, [[3]]),
        ({"requests": np.array([7, 3, 7]), "splits": [np.array([1, 1, 2])]}, [[3, 3, 7]]),
        ({"requests": ROWS_10, "splits": np.arange(8).reshape(2, 4)}, [[5, 6, 7, 8], [9, 10, 11, 12]]),
        ({"requests": ROWS_10, "splits": [np.arange(10)[::-2]]}, [[14, 12, 10, 8, 6]]),
    ],
)
def test_what_annbatchs_loader_reads_as_it_is_meant_is_read_so(request_: Any, expected: list[list[int]]) -> None:
    sampler = Yielding(request_, n_batches=len(expected))
    [rank] = job(sampler, 1, remainder="keep")
    assert batches(rank.sample(20)) == read_alone(sampler) == expected


#: What is wrong, which kind of error it is, and what that says.
MALFORMED: list[tuple[Any, type[Exception], str]] = [
    # what is no load request
    (None, TypeError, "must yield load requests, dicts with 'requests' and 'splits', got None"),
    ([slice(0, 4)], TypeError, "must yield load requests"),
    ({"splits": TEN}, TypeError, "must yield load requests"),
    # rows
    ({"requests": None, "splits": TEN}, TypeError, "slices or an integer array of rows, got None"),
    ({"requests": slice(0, 10), "splits": TEN}, TypeError, r"slices or an integer array of rows, got slice\(0, 10"),
    ({"requests": [*range(10)], "splits": TEN}, TypeError, r"slices or an integer array of rows, got \[0, 1"),
    ({"requests": [slice(0, 9), 9], "splits": TEN}, TypeError, "slices or an integer array of rows, got"),
    ({"requests": [range(10)], "splits": TEN}, TypeError, "slices or an integer array of rows, got"),
    ({"requests": np.arange(10).reshape(1, 10), "splits": TEN}, TypeError, "an array of int64 in 2 dimensions"),
    ({"requests": np.array(3), "splits": [np.arange(1)]}, TypeError, "an array of int64 in 0 dimensions"),
    ({"requests": np.arange(10.0), "splits": TEN}, TypeError, "an array of float64 in 1 dimensions"),
    ({"requests": np.ones(10, dtype=bool), "splits": TEN}, TypeError, "an array of bool in 1 dimensions"),
    ({"requests": np.array([["a"]]), "splits": TEN}, TypeError, "an array of <U1"),
    ({"requests": np.array([[slice(0, 10)]]), "splits": TEN}, TypeError, "slices or an integer array of rows, got"),
    ({"requests": [slice(0.0, 10.0)], "splits": TEN}, TypeError, r"slice\(0.0, 10.0, None\). Bounds must be integers"),
    ({"requests": [slice(0, 4), slice(4, 10.0)], "splits": TEN}, TypeError, r"slice\(4, 10.0, None\). Bounds must"),
    ({"requests": [slice(10)], "splits": TEN}, TypeError, r"slice\(None, 10, None\). Bounds must be integers"),
    ({"requests": [slice(0, None)], "splits": TEN}, TypeError, "Bounds must be integers"),
    ({"requests": [slice("a", "b")], "splits": TEN}, TypeError, "Bounds must be integers"),
    ({"requests": [slice(0, 10**30)], "splits": TEN}, TypeError, "Bounds must be integers of 64 bits"),
    ({"requests": [slice(0, 20, 2)], "splits": TEN}, RuntimeError, r"slice\(0, 20, 2\).*leave out its step"),
    ({"requests": [slice(0, 5), slice(9, 4, -1)], "splits": [np.arange(5)]}, RuntimeError, "leave out its step"),
    ({"requests": [slice(0, 5), slice(9, 4)], "splits": [np.arange(5)]}, RuntimeError, "stops before it starts"),
    ({"requests": [slice(-3, 7)], "splits": TEN}, RuntimeError, r"asked for rows from \[-3, 7\)"),
    ({"requests": [slice(15, 25)], "splits": TEN}, RuntimeError, r"asked for rows from \[15, 25\)"),
    ({"requests": np.arange(-1, 9), "splits": TEN}, RuntimeError, r"asked for rows from \[-1, 9\)"),
    ({"requests": np.arange(11, 21), "splits": TEN}, RuntimeError, r"asked for rows from \[11, 21\)"),
    ({"requests": [], "splits": []}, RuntimeError, "a load request for no rows"),
    ({"requests": [slice(3, 3)]}, RuntimeError, "a load request for no rows"),
    ({"requests": np.arange(0)}, RuntimeError, "a load request for no rows"),
    # splits
    (
        {"requests": ROWS_10, "splits": None},
        TypeError,
        "must be a list of integer arrays, one for each batch, got None",
    ),
    ({"requests": ROWS_10, "splits": (part for part in TEN)}, TypeError, "must be a list of integer arrays"),
    ({"requests": ROWS_10, "splits": {0: [1]}}, TypeError, "must be a list of integer arrays"),
    ({"requests": ROWS_10, "splits": np.arange(10)}, TypeError, "one of int64 in 0 dimensions"),
    ({"requests": ROWS_10, "splits": [3]}, TypeError, "one of int64 in 0 dimensions"),
    ({"requests": ROWS_10, "splits": [None]}, TypeError, "one of object in 0 dimensions"),
    ({"requests": ROWS_10, "splits": [[[0], [1, 2]]]}, TypeError, "one of object in 0 dimensions"),
    ({"requests": ROWS_10, "splits": [slice(0, 3)]}, TypeError, "one of object in 0 dimensions"),
    ({"requests": ROWS_10, "splits": [np.arange(10).reshape(2, 5)]}, TypeError, "one of int64 in 2 dimensions"),
    ({"requests": ROWS_10, "splits": [np.arange(10) < 3]}, TypeError, "one of bool in 1 dimensions.*np.flatnonzero"),
    ({"requests": ROWS_10, "splits": [np.arange(3.0)]}, TypeError, "one of float64 in 1 dimensions"),
    ({"requests": ROWS_10, "splits": [np.arange(3), np.arange(0)]}, RuntimeError, "yielded a batch without rows"),
    ({"requests": ROWS_10, "splits": [[]]}, RuntimeError, "yielded a batch without rows"),
    ({"requests": ROWS_10, "splits": [np.array([0, -1])]}, RuntimeError, r"positions in \[0, 10\).*from -1 to 0"),
    ({"requests": ROWS_10, "splits": [np.array([0]), np.array([10])]}, RuntimeError, "positions from 0 to 10"),
    ({"requests": ROWS_10, "splits": [np.array([2**64 - 1], dtype=np.uint64)]}, RuntimeError, "positions from"),
]


@pytest.mark.parametrize(("request_", "error", "message"), MALFORMED)
@pytest.mark.parametrize("policy", ["drop", "keep", "exact", "pad"])
def test_what_annbatchs_loader_cannot_read_or_would_misread_is_an_error_that_names_the_sampler(
    request_: Any, error: Any, message: str, policy: Any
) -> None:
    [rank] = job(Yielding(request_), 1, remainder=policy)
    requests = rank.sample(20)
    with pytest.raises(error, match=message) as raised:
        list(requests)
    assert "Yielding" in str(raised.value)


@given(st.data())
def test_a_request_in_order_is_passed_on_with_the_same_rows_in_the_same_batches(data: st.DataObject) -> None:
    if data.draw(st.booleans(), label="index array"):
        requests: Any = np.array(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)))
    else:
        pairs = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(lambda pair: slice(*sorted(pair)))
        requests = data.draw(st.lists(pairs, max_size=4).filter(lambda parts: any(p.start < p.stop for p in parts)))
    n_rows = len(request_rows({"requests": requests}))
    splits = data.draw(st.lists(st.lists(st.integers(0, n_rows - 1), min_size=1), min_size=1, max_size=4))
    request: Any = {"requests": requests, "splits": splits, "note": 1}
    [checked] = check([request], n_rows=10, name="It")
    assert batches([checked]) == [[request_rows(request)[position] for position in split] for split in splits]
    assert checked["note"] == 1  # type: ignore[typeddict-item]  # a key of a user's own, not in LoadRequest
    assert request["splits"] is splits


@pytest.mark.parametrize("request_", [{"requests": [], "splits": []}, {"requests": [slice(0, 3)], "splits": []}])
def test_requests_without_batches_end_even_if_the_sampler_would_go_on_for_ever(request_: Any) -> None:
    taken = count()
    endless = (request_ for _ in iter(lambda: next(taken), -1))
    with pytest.raises(
        RuntimeError, match=r"It (yielded a load request for no rows|asked for 12 rows in load requests)"
    ):
        list(islice(check(endless, n_rows=10, name="It"), 1_000))
    assert next(taken) < 10


def test_some_requests_without_batches_are_passed_on() -> None:
    requests: list[Any] = [
        {"requests": [slice(0, 5)], "splits": []},
        cut([10]),
        {"requests": [slice(5, 10)], "splits": []},
    ]
    assert batch_sizes(check(requests, n_rows=10, name="It")) == [[], [10], []]


def test_a_sampler_that_yields_nothing_at_all_says_so() -> None:
    class Returning(MaskBlind):
        def _sample(self, n_obs: int) -> Any:
            return None

    [rank] = job(Returning(4), 1)
    with pytest.raises(TypeError, match="Returning must yield load requests for its rows, got None"):
        list(rank.sample(20))


def test_endless_requests_are_stopped_where_the_promise_is_broken() -> None:
    class Endless(MaskBlind):
        def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
            while True:
                yield {"requests": [slice(0, 4)], "splits": [np.arange(4)]}

    for policy in ("drop", "keep", "exact", "pad"):
        [rank] = job(Endless(4), 1, remainder=policy)
        with pytest.raises(RuntimeError, match="Endless promised 5 batches"):
            list(rank.sample(20))


def test_load_requests_with_splits_and_without_are_passed_on_one_after_the_other_with_splits_as_arrays() -> None:
    given = [
        {"requests": [slice(0, 3)]},
        {"requests": [slice(3, 5, 1), slice(5, 6, None)], "splits": [[0, 2], (1,)], "note": 7},
        {"requests": np.array([6, 7])},
        {"requests": [slice(8, 10)], "splits": []},
    ]
    found = list(check(given, n_rows=10, name="S"))
    assert [request["requests"] is asked["requests"] for request, asked in zip(found, given, strict=True)] == [True] * 4
    assert ["splits" in request for request in found] == [False, True, False, True]
    assert [type(split) for split in found[1]["splits"]] == [np.ndarray] * 2
    assert [split.tolist() for split in found[1]["splits"]] == [[0, 2], [1]]
    assert dict(found[1])["note"] == 7
    assert given[1]["splits"] == [[0, 2], (1,)]
