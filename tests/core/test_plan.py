"""Plans compared with assigning the rows one by one, and plans too large to enumerate."""

from __future__ import annotations

import pickle
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler
from hypothesis import assume, given
from hypothesis import strategies as st

from annbatch_distributed import (
    DistributedSampler,
    EpochPlan,
    Rank,
    Rows,
    Shuffled,
)
from annbatch_distributed.core.plan import Plan
from annbatch_distributed.core.units import EachRow
from tests.loaders import numbered
from tests.samplers import MaskBlind, batches, config_of, flat, plan_of
from tests.strategies import POLICIES

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.core.lanes import Remainder


class Drawing(MaskBlind):
    """A sampler that takes some samples with replacement."""

    def __init__(self, batch_size: int, n_samples: int) -> None:
        super().__init__(batch_size)
        self.n_samples = n_samples

    def n_draws(self, n_rows: int) -> int:
        return self.n_samples

    def set_draws(self, n_draws: int) -> None:
        self.n_samples = n_draws


class Fixed(MaskBlind):
    """A sampler that holds a value for each row, so that dropped rows stay the same."""

    def localize(self, rows: Rows, n_obs: int) -> None:
        pass


def plan_with(
    window: Rows,
    remainder: Remainder,
    world_size: int,
    batch_size: int | None,
    *,
    n_obs: int = 1000,
    epoch: int = 0,
    n_draws: int | None = None,
    rotates: bool = True,
    align: int | None = None,
    sampler_batches: tuple[int, ...] = (),
) -> Plan:
    """The plan of some rows of a collection."""
    size: Any = batch_size
    sampler: Any = MaskBlind(size) if rotates else Fixed(size)
    if n_draws is not None:
        sampler = Drawing(size, n_draws)
    sharding = "contiguous" if n_draws is None else "independent"
    config = config_of(sampler, remainder=remainder, sharding=sharding)
    units = EachRow().in_epoch(n_obs, epoch, None)
    plan = Plan.of(replace(config, align=align), n_obs, units, epoch, world_size, window)
    return replace(plan, sampler_batches=sampler_batches)


def assign(order: list[int], remainder: Remainder, world_size: int, batch_size: int) -> list[list[int]]:
    """The rows of each rank: its own rows, followed by the rows that it repeats under "pad"."""
    if remainder == "drop":
        n_full = 0
        while (n_full + 1) * world_size * batch_size <= len(order):
            n_full += 1
        return [order[rank * n_full * batch_size :][: n_full * batch_size] for rank in range(world_size)]
    sizes = [0] * world_size
    for number in range(len(order)):  # the last ranks have a row more
        sizes[-1 - number % world_size] += 1
    starts = [sum(sizes[:rank]) for rank in range(world_size)]
    if remainder == "pad":
        sizes = [ceil(max(sizes) / batch_size) * batch_size] * world_size
    return [
        [order[(start + place) % len(order)] for place in range(size)]
        for start, size in zip(starts, sizes, strict=True)
    ]


@st.composite
def windows(draw: st.DrawFn) -> Rows:
    """Rows with up to three gaps."""
    flags = [draw(st.booleans())] * draw(st.integers(0, 9))
    for _ in range(draw(st.integers(1, 3))):
        flags += [True] * draw(st.integers(1, 60)) + [False] * draw(st.integers(0, 9))
    return Rows.from_mask(np.array(flags))


@pytest.mark.parametrize("remainder", POLICIES)
@given(windows(), st.integers(1, 6), st.integers(1, 12), st.integers(0, 30))
def test_shards_are_contiguous_in_the_order(
    remainder: Any, window: Rows, world_size: int, batch_size: int, epoch: int
) -> None:
    """Each rank has a contiguous range of the order, with the size that the policy requires."""
    rows = list(window)
    assume(len(rows) >= world_size * {"drop": batch_size, "pad": 0}.get(remainder, 1))
    plan, after = (plan_with(window, remainder, world_size, batch_size, epoch=number) for number in (epoch, epoch + 1))
    n_dropped = len(rows) - len(flat(assign(rows, remainder, world_size, batch_size))) if remainder == "drop" else 0
    order = rows
    for _ in range(epoch if n_dropped else 0):  # each epoch drops the rows before the previous epoch's dropped rows
        order = order[-n_dropped:] + order[:-n_dropped]
    expected = assign(order, remainder, world_size, batch_size)
    assert [list(plan.shard(rank).rows) for rank in range(world_size)] == expected
    assert list(plan.dropped) == order[len(rows) - n_dropped :]
    assert not {*plan.dropped} & {*after.dropped}
    fixed = plan_with(window, remainder, world_size, batch_size, epoch=epoch, rotates=False)
    assert list(fixed.dropped) == rows[len(rows) - n_dropped :]

    assert plan.sizes == tuple(map(plan.size, range(world_size))) == tuple(map(len, expected))
    n_own = [plan.shard(rank).n_own for rank in range(world_size)]
    assert sum(n_own) == len(rows) - n_dropped
    assert [list(plan.shard(rank).repeated) for rank in range(world_size)] == [
        read[own:] for read, own in zip(expected, n_own, strict=True)
    ]
    assert (plan.n_dropped, plan.n_repeated) == (n_dropped, len(flat(expected)) - sum(n_own))


@pytest.mark.parametrize("remainder", POLICIES)
@given(st.integers(40, 90), st.integers(1, 5), st.integers(1, 8))
def test_independent_ranks_split_the_number_of_samples(
    remainder: Any, n_draws: int, world_size: int, batch_size: int
) -> None:
    """Independent ranks have the whole window, and split the number of samples."""
    window = Rows((range(10, 30), range(40, 61)))
    plan = plan_with(window, remainder, world_size, batch_size, n_draws=n_draws)
    assert (plan.n_samples, plan.dropped, plan.n_dropped, plan.n_repeated) == (n_draws, Rows(), 0, 0)
    for rank in range(world_size):
        assert (plan.shard(rank).rows, plan.shard(rank).n_own) == (window, len(window))
    draws = [*range(n_draws)]
    assert list(plan.sizes) == list(map(len, assign(draws, remainder, world_size, batch_size)))


@given(windows(), st.integers(1, 4), st.integers(1, 12), st.integers(1, 3), st.sampled_from(POLICIES))
def test_whole_chunks_come_first_in_a_shard(
    window: Rows, world_size: int, align: int, epoch: int, remainder: Any
) -> None:
    """Whole chunks of a shard come first; its other rows and its repeated rows keep their order."""
    assume(len(window) >= 2 * world_size)
    bare, aligned = (plan_with(window, remainder, world_size, 2, align=grid, epoch=epoch) for grid in (None, align))
    assert aligned.align == align
    for rank in range(world_size):
        rows, ordered = bare.shard(rank).rows, aligned.shard(rank)
        assert aligned.in_order(rank) == rows
        own = list(rows)[: ordered.n_own]
        chunks = [range(start, start + align) for start in own if not start % align]
        whole = [row for chunk in chunks if {*chunk} <= {*own} for row in chunk]
        assert list(ordered.rows) == whole + [row for row in own if row not in whole] + list(ordered.repeated)
        assert ordered.repeated == bare.shard(rank).repeated


@pytest.mark.parametrize(
    ("n_rows", "remainder", "epoch", "is_annbatchs"),
    [
        (100, "drop", 0, True),
        (99, "keep", 0, True),
        (100, "keep", 0, False),
        (100, "drop", 1, False),
        (99, "exact", 0, False),
        (99, "pad", 0, False),
    ],
)
def test_shards_equal_to_annbatchs_keep_its_order(n_rows: int, remainder: Any, epoch: int, is_annbatchs: bool) -> None:
    """A shard that equals annbatch's keeps annbatch's order, without alignment."""
    window = Rows((range(n_rows),))
    assert (plan_with(window, remainder, 3, 4, n_obs=n_rows, epoch=epoch, align=8).align is None) == is_annbatchs
    assert plan_with(window, remainder, 3, 4, n_obs=n_rows + 3, epoch=epoch, align=8).align == 8  # there is a mask


@pytest.mark.parametrize(("chunk_size", "expected"), [(8, 8), (3, 8), (4, 4), (16, 8)])
def test_blocks_limit_the_alignment(chunk_size: int, expected: int) -> None:
    """Chunks are aligned within blocks if their size divides the blocks' size; otherwise, the blocks are aligned."""
    sampler = DistributedSampler(RandomSampler(chunk_size, 4, 4), dist_info=Rank(0, 3), sharding=Shuffled(8), seed=0)
    assert plan_of(sampler, 500).align == expected


def test_replacement_from_shuffled_rows_starts_anywhere() -> None:
    """A chunk that is sampled with replacement starts at any row of a shuffled shard, whose rows keep their order."""
    wrapped = RandomSampler(8, 1, 8, replacement=True, num_samples=8)
    sampler = DistributedSampler(wrapped, dist_info=Rank(0, 1), sharding=Shuffled(8), seed=0, max_gap=0)
    assert plan_of(sampler, 32).align is None
    shard = list(sampler.plan(32).shard(0).rows)
    starts = {shard.index(rows[0]) for _ in range(50) for rows in batches(sampler.sample(32))}
    assert len({start % 8 for start in starts}) == 8


SIZES = {"chunk_size": 8, "preload_nchunks": 4, "batch_size": 16}


def shard(sampler: Sampler, **options: Any) -> list[int]:
    distributed = DistributedSampler(sampler, dist_info=Rank(1, 3), seed=0, mask=slice(3, 490), **options)
    distributed.set_epoch(1)
    return list(distributed.plan(500).shard(1).rows)


def test_rows_move_only_for_chunked_shuffling_samplers() -> None:
    """Rows move only for samplers that shuffle chunks, and by the sampler's chunk size."""
    samplers: list[Sampler] = [
        SequentialSampler(**SIZES),
        RandomSampler(**SIZES, replacement=True),
        ClassSampler(**SIZES, classes=pd.Categorical(["B"] * 500), num_samples=64),
    ]
    for sampler in samplers:
        assert shard(sampler) == sorted(shard(sampler))
    for chunk_size in (8, 16):
        rows = shard(RandomSampler(chunk_size, 4, 16))
        assert sorted(rows) != rows
        n_whole = len(rows) // chunk_size - 1
        assert all(start % chunk_size == 0 for start in rows[: n_whole * chunk_size : chunk_size])


@pytest.mark.parametrize(
    ("remainder", "sizes", "message"),
    [
        (
            "drop",
            (99, 10, 10),
            "selects 99 rows, too few .* 10 ranks times batch size 10 is 100",
        ),
        ("keep", (3, 4, 2), "selects 3 rows, too few for 4 ranks"),
        ("keep", (3, 4, None), "selects 3 rows, too few for 4 ranks"),
        ("exact", (3, 4, 2), "selects 3 rows, too few for 4 ranks"),
        ("pad", (0, 2, 3), "selects 0 rows, but at least one"),
    ],
)
def test_too_few_rows_or_samples_are_counted(remainder: Any, sizes: Any, message: str) -> None:
    """The error for too few rows or samples counts them; one row more is enough."""
    n_rows, world_size, batch_size = sizes
    with pytest.raises(ValueError, match=message):
        plan_with(Rows((range(n_rows),)), remainder, world_size, batch_size)
    plan_with(Rows((range(n_rows + 1),)), remainder, world_size, batch_size)
    with pytest.raises(ValueError, match=message.replace("selects", "takes").replace("rows", "samples")):
        plan_with(Rows((range(500),)), remainder, world_size, batch_size, n_draws=n_rows)


def test_batches_are_numbered_from_stream_to_stream() -> None:
    """Batches are numbered from stream to stream; each stream has the same number, except under `keep`."""
    window = Rows((range(50),))
    for remainder in POLICIES:
        plan = plan_with(window, remainder, 4, 4, sampler_batches=(3, 0, 5, 4))
        counts = [plan.n_batches(rank) for rank in range(4)]
        assert counts == ([3, 0, 5, 4] if remainder == "keep" else [5] * 4)
        assert [plan.first_number(stream) for stream in range(5)] == [sum(counts[:stream]) for stream in range(5)]
        streams = [stream for stream, count in enumerate(counts) for _ in range(count)]
        assert [plan.stream_of(number) for number in range(len(streams))] == streams


def public_plan(n_obs: int, world_size: int, **options: Any) -> EpochPlan:
    return DistributedSampler(RandomSampler(4, 2, 8), dist_info=Rank(0, world_size), **options).plan(n_obs)


@pytest.mark.parametrize("remainder", POLICIES)
def test_plan_of_10_billion_rows_stays_small(remainder: str) -> None:
    """A pickled plan of 10 billion rows on 1,024 ranks has less than 10 kB."""
    plan = public_plan(10**10, 1024, remainder=remainder)
    assert len(pickle.dumps(plan)) < 10_000
    assert sum(plan.shard(rank).n_own for rank in range(1024)) + plan.n_dropped == 10**10
    assert plan.shard(1023).rows.stops[0] == 10**10 - plan.n_dropped
    assert len({plan.n_batches(rank) for rank in range(1024)}) == 1


def test_plans_are_equal_on_every_rank() -> None:
    """Plans of one job are equal and have the same hash on every rank."""
    plans = [
        DistributedSampler(RandomSampler(4, 2, 8), dist_info=Rank(rank, 3), remainder="exact").plan(n_obs)
        for rank, n_obs in ((0, 100), (1, 100), (2, 100), (0, 101))
    ]
    assert [plan == plans[0] for plan in plans] == [True, True, True, False]
    assert len(set(plans)) == 2


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("virtual_ranks", [None, 4])
def test_rows_in_memory_are_as_planned(prefetch: int, virtual_ranks: int | None) -> None:
    """The plan's rows in memory are the largest load requests that a loader holds at once."""
    sampler = RandomSampler(chunk_size=4, preload_nchunks=6, batch_size=8)
    distributed = DistributedSampler(sampler, dist_info=Rank(0, 2), seed=0, virtual_ranks=virtual_ranks)
    loader = numbered(distributed, 500, prefetch=prefetch)
    sizes = [sum(part.stop - part.start for part in request["requests"]) for request in distributed.sample(500)]
    assert loader.plan() == distributed.plan(500)
    assert loader.plan().rows_in_memory == max(sizes) * (1 + prefetch)
    assert distributed.plan(40).rows_in_memory == 16  # all rows of a rank
