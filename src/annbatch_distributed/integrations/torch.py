"""torch's ``DataLoader`` around a StatefulLoader, which :meth:`StatefulLoader.to_dataloader` returns."""

from annbatch_distributed.loader.workers import WorkerDataLoader

__all__ = ["WorkerDataLoader"]
