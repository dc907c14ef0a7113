"""Which batches DataLoader workers have, against a simulated torch, which collects from its workers in turn."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.sharding.batches import (
    Collected,
    Numbers,
    Worker,
    _cut,
    batches_done,
    batches_left,
    batches_of_worker,
    contains,
)

#: How many workers there are, and how many batches are collected.
runs = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=4)


def collect(n_batches: int, earlier: Collected, n_workers: int, n: int, *, keeps_order: bool) -> list[int]:
    """Collect so many batches, from workers that begin where earlier ones have come to."""
    *_, (_, before) = earlier
    workers = [
        chain.from_iterable(
            batches_of_worker(
                n_batches, earlier, Worker((worker + before) % n_workers, n_workers), keeps_order=keeps_order
            ).own
        )
        for worker in range(n_workers)
    ]
    found: list[int] = []
    n_asked = 0
    ended: set[int] = set()
    while len(found) < n and len(ended) < n_workers:
        worker = n_asked % n_workers
        n_asked += 1
        if worker not in ended:
            batch = next(workers[worker], None)
            ended |= {worker} if batch is None else set()
            found += [] if batch is None else [batch]
    return found


@given(st.integers(0, 40), runs, st.booleans())
def test_every_batch_is_collected_once_whatever_the_numbers_of_workers(n: int, runs: Collected, keeps: bool) -> None:
    collected: list[int] = []
    earlier: Collected = ()
    for n_workers, wanted in runs:
        before = ((1, len(collected)),) if keeps else (*earlier, (n_workers, 0))
        found = collect(n, before, n_workers, wanted, keeps_order=keeps)
        assert len(found) == min(wanted, n - len(collected))
        collected += found
        earlier = ((1, len(collected)),) if keeps else (*earlier, (n_workers, len(found)))
        assert sorted(chain(*batches_left(n, earlier))) == sorted(set(range(n)) - set(collected))
        assert list(chain(*batches_done(n, earlier))) == sorted(collected)
    assert len(set(collected)) == len(collected)
    if keeps:
        assert collected == list(range(len(collected)))


@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 40), st.booleans())
def test_the_same_number_of_workers_goes_on_where_it_was(n: int, n_workers: int, at: int, keeps: bool) -> None:
    at = min(at, n)
    dealt_to = 1 if keeps else n_workers
    whole = collect(n, ((dealt_to, 0),), n_workers, n, keeps_order=keeps)
    rest = collect(n, ((dealt_to, at),), n_workers, n, keeps_order=keeps)
    assert whole[at:] == rest


@given(st.integers(1, 60), st.integers(2, 6), st.integers(1, 8))
def test_the_batches_of_most_load_requests_belong_to_one_worker(n: int, n_workers: int, per_request: int) -> None:
    owners = [
        batches_of_worker(n, ((n_workers, 0),), Worker(worker, n_workers), keeps_order=False).own
        for worker in range(n_workers)
    ]
    requests = [range(first, min(n, first + per_request)) for first in range(0, n, per_request)]
    readers = [sum(any(contains(own, batch) for batch in request) for own in owners) for request in requests]
    assert sum(readers) <= len(requests) + n_workers - 1


def test_one_rank_may_have_a_batch_less_than_what_all_have_done() -> None:
    assert batches_left(3, ((1, 4),)) == ()
    assert batches_left(4, ((2, 5),)) == ()
    assert batches_of_worker(4, ((2, 5),), Worker(1, 2), keeps_order=False) == ((), ())
    assert batches_done(4, ((2, 5),)) == (range(4),)


@given(st.integers(0, 40), runs, st.integers(1, 5), st.booleans())
def test_every_worker_knows_what_any_of_them_has_left(n: int, runs: Collected, n_workers: int, keeps: bool) -> None:
    earlier = (*runs, (1 if keeps else n_workers, 0))
    workers = [batches_of_worker(n, earlier, Worker(w, n_workers), keeps_order=keeps) for w in range(n_workers)]
    assert all(each.left == batches_left(n, earlier) for each in workers)
    assert sorted(chain(*chain(*(each.own for each in workers)))) == list(chain(*batches_left(n, earlier)))


@given(st.integers(0, 40), runs, st.integers(2, 5))
def test_what_is_left_in_pieces_can_be_divided_one_by_one(n: int, runs: Collected, n_workers: int) -> None:
    numbers = list(chain(*batches_left(n, runs)))
    for worker in range(n_workers):
        own = batches_of_worker(n, (*runs, (1, 0)), Worker(worker, n_workers), keeps_order=True).own
        assert list(chain(*own)) == [number for place, number in enumerate(numbers) if place % n_workers == worker]


@given(
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.integers(0, 25), max_size=8),
)
def test_the_numbers_at_some_places_are_those_that_stand_there(lengths: list[int], bounds: list[int]) -> None:
    numbers: Numbers = tuple(range(10 * which, 10 * which + length) for which, length in enumerate(lengths))
    bounds = sorted(bounds)[len(bounds) % 2 :]
    standing = list(chain(*numbers))
    found = _cut(numbers, bounds)
    assert all(found)
    assert list(chain(*found)) == [
        number for place, number in enumerate(standing) if sum(bound <= place for bound in bounds) % 2
    ]


@given(st.integers(0, 40), runs, st.integers(-1, 41))
def test_a_number_is_among_those_in_one_of_their_parts(n: int, runs: Collected, number: int) -> None:
    numbers = batches_left(n, runs)
    assert contains(numbers, number) is (number in list(chain(*numbers)))


@pytest.mark.timeout(30)
def test_workers_that_have_nothing_cost_nothing() -> None:
    """A thousand batches, and as many workers as would take years to go through."""
    earlier = ((10**18, 3),) * 100
    assert batches_left(1000, earlier) == (range(300, 1000),)
    assert batches_done(1000, earlier) == (range(300),)
    assert batches_of_worker(1000, ((10**18, 0),), Worker(999, 10**18), keeps_order=False).own == (range(999, 1000),)
    assert batches_of_worker(1000, ((10**18, 0),), Worker(10**17, 10**18), keeps_order=False).own == ()
    assert batches_of_worker(1000, ((1, 0),), Worker(10**17, 10**18), keeps_order=True).own == ()


@pytest.mark.timeout(60)
def test_many_workers_cost_no_more_than_what_they_have_done() -> None:
    n = 100_000
    earlier = ((20_000, 20_000), (30_000, 25_000)) * 2
    numbers = batches_left(n, earlier)
    assert sum(map(len, numbers)) == n - 90_000
    assert sum(contains(numbers, number) for number in range(n)) == n - 90_000
