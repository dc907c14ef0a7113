"""Grain's IndexSampler, which computes each row independently, and whose state is a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grain.samplers import IndexSampler
from grain.sharding import ShardOptions

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = "grain", "numpy"


def plan(n_obs: int, *numbers: int) -> Callable[[], object]:
    """Ask for the rows of the first batch."""
    *_, batch_size, rank, world_size = numbers

    def begin() -> object:
        shard = ShardOptions(shard_index=rank, shard_count=world_size, drop_remainder=True)
        sampler = IndexSampler(n_obs, shard_options=shard, shuffle=True, num_epochs=1, seed=0)
        return [sampler[rank + world_size * row] for row in range(batch_size)]

    return begin
