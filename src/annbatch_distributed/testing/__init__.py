"""The laws of sharing out, for shardings of your own; the ones of this package pass the same.

They know what users know: the public names, and nothing of how those come about.

Needs hypothesis: install the extra ``testing``.
"""

from __future__ import annotations

from annbatch_distributed.testing.laws import check_sharding
from annbatch_distributed.testing.strategies import Deal, deals, masks

__all__ = ["Deal", "check_sharding", "deals", "masks"]
