"""Shuffled: blocks of consecutive rows, dealt to the ranks anew in each epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from annbatch_distributed.sharding.blocks import shuffled
from annbatch_distributed.sharding.contract import check_rows
from annbatch_distributed.sharding.integers import integer

if TYPE_CHECKING:
    from annbatch_distributed.sharding.rows import Rows

__all__ = ["Shuffled"]


@dataclass(frozen=True)
class Shuffled:
    """Deal blocks of consecutive rows to the ranks anew in each epoch: for rows that are sorted or grouped on disk.

    How 12 rows may go to 2 ranks, with blocks of 2 rows::

                  epoch 0            epoch 1            epoch 2
        rank 0    6 7 2 3 4 5        0 1 4 5 2 3        10 11 4 5 6 7
        rank 1    10 11 0 1 8 9      10 11 8 9 6 7      2 3 0 1 8 9

    The order of the blocks follows from the sampler's ``seed`` and the epoch, and every rank works it out alone. It is
    a keyed permutation with random access: 10^9 rows take no more memory or time to plan than 10^6.

    Blocks are cut at the multiples of their size, so that a row is in the same block in every epoch. A rank boundary
    may cut a block, and so may the mask. In its shard, a rank has such parts after its whole blocks: local rows
    ``[k * block_size, (k + 1) * block_size)`` are one block, and a chunk of them is one contiguous read.

    Parameters
    ----------
    block_size
        Rows of a block. None takes the wrapped sampler's own chunk size, so that what it reads as a chunk is a block.

    Raises
    ------
    TypeError, ValueError
        If ``block_size`` is not an integer of at least 1.

    Examples
    --------
    >>> from annbatch.samplers import SequentialSampler
    >>> from annbatch_distributed import DistributedSampler, Rank, Shuffled
    >>> sampler = DistributedSampler(
    ...     SequentialSampler(2, 2, 2),
    ...     dist_info=Rank(0, 2),
    ...     sharding=Shuffled(block_size=2),
    ...     seed=0,
    ... )
    >>> for epoch in range(3):
    ...     sampler.set_epoch(epoch)
    ...     print([list(sampler.plan(12).shard(rank).rows) for rank in range(2)])
    [[6, 7, 2, 3, 4, 5], [10, 11, 0, 1, 8, 9]]
    [[0, 1, 4, 5, 2, 3], [10, 11, 8, 9, 6, 7]]
    [[10, 11, 4, 5, 6, 7], [2, 3, 0, 1, 8, 9]]
    """

    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None:
            object.__setattr__(self, "block_size", integer("block_size", self.block_size, least=1))

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        """Return the rows with their blocks in the epoch's order."""
        check_rows(rows)
        self.check_seed(seed)
        if self.block_size is None:
            raise ValueError(
                "Shuffled() has no block size of its own, and there is no sampler whose chunk size it could take. Pass "
                "Shuffled(block_size=...)."
            )
        assert seed is not None
        return shuffled(rows, self.block_size, (seed, epoch))

    def check_seed(self, seed: int | None) -> None:
        """Raise a ValueError if there is no seed."""
        if seed is None:
            raise ValueError(
                "sharding='shuffled' needs a seed: without one, every rank would shuffle the rows differently, so that "
                "some were read twice and others never. Pass the same seed=... on every rank."
            )
