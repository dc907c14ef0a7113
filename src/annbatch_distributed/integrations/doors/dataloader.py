"""A door to :mod:`annbatch_distributed.integrations.torch`, from when this name was found here."""

from annbatch_distributed.integrations.torch import WorkerDataLoader

__all__ = ["WorkerDataLoader"]
