"""Whether all ranks have the same configuration, and have read the plan.

What a process says of itself, how all processes hear of it, and the verdict on it. This room knows texts, tallies and
the stores in which processes meet; of how a pass runs it knows only that one can be run once more, without reading.
"""

from __future__ import annotations

from annbatch_distributed.checks.agreement import (
    Description,
    Read,
    Reading,
    Tally,
    epoch_read,
    epochs_read,
    ranks_agree,
)
from annbatch_distributed.checks.exchange import Gather, Timeout

__all__ = ["Description", "Gather", "Read", "Reading", "Tally", "Timeout", "epoch_read", "epochs_read", "ranks_agree"]
