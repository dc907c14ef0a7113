"""Who am I? One file per source of (rank, world size), and ``resolve``, which picks one."""

from __future__ import annotations

from annbatch_distributed.ranks.membership import Membership
from annbatch_distributed.ranks.rank import Rank
from annbatch_distributed.ranks.resolve import DistInfo, resolve

__all__ = ["DistInfo", "Membership", "Rank", "resolve"]
