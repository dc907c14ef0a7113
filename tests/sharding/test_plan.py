"""The plan as people see it, and at sizes where nothing can be enumerated."""

from __future__ import annotations

import pickle
from typing import Any

import anndata as ad
import numpy as np
import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, EpochPlan, Rank, StatefulLoader
from tests.samplers import MaskBlind
from tests.strategies import POLICIES


def plan(n_obs: int, world_size: int, **kwargs: object) -> EpochPlan:
    sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=8)
    return DistributedSampler(sampler, dist_info=Rank(0, world_size), **kwargs).plan(n_obs)


def test_the_table_says_who_gets_what_and_what_is_lost() -> None:
    assert str(plan(100, 3, mask=[slice(0, 40), slice(50, 90)])).splitlines() == [
        'epoch 0: 3 ranks share 80 of 100 rows (remainder="drop", batch size 8)',
        "rank  batches  rows  repeated  global rows",
        "   0        3    24         0  0:24",
        "   1        3    24         0  24:40, 50:58",
        "   2        3    24         0  58:82",
        "lost in this epoch: 8 rows, 10 % (82:90)",
        'to lose none: remainder="exact", "keep" or "pad"',
    ]


def test_the_table_says_what_is_repeated() -> None:
    assert str(plan(10, 2, remainder="pad")).splitlines()[2:] == [
        "   0        1     8         3  0:8",
        "   1        1     8         3  5:10, 0:3",
        "lost in this epoch: 0 rows; repeated: 6",
        "in memory: up to 8 rows on each rank",
    ]


def test_the_table_of_many_ranks_shows_the_first_and_the_last() -> None:
    lines = str(plan(10**9, 1024)).splitlines()
    table = lines[2:-3]
    assert len(table) == 17
    assert table[-2].split() == ["..."] * 5
    assert table[-1].split()[0] == "1023"
    assert len({len(line.split()) for line in table}) == 1


def test_the_table_shortens_rows_of_many_stretches() -> None:
    assert "0:1, 2:3, 4:5, ..." in str(plan(20, 1, remainder="keep", mask=[slice(i, i + 1) for i in range(0, 20, 2)]))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_of_10_billion_rows_is_a_few_integers(policy: str) -> None:
    made = plan(10**10, 1024, remainder=policy)
    assert len(pickle.dumps(made)) < 10_000
    assert sum(made.shard(rank).n_own for rank in range(1024)) + made.n_lost == 10**10
    assert made.shard(1023).rows.pieces[0].stop == 10**10 - made.n_lost
    assert len({made.n_batches(rank) for rank in range(1024)}) == 1


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_plan_has_no_other_ranks(rank: int) -> None:
    with pytest.raises(IndexError, match=rf"rank must be in \[0, 3\), the ranks of this plan, got {rank}"):
        plan(100, 3).shard(rank)
    with pytest.raises(IndexError, match=rf"rank must be in \[0, 3\), the ranks of this plan, got {rank}"):
        plan(100, 3).n_batches(rank)


def test_plans_are_equal_and_hash_alike_on_every_rank() -> None:
    sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=8)
    plans = [DistributedSampler(sampler, dist_info=Rank(rank, 3), remainder="exact").plan(100) for rank in range(3)]
    assert len(set(plans)) == 1
    assert plans[0] != DistributedSampler(sampler, dist_info=Rank(0, 3), remainder="exact").plan(101)


def test_a_row_that_is_repeated_in_batches_of_a_million_is_a_few_pieces_of_a_plan() -> None:
    sampler = DistributedSampler(RandomSampler(10**6, 1, 10**6), dist_info=Rank(1, 2), remainder="pad")
    made = sampler.plan(3)
    assert [len(made.shard(rank)) for rank in range(2)] == [10**6, 10**6]
    assert [made.shard(rank).n_own for rank in range(2)] == [1, 2]
    assert all(len(made.shard(rank).rows.pieces) < 10 for rank in range(2))
    assert len(made.shard(1).repeated) == 10**6 - 2
    [request] = sampler.sample(3)
    assert request["requests"][:3] == [slice(1, 3), slice(0, 3), slice(0, 3)]
    assert sum(part.stop - part.start for part in request["requests"]) == 10**6


@pytest.mark.timeout(20)
@pytest.mark.parametrize("sharding", ["contiguous", "independent"])
def test_a_plan_of_100000_ranks_that_differ_by_a_batch_takes_no_time_for_each_pair_of_them(sharding: str) -> None:
    sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=4, replacement=sharding == "independent")
    world_size = 100_000
    made = DistributedSampler(sampler, dist_info=Rank(0, world_size), remainder="exact", sharding=sharding).plan(
        17 * world_size // 2
    )
    assert {made.n_batches(rank) for rank in (0, world_size - 1)} == {3}
    assert (made.sizes[0], made.sizes[-1]) == (8, 9)


@pytest.mark.parametrize("read_ahead", [0, 1])
@pytest.mark.parametrize("virtual_ranks", [None, 4])
def test_a_loader_holds_no_more_rows_than_the_plan_says(read_ahead: int, virtual_ranks: int | None) -> None:
    sampler = RandomSampler(chunk_size=4, preload_nchunks=6, batch_size=8)
    distributed = DistributedSampler(sampler, dist_info=Rank(0, 2), seed=0, virtual_ranks=virtual_ranks)
    loader = StatefulLoader(batch_sampler=distributed, preload_to_gpu=False, read_ahead=read_ahead)
    loader.add_adata(ad.AnnData(np.zeros((500, 1))))
    asked_for = [sum(part.stop - part.start for part in request["requests"]) for request in distributed.sample(500)]
    assert loader.plan() == distributed.plan(500)
    assert loader.plan().rows_in_memory == max(asked_for) * (1 + read_ahead)


def test_a_loader_holds_no_more_rows_than_a_rank_has() -> None:
    sampler = RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=8)
    assert DistributedSampler(sampler, dist_info=Rank(0, 2)).plan(100).rows_in_memory == 48


@pytest.mark.parametrize("mask", [np.arange(40_000) % 3 > 0, [slice(0, 900), slice(1_000, 5_000)]])
def test_in_a_window_with_holes_it_is_not_said_what_is_in_memory(mask: Any) -> None:
    made = plan(40_000, 2, mask=mask)
    assert made.rows_in_memory is None
    assert "in memory" not in str(made)


def test_of_a_sampler_of_a_users_own_it_is_not_known_what_is_in_memory() -> None:
    made = DistributedSampler(MaskBlind(batch_size=8), dist_info=Rank(0, 2)).plan(100)
    assert made.rows_in_memory is None
    assert "in memory" not in str(made)


def test_what_is_left_of_an_epoch_is_dealt_as_it_is() -> None:
    sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=8)
    saved = DistributedSampler(sampler, dist_info=Rank(0, 2), seed=0).state_dict(batches_done=2)
    resumed = DistributedSampler(sampler, dist_info=Rank(0, 3), seed=0)
    resumed.load_state_dict(saved)
    made = resumed.plan(101)
    assert made.n_lost
    assert "to lose none" not in str(made)
