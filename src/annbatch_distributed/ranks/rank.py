"""Rank: which process of the job this is, and how many there are; and where that is known from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from annbatch_distributed.rows import integer

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
        # numpy's integers become Python's, as a Rank is compared, printed and written as JSON
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
            # a number of thousands of digits can't even be printed
            about = self.world_size.bit_length() - 1
            raise ValueError(f"world size must be at most {MOST_RANKS}, got about 2**{about}.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be in [0, world_size), that is [0, {self.world_size}), got rank {self.rank} with "
                f"world size {self.world_size}. Ranks count from 0."
            )


type Framework = Literal["torch", "jax"]


@dataclass(frozen=True)
class Placement:
    """This process in a job.

    It can be given as ``dist_info`` as it is.
    """

    rank: Rank
    """Which of the job's shares this process has. Several processes may have the same one: ``n_peers`` do."""
    source: str
    """Where that is known from, as a text for people."""
    framework: Framework | None = None
    """Whose numbers the processes have; None if no framework was asked."""
    processes: tuple[int, ...] | None = None
    """The processes of the job, in ascending order, as the framework numbers them; None means all of them."""
    can_be_asked: bool = False
    """True if its source can be asked at any time, by one process alone."""
    n_peers: int | None = 1
    """How many processes have the same share, this one included: those that split up a model, not the data. None where
    it follows from how many processes there are."""

    @classmethod
    def of_ranks(cls, rank_of: Mapping[int, int], here: int, source: str, framework: Framework) -> Placement:
        """Return that of a process in a job in which each process has the rank that a mapping says.

        Every rank is that of at least one process, and of as many as any other.
        """
        # {0: 0, 1: 0, 2: 1, 3: 1}: 2 ranks of 2 processes each
        processes = tuple(sorted(rank_of))
        world_size = max(rank_of.values()) + 1
        return cls(
            Rank(rank_of[here], world_size),
            source,
            framework,
            processes,
            n_peers=len(processes) // world_size,
        )
