"""What ranks of the command line do in tests instead of streaming an epoch, or besides.

Ranks are spawned, and find these functions by their names.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from annbatch_distributed import StatefulLoader
from annbatch_distributed.cli import check

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Generator
    from multiprocessing.connection import Connection

#: Set before a test takes its place.
_rank = check._rank


def tampered(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:
    """Stream as a rank; but in epoch 1, rank 1 is told of another row in one of its batches than it has read."""
    as_it_is = StatefulLoader.__iter__

    def changed(self: StatefulLoader) -> Generator[Any]:
        is_wrong = (self.sampler.rank, self.sampler.epoch) == (1, 1)
        for number, batch in enumerate(as_it_is(self)):
            if is_wrong and number == 3:
                batch["index"] = batch["index"].copy()
                batch["index"][2] = 0
            yield batch

    StatefulLoader.__iter__ = changed  # type: ignore[method-assign]  # of this process alone, which ends with it
    _rank(options, mask, rank, pipe)


def killed(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:
    """Stream as a rank; but rank 1 is killed when it has read some batches."""
    as_it_is = StatefulLoader.__iter__

    def changed(self: StatefulLoader) -> Generator[Any]:
        for number, batch in enumerate(as_it_is(self)):
            if self.sampler.rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    StatefulLoader.__iter__ = changed  # type: ignore[method-assign]  # of this process alone, which ends with it
    _rank(options, mask, rank, pipe)


def without_end(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:
    """Wait for ever, but end with the parent as a rank does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=check._end_with, args=[parent], daemon=True).start()
    time.sleep(1_000)
