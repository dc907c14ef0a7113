"""Membership: this process in a job, with where that is known from and which processes it concerns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from annbatch_distributed.ranks.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Framework", "Membership", "merged"]

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

    def asks_again(self, other: Membership) -> bool:
        """Whether another membership tells processes apart in the same way, so that each has one place in both.

        Then no process has the first place in one and the second place in the other: rows that are shared out by
        both would not all be read. Where too little is known of the processes to tell, it is False.

        >>> nodes, ranks = (
        ...     Membership(Rank(0, 2), "a mesh", "torch", (0, 1, 2, 3), 2, ranks=of)
        ...     for of in ((0, 0, 1, 1), (0, 1, 0, 1))
        ... )
        >>> nodes.asks_again(nodes), nodes.asks_again(ranks)
        (True, False)
        """
        if self.name is not None and self.name == other.name:
            return True
        if self.framework is None or self.framework != other.framework:
            return False
        one, two = self._ranks_by_process(), other._ranks_by_process()
        pairs = {(one[process], two[process]) for process in one.keys() & two.keys()}
        n_ones, n_twos = (len(set(places)) for places in zip(*pairs, strict=True)) if pairs else (0, 0)
        return (n_ones > 1 and n_twos == len(pairs)) or (n_twos > 1 and n_ones == len(pairs))

    def _ranks_by_process(self) -> dict[int, int]:
        """Return the rank of each process of which it is known."""
        if self.name is not None and self.processes is None:
            return {process: process for process in range(self.rank.world_size)}
        return dict(zip(self.processes or (), self.ranks or (), strict=False))


def merged(memberships: Sequence[Membership]) -> Membership:
    """Return one membership for ranks within ranks, of which the outermost is given first; they are numbered through.

    Its source is what frameworks say, which is the same in all processes.

    >>> node, within_node = (
    ...     Membership(Rank(2, 3), "nodes"),
    ...     Membership(Rank(1, 4), "within nodes"),
    ... )
    >>> merged([node, within_node]).rank
    Rank(rank=9, world_size=12)
    """
    rank, world_size = 0, 1
    for member in memberships:
        rank = rank * member.rank.world_size + member.rank.rank
        world_size *= member.rank.world_size
    asked = [member for member in memberships if member.framework is not None]
    source, framework = ", then ".join(member.source for member in asked), asked[0].framework if asked else None
    if len(memberships) == 1:
        return replace(memberships[0], source=source)
    # each of them may be about a part of the processes, and the peers in one be other ranks in another
    n_peers = 1 if all(member.processes is None for member in memberships) else None
    return Membership(Rank(rank, world_size), source, framework, None, n_peers)
