"""Ranks: the rank and the worker number of this process, with one module for each source.

``resolve`` selects the source. The modules know frameworks and launchers, but neither samplers nor plans.
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
