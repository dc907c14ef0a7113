"""Ranks prove that they have read what was planned, for every kind of job; and what they read otherwise is found."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pytest
from annbatch.samplers import RandomSampler
from hypothesis import assume, given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader, Tally
from annbatch_distributed.agreement import Description
from annbatch_distributed.coverage import Reading, compare_readings
from tests.meeting import heard
from tests.samplers import batches, flat, job
from tests.strategies import PASSING, Job, jobs
from tests.test_laws import drops_rows, runnable
from tests.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from annbatch_distributed.ranks.exchange import Gather


def tally(read: Iterable[list[int]]) -> Tally:
    """Count the rows of some batches."""
    found = Tally()
    for rows in read:
        found.add(np.array(rows, dtype=np.int64))
    return found


def counted(n_rows: int, n_batches: int) -> str:
    """Rows and batches as a text."""
    return f"{n_rows} row{'s' * (n_rows != 1)} in {n_batches} batch{'es' * (n_batches != 1)}"


def said(ranks: Sequence[DistributedSampler], n_obs: int, read: Sequence[Iterable[list[int]]]) -> str:
    """Return what all ranks hear of what they have read."""
    pairs = zip(ranks, map(tally, read), strict=True)
    (text,) = set(heard([partial(_check, sampler, n_obs, counted) for sampler, counted in pairs]))
    return text


def _check(sampler: DistributedSampler, n_obs: int, counted: Tally, gather: Gather) -> str:
    return sampler.check_epoch_read(n_obs, counted, gather=gather)


@given(jobs(), st.integers(0, 3), st.data())
def test_what_was_planned_is_the_plan_and_anything_else_is_not(drawn: Job, epoch: int, data: st.DataObject) -> None:
    ranks = runnable(drawn, epoch)
    assume(all(sampler.n_batches(drawn.n_obs) for sampler in ranks))
    read = [batches(sampler.sample(drawn.n_obs)) for sampler in ranks]
    n_rows, n_batches = len(flat(flat(read))), sum(map(len, read))
    text = said(ranks, drawn.n_obs, read)
    have = "1 rank has" if drawn.world_size == 1 else f"{drawn.world_size} ranks have"
    assert text.startswith(f"epoch {epoch}: {have} read {counted(n_rows, n_batches)}, as planned")
    if drawn.kind in PASSING and not drops_rows(drawn):
        plan = ranks[0].plan(drawn.n_obs)
        assert f"Each of the {len(plan.window) - plan.n_lost} rows was read once" in text
        assert (f", {plan.n_repeated} were repeated" in text) == bool(plan.n_repeated)
        assert (f", {plan.n_lost} of the {len(plan.window)} are lost" in text) == bool(plan.n_lost)

    rank = data.draw(st.integers(0, drawn.world_size - 1))
    wrong = copy.deepcopy(read)
    match data.draw(st.sampled_from(["a batch less", "a batch twice", "another row", "rows in one batch"])):
        case "a batch less":
            wrong[rank] = wrong[rank][1:]
        case "a batch twice":
            wrong[rank] += wrong[rank][-1:]
        case "another row":
            wrong[rank][0] = [*wrong[rank][0][1:], (wrong[rank][0][0] + 1)]
        case "rows in one batch":
            wrong[rank] = [flat(wrong[rank]), *[[] for _ in wrong[rank]]]
    text = said(ranks, drawn.n_obs, wrong)
    assert text.startswith(
        f"What the ranks have read in epoch {epoch} is not what was planned:\n  rank {rank} has read"
    )
    assert text.count("\n") == 1


@given(jobs(policies=("keep", "exact", "pad", "drop")), st.data())
def test_what_was_left_of_an_epoch_is_told_from_all_of_it(drawn: Job, data: st.DataObject) -> None:
    ranks = runnable(drawn)
    n_batches = min(sampler.n_batches(drawn.n_obs) for sampler in ranks)
    assume(n_batches > 1)
    done = data.draw(st.integers(1, n_batches - 1))
    read = [batches(sampler.sample(drawn.n_obs)) for sampler in ranks]
    resumed = drawn.ranks()
    for sampler, before in zip(resumed, ranks, strict=True):
        sampler.load_state_dict(before.state_dict(batches_done=done))
    rest = [batches(sampler.sample(drawn.n_obs)) for sampler in resumed]
    assert rest == [one[done:] for one in read]
    n_left = len(flat(flat(rest)))
    assert f"read {counted(n_left, sum(map(len, rest)))}, as planned" in said(resumed, drawn.n_obs, rest)
    assert "is not what was planned" in said(resumed, drawn.n_obs, read)


def test_what_other_numbers_of_ranks_have_left_is_read_once_by_all() -> None:
    sampler = RandomSampler(4, 2, 4, rng=np.random.default_rng(0))
    before = job(sampler, 3, seed=0, remainder="exact")[0]
    before.sample(100)
    state = before.state_dict(batches_done=3)
    after = job(sampler, 2, seed=0, remainder="exact")
    for one in after:
        one.load_state_dict(state)
    text = said(after, 100, [batches(one.sample(100)) for one in after])
    rows = "64 rows in 16 batches, as planned. Each of the 64 rows was read once"
    assert text == f"what was left of epoch 0: 2 ranks have read {rows}"


def test_shares_that_are_not_the_whole_are_found_although_each_rank_has_read_its_own() -> None:
    plan = job(RandomSampler(4, 2, 4), 2, seed=0, remainder="exact")[0].plan(40)
    shares = [Tally.of_rows(plan.shard(rank).rows) for rank in range(2)]
    who = [Description(rank, 2, 1, "", {}, "", {}) for rank in range(2)]

    def compared(*read: Tally) -> str:
        readings = [Reading(one, tally, tally, is_share=True) for one, tally in zip(who, read, strict=True)]
        return compare_readings([reading.to_text() for reading in readings], range(2), plan=plan).text

    assert "as planned" in compared(*shares)
    assert compared(shares[0], shares[0]).endswith("the shares of all ranks, 40 rows, are not those of the plan")


def test_the_loader_counts_what_it_yields() -> None:
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), seed=0, remainder="pad")
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
    loader.add_adata(ad.AnnData(np.zeros((50, 1))))
    list(loader)
    assert loader.check_epoch_read() == (
        "epoch 0: 1 rank has read 52 rows in 13 batches, as planned. Each of the 50 rows was read once, 2 were repeated"
    )
    loader.set_epoch(1)
    with pytest.raises(ValueError, match="no pass was begun since the epoch was set"):
        loader.check_epoch_read()
    some = iter(loader)
    for _ in range(12):
        next(some)
        with pytest.raises(ValueError, match="is not what was planned"):
            loader.check_epoch_read()
    next(some)
    assert loader.check_epoch_read().startswith("epoch 1: 1 rank has read 52 rows")


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_what_workers_have_read_is_counted_by_who_collects_it(n_workers: int) -> None:
    ranks = job(RandomSampler(4, 2, 4, rng=np.random.default_rng(0)), 2, seed=0, remainder="exact")
    read = [list(Workers(sampler, n_workers, n_obs=101)) for sampler in ranks]
    rows = "101 rows in 26 batches, as planned. Each of the 101 rows was read once"
    assert said(ranks, 101, read) == f"epoch 0: 2 ranks have read {rows}"


def test_a_loader_whose_workers_read_asks_for_the_tally() -> None:
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), seed=0)
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, return_index=True)
    loader.add_adata(ad.AnnData(np.zeros((48, 1))))
    read = list(Workers(loader, 2))
    with pytest.raises(RuntimeError, match=r"Make a Tally, add each batch\['index'\] to it"):
        loader.check_epoch_read()
    assert "48 rows in 12 batches, as planned" in loader.check_epoch_read(tally(read))
