"""Ranks of the command line as threads of this process, which take no time to start."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from annbatch_distributed.cli.check import as_rank

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator


def in_threads(options: Namespace, mask: Any) -> Iterator[list[Any]]:
    """Stream the epochs as each rank, and yield what all of them have read in each."""
    together, said = threading.Barrier(options.ranks), [None] * options.ranks
    epochs: list[list[Any]] = []

    def stream(rank: int) -> None:
        def meet(what: Any) -> list[Any]:
            said[rank] = what
            together.wait(60)
            heard: list[Any] = list(said)
            together.wait(60)
            if rank == 0 and isinstance(what, tuple):
                epochs.append(heard)
            return heard

        as_rank(options, mask, rank, meet)

    with ThreadPoolExecutor(options.ranks) as ranks:
        list(ranks.map(stream, range(options.ranks)))
    yield from epochs
