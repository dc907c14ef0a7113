"""Consistency checks across the ranks of a job: of their configuration, and of the rows that they have read.

Each process describes itself, all processes exchange their descriptions, and each compares them. This package knows
strings, tallies, and the stores of frameworks. It doesn't know how a pass runs, only that it can run again without
reading data.
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
