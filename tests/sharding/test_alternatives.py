"""Settings that lose fewer rows, against every batch size near the given one, dealt out row by row."""

from __future__ import annotations

from annbatch.samplers import RandomSampler
from hypothesis import assume, example, given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, EpochPlan, Rank
from annbatch_distributed.sharding.alternatives import alternatives, least_lost, nearby


def lost(n_rows: int, world_size: int, batch_size: int) -> int:
    """Rows that are left when each rank has taken full batches as long as there is one for all."""
    while n_rows >= world_size * batch_size:
        n_rows -= world_size * batch_size
    return n_rows


@given(st.integers(1, 400), st.integers(1, 6), st.integers(1, 40))
@example(400, 2, 23)  # 20 and 25 lose none
def test_a_batch_size_is_the_closest_of_those_that_lose_least(n_rows: int, world_size: int, wished: int) -> None:
    sizes = [size for size in range(1, 100) if abs(size - wished) <= wished // 4 and size * world_size <= n_rows]
    found = least_lost(n_rows, world_size, nearby(wished), wished)
    assert (found is None) == (not sizes)
    if found is not None:
        fewest = min(lost(n_rows, world_size, size) for size in sizes)
        best = [size for size in sizes if lost(n_rows, world_size, size) == fewest]
        assert found in best
        assert abs(found - wished) == min(abs(size - wished) for size in best)


@given(st.integers(1, 400), st.integers(1, 6), st.integers(1, 40))
@example(3, 2, 1)  # of two batches of a row, a rank has one row
def test_alternatives_are_what_they_say(n_rows: int, world_size: int, batch_size: int) -> None:
    found = alternatives(n_rows, world_size, batch_size)
    now = lost(n_rows, world_size, batch_size)
    assert bool(found) == bool(now)
    for other in found:
        if other.remainder == "drop":
            assert other.n_lost == lost(n_rows, world_size, other.batch_size) < now / 2
            assert other.n_batches * other.batch_size * world_size + other.n_lost == n_rows
            continue
        assert (other.batch_size, other.n_lost) == (batch_size, 0)
        largest = max(len(range(rank, n_rows, world_size)) for rank in range(world_size))
        assert (other.n_batches - 1) * batch_size < largest <= other.n_batches * batch_size
        smallest = min(len(range(rank, n_rows, world_size)) for rank in range(world_size))
        if other.remainder == "exact":
            assert smallest >= other.n_batches
        if other.remainder == "pad":
            assert other.n_repeated == world_size * other.n_batches * batch_size - n_rows


@given(
    st.integers(1, 2_000), st.integers(1, 4), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers()
)
@example(20_000, 2, 100, 10, 4, 0)  # 250, closer than 200
@example(20_000, 2, 64, 32, 8, 0)  # no other size near 256 makes 2048 rows
def test_a_sampler_takes_every_batch_size_that_a_plan_names(
    n_obs: int, world_size: int, chunk_size: int, preload_nchunks: int, n_batches: int, which: int
) -> None:
    n_request = chunk_size * preload_nchunks
    fitting = [size for size in range(1, n_request + 1) if n_request % size == 0 and size * world_size <= n_obs]
    assume(fitting)
    batch_size = n_request // n_batches if n_request % n_batches == 0 else fitting[which % len(fitting)]
    assume(batch_size in fitting)
    chunks = {"chunk_size": chunk_size, "preload_nchunks": preload_nchunks}

    def plan(size: int) -> EpochPlan:
        return DistributedSampler(RandomSampler(**chunks, batch_size=size), dist_info=Rank(0, world_size)).plan(n_obs)

    now = plan(batch_size)
    by_size = [other for other in now.alternatives if other.remainder == "drop"]
    for other in by_size:
        found = plan(other.batch_size)
        assert (found.n_lost, found.most_batches) == (other.n_lost, other.n_batches)
        assert (f"batch_size={other.batch_size}" in str(now)) == (not other.n_lost)
    near = [size for size in fitting if abs(size - batch_size) <= batch_size // 4]
    assert bool(by_size) == (2 * min(plan(size).n_lost for size in near) < now.n_lost)
