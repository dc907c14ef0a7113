"""Which batches of a stream are kept and which rows are read for them, against going through batches one by one."""

# What mypy is told to ignore: annbatch's LoadRequest doesn't declare the keys that samplers may add to it.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.lanes import SharedStep
from annbatch_distributed.passes.requests import (
    add_missing_splits,
    batches_of,
    enforce_n_batches,
    select,
    share,
    translate,
)
from annbatch_distributed.rows import Rows
from tests.samplers import batches, flat, repeats, request_rows

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


def cut(numbers: list[int], step: int) -> tuple[range, ...]:
    """Ascending numbers as ranges with a step wherever they follow each other so."""
    parts: list[range] = []
    for number in numbers:
        if parts and parts[-1].stop == number:
            parts[-1] = range(parts[-1].start, number + step, step)
        else:
            parts.append(range(number, number + step, step))
    return tuple(parts)


@given(streams(), st.integers(1, 3), st.data())
def test_exactly_the_batches_of_some_numbers_are_kept_and_their_rows_read(
    stream: list[LoadRequest], step: int, data: st.DataObject
) -> None:
    n = sum(len(request["splits"]) for request in stream)
    own = [number for number in range(n) if data.draw(st.booleans())]
    if not own:
        return
    found = list(select(stream, cut(own, step), n))
    # a request without batches may come along
    assert batches(found) == [batch for number, batch in enumerate(batches(stream)) if number in own]
    first, due = 0, iter([request for request in found if request["splits"]])
    for whole in stream:
        here = [number - first for number in own if first <= number < first + len(whole["splits"])]
        first += len(whole["splits"])
        if not here:
            continue
        request: Any = next(due)
        if len(here) == len(whole["splits"]):
            assert request is whole
            continue
        needed = sorted({int(place) for number in here for place in whole["splits"][number]})
        rows: Any = request_rows(whole)
        assert request_rows(request) == [rows[place] for place in needed]
        assert request["repeated"].tolist() == [whole["repeated"][place] for place in needed]  # type: ignore[typeddict-item]  # a key of a user's own
        assert request["note"] == whole["note"]  # type: ignore[typeddict-item]  # a key of a user's own, not in LoadRequest
    assert next(due, None) is None


def test_nothing_is_drawn_from_a_sampler_behind_the_last_batch_of_a_lane_unless_it_is_the_last_of_all() -> None:
    drawn = []

    def requests() -> Iterator[LoadRequest]:
        for number in range(4):
            drawn.append(number)
            yield {"requests": [slice(0, 4)], "splits": [np.arange(2), np.arange(2, 4)]}
        drawn.append(-1)  # whoever comes here sees whether the sampler keeps its promise

    for own, expected in [
        ((range(2, 4),), [0, 1]),
        ((range(2, 5),), [0, 1, 2]),
        ((range(1), range(3, 4)), [0, 1]),
        ((range(1, 7, 3),), [0, 1, 2]),
        ((range(2, 8),), [0, 1, 2, 3, -1]),
        ((range(1), range(7, 8)), [0, 1, 2, 3, -1]),
    ]:
        drawn.clear()
        kept = list(select(requests(), own, 8))
        assert sum(len(request["splits"]) for request in kept) == sum(map(len, own))
        assert drawn == expected


@given(st.integers(1, 6), st.integers(0, 20), st.integers(1, 3))
def test_lanes_that_share_a_batch_read_each_of_its_rows_once_in_parts_as_even_as_can_be(
    n_parts: int, n_more: int, first: int
) -> None:
    n_rows = n_parts + n_more
    split = np.random.default_rng(first).permutation(n_rows)
    request: Any = {"requests": [slice(first, first + n_rows)], "splits": [split], "note": 1}
    parts = [next(share([request], SharedStep(7, part, n_parts))) for part in range(n_parts)]
    assert flat(flat(map(batches, ([part] for part in parts)))) == flat(batches([request]))
    sizes = [len(request_rows(part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(sorted(flat(batches([part]))) == request_rows(part) for part in parts)
    assert not any("repeated" in part for part in parts)


def test_of_a_batch_that_several_lanes_read_all_but_one_mark_it_as_a_repeat() -> None:
    marks = np.array([False, False, True])
    request: Any = {"requests": [slice(4, 7)], "splits": [np.array([2, 0, 1])], "repeated": marks}
    (own,) = share([request], SharedStep(7))
    (again,) = share([request], SharedStep(7, is_repeat=True))
    assert batches([own]) == batches([again]) == [[6, 4, 5]]
    assert repeats([own]) == [[True, False, False]]  # which "pad" has repeated before
    assert repeats([again]) == [[True] * 3]


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
