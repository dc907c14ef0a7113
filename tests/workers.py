"""DataLoader workers that are not there: a sampler is told that it is in one, by the name that torch keeps it under."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils import worker as torchs

from annbatch_distributed import DistributedSampler, StatefulLoader
from tests.samplers import batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@contextmanager
def as_worker(worker: int, n_workers: int) -> Iterator[None]:
    """Be a worker for a while; torch has drawn the same seed in every iteration."""
    before = torchs._worker_info
    torchs._worker_info = torchs.WorkerInfo(id=worker, num_workers=n_workers, seed=7 + worker, dataset=None)
    try:
        yield
    finally:
        torchs._worker_info = before


def forked[Source: (DistributedSampler, StatefulLoader)](source: Source) -> Source:
    """A copy that a worker would have if it were started now."""
    return copy.deepcopy(source)


class Workers:
    """Workers of one rank, which fetch all of their batches ahead; they are started anew unless they persist."""

    def __init__(
        self,
        source: Any,
        n_workers: int,
        *,
        n_obs: int = 0,
        persistent: bool = False,
        read: Callable[[Any], Iterable[Any]] | None = None,
    ) -> None:
        self.source, self.n_workers, self.n_obs, self.persistent = source, n_workers, n_obs, persistent
        self.read = self.rows if read is None else read
        self.copies: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        if not (self.persistent and self.copies):
            self.copies = [forked(self.source) for _ in range(self.n_workers)]
        streams = []
        for worker, duplicate in enumerate(self.copies):
            with as_worker(worker, self.n_workers):
                streams.append(iter(list(self.read(duplicate))))
        return in_turn(streams)

    def rows(self, duplicate: Any) -> list[list[int]]:
        if isinstance(duplicate, StatefulLoader):
            return [batch["index"].tolist() for batch in duplicate]
        return batches(duplicate.sample(self.n_obs))


def in_turn(streams: list[Iterator[Any]]) -> Iterator[Any]:
    """Collect as torch does: from each worker in turn, without those that have come to their end."""
    while streams:
        for stream in list(streams):
            try:
                yield next(stream)
            except StopIteration:
                streams.remove(stream)
