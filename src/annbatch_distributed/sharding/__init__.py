"""Which rows are whose: pure arithmetic on the standard library and numpy, without annbatch or any framework."""

from __future__ import annotations

from annbatch_distributed.sharding.plan import EpochPlan, Shard
from annbatch_distributed.sharding.remainder import Remainder
from annbatch_distributed.sharding.rows import Rows
from annbatch_distributed.sharding.window import Mask, resolve_mask, window

__all__ = ["EpochPlan", "Mask", "Remainder", "Rows", "Shard", "resolve_mask", "window"]
