"""What a policy promises is kept by every sampler, or it is an error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch.samplers import RandomSampler
from hypothesis import event, given
from hypothesis import strategies as st

from annbatch_distributed.passes.traits import n_draws
from tests.samplers import MaskBlind, batches, flat, job
from tests.strategies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from annbatch.types import LoadRequest

#: The rows of each batch, in load requests, that a sampler reads of so many rows in batches of so many.
type Requests = list[list[list[int]]]


def right(n_rows: int, size: int) -> Requests:
    """Every row once, two batches in a request."""
    cut = [list(range(start, min(n_rows, start + size))) for start in range(0, n_rows, size)]
    return [cut[start : start + 2] for start in range(0, len(cut), 2)]


def same_rows(n_rows: int, size: int) -> Requests:
    return [[[row % size for row in batch] for batch in request] for request in right(n_rows, size)]


def one_row_twice(n_rows: int, size: int) -> Requests:
    requests = right(n_rows, size)
    requests[-1][-1][-1] = 0
    return requests


def single_rows(n_rows: int, size: int) -> Requests:
    return [[batch[:1] for batch in request] for request in right(n_rows, size)]


def short_in_the_middle(n_rows: int, size: int) -> Requests:
    """Every row once, but a row of the first batch comes with the last one."""
    requests = right(n_rows, size)
    requests[-1][-1].append(requests[0][0].pop())
    return requests


def too_large(n_rows: int, size: int) -> Requests:
    return [[batch + batch for batch in request] for request in right(n_rows, size)]


def an_empty_batch(n_rows: int, size: int) -> Requests:
    requests = right(n_rows, size)
    requests[0][0] = []
    return requests


def nothing_twice(n_rows: int, size: int) -> Requests:
    """Too few rows: the second half of the requests reads the rows of the first half's."""
    requests = right(n_rows, size)
    half = len(requests) // 2
    return requests[:half] + requests[: len(requests) - half]


def back_to_front(n_rows: int, size: int) -> Requests:
    return [request[::-1] for request in right(n_rows, size)][::-1]


STREAMS = [
    right,
    back_to_front,
    same_rows,
    one_row_twice,
    single_rows,
    short_in_the_middle,
    too_large,
    an_empty_batch,
    nothing_twice,
]


class Told(MaskBlind):
    """Yields what it is told, as slices or index arrays, and promises as many batches as there are."""

    def __init__(self, batch_size: int, stream: Callable[[int, int], Requests], *, as_slices: bool) -> None:
        super().__init__(batch_size)
        self.stream, self.as_slices = stream, as_slices

    def n_batches(self, n_obs: int) -> int:
        return math.ceil(n_obs / self.batch_size)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        for request in self.stream(n_obs, self.batch_size):
            rows = sorted({row for batch in request for row in batch})
            requests: Any = [slice(row, row + 1) for row in rows] if self.as_slices else np.array(rows, dtype=int)
            yield {"requests": requests, "splits": [np.searchsorted(rows, batch).astype(int) for batch in request]}


def keeps(policy: str, requests: Requests, n_rows: int, size: int) -> bool:
    """Whether a policy's promise is kept, by looking at each batch and at each row."""
    read = flat(requests)
    lengths = [len(batch) for batch in read]
    if len(read) != math.ceil(n_rows / size) or not all(1 <= length <= size for length in lengths):
        return False
    if policy in ("drop", "pad") and any(length != size for length in lengths):
        return False
    return policy in ("drop", "keep") or sorted(flat(read)) == list(range(n_rows))


@given(
    st.sampled_from(STREAMS),
    st.sampled_from(POLICIES),
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(1, 6),
    st.booleans(),
)
def test_a_stream_that_breaks_the_promise_of_a_policy_is_an_error_and_one_that_keeps_it_is_not(
    stream: Callable[[int, int], Requests], policy: Any, n_obs: int, world_size: int, size: int, as_slices: bool
) -> None:
    ranks = job(Told(size, stream, as_slices=as_slices), world_size, remainder=policy)
    try:
        plan = ranks[0].plan(n_obs)
    except ValueError:
        return event("can't run")
    for rank, sampler in enumerate(ranks):
        n_rows = len(plan.shard(rank))
        if keeps(policy, stream(n_rows, size), n_rows, size):
            event("kept")
            read = batches(sampler.sample(n_obs))
            assert len(read) == sampler.n_batches(n_obs)
            if policy in ("exact", "pad"):
                assert sorted(flat(read)) == sorted(plan.shard(rank).rows)
        else:
            event("broken")
            with pytest.raises(RuntimeError, match=r"^Told (read|yielded|never|promised|ended)"):
                list(sampler.sample(n_obs))
    return None


def told(stream: Callable[[int, int], Requests], **options: Any) -> list[list[int]]:
    """What the only rank of a job reads of 1,000 rows in batches of 8."""
    [rank] = job(Told(8, stream, as_slices=False), 1, **options)
    return batches(rank.sample(1000))


@pytest.mark.parametrize(
    ("stream", "policy", "message"),
    [
        (same_rows, "exact", r"Told read rows more than once, row 0 for one.*remainder='exact'"),
        (one_row_twice, "pad", r"Told read rows more than once, row 0 for one.*remainder='pad'"),
        (single_rows, "drop", r"Told yielded a batch of 1 row.*8 rows.*remainder='drop'"),
        (single_rows, "pad", r"Told yielded a batch of 1 row.*8 rows.*remainder='pad'"),
        (single_rows, "exact", r"Told never read 875 of its 1000 rows, row 1 for one.*remainder='exact'"),
        (too_large, "keep", "Told yielded a batch of 16 rows, and its batch_size is 8"),
        (an_empty_batch, "keep", "Told yielded a batch without rows"),
    ],
)
def test_an_error_says_what_was_promised_and_what_came(
    stream: Callable[[int, int], Requests], policy: str, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        told(stream, remainder=policy)


def test_reading_the_same_rows_again_is_noticed_in_the_request_that_does() -> None:
    [rank] = job(Told(8, same_rows, as_slices=True), 1, remainder="exact")
    requests = rank.sample(1000)
    next(requests)
    with pytest.raises(RuntimeError, match="Told read rows more than once"):
        next(requests)


class RankAware(Told):
    """Holds a world size of its own, which has nothing to do with the job's."""

    world_size = 3
    rank = 0


def test_a_sampler_with_a_world_size_of_its_own_is_not_taken_for_a_wrapper() -> None:
    for sampler in job(RankAware(8, same_rows, as_slices=False), 2, remainder="exact"):
        with pytest.raises(RuntimeError, match="RankAware read rows more than once"):
            list(sampler.sample(1000))
    for sampler in job(RankAware(8, right, as_slices=False), 2, remainder="exact"):
        assert len(flat(batches(sampler.sample(1000)))) == 500


class Drawing(MaskBlind):
    """Draws with replacement, in full batches."""

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        for _ in range(self.n_batches(n_obs)):
            yield {"requests": np.zeros(self.batch_size, dtype=int), "splits": [np.arange(self.batch_size)]}


class RegisteredDrawing(Drawing):
    """The same, and tells so."""


n_draws.register(RegisteredDrawing, lambda sampler, n_rows: n_rows)


@pytest.mark.parametrize(("sampler", "policies"), [(Drawing(8), ("drop", "keep")), (RegisteredDrawing(8), POLICIES)])
def test_a_sampler_that_draws_with_replacement_is_held_to_nothing_that_it_does_not_promise(
    sampler: MaskBlind, policies: tuple[str, ...]
) -> None:
    for policy in policies:
        [rank] = job(sampler, 1, remainder=policy)
        assert [len(batch) for batch in batches(rank.sample(800))] == [8] * 100


def test_where_every_row_is_promised_a_sampler_that_draws_with_replacement_must_be_registered() -> None:
    [rank] = job(Drawing(8), 1, remainder="exact")
    with pytest.raises(RuntimeError, match=r"annbatch_distributed\.passes\.n_draws"):
        list(rank.sample(800))


class TwiceAsMany(Told):
    """Promises more full batches than its rows make."""

    def n_batches(self, n_obs: int) -> int:
        return 2 * super().n_batches(n_obs)


@pytest.mark.parametrize(("policy", "size"), [("exact", 1), ("pad", 4)])
def test_more_batches_than_the_rows_can_make_are_refused_beforehand(policy: Any, size: int) -> None:
    raised = set()
    for rank in job(TwiceAsMany(size, right, as_slices=True), 2, remainder=policy):
        with pytest.raises(ValueError, match="makes 20 batches") as error:
            rank.validate(20 if size == 1 else 80)
        raised.add(str(error.value))
    assert len(raised) == 1


class Own(RandomSampler):
    """A user's own subclass."""


@pytest.mark.parametrize("policy", POLICIES)
def test_subclasses_of_annbatchs_samplers_keep_their_settings(policy: Any) -> None:
    for options in ({"num_samples": 26}, {"replacement": True, "num_samples": 30}):
        for rank in job(Own(4, 2, 8, **options), 2, remainder=policy):
            assert len(batches(rank.sample(160))) == rank.n_batches(160) == 4
    for rank in job(Own(4, 2, 8), 2, remainder=policy):
        assert len(batches(rank.sample(163))) == rank.n_batches(163)
