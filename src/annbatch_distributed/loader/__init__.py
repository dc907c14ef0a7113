"""The loader: annbatch's Loader that knows how far its consumer is, that can read ahead of it, and read in workers.

For the sizes of load requests and batches, :func:`suggest_sizes` has suggestions.

It knows annbatch's loader, arrays of zarr and what reads them, torch's ``DataLoader`` and what a sampler records of a
pass. It knows nothing of how an epoch is planned.
"""

from __future__ import annotations

from annbatch_distributed.loader.aligned import AlignedLoader
from annbatch_distributed.loader.interface import TrainingLoader
from annbatch_distributed.loader.mixed import MixedLoader
from annbatch_distributed.loader.sizes import Sizes, suggest_sizes
from annbatch_distributed.loader.stateful import StatefulLoader
from annbatch_distributed.loader.workers import WorkerDataLoader

__all__ = [
    "AlignedLoader",
    "MixedLoader",
    "Sizes",
    "StatefulLoader",
    "TrainingLoader",
    "WorkerDataLoader",
    "suggest_sizes",
]
