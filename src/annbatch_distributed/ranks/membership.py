"""Membership: this process in a job, with where that is known from and which processes it concerns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from annbatch_distributed.ranks.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Framework", "Membership"]

type Framework = Literal["torch", "jax"]


@dataclass(frozen=True)
class Membership:
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
    n_peers: int | None = 1
    """How many processes have the same share, this one included: those that split up a model, not the data. None where
    it follows from how many processes there are."""
    name: Literal["torch", "jax", "env"] | None = None
    """The string that asks for this as ``dist_info``; None if none does."""
    ranks: tuple[int, ...] | None = None
    """The share of each of those processes, in the same order; None if that isn't known."""

    @classmethod
    def of_ranks(cls, rank_of: Mapping[int, int], here: int, source: str, framework: Framework) -> Membership:
        """Return that of a process in a job in which each process has the rank that a mapping says.

        Every rank is that of at least one process, and of as many as any other.
        """
        processes = tuple(sorted(rank_of))
        world_size = max(rank_of.values()) + 1
        return cls(
            Rank(rank_of[here], world_size),
            source,
            framework,
            processes,
            n_peers=len(processes) // world_size,
            ranks=tuple(rank_of[process] for process in processes),
        )
