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


def failing(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:
    """Stream as a rank; but rank 1 is told of a row that it hasn't read in epoch 1, and is killed in epoch 2."""
    as_it_is = StatefulLoader.__iter__

    def changed(self: StatefulLoader) -> Generator[Any]:
        for number, batch in enumerate(as_it_is(self)):
            if (self.sampler.rank, number) == (1, 3):
                if self.sampler.epoch == 1:
                    batch["index"] = [0, *batch["index"][1:]]
                if self.sampler.epoch == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    StatefulLoader.__iter__ = changed  # type: ignore[assignment, method-assign]  # of this process alone, which ends with it
    _rank(options, mask, rank, pipe)


def without_end(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:
    """Wait for ever, but end with the parent as a rank does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=check._end_with, args=[parent], daemon=True).start()
    time.sleep(1_000)
