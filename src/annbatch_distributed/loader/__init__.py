"""Loaders: annbatch's Loader with a position in the epoch, prefetching, and worker processes.

:func:`suggest_sizes` suggests sizes of load requests and batches.

The modules here depend on annbatch's loader, zarr, PyTorch's ``DataLoader``, and the passes of a sampler. They contain
no planning of epochs.
"""

from __future__ import annotations

from annbatch_distributed.loader.batches import CSRRows
from annbatch_distributed.loader.sizes import Sizes, suggest_sizes
from annbatch_distributed.loader.stateful import StatefulLoader

__all__ = [
    "CSRRows",
    "Sizes",
    "StatefulLoader",
    "suggest_sizes",
]
