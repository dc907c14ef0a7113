"""Reports: a plan as text, as a table, as HTML and as a picture, and the composition of its ranks."""

from __future__ import annotations

from annbatch_distributed.reports.plan import EpochPlan

__all__ = ["EpochPlan"]
