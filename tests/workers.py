"""Simulated DataLoader workers: PyTorch's worker info is set in this process."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils import worker as torchs

from annbatch_distributed.sampler import cursor_of
from tests.samplers import batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from annbatch_distributed import DistributedSampler
    from annbatch_distributed.core.stream import Pass


@contextmanager
def as_worker(worker: int, n_workers: int) -> Iterator[None]:
    """Be a worker within a context, with the same seed in every iteration."""
    before = torchs._worker_info
    torchs._worker_info = torchs.WorkerInfo(id=worker, num_workers=n_workers, seed=7 + worker, dataset=None)
    try:
        yield
    finally:
        torchs._worker_info = before


def read_by_workers(
    sampler: DistributedSampler, n_obs: int, n_workers: int, read: Callable[[Pass], list[Any]] = batches
) -> list[Any]:
    """The batches of a pass by workers that know its position, as PyTorch collects them; the sampler doesn't change."""
    position = cursor_of(copy.deepcopy(sampler)).next(n_workers)
    streams = []
    for worker in range(n_workers):
        with as_worker(worker, n_workers):
            streams.append(iter(read(cursor_of(copy.deepcopy(sampler)).begin(n_obs, position))))
    return list(in_turn(streams))


def in_turn(streams: list[Iterator[Any]]) -> Iterator[Any]:
    """Collect as PyTorch does: from each worker in turn, without finished workers."""
    while streams:
        for stream in list(streams):
            try:
                yield next(stream)
            except StopIteration:
                streams.remove(stream)
