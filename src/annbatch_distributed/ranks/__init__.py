"""Ranks: the rank and the worker number of this process, with one module for each kind of source.

A ``Source`` selects the module. The modules know frameworks and launchers, but neither samplers nor plans.
"""

from __future__ import annotations

from annbatch_distributed.core.rank import Placement, Rank
from annbatch_distributed.ranks.source import DistInfo, Source, deferred, mesh_ranks

__all__ = ["DistInfo", "Placement", "Rank", "Source", "deferred", "mesh_ranks"]
