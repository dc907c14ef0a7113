"""Which rows are whose: pure arithmetic on the standard library and numpy, without annbatch or any framework.

A *sharding* is the rule that decides it. There is one so far, contiguous: ``remainder.stretch`` says which positions
of the window a rank has, and ``Rows.cyclic`` which rows they are. The argument ``sharding=`` of the sampler, for rules
that deal the rows out in another order, is to take the place of the latter.
"""

from __future__ import annotations

from annbatch_distributed.sharding.plan import EpochPlan, Shard
from annbatch_distributed.sharding.remainder import Remainder
from annbatch_distributed.sharding.rows import Rows
from annbatch_distributed.sharding.window import Mask, resolve_mask, window

__all__ = ["EpochPlan", "Mask", "Remainder", "Rows", "Shard", "resolve_mask", "window"]
