"""Membership: this process in a job, with where that is known from and which processes it concerns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from annbatch_distributed.ranks.rank import Rank

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
    n_peers: int = 1
    """How many processes have the same share, this one included: those that split up a model, not the data."""
