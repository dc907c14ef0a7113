"""Ranks: the rank and the worker number of this process, with one module for each kind of source.

A ``RankSource`` selects the module. The modules know frameworks and launchers, but neither samplers nor plans.
"""

from __future__ import annotations

from annbatch_distributed.core.rank import Placement
from annbatch_distributed.ranks.rank import Rank
from annbatch_distributed.ranks.source import DistInfo, RankSource, deferred

__all__ = ["DistInfo", "Placement", "Rank", "RankSource", "deferred"]
