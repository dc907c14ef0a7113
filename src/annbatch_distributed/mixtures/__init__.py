"""Mixtures: loaders of several collections, mixed by weights or with the same cells."""

from __future__ import annotations

from annbatch_distributed.mixtures.aligned import AlignedLoader
from annbatch_distributed.mixtures.mixed import MixedLoader

__all__ = ["AlignedLoader", "MixedLoader"]
