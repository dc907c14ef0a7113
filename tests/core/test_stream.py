"""Load requests of a wrapped sampler are checked, counted, selected and mapped to global rows."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
from annbatch import Loader
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank, Rows
from annbatch_distributed.core.lanes import Lane, SharedStep
from annbatch_distributed.core.plan import Plan
from annbatch_distributed.core.state import Position
from annbatch_distributed.core.stream import Pass
from annbatch_distributed.core.units import EachRow
from tests.samplers import Counting, IndexArrays, MaskBlind, batches, config_of, flat, job, request_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

    from annbatch_distributed.core.lanes import Numbers
    from annbatch_distributed.core.request import Request


class Yielding(MaskBlind):
    """A sampler that yields given load requests, with a given number of batches."""

    def __init__(self, *requests: Any, n_batches: Any = 1) -> None:
        super().__init__(batch_size=20)
        self.requests, self.count = requests, n_batches

    def n_batches(self, n_obs: int) -> int:
        return int(self.count)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        yield from self.requests


@pytest.mark.parametrize("is_enabled", [True, False])
def test_slices_are_made_without_garbage_collections(is_enabled: bool) -> None:
    """No garbage collection scans the slices that annbatch makes; later collections are as they were."""
    n_collections = 0

    def count(phase: str, info: object) -> None:
        nonlocal n_collections
        n_collections += phase == "start"

    def collections_of(run: Callable[[], object]) -> int:
        before = n_collections
        run()
        return n_collections - before

    requests = DistributedSampler(RandomSampler(1, 8, 8), dist_info=Rank(0, 1), seed=0).sample(100_000)
    gc.callbacks.append(count)
    try:
        assert collections_of(lambda: [slice(row, row + 1) for row in range(100_000)]) > 20
        if not is_enabled:
            gc.disable()
        assert collections_of(lambda: next(requests)) < 5
        assert gc.isenabled() == is_enabled
    finally:
        gc.callbacks.remove(count)
        gc.enable()


class OnlyStream:
    """The only stream of a plan of some rows."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def requests(self, numbers: Numbers, *, step: SharedStep | None = None, max_gap: int = 0) -> Iterator[Request]:
        lane = Lane(numbers) if step is None else Lane((), step)
        requests = Pass(self.plan, [lane], Position(), max_gap=max_gap)
        while True:
            try:
                yield requests.take()
            except StopIteration:
                return


def stream(sampler: Sampler, rows: Rows, policy: Any = "keep") -> OnlyStream:
    config = config_of(sampler, remainder=policy)
    plan = Plan(
        config, 100, EachRow().in_epoch(100, 0, None), 0, n_streams=1, selected=rows, order=rows, dropped=Rows()
    )
    return OnlyStream(replace(plan, sampler_batches=(sampler.n_batches(len(rows)),)))


ROWS = Rows((range(10, 14), range(20, 26)))


@given(st.data())
def test_batches_are_mapped_to_the_shard(data: st.DataObject) -> None:
    """Batches of the wrapped sampler are mapped to the rows of the shard, whatever gaps are read."""
    if data.draw(st.booleans(), label="index array"):
        requests: Any = np.array(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)), dtype=np.uint8)
    else:
        bounds = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(lambda pair: slice(*sorted(pair)))
        requests = data.draw(st.lists(bounds, max_size=4).filter(lambda parts: any(p.start < p.stop for p in parts)))
    local = request_rows({"requests": requests})
    splits = data.draw(st.lists(st.lists(st.integers(0, len(local) - 1), min_size=1), min_size=1, max_size=4))
    sampler = Yielding({"requests": requests, "splits": splits}, n_batches=len(splits))
    rows = list(ROWS)
    expected = [[rows[local[place]] for place in split] for split in splits]
    for longest in (0, 3, 64):
        (request,) = stream(sampler, ROWS).requests((range(len(splits)),), max_gap=longest)
        assert batches([request.to_annbatch()]) == expected


@pytest.mark.parametrize("offset", [200, 60_000, 4 * 10**9])
def test_small_index_dtypes_map_to_large_rows(offset: int) -> None:
    """An index array of a small dtype is mapped to rows that are too large for the dtype."""
    sampler = Yielding({"requests": np.arange(100, dtype=np.int8), "splits": [np.arange(100)]})
    (request,) = stream(sampler, Rows((range(offset, offset + 100),))).requests((range(1),))
    assert batches([request.to_annbatch()]) == [list(range(offset, offset + 100))]


def test_index_arrays_are_read_in_order() -> None:
    """The rows of index arrays are read in the order of the collection."""
    requests = list(job(IndexArrays(8), 1)[0].sample(64))
    assert len(requests) == 2
    for request in requests:
        assert sorted(request_rows(request)) == request_rows(request)
    assert sorted(flat(batches(requests))) == list(range(64)) != flat(batches(requests))


@pytest.mark.parametrize("rows", [np.arange(28, -1, -2), [slice(row, row + 1) for row in range(0, 29, 2)]])
def test_gaps_of_custom_samplers_are_read(rows: Any) -> None:
    """Gaps in the load requests of custom samplers are read if they are short enough."""
    sampler = Yielding({"requests": rows, "splits": [np.arange(15)]})
    for longest, n_ranges in ((0, 15), (1, 1), (64, 1)):
        (request,) = stream(sampler, Rows((range(100, 130),))).requests((range(1),), max_gap=longest)
        assert len(request.starts) == n_ranges
        assert sorted(flat(batches([request.to_annbatch()]))) == list(range(100, 129, 2))


@pytest.mark.parametrize("longest", [0, 2, 3, 64])
@pytest.mark.parametrize("sampler", [SequentialSampler(4, 2, 4), RandomSampler(4, 4, 4)])
def test_gaps_between_neighboring_rows_are_read(sampler: Any, longest: int) -> None:
    """A gap is read between rows that are neighbors in the shard, also if a chunk ends there."""
    # gaps of 2, 3, 4 and 2 rows, at local rows 4, 9, 16 and 18; chunks begin at 4, 8, 12 and 16
    shard = Rows((range(10, 14), range(16, 21), range(24, 31), range(35, 37), range(39, 41)))
    local = stream(sampler, Rows((range(len(shard)),))).requests((range(5),))
    read = stream(sampler, shard).requests((range(5),), max_gap=longest)
    rows = list(shard)
    for of_shard, in_global in zip(local, read, strict=True):
        order = of_shard.rows().tolist()
        expected = [rows[order[0]]]
        for before, after in pairwise(order):
            gap = range(rows[before] + 1, rows[after]) if after == before + 1 else range(0)
            expected += [*gap] * (len(gap) <= longest) + [rows[after]]
        assert in_global.rows().tolist() == expected


class Cut(MaskBlind):
    """A sampler of consecutive rows with given sizes of batches for each load request."""

    def __init__(self, *sizes: list[int], n_batches: int) -> None:
        super().__init__(batch_size=20)
        self.sizes, self.count = sizes, n_batches

    def n_batches(self, n_obs: int) -> int:
        return self.count

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        first = 0
        for sizes in self.sizes:
            n_rows = sum(sizes)
            splits = np.split(np.arange(n_rows), np.cumsum(sizes)[:-1])
            yield {"requests": [slice(first, first + n_rows)], "splits": splits if sizes else []}
            first += n_rows


def counted(*sizes: list[int], promised: int, planned: int) -> list[list[int]]:
    sampler = Cut(*sizes, n_batches=promised)
    only = stream(sampler, Rows((range(40),)), "exact")
    vars(only.plan)["most_batches"] = planned
    return [[len(split) for split in request.splits] for request in only.requests((range(planned),))]


@pytest.mark.parametrize(
    ("planned", "expected"),
    [(5, [[4, 4], [4, 4, 3]]), (6, [[4, 4], [4, 2, 2, 3]])],
)
def test_missing_batch_halves_the_largest_one(planned: int, expected: list[list[int]]) -> None:
    """A missing batch is made by halving the largest batch of the last load request."""
    assert counted([4, 4], [4, 4, 3], promised=5, planned=planned) == expected
    assert counted([4, 4], [4, 4, 3], [], promised=5, planned=planned) == expected


def test_batch_of_one_row_cannot_be_halved() -> None:
    """A batch of two rows can be halved; a batch of one row can't, which raises."""
    assert counted([2, 1], promised=2, planned=3) == [[1, 1, 1]]
    with pytest.raises(RuntimeError, match="Cut must yield full batches"):
        counted([1, 1], promised=2, planned=3)


@pytest.mark.parametrize(
    ("n_rows", "planned", "expected"),
    [
        (7, 3, [[0, 1, 2], [3, 4], [5, 6]]),  # batches of 3, 3 and 1 rows
        (6, 3, [[0, 1], [3, 4], [2, 5]]),  # 3 and 3 rows, of which the last are halved: 3, 2 and 1
        (9, 4, [[0, 1], [3, 4, 5], [6, 7], [2, 8]]),  # 3, 3, 2 and 1
        (5, 3, [[0, 1], [2], [3, 4]]),  # 2, 1 and 2: no batch can spare a row
    ],
)
def test_lone_row_joins_a_second_one(n_rows: int, planned: int, expected: list[list[int]]) -> None:
    """A lone row gets a row of the batch before if that has three, or else of the largest batch, if that has three."""
    only = stream(SequentialSampler(3, 3, 3), Rows((range(n_rows),)), "exact")
    vars(only.plan)["most_batches"] = planned
    assert batches(request.to_annbatch() for request in only.requests((range(planned),))) == expected


@pytest.mark.parametrize(("promised", "yielded"), [(3, "only 2"), (1, "2 or more")])
def test_wrong_number_of_batches_raises(promised: int, yielded: str) -> None:
    """Yielding a different number of batches than `n_batches` returned raises."""
    with pytest.raises(RuntimeError, match=rf"Cut yielded {yielded} batches, .* returned {promised}"):
        counted([2, 2], promised=promised, planned=promised)


@pytest.mark.parametrize("remainder", ["drop", "keep"])
def test_batches_despite_a_promise_of_none_raise(remainder: Any) -> None:
    """A sampler that returns 0 and yields batches raises on every rank, although no pass would run it."""
    for rank in job(Counting(8, lambda n_rows: math.ceil(n_rows / 8) - 1), 2, remainder=remainder):
        with pytest.raises(RuntimeError, match=r"Counting yielded 1 or more batches, .* returned 0"):
            rank.validate(16)
        with pytest.raises(RuntimeError, match=r"Counting yielded 2 or more batches, .* returned 1"):
            list(rank.sample(32))


@given(st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=4), st.data())
def test_stream_selects_batches_by_number(sizes: list[list[int]], data: st.DataObject) -> None:
    """A stream yields the batches of the selected numbers, and reads only their rows."""
    n = sum(map(len, sizes))
    numbers = [number for number in range(n) if data.draw(st.booleans())]
    if not numbers:
        return
    only = stream(Cut(*sizes, n_batches=n), Rows((range(30, 100),)))
    whole = batches(request.to_annbatch() for request in only.requests((range(n),)))
    parts = tuple(range(number, number + 1) for number in numbers)
    selected = [request.to_annbatch() for request in only.requests(parts)]
    assert batches(selected) == [whole[number] for number in numbers]
    assert flat(map(request_rows, selected)) == flat(whole[number] for number in numbers)


def test_sampler_is_not_run_past_the_lane() -> None:
    """A sampler isn't run past the last batch of a lane, unless that is the last batch of all."""
    request = {"requests": [slice(0, 4)], "splits": [np.arange(2), np.arange(2, 4)]}
    for numbers, n_requests in [
        ((range(2, 4),), 2),
        ((range(2, 5),), 3),
        ((range(1), range(3, 4)), 2),
        ((range(1, 7, 3),), 3),
        ((range(1), range(5, 6)), 3),
    ]:
        # a fifth request breaks the promise, which raises only in a lane that runs the sampler so far
        longer = stream(Yielding(*[request] * 5, n_batches=8), Rows((range(4),)))
        n_batches = sum(len(part.splits) for part in longer.requests(numbers))
        assert n_batches == sum(map(len, numbers))
        shorter = stream(Yielding(*[request] * n_requests, n_batches=8), Rows((range(4),)))
        assert sum(len(part.splits) for part in shorter.requests(numbers)) == n_batches
    with pytest.raises(RuntimeError, match="returned 8"):
        list(stream(Yielding(*[request] * 5, n_batches=8), Rows((range(4),))).requests((range(2, 8),)))


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 3))
def test_shared_batch_is_split_evenly(n_parts: int, n_more: int, seed: int) -> None:
    """Lanes that share a batch read each of its rows once, in parts that differ by at most one row."""
    n_rows = n_parts + n_more
    split = np.random.default_rng(seed).permutation(n_rows)
    only = stream(Yielding({"requests": [slice(0, n_rows)], "splits": [split]}), Rows((range(5, 5 + n_rows),)))
    parts = [
        request.to_annbatch()
        for part in range(n_parts)
        for request in only.requests((range(1),), step=SharedStep(0, part, n_parts))
    ]
    assert flat(batches(parts)) == (split + 5).tolist()
    sizes = [len(request_rows(part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert not any("repeated" in part for part in parts)


@pytest.mark.parametrize("rows", [np.arange(9, 20), [slice(0, 4), slice(9, 16)], np.array([slice(0, 4), slice(9, 16)])])
@pytest.mark.parametrize("shuffles", [True, False])
def test_missing_splits_are_cut_from_all_rows(rows: Any, shuffles: bool) -> None:
    """All rows of a request without splits are cut into batches, shuffled if the sampler shuffles."""

    class NoSplits(Yielding):
        batch_size, shuffle = 4, shuffles

    [rank] = job(NoSplits({"requests": rows}, n_batches=3), 1, remainder="keep")
    read = batches(rank.sample(20))
    assert [len(batch) for batch in read] == [4, 4, 3]
    assert sorted(flat(read)) == sorted(request_rows({"requests": rows}))
    assert (flat(read) == request_rows({"requests": rows})) is not shuffles


@pytest.mark.parametrize(("size", "shuffles"), [(None, True), (2, None)])
def test_missing_splits_require_batch_size_and_shuffle(size: Any, shuffles: Any) -> None:
    """A sampler that yields no splits must have a batch size and `shuffle`."""

    class NoSplits(Yielding):
        batch_size, shuffle = size, shuffles

    [rank] = job(NoSplits({"requests": [slice(0, 4)]}), 1, remainder="keep")
    with pytest.raises(ValueError, match="NoSplits must have a batch_size"):
        list(rank.sample(20))


def test_requests_without_batches_are_not_read() -> None:
    empty: list[Any] = [{"requests": [], "splits": []}, {"requests": [slice(0, 3)], "splits": []}, {"requests": []}]
    [rank] = job(Yielding(*empty, {"requests": [slice(0, 9)], "splits": TEN[:1]}, *empty), 1, remainder="keep")
    with pytest.raises(RuntimeError, match="positions from 0 to 9 of 9 rows"):
        list(rank.sample(20))
    [rank] = job(Yielding(*empty, {"requests": ROWS_10, "splits": TEN}, *empty), 1, remainder="keep")
    assert list(map(request_rows, rank.sample(20))) == [list(range(5, 15))]


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
def test_requests_are_read_as_by_annbatch(request_: Any, expected: list[list[int]]) -> None:
    """Load requests of every valid form are read as annbatch's Loader reads them."""
    sampler = Yielding(request_, n_batches=len(expected))
    [rank] = job(sampler, 1, remainder="keep")
    assert batches(rank.sample(20)) == read_alone(sampler) == expected


NO_REQUEST, BEYOND = "Yielding must yield load requests", "got rows of"
#: A malformed load request, the type of the error, and its message.
MALFORMED: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, NO_REQUEST),
    ([slice(0, 4)], TypeError, NO_REQUEST),
    ({"splits": TEN}, TypeError, NO_REQUEST),
    *(
        ({"requests": rows, "splits": TEN}, TypeError, f"{NO_REQUEST}.* got requests ")
        for rows in (
            None,
            slice(0, 20, 2),
            [*range(10)],
            [slice(0, 9), 9],
            [range(10)],
            np.arange(10).reshape(1, 10),
            np.arange(10.0),
            np.ones(10, dtype=bool),
            np.array([[slice(0, 10)]]),
            [slice(0.0, 10.0)],
            [slice(0, 4), slice(4, 10.0)],
            [slice(10)],
            [slice(0, None)],
            [slice(0, 10**30)],
            [slice(0, 20, 2)],
            [slice(0, 5), slice(9, 4, -1)],
            [slice(0, 5), slice(9, 4)],
        )
    ),
    ({"requests": [slice(-3, 7)], "splits": TEN}, RuntimeError, rf"{BEYOND} \[-3, 7\)"),
    ({"requests": [slice(15, 25)], "splits": TEN}, RuntimeError, rf"{BEYOND} \[15, 25\)"),
    ({"requests": np.arange(-1, 9), "splits": TEN}, RuntimeError, rf"{BEYOND} \[-1, 9\)"),
    ({"requests": np.arange(11, 21), "splits": TEN}, RuntimeError, rf"{BEYOND} \[11, 21\)"),
    *(
        ({"requests": ROWS_10, "splits": splits}, TypeError, f"{NO_REQUEST}.* got (splits|a batch of) ")
        for splits in (
            None,
            {0: [1]},
            np.arange(10),
            [3],
            [None],
            [[[0], [1, 2]]],
            [slice(0, 3)],
            [np.arange(10).reshape(2, 5)],
            [np.arange(10) < 3],
            [np.arange(3.0)],
            [np.arange(3), np.arange(0)],
            [[]],
        )
    ),
    ({"requests": ROWS_10, "splits": [np.array([0, -1])]}, RuntimeError, "positions from -1 to 0 of 10 rows"),
    ({"requests": ROWS_10, "splits": [np.array([0]), np.array([10])]}, RuntimeError, "positions from 10 to 10"),
    ({"requests": ROWS_10, "splits": [np.array([2**64 - 1], dtype=np.uint64)]}, RuntimeError, "positions from"),
]


@pytest.mark.parametrize(("request_", "error", "message"), MALFORMED)
def test_malformed_request_names_the_sampler(request_: Any, error: Any, message: str) -> None:
    """A load request that annbatch's Loader can't read, or would misread, raises and names the sampler."""
    for policy in ("drop", "keep", "exact", "pad"):
        [rank] = job(Yielding(request_), 1, remainder=policy)
        requests = rank.sample(20)
        with pytest.raises(error, match=message) as raised:
            list(requests)
        assert "Yielding" in str(raised.value)


def test_sample_must_return_an_iterable() -> None:
    """A sampler whose `sample` returns None raises a `TypeError` that names it."""

    class Returning(MaskBlind):
        def _sample(self, n_obs: int) -> Any:
            return None

    [rank] = job(Returning(4), 1)
    with pytest.raises(TypeError, match=r"Returning.sample must return an iterable"):
        list(rank.sample(20))
