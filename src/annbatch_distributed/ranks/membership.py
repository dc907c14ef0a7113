"""Membership: this process in a job, with where that is known from and which processes it concerns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from annbatch_distributed.ranks.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def merged(memberships: Sequence[Membership]) -> Membership:
    """Return one membership for ranks within ranks, which are numbered through.

    Its source is what frameworks say, which is the same in all processes.

    Parameters
    ----------
    memberships
        From the outermost.

    Examples
    --------
    >>> node, within_node = Membership(Rank(2, 3), "nodes"), Membership(Rank(1, 4), "within nodes")
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
