"""Which rank of the job this process is, and which worker: one file per source of the answer.

``resolve`` picks the source. This room knows frameworks and launchers, and nothing of rows.
"""

from __future__ import annotations

from annbatch_distributed.ranks.rank import Membership, Rank
from annbatch_distributed.ranks.resolve import Deferred, DistInfo, deferred, member, mesh_ranks, resolve

__all__ = [
    "Deferred",
    "DistInfo",
    "Membership",
    "Rank",
    "deferred",
    "member",
    "mesh_ranks",
    "resolve",
]
