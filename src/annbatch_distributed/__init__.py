"""Every rank its own share of an annbatch collection.

Wrap any annbatch sampler in a :class:`DistributedSampler`, and pass it to annbatch's ``Loader``.
"""

from __future__ import annotations

from annbatch_distributed.loader import StatefulLoader
from annbatch_distributed.ranks import Rank, deferred, mesh_ranks
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.sharding import Contiguous, EpochPlan, Independent, Shuffled
from annbatch_distributed.tally import Tally

__all__ = [
    "Contiguous",
    "DistributedSampler",
    "EpochPlan",
    "Independent",
    "Rank",
    "Shuffled",
    "StatefulLoader",
    "Tally",
    "deferred",
    "mesh_ranks",
]
