"""Shardings: functions that determine the order of the selected rows, which is then cut into streams.

They know the rows, the epoch and the seed, but nothing about ranks, samplers, batches or remainders.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from annbatch_distributed.core.rows import Order, Rows, block_bounds
from annbatch_distributed.core.values import BOUND, integer

#: Function ``(rows, *, epoch, seed)`` that returns the same rows in a different order. The order must depend only on
#: these arguments, so that every rank computes the same order.
type Sharding = Callable[..., Rows]


@dataclass(frozen=True, repr=False)
class Contiguous:
    """Sharding with one contiguous range of rows per rank.

    It reads fastest, and suits collections that were shuffled when they were written.

    How 12 rows are assigned to 2 ranks, in every epoch::

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
        """Return the rows in their order."""
        del epoch, seed  # the order doesn't depend on them
        return rows


@dataclass(frozen=True)
class Shuffled:
    """Sharding that reassigns blocks of consecutive rows to ranks in every epoch.

    It suits rows that are sorted or grouped on disk.

    How 12 rows may be assigned to 2 ranks, with blocks of 2 rows::

                  epoch 0             epoch 1           epoch 2
        rank 0    0 1 2 3 10 11       6 7 2 3 8 9       4 5 6 7 8 9
        rank 1    4 5 6 7 8 9         4 5 0 1 10 11     2 3 0 1 10 11

    The order of the blocks depends on the sampler's ``seed`` and the epoch. Every rank computes it, which takes some
    seconds and 490 MB in each epoch for 10^9 rows in blocks of 64. Of this, 370 MB are held during the epoch.

    Blocks begin at multiples of their size, so a row is in the same block in every epoch. The rows of a block that a
    mask selects stay together. A boundary between ranks may cut a block. Such parts come after the whole blocks in a
    shard, so that local rows ``[k * block_size, (k + 1) * block_size)`` are one block, and a chunk is one contiguous
    read.

    Parameters
    ----------
    block_size
        Number of rows of a block. None (default) takes the chunk size of the wrapped sampler, so that each chunk is a
        block.

    Raises
    ------
    TypeError
        If ``block_size`` is not an integer.
    ValueError
        If ``block_size`` is not within ``[1, 2**63)``.

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
        return self.order(rows, epoch=epoch, seed=seed).to_rows()

    def order(self, rows: Rows, *, epoch: int, seed: int | None) -> Order:
        """Return the order of the rows in an epoch."""
        self.check_seed(seed)
        if self.block_size is None:
            raise ValueError(
                "block_size must be set, since there is no sampler whose chunk size could be used. Pass "
                "Shuffled(block_size=...)."
            )
        assert seed is not None
        # blocks that begin at local rows 0 3 7 of 9 are 7:9 0:3 3:7, if they are shuffled to 2 0 1
        bounds = block_bounds(rows, self.block_size)
        # a spawn key, which no generator of a stream has
        rng = np.random.default_rng(np.random.SeedSequence([seed, epoch], spawn_key=(0, 0)))
        order = rng.permutation(len(bounds) - 1)
        starts = bounds[order]
        order += 1
        stops = bounds[order]
        del bounds, order  # to save memory, since ranges that happen to continue each other are joined in new arrays
        return Order(rows, Rows.of_bounds(starts, stops))

    def check_seed(self, seed: int | None) -> None:
        """Raise a ValueError if there is no seed."""
        if seed is None:
            raise ValueError(
                "sharding='shuffled' requires a seed, since ranks that shuffle rows differently would repeat some rows "
                "and never read others. Pass the same seed=... on every rank."
            )


@dataclass(frozen=True, repr=False)
class Independent:
    """Sharding under which every rank samples from all rows.

    It is for samplers with replacement. The samples are divided among the ranks: the job takes the same number of
    samples as the wrapped sampler would take on a single rank. Each rank takes its part of them, with its own
    generator. Class weights hold for the whole job, even if rows are sorted by class.

    How 10 samples are divided among 2 ranks with a batch size of 2 or 4::

        remainder    batches of 2                  batches of 4
        "drop"       4 and 4, in 2 batches each    4 and 4, in 1 batch each: 2 fewer samples
        "keep"       5 and 5, in 3 batches each    5 and 5, in 2 batches each
        "exact"      5 and 5, in 3 batches each    5 and 5, in 2 batches each
        "pad"        6 and 6, in 3 batches each    8 and 8, in 2 batches each: 6 more samples

    Examples
    --------
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler, Rank
    >>> sampler = RandomSampler(2, 2, 2, replacement=True, num_samples=10)
    >>> job = [
    ...     DistributedSampler(
    ...         sampler, dist_info=Rank(rank, 2), sharding="independent"
    ...     )
    ...     for rank in range(2)
    ... ]
    >>> [rank.n_batches(100) for rank in job]
    [2, 2]
    """

    def __repr__(self) -> str:
        return '"independent"'

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        """Return the rows, which every rank samples from."""
        del epoch, seed  # the rows don't depend on them
        return rows


def checked_sharding(thing: object, expected: str) -> Sharding:
    """Return the argument; raise a TypeError unless it can be called as a sharding.

    ``expected`` is the beginning of the message.
    """
    if inspect.isclass(thing) or not callable(thing):
        hint = " Pass an instance, not the class." if inspect.isclass(thing) else ""
        raise TypeError(f"{expected}, got {thing!r}.{hint}")
    try:
        inspect.signature(thing).bind(Rows(), epoch=0, seed=None)
    except ValueError:
        pass  # functions written in C may have no signature
    except TypeError as error:
        raise TypeError(
            f"sharding must be a function (rows, *, epoch, seed), got {name_of(thing)}: {error}. Give it these "
            "parameters."
        ) from None
    return cast("Sharding", thing)


def name_of(sharding: object) -> str:
    """Return the name of a sharding, without its attributes, since other ranks receive it."""
    return getattr(sharding, "__name__", type(sharding).__name__)


def ordered(sharding: Sharding, order: Order, *, epoch: int, seed: int | None) -> Order:
    """Return rows in the order of a sharding.

    A TypeError if a custom sharding doesn't return Rows; a ValueError if it returns different rows. They are compared
    by their number and their checksum, in 7 to 16 ns per row.
    """
    if isinstance(sharding, Contiguous | Independent):
        return order
    rows = order.to_rows()
    if isinstance(sharding, Shuffled):  # without expanding its blocks
        return sharding.order(rows, epoch=epoch, seed=seed)
    answer: object = sharding(rows, epoch=epoch, seed=seed)
    name = name_of(sharding)
    if not isinstance(answer, Rows):
        raise TypeError(
            f"The sharding {name} must return Rows, got an object of type {type(answer).__name__}. Convert row indices "
            "with Rows.from_indices."
        )
    if len(answer) != len(rows) or answer.hash_sum() != rows.hash_sum():
        raise ValueError(
            f"The sharding {name} must return each of the {len(rows):,} rows {rows.format(3)} once, and no other rows, "
            f"in any order, got {len(answer):,} rows, {answer.format(3)}."
        )
    return Order.of(answer)
