"""What is known of the batches of a pass that were yielded."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from annbatch_distributed import Rank, Tally
from annbatch_distributed.loader.delivered import Delivered

BEGUN: Any = Rank(0, 1)  # anything that can be pickled
#: Load requests, and the rows of their batches.
REQUESTS: list[tuple[Any, list[list[int]]]] = [
    ({"requests": [slice(10, 14), slice(2, 4)], "splits": [np.array([5, 0]), np.array([1, 1])]}, [[3, 10], [11, 11]]),
    ({"requests": [slice(0, 2)], "splits": []}, []),
    (
        {"requests": [slice(7, 8), slice(5, 7)], "splits": [np.array([2, 0])], "repeated": np.array([1, 1, 0]) > 0},
        [[6, 7]],
    ),
]


@pytest.mark.parametrize("n_asked", [1, 3])
def test_batches_are_counted_as_they_were_asked_for_or_else_as_they_were_given(n_asked: int) -> None:
    asked, given = Delivered(BEGUN), Delivered(BEGUN)
    expected, marks = Tally(), []
    for which in range(0, 3, n_asked):
        for request, _ in REQUESTS[which : which + n_asked]:  # some are asked for before others are yielded
            asked.ask(request)
            given.ask(request)
        for rows in (rows for _, batches in REQUESTS[which : which + n_asked] for rows in batches):
            marks.append(asked.deliver(None))
            expected.add(rows)
            given.deliver(np.array([1000, 1001]))
            assert asked.read.to_dict() == expected.to_dict()
    assert given.read == sum((_tally([1000, 1001]) for _ in range(3)), Tally())
    assert marks[:2] == [None, None]
    assert marks[2] is not None
    assert marks[2].tolist() == [False, True]


def _tally(rows: list[int]) -> Tally:
    tally = Tally()
    tally.add(rows)
    return tally


def test_a_pickle_has_what_was_counted_and_no_load_request() -> None:
    delivered = Delivered(BEGUN)
    delivered.ask({"requests": [slice(0, 100_000)], "splits": [np.arange(100_000), np.arange(9)]})
    delivered.deliver(None)
    pickled = pickle.dumps(delivered)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).read.to_dict() == delivered.read.to_dict()
