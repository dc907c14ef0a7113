"""Shardings: functions that put the rows of a window into the order that is cut into streams.

They know rows, the epoch and the seed, and nothing of ranks, samplers, batches or what becomes of the remainder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from annbatch_distributed.rows import BOUND, Rows, cut_at_multiples, expand, integer

#: Takes rows, and by name the epoch and the seed, and returns the same rows in another order. What it returns depends
#: on these alone, so that every rank works out the same.
type Sharding = Callable[..., Rows]


@dataclass(frozen=True, repr=False)
class Contiguous:
    """Cut the rows into one stretch for each rank: the best locality, for collections that have been shuffled.

    How 12 rows go to 2 ranks, in every epoch::

        rank 0    0 1 2 3 4 5
        rank 1    6 7 8 9 10 11

    Examples
    --------
    >>> from annbatch.samplers import SequentialSampler
    >>> from annbatch_distributed import DistributedSampler, Rank
    >>> sampler = DistributedSampler(
    ...     SequentialSampler(2, 2, 2), dist_info=Rank(0, 2), sharding="contiguous"
    ... )
    >>> [list(sampler.plan(12).shard(rank).rows) for rank in range(2)]
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    """

    def __repr__(self) -> str:
        return '"contiguous"'

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        """Return the rows in the order that they have."""
        del epoch, seed  # the same for all of them
        return rows


@dataclass(frozen=True)
class Shuffled:
    """Deal blocks of consecutive rows to the ranks anew in each epoch: for rows that are sorted or grouped on disk.

    How 12 rows may go to 2 ranks, with blocks of 2 rows::

                  epoch 0             epoch 1           epoch 2
        rank 0    0 1 2 3 10 11       6 7 2 3 8 9       4 5 6 7 8 9
        rank 1    4 5 6 7 8 9         4 5 0 1 10 11     2 3 0 1 10 11

    The order of the blocks follows from the sampler's ``seed`` and the epoch, and every rank works it out alone. For
    10^9 rows in blocks of 64, that takes some seconds and 400 MB, once in each epoch.

    Blocks are cut at the multiples of their size, so that a row is in the same block in every epoch. The rows that a
    mask leaves of a block stay together. A rank boundary may cut a block. In its shard, a rank has such parts after its
    whole blocks: local rows ``[k * block_size, (k + 1) * block_size)`` are one block, and a chunk of them is one
    contiguous read.

    Parameters
    ----------
    block_size
        Rows of a block. None takes the wrapped sampler's own chunk size, so that what it reads as a chunk is a block.

    Raises
    ------
    TypeError, ValueError
        If ``block_size`` is not an integer of at least 1 and below 2**63.

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
    [[0, 1, 2, 3, 10, 11], [4, 5, 6, 7, 8, 9]]
    [[6, 7, 2, 3, 8, 9], [4, 5, 0, 1, 10, 11]]
    [[4, 5, 6, 7, 8, 9], [2, 3, 0, 1, 10, 11]]
    """

    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None:
            object.__setattr__(self, "block_size", integer("block_size", self.block_size, least=1, below=BOUND))

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        """Return the rows with their blocks in the epoch's order."""
        self.check_seed(seed)
        if self.block_size is None:
            raise ValueError(
                "Shuffled() has no block size of its own, and there is no sampler whose chunk size it could take. Pass "
                "Shuffled(block_size=...)."
            )
        assert seed is not None
        size = self.block_size
        starts, stops = cut_at_multiples(rows, size)
        # two words, which no pass of a stream has as its spawn key
        rng = np.random.default_rng(np.random.SeedSequence([seed, epoch], spawn_key=(0, 0)))
        # where no two ranges share a block, each piece is a block
        if not (rows.starts[1:] // size == (rows.stops[:-1] - 1) // size).any():
            order = rng.permutation(len(starts))
        else:  # the ranges of each block, one after the other
            # blocks of 4 with pieces 0:2, 3:4, 4:8: the first piece of each block is 0 and 2; shuffled as 2, 0 1
            first = np.flatnonzero(np.diff(starts // size, prepend=-1))
            order = rng.permutation(len(first))
            stop = np.append(first[1:], len(starts))
            order = expand(first[order], stop[order])
        starts = starts[order]
        return Rows.of_bounds(starts, stops[order])

    def check_seed(self, seed: int | None) -> None:
        """Raise a ValueError if there is no seed."""
        if seed is None:
            raise ValueError(
                "sharding='shuffled' needs a seed: without one, every rank would shuffle the rows differently, so that "
                "some were read twice and others never. Pass the same seed=... on every rank."
            )


@dataclass(frozen=True, repr=False)
class Independent:
    """Let every rank draw from all of the rows: for samplers that draw with replacement.

    What the ranks share out is the draws. The job as a whole makes as many as the wrapped sampler would make alone, and
    every rank its part of them, with a generator of its own. Weights of classes hold for the whole job, which they
    can't where each rank sees only a stretch of rows that are sorted by class.

    How 10 draws go to 2 ranks with a batch size of 2 or 4::

        remainder    batches of 2                  batches of 4
        "drop"       4 and 4, in 2 batches each    4 and 4, in 1 batch each: 2 fewer draws
        "keep"       5 and 5, in 3 batches each    5 and 5, in 2 batches each
        "exact"      5 and 5, in 3 batches each    5 and 5, in 2 batches each
        "pad"        6 and 6, in 3 batches each    8 and 8, in 2 batches each: 6 draws more

    Examples
    --------
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler, Rank
    >>> sampler = RandomSampler(2, 2, 2, replacement=True, num_samples=10)
    >>> job = [
    ...     DistributedSampler(sampler, dist_info=Rank(rank, 2), sharding="independent")
    ...     for rank in range(2)
    ... ]
    >>> [rank.n_batches(100) for rank in job]
    [2, 2]
    """

    def __repr__(self) -> str:
        return '"independent"'

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        """Return the rows, which are every rank's to draw from."""
        del epoch, seed  # the same for all of them
        return rows


def checked_sharding(thing: object, expected: str) -> Sharding:
    """Return what can be asked for an order, as far as that can be told without asking, or raise a TypeError.

    ``expected`` is the beginning of its message.
    """
    if inspect.isclass(thing) or not callable(thing):
        hint = " Pass an instance, not the class." if inspect.isclass(thing) else ""
        raise TypeError(f"{expected}, got {thing!r}.{hint}")
    try:
        inspect.signature(thing).bind(Rows(), epoch=0, seed=None)
    except ValueError:
        pass  # what is written in C may not tell
    except TypeError as error:
        raise TypeError(f"A sharding is a function (rows, *, epoch, seed), but {name_of(thing)} has {error}.") from None
    return cast("Sharding", thing)


def name_of(sharding: object) -> str:
    """Return the name of a sharding, and nothing that it holds: other ranks see it."""
    return getattr(sharding, "__name__", type(sharding).__name__)


def ordered(sharding: Sharding, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
    """Ask a sharding for an order of rows.

    A TypeError if a user's returns something else; a ValueError if these aren't the same rows. They are compared by
    their number and a sum over mixed row numbers, which takes 10 to 15 ns for each.
    """
    answer: object = sharding(rows, epoch=epoch, seed=seed)
    if isinstance(sharding, Contiguous | Shuffled | Independent):
        return cast("Rows", answer)
    name = name_of(sharding)
    if not isinstance(answer, Rows):
        raise TypeError(
            f"The sharding {name} must return Rows, got an object of type {type(answer).__name__}. Make them of row "
            "numbers with Rows.of."
        )
    if len(answer) != len(rows) or answer.mixed_sum() != rows.mixed_sum():
        raise ValueError(
            f"The sharding {name} must return each of the {len(rows):,} rows of {rows.format(3)} once and no other, "
            f"in any order; it returned {len(answer):,} rows, {answer.format(3)}."
        )
    return answer
