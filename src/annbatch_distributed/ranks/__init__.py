"""Which rank of the job this process is, and which worker: one file per source of the answer.

``resolve`` picks the source. This room knows frameworks and launchers, and nothing of rows.
"""

from __future__ import annotations

from annbatch_distributed.ranks.rank import Placement, Rank
from annbatch_distributed.ranks.resolve import (
    Deferred,
    DistInfo,
    deferred,
    mesh_ranks,
    placement_again,
    placement_of,
    rank_now,
    resolve,
)

__all__ = [
    "Deferred",
    "DistInfo",
    "Placement",
    "Rank",
    "deferred",
    "mesh_ranks",
    "placement_again",
    "placement_of",
    "rank_now",
    "resolve",
]
