"""Virtual ranks read the rows of the same number of real ranks, whatever the number of ranks that run them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler
from tests.samplers import MaskBlind, batches, flat, job, request_rows
from tests.strategies import Job, jobs
from tests.workers import read_by_workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from annbatch.types import LoadRequest

    from annbatch_distributed.core.stream import Pass

    type Read = list[list[int]]


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def joined(read: Sequence[Read], world_size: int) -> list[Read]:
    """The batches of each of fewer ranks: the concatenated batches of the real ranks that it runs."""
    n_own = len(read) // world_size
    result = []
    for rank in range(world_size):
        own = read[rank * n_own : (rank + 1) * n_own]
        result.append([flat(part[step] for part in own if step < len(part)) for step in range(max(map(len, own)))])
    return result


def on(drawn: Job, world_size: int) -> list[DistributedSampler]:
    """The virtual ranks of a job, run by fewer ranks."""
    return job(drawn.sampler, world_size, **drawn.options, virtual_ranks=drawn.world_size)


@given(jobs(), st.integers(0, 3))
def test_virtual_ranks_read_like_real_ranks(drawn: Job, epoch: int) -> None:
    """Each step of V virtual ranks has the rows of V real ranks, on every number of ranks that divides V."""
    real = drawn.ranks()
    for sampler in real:
        sampler.set_epoch(epoch)
    try:
        plan = real[0].plan(drawn.n_obs)
    except ValueError as error:
        for world_size in divisors(drawn.world_size):
            with pytest.raises(type(error)):
                on(drawn, world_size)[0].plan(drawn.n_obs)
        return
    read = [batches(sampler.sample(drawn.n_obs)) for sampler in real]
    for world_size in divisors(drawn.world_size):
        for rank, sampler in enumerate(on(drawn, world_size)):
            sampler.set_epoch(epoch)
            virtual = sampler.plan(drawn.n_obs)
            assert batches(sampler.sample(drawn.n_obs)) == joined(read, world_size)[rank]
            assert sampler.batch_size == drawn.batch_size * (drawn.world_size // world_size)
            assert replace(virtual, n_processes=None) == plan
            assert virtual.n_processes == world_size


def test_states_move_to_and_from_virtual_ranks() -> None:
    """A state of plain ranks resumes on virtual ranks, and the reverse."""

    def ranks(world_size: int, virtual_ranks: int | None) -> list[DistributedSampler]:
        return job(
            RandomSampler(4, 2, 4), world_size, seed=0, remainder="exact", virtual_ranks=virtual_ranks, max_gap=0
        )

    for old, new in [
        ((3, None), (2, 4)),
        ((2, 4), (3, None)),
        ((2, 4), (2, 6)),
        ((4, None), (2, 4)),
        ((2, 4), (4, None)),
    ]:
        before = ranks(*old)
        done = flat(flat(batches(rank.sample(200))[:5]) for rank in before)
        after = ranks(*new)
        for rank in after:
            rank.load_state_dict(before[0].state_dict(batches_done=5))
        rest = [batches(rank.sample(200)) for rank in after]
        assert sorted(done + flat(map(flat, rest))) == list(range(200))
        if 4 in old and 4 in new:  # the lanes don't change, so every step keeps its rows
            (whole,) = joined([batches(rank.sample(200)) for rank in ranks(4, None)], 1)
            assert joined(rest, 1) == [whole[5:]]


class Ragged(MaskBlind):
    """A sampler with any number of batches in each load request, which overwrites the memory of its splits."""

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        rng, start, buffer = np.random.default_rng(n_obs), 0, np.empty(n_obs, dtype=np.intp)
        while start < n_obs:
            n_rows = min(int(rng.integers(1, 5)) * self.batch_size, n_obs - start)
            buffer[:n_rows] = rng.permutation(n_rows)
            splits = [buffer[at : min(at + self.batch_size, n_rows)] for at in range(0, n_rows, self.batch_size)]
            yield {"requests": [slice(start, start + n_rows)], "splits": splits}
            buffer[:n_rows] = -1
            start += n_rows


def read_one_by_one(open_pass: Pass) -> tuple[Read, list[int]]:
    """The batches, if each load request is read before the next is requested, and the rows that each request loads."""
    result, sizes = [], []
    for request in open_pass:
        result += batches([request])
        sizes.append(len(request_rows(request)))
    return result, sizes


@pytest.mark.parametrize("max_gap", [0, 64])
@pytest.mark.parametrize("virtual_ranks", [2, 4, 8])
def test_virtual_ranks_read_each_row_once(virtual_ranks: int, max_gap: int) -> None:
    """No row is read twice and the rows in memory are bounded, whatever the length of load requests."""
    n_obs = 401 * virtual_ranks + virtual_ranks // 2  # so that virtual ranks have different lengths
    options: dict[str, Any] = {"remainder": "keep", "max_gap": max_gap}
    read = [read_one_by_one(rank.sample(n_obs))[0] for rank in job(Ragged(2), virtual_ranks, **options)]
    for world_size in divisors(virtual_ranks):
        for rank, sampler in enumerate(job(Ragged(2), world_size, virtual_ranks=virtual_ranks, **options)):
            own, sizes = read_one_by_one(sampler.sample(n_obs))
            assert own == joined(read, world_size)[rank]
            assert max_gap or sum(sizes) == len(flat(own))
            assert max(sizes) <= 4 * 8 * virtual_ranks // world_size


def test_workers_of_virtual_ranks_hold_few_requests() -> None:
    """Workers of virtual ranks of unequal length hold only a few load requests at once."""
    n_obs = 4 * 16 * 100 + 1
    (sampler,) = job(RandomSampler(16, 4, 16), 1, seed=0, remainder="keep", virtual_ranks=4)
    sizes: list[int] = []

    def read(open_pass: Pass) -> Read:
        result, own = read_one_by_one(open_pass)
        sizes.extend(own)
        return result

    assert sorted(flat(read_by_workers(sampler, n_obs, 2, read))) == list(range(n_obs))
    assert max(sizes) <= 4 * 4 * 64 * 1.25


def test_load_request_covers_every_virtual_rank() -> None:
    """A load request joins one request of each virtual rank, and a chunk is one read."""
    (sampler,) = job(RandomSampler(8, 4, 16), 1, seed=0, virtual_ranks=4)
    requests = list(sampler.sample(1024))
    assert [len(request["requests"]) for request in requests] == [16] * 8
    assert {part.stop - part.start for request in requests for part in request["requests"]} == {8}
    assert [len(split) for request in requests for split in request["splits"]] == [64] * 16
    assert [len({row // 256 for row in batch}) for batch in batches(requests)] == [4] * 16
