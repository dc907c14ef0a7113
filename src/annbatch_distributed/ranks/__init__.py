"""Who am I? One file per source of (rank, world size), and ``resolve``, which picks one."""

from __future__ import annotations

from annbatch_distributed.ranks.deferred import Deferred, deferred
from annbatch_distributed.ranks.membership import Membership, merged
from annbatch_distributed.ranks.mesh import mesh_ranks
from annbatch_distributed.ranks.rank import Rank
from annbatch_distributed.ranks.resolve import DistInfo, resolve

__all__ = ["Deferred", "DistInfo", "Membership", "Rank", "deferred", "merged", "mesh_ranks", "resolve"]
