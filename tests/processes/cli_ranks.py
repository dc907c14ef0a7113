"""Replacements for the ranks of the command line in tests.

Ranks are spawned, and import these functions by name.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from annbatch_distributed import StatefulLoader
from annbatch_distributed.cli import check
from annbatch_distributed.core.processes import follow_parent

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Generator
    from multiprocessing.connection import Connection

#: The original function, before a test replaces it.
_rank = check._rank


def failing(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:
    """Stream as a rank, except that rank 1 reports a wrong row in epoch 1 and is killed in epoch 2."""
    iterate = StatefulLoader.__iter__

    def changed(self: StatefulLoader) -> Generator[Any]:
        for number, batch in enumerate(iterate(self)):
            if (self.sampler.rank, number) == (1, 3):
                if self.sampler.epoch == 1:
                    batch["index"] = [0, *batch["index"][1:]]
                if self.sampler.epoch == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    StatefulLoader.__iter__ = changed  # type: ignore[assignment, method-assign]  # only in this process, which ends afterwards
    _rank(options, mask, rank, pipe)


def without_end(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:
    """Wait forever, but end with the parent process, as a rank does."""
    follow_parent()
    time.sleep(1_000)
