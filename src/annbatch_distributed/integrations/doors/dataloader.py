"""A door to :mod:`annbatch_distributed.loader.workers`, from when this name was found here."""

from annbatch_distributed.loader.workers import WorkerDataLoader

__all__ = ["WorkerDataLoader"]
