"""Placement: the rank of this process, the world size, and their source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from annbatch_distributed.core.values import integer

#: Largest number of ranks, or of workers of a rank; a larger number is a mistake.
MOST_RANKS = 2**20

type Framework = Literal["torch", "jax"]


@dataclass(frozen=True, eq=False, repr=False)
class Placement:
    """Rank of this process, world size, and their source. Two are equal if rank and world size are.

    >>> Placement(1, 4, "the variables of Slurm") == Placement(1, 4, "a callable")
    True
    """

    rank: int
    """Rank of this process. ``n_peers`` processes have the same rank."""
    world_size: int
    """Number of ranks of the job."""
    source: str = "a Rank"
    """Name of the source, for messages."""
    framework: Framework | None = None
    """Framework that numbers ``processes``; None if the source isn't a framework."""
    processes: tuple[int, ...] | None = None
    """Process numbers of the job in ascending order; None for all processes of the framework."""
    can_be_asked: bool = False
    """True if a process can ask the source at any time, without other processes."""
    n_peers: int | None = 1
    """Number of processes with the same rank, this one included, such as tensor-parallel peers. None if the number of
    processes determines it."""

    def __post_init__(self) -> None:
        # NumPy integers become Python integers, since a placement is compared, printed and written as JSON
        for name in ("rank", "world_size"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, integer(name, value))
            except TypeError:
                raise TypeError(
                    f"rank and world_size must be integers, got {name}={value!r} of type {type(value).__name__}. "
                    "Convert the value of an environment variable with int(...)."
                ) from None
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}. Count all ranks of the job.")
        if self.world_size > MOST_RANKS:
            # Python can't print a number of thousands of digits
            about = self.world_size.bit_length() - 1
            raise ValueError(f"world_size must be at most {MOST_RANKS}, got about 2**{about}.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be in [0, world_size), got rank {self.rank} and world_size {self.world_size}. Ranks count "
                "from 0."
            )

    def with_source(self, source: str) -> Placement:
        """Return the same placement, with another name of its source."""
        return replace(self, source=source)

    def __eq__(self, other: object) -> bool:
        # also to a Rank
        return (self.rank, self.world_size) == (getattr(other, "rank", None), getattr(other, "world_size", None))

    def __hash__(self) -> int:
        return hash((self.rank, self.world_size))

    def __repr__(self) -> str:
        return f"Rank(rank={self.rank}, world_size={self.world_size})"

    @classmethod
    def of_ranks(cls, rank_of: Mapping[int, int], here: int, source: str, framework: Framework) -> Placement:
        """Return the placement of process ``here``, from the rank of each process.

        Every rank must have the same number of processes, at least one.
        """
        # {0: 0, 1: 0, 2: 1, 3: 1}: 2 ranks of 2 processes each
        processes = tuple(sorted(rank_of))
        world_size = max(rank_of.values()) + 1
        return cls(
            rank_of[here],
            world_size,
            source,
            framework,
            processes,
            n_peers=len(processes) // world_size,
        )


class HasPlacement(Protocol):
    """Source of the rank of this process."""

    @property
    def placement(self) -> Placement:
        """Placement of this process; a deferred source is asked now."""
