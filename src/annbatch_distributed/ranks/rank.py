"""Rank: which process of the job this is, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass

from annbatch_distributed.integers import integer

__all__ = ["MOST_RANKS", "Rank"]

#: More ranks, or workers of one of them, than any job has: a larger number is a mistake.
MOST_RANKS = 2**20


@dataclass(frozen=True)
class Rank:
    """One process of a job.

    Can be given as ``dist_info`` as it is, to see in one process what any rank of a job would do.

    Parameters
    ----------
    rank
        Which process this is, within ``[0, world_size)``. Any integer type, numpy's too.
    world_size
        How many processes there are, at least 1 and at most 2**20.

    Raises
    ------
    TypeError
        If either is not an integer.
    ValueError
        If ``world_size`` is outside ``[1, 2**20]``, or ``rank`` outside ``[0, world_size)``.

    Examples
    --------
    >>> Rank(1, 4)
    Rank(rank=1, world_size=4)
    >>> Rank(4, 4)
    Traceback (most recent call last):
    ...
    ValueError: rank must be in [0, world_size), that is [0, 4), got rank 4 with world size 4. Ranks count from 0.
    """

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        for name in ("rank", "world_size"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, integer(name, value))
            except TypeError:
                raise TypeError(
                    f"rank and world size must be two integers, got {name}={value!r} of type {type(value).__name__}. "
                    "Convert it with int(...) if it came from an environment variable."
                ) from None
        if self.world_size < 1:
            raise ValueError(f"world size must be at least 1, got world size {self.world_size} with rank {self.rank}.")
        if self.world_size > MOST_RANKS:
            about = self.world_size.bit_length() - 1
            raise ValueError(f"world size must be at most {MOST_RANKS}, got about 2**{about}.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be in [0, world_size), that is [0, {self.world_size}), got rank {self.rank} with "
                f"world size {self.world_size}. Ranks count from 0."
            )
