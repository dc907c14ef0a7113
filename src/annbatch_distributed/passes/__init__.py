"""Running any annbatch sampler on one rank's rows: what is known of annbatch's samplers, and of nothing else.

A pass takes a plan, a rank and a private copy of the sampler, and yields load requests for global rows. It knows
annbatch's samplers and which rows a rank has; it knows nothing of the epochs that were done, of other ranks, or of
where a rank comes from.

Whoever has a sampler of their own registers functions for its type with what is listed here.
"""

from __future__ import annotations

from annbatch_distributed.passes.fingerprint import settings
from annbatch_distributed.passes.shard import localize
from annbatch_distributed.passes.traits import chunk_size, n_draws, set_draws

__all__ = ["chunk_size", "localize", "n_draws", "set_draws", "settings"]
