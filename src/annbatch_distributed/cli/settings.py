"""Settings: what every rank makes its sampler with, as the options say it."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from annbatch_distributed.cli.cells import InputError

if TYPE_CHECKING:
    from annbatch_distributed import DistributedSampler, EpochPlan
    from annbatch_distributed.passes.compatibility import ShardingName
    from annbatch_distributed.sharding import Remainder, Rows

__all__ = ["Settings"]

#: So many chunks are mixed in a load request, or as many more as make whole batches.
_CHUNKS = 32


@dataclass(frozen=True)
class Settings:
    """What every rank makes its sampler with, and which epochs there are."""

    world_size: int
    chunk_size: int
    preload_nchunks: int | None
    """None takes the first number from 32 on that makes whole batches."""
    batch_size: int
    is_random: bool
    """Whether chunks are read in any order, or one after the other."""
    remainder: Remainder
    sharding: ShardingName
    seed: int
    virtual_ranks: int | None
    mask: Rows | None
    epochs: range
    read_ahead: int = 0

    @property
    def n_chunks(self) -> int:
        """How many chunks a load request has."""
        step = self.batch_size // gcd(self.batch_size, self.chunk_size)
        return self.preload_nchunks or -(-_CHUNKS // step) * step

    def sampler(self, rank: int) -> DistributedSampler:
        """Make the sampler of a rank; a ValueError or a TypeError if there can't be one."""
        from annbatch.samplers import RandomSampler, SequentialSampler

        from annbatch_distributed import DistributedSampler, Rank

        sizes = self.chunk_size, self.n_chunks, self.batch_size
        return DistributedSampler(
            (RandomSampler if self.is_random else SequentialSampler)(*sizes),
            dist_info=Rank(rank, self.world_size),
            remainder=self.remainder,
            sharding=self.sharding,
            seed=self.seed,
            virtual_ranks=self.virtual_ranks,
            mask=self.mask,
        )

    def plans(self, n_obs: int) -> list[EpochPlan]:
        """Return the plan of each epoch; an InputError if there can't be one."""
        plans = []
        try:
            sampler = self.sampler(0)
            for epoch in self.epochs:
                sampler.set_epoch(epoch)
                plans.append(sampler.plan(n_obs))
        except (TypeError, ValueError) as error:
            raise InputError(str(error)) from error
        return plans

    def own_ranks(self, rank: int) -> range:
        """Which ranks of a plan a process is: itself, or the virtual ranks that it runs."""
        n_own = 1 if self.virtual_ranks is None else self.virtual_ranks // self.world_size
        return range(rank * n_own, (rank + 1) * n_own)
