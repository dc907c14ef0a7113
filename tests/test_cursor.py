"""The cursor: where the next pass begins after a state is loaded, an epoch is set, or a pass ends."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.cursor import Cursor
from annbatch_distributed.sampler import cursor_of
from tests.samplers import batches
from tests.workers import read_by_workers

N_OBS = 96


def new() -> Cursor:
    """The cursor of a rank whose epochs have 12 batches, in 3 load requests."""
    sampler = RandomSampler(4, 4, 4, rng=np.random.default_rng(0))
    return cursor_of(DistributedSampler(sampler, dist_info=Rank(0, 2), seed=0))


def state_of(cursor: Cursor, batches_done: int) -> dict[str, Any]:
    return cursor.state(cursor.position_after(batches_done), {})


def test_state_before_a_pass_has_known_bounds() -> None:
    """A loaded state has the number of rows, so the next state can't have more batches than the epoch."""
    before, after = new(), new()
    before.begin(N_OBS)
    after.resume(state_of(before, 0), strict=True)
    assert [state_of(after, done)["finished"] for done in range(13)] == [False] * 12 + [True]
    with pytest.raises(ValueError, match="must be from 0 to 12"):
        state_of(after, 13)


def test_number_of_rows_may_change_between_epochs() -> None:
    """The rest of an epoch needs the rows of its state; the next epoch may have more rows."""
    for done in (5, 12):
        before, after = new(), new()
        before.begin(N_OBS)
        after.resume(state_of(before, done), strict=True)
        if done == 5:
            with pytest.raises(ValueError, match=f"saved for a collection of {N_OBS} rows"):
                after.begin(N_OBS + 8)
        else:
            assert len(batches(after.begin(N_OBS + 8))) == 13


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4])
def test_rows_follow_the_workers_of_the_pass(n_workers: int) -> None:
    """The rows of the steps are in the order in which the workers of the last pass yield them."""
    sampler = DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 2), seed=0)
    yielded = read_by_workers(sampler, N_OBS, n_workers)
    cursor = cursor_of(sampler)
    cursor.begin(N_OBS, cursor.next(n_workers))
    steps = sampler.rows_of(N_OBS, slice(None), ranks=0).groupby("step")["row"]
    assert [rows.tolist() for _, rows in steps] == yielded


def test_rest_is_read_by_workers_in_turn() -> None:
    """Workers that resume after any number of batches read the rest as they would have without the break."""
    sampler = DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 2), seed=0)
    whole = read_by_workers(sampler, N_OBS, 3)
    for done in range(len(whole)):
        state = sampler.state_dict(batches_done=0) | {"segments": [[2, 3, done]]}
        after = DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 2), seed=0)
        after.load_state_dict(state)
        assert read_by_workers(after, N_OBS, 3) == whole[done:]


def test_workers_of_ordered_samplers_change_no_state() -> None:
    """A sampler that keeps an order yields the same batches by any number of workers, and has the same states."""
    cursor = cursor_of(DistributedSampler(SequentialSampler(4, 4, 4), dist_info=Rank(0, 2), seed=0))
    assert cursor.next(3) == cursor.next(1)
    assert new().next(3) != new().next(1)


def test_next_epoch_forgets_the_rows_of_a_loaded_one() -> None:
    """The state of an epoch that is set after loading names no number of rows: its collection may have grown."""
    before, after = new(), new()
    before.begin(N_OBS)
    after.resume(state_of(before, 5), strict=True)
    assert after.state(after.position_after(None), {})["identity"]["n_obs"] == N_OBS
    after.set_epoch(1)
    assert after.state(after.position_after(None), {})["identity"]["n_obs"] is None


def test_unverified_batches_stay_unverified() -> None:
    """A state that was loaded without comparing settings says so, also after another resume."""
    states = [state_of(started(), 5)]
    for strict in (False, True, True):
        cursor = new()
        cursor.resume(states[-1], strict=strict)
        cursor.begin(N_OBS)
        states.append(state_of(cursor, 6))
    assert [state.get("unverified", False) for state in states] == [False, True, True, True]


def started() -> Cursor:
    cursor = new()
    cursor.begin(N_OBS)
    return cursor


def test_cut_pass_has_left_its_remaining_batches() -> None:
    """If the ranks change after the last batch of a pass, an open loop ends instead of reading the epoch again."""
    for done in range(13):
        cursor = new()
        cut = cursor.begin(N_OBS)
        cursor.reshard(cursor.position_after(done), Rank(0, 1))
        assert cursor.clock.has_rest(cut) == (done < 12)


@pytest.mark.parametrize("options", [{"remainder": "exact"}, {"remainder": "pad"}, {"virtual_ranks": 64}])
@pytest.mark.parametrize(("n_obs", "warns"), [(100, True), (127, True), (128, False)])
def test_batches_under_half_their_size_warn(options: dict[str, Any], n_obs: int, warns: bool) -> None:
    """A pass warns if a step of all ranks has less than half of the rows that the batch size asks for."""
    world_size, kind = (1, "virtual ranks") if "virtual_ranks" in options else (64, "ranks")
    sampler = DistributedSampler(
        RandomSampler(4, 4, 4), dist_info=Rank(0, world_size), seed=0, **{"remainder": "exact"} | options
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            cursor_of(sampler).begin(n_obs)
    text = f"Each of the 64 {kind} has a single batch in an epoch, with at most 2 rows of its own, although batch_size"
    assert [text in str(one.message) for one in caught] == [True] * warns
