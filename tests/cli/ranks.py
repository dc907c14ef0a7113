"""Ranks of the command line as threads of this process, which take no time to start."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from annbatch_distributed.cli.cells import Cells
from annbatch_distributed.cli.job import Job, Read, readings

if TYPE_CHECKING:
    from collections.abc import Callable


def in_threads(job: Job, say: Callable[[int], object]) -> list[Read]:
    """Stream the epochs as each rank, and return what each of them has read."""
    world_size = job.settings.world_size
    together, texts = threading.Barrier(world_size), [""] * world_size

    def as_rank(rank: int) -> list[Read]:
        def meet(text: str) -> list[str]:
            texts[rank] = text
            together.wait(60)
            said = list(texts)
            together.wait(60)
            return said

        return list(readings(Cells(job.path), job.settings, rank, meet=meet, say=say))

    with ThreadPoolExecutor(world_size) as ranks:
        return [read for its in ranks.map(as_rank, range(world_size)) for read in its]
