"""Which batches of a stream are kept and which rows are read for them, against going through batches one by one."""

# What mypy is told to ignore: annbatch's LoadRequest doesn't declare the keys that samplers may add to it.

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.passes.requests import (
    add_missing_splits,
    batches_of,
    bounds_of,
    enforce_n_batches,
    mark_repeats,
    select,
    translate,
)
from annbatch_distributed.sharding import Rows
from annbatch_distributed.sharding.batches import WorkerBatches
from tests.samplers import batches, request_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest


@st.composite
def streams(draw: st.DrawFn) -> list[LoadRequest]:
    """Some requests, of slices or index arrays, whose rows are cut to batches as they are or in any order."""
    requests: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.integers(1, 4), max_size=4))
        n_rows = sum(sizes)
        first = draw(st.integers(0, 50))
        rows: Any = [slice(first, first + n_rows // 2), slice(first + 60, first + 60 + n_rows - n_rows // 2)]
        if draw(st.booleans()):
            rows = np.array(request_rows({"requests": rows}), dtype=np.int64)
        order = np.array(draw(st.permutations(range(n_rows)) | st.just(range(n_rows))), dtype=np.int64)
        splits = np.split(order, np.cumsum(sizes)[:-1]) if sizes else []
        requests.append({"requests": rows, "splits": splits, "repeated": np.arange(n_rows) % 3 == 0, "note": first})
    return requests


def stretches(numbers: set[int]) -> list[list[int]]:
    """Ascending numbers, those that follow each other together."""
    return [
        [number for _, number in run]
        for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ]


def pieces(numbers: set[int]) -> tuple[range, ...]:
    return tuple(range(part[0], part[-1] + 1) for part in stretches(numbers))


@given(streams(), st.data())
def test_exactly_the_batches_in_hand_are_kept_and_read(stream: list[LoadRequest], data: st.DataObject) -> None:
    numbered: list[tuple[LoadRequest, list[int]]] = []
    n = 0
    for request in stream:
        numbered.append((request, list(range(n, n + len(request["splits"])))))
        n += len(request["splits"])
    left = {number for number in range(n) if data.draw(st.booleans())}
    own = {number for number in left if data.draw(st.booleans())}
    found = [request for request in select(stream, WorkerBatches(pieces(left), pieces(own))) if request["splits"]]

    expected = []
    with_own = [(request, numbers) for request, numbers in numbered if own.intersection(numbers)]
    for request, numbers in with_own:
        kept = [split for number, split in zip(numbers, request["splits"], strict=True) if number in own]
        expected += [[request_rows(request)[position] for position in split] for split in kept]
    assert batches(found) == expected

    for request, (whole, numbers) in zip(found, with_own, strict=True):
        assert request["note"] == whole["note"]  # type: ignore[typeddict-item]  # a key of a user's own, not in LoadRequest
        rows = request_rows(whole)
        marks = dict(zip(rows, whole["repeated"], strict=True))  # type: ignore[typeddict-item]  # a key of a user's own
        assert request["repeated"].tolist() == [marks[row] for row in request_rows(request)]  # type: ignore[typeddict-item]  # a key of a user's own
        due = {
            int(position)
            for number, split in zip(numbers, whole["splits"], strict=True)
            if number in own
            for position in split
        }
        if own.issuperset(numbers):
            assert request is whole
        else:
            assert request_rows(request) == [rows[position] for position in sorted(due)]


def test_nothing_is_drawn_from_a_sampler_behind_the_last_batch_in_hand_unless_the_pass_ends_with_it() -> None:
    drawn = []

    def requests() -> Iterator[LoadRequest]:
        for number in range(4):
            drawn.append(number)
            yield {"requests": [slice(0, 4)], "splits": [np.arange(2), np.arange(2, 4)]}
        drawn.append(-1)

    for own, left, expected in [
        (range(2, 4), range(8), [0, 1]),
        (range(2, 5), range(8), [0, 1, 2]),
        (range(1, 2), range(1, 8), [0]),
        (range(2, 8), range(8), [0, 1, 2, 3, -1]),
        (range(2, 4), range(4), [0, 1, 2, 3, -1]),
    ]:
        drawn.clear()
        kept = list(select(requests(), WorkerBatches((left,), (own,))))
        assert sum(len(request["splits"]) for request in kept) == len(own)
        assert drawn == expected
    drawn.clear()
    assert list(select(requests(), WorkerBatches((range(8),), ()))) == []
    assert drawn == [0]
    single: Iterator[LoadRequest] = iter([{"requests": [slice(0, 2)], "splits": [np.arange(2)]}] * 4)
    assert list(select(single, WorkerBatches((range(4),), ()))) == []
    assert len(list(single)) == 3
    drawn.clear()
    assert list(select(requests(), WorkerBatches((), ()))) == []
    assert drawn == [0, 1, 2, 3, -1]


@given(streams(), st.booleans(), st.data())
def test_bounds_are_those_of_the_rows_in_some_batches_that_are_no_repeats(
    stream: list[LoadRequest], marked: bool, data: st.DataObject
) -> None:
    for whole in stream:
        request: Any = whole if marked else {key: value for key, value in whole.items() if key != "repeated"}
        splits = [split for split in request["splits"] if data.draw(st.booleans())]
        if not splits:
            continue
        rows = request_rows(request)
        marks = request.get("repeated", np.zeros(len(rows), dtype=bool))
        expected = stretches({rows[position] for split in splits for position in split if not marks[position]})
        for once in (True, False):
            starts, stops = bounds_of(request, splits, once=once)
            assert starts.dtype == stops.dtype == np.int64
            assert Rows.of_bounds(starts, stops) == Rows(tuple(range(part[0], part[-1] + 1) for part in expected))
            if not once:
                assert list(zip(starts, stops, strict=True)) == [(part[0], part[-1] + 1) for part in expected]


def test_of_a_request_that_is_read_wholly_the_bounds_are_its_slices() -> None:
    splits = [np.array([0, 2]), np.array([1, 3])]
    for requests in ([slice(7, 9), slice(2, 4)], np.array([slice(7, 9), slice(2, 4)])):
        request: LoadRequest = {"requests": requests, "splits": splits}
        assert [bounds.tolist() for bounds in bounds_of(request, splits, once=True)] == [[7, 2], [9, 4]]
        assert [bounds.tolist() for bounds in bounds_of(request, splits[:1], once=True)] == [[2, 7], [3, 8]]
    twice = [np.array([0, 0, 0, 0])]
    assert [bounds.tolist() for bounds in bounds_of(request, twice, once=False)] == [[7], [8]]
    empty: LoadRequest = {"requests": [], "splits": []}
    starts, stops = bounds_of(empty, [], once=True)
    assert (starts.tolist(), stops.tolist()) == ([], [])
    assert starts.dtype == stops.dtype == np.int64


@given(streams())
def test_the_rows_of_batches_are_those_at_the_positions_of_their_splits(stream: list[LoadRequest]) -> None:
    for request in stream:
        assert [rows.tolist() for rows in batches_of(request)] == batches([request])


def test_splits_are_left_out_of_some_requests_only() -> None:
    there: LoadRequest = {"requests": [slice(0, 2)], "splits": [np.arange(2)]}
    requests: list[LoadRequest] = [there, {"requests": [slice(2, 5)]}, there]
    completed = add_missing_splits(requests, batch_size=2, shuffle=False, rng=np.random.default_rng(0), name="It")
    assert batches(completed) == [[0, 1], [2, 3], [4], [0, 1]]


def test_a_batch_of_two_rows_can_be_halved_and_another_key_stays() -> None:
    request: Any = {"requests": [slice(0, 3)], "splits": [np.arange(2), np.arange(2, 3)], "note": 1}
    [fitted] = enforce_n_batches([request], promised=2, planned=3, name="It")
    assert batches([fitted]) == [[0], [1], [2]]
    assert fitted["note"] == 1  # type: ignore[typeddict-item]  # a key of a user's own, not in LoadRequest


def test_a_sampler_runs_ahead_until_there_are_slices_or_rows_enough_and_again_after_that() -> None:
    taken = []

    def requests(slices: int, sizes: list[int]) -> Iterator[LoadRequest]:
        for size in sizes:
            taken.append(size)
            yield {"requests": [slice(0, 1)] * slices, "splits": [np.zeros(size, dtype=np.int64)]}

    for slices, sizes, per_group in [
        (1, [0] * 6_000, 2_048),
        (3, [0] * 6_000, 683),
        (0, [2**20 - 1, 1] * 9, 2),
        (0, [2**19] * 9, 2),
    ]:
        taken.clear()
        ahead = translate(requests(slices, sizes), Rows((range(10),)), name="It", rows_ahead=1 << 20)
        for number in range(2 * per_group):
            next(ahead)
            assert len(taken) == (1 + number // per_group) * per_group


def test_of_requests_translated_ahead_the_one_that_strays_is_named_whatever_is_before_it() -> None:
    requests: list[Any] = [
        {"requests": part, "splits": []} for part in ([], [slice(3, 7)], [slice(4, 4)], [slice(8, 11)], [])
    ]
    with pytest.raises(RuntimeError, match=r"was given the rows \[0, 10\) and asked for rows from \[8, 11\)"):
        list(translate(requests, Rows((range(10),)), name="It", rows_ahead=1 << 20))


def test_repeats_are_marked_in_every_request() -> None:
    requests: list[LoadRequest] = [
        {"requests": [slice(0, 3)], "splits": []},
        {"requests": np.array([5, 1]), "splits": []},
    ]
    marks = [request["repeated"].tolist() for request in mark_repeats(requests, first=2)]  # type: ignore[typeddict-item]  # a key of a user's own
    assert marks == [[False, False, True], [True, False]]
