"""Which rows are whose: pure arithmetic, which knows integers and numpy, and neither samplers nor frameworks.

How a rank's rows in an epoch come about:

1. :mod:`window` resolves the mask: the rows to be shared out.
2. A sharding puts them into one order for all ranks. Each is a file of its own: :mod:`contiguous`, :mod:`shuffled`,
   :mod:`independent`.
3. :mod:`division` cuts the order into even stretches, as :mod:`remainder` says, so that batches come out as promised.
4. :mod:`plan` describes the epoch.
"""

from __future__ import annotations

from annbatch_distributed.sharding.contiguous import Contiguous
from annbatch_distributed.sharding.contract import Sharding
from annbatch_distributed.sharding.division import Division, Shard
from annbatch_distributed.sharding.independent import Independent
from annbatch_distributed.sharding.plan import EpochPlan
from annbatch_distributed.sharding.remainder import Remainder
from annbatch_distributed.sharding.rows import Rows
from annbatch_distributed.sharding.shuffled import Shuffled
from annbatch_distributed.sharding.window import AnyMask, Mask, resolve_mask, window

__all__ = [
    "AnyMask",
    "Contiguous",
    "Division",
    "EpochPlan",
    "Independent",
    "Mask",
    "Remainder",
    "Rows",
    "Shard",
    "Sharding",
    "Shuffled",
    "resolve_mask",
    "window",
]
