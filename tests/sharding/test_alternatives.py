"""Settings that lose fewer rows, against every batch size near the given one, dealt out row by row."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

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
