"""Workers: the worker of a PyTorch ``DataLoader`` that this process is, if any.

annbatch's samplers would split their rows among the workers. Here, the lanes are split among the workers, so the worker
is hidden from annbatch's samplers.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from multiprocessing.context import get_spawning_popen

from annbatch_distributed.core.lanes import Worker

#: Held while the worker is hidden, since it is hidden from all threads.
_hiding = threading.RLock()


def _replace_lock() -> None:
    """Replace the lock in a forked process, where the thread that held it doesn't exist."""
    global _hiding  # noqa: PLW0603 a lock can't be reset
    _hiding = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)


def current_worker() -> Worker | None:
    """Return the worker that this process is; None if it isn't a worker.

    A process becomes a worker after it has started, so the answer may change.
    """
    torch = sys.modules.get("torch")  # every worker has imported PyTorch
    if torch is None:
        return None
    with _hiding:
        info = torch.utils.data.get_worker_info()
    return None if info is None else Worker(info.id, info.num_workers)


class SharedFlag:
    """Flag that this process shares with the processes that it starts, in memory that a fork inherits.

    A spawned process doesn't have this memory, so pickling for a spawned process sets the flag at once.
    """

    def __init__(self) -> None:
        self._memory = mmap(-1, 1)

    @property
    def is_set(self) -> bool:
        """True once this process, or a process that it started, has set the flag."""
        return self._memory[0] != 0

    def set(self) -> None:
        """Set the flag, in all processes."""
        self._memory[0] = 1

    def clear(self) -> None:
        """Clear the flag, in all processes."""
        self._memory[0] = 0

    def __reduce__(self) -> tuple[type[SharedFlag], tuple[()]]:
        # not None while multiprocessing pickles for a process that it spawns
        if get_spawning_popen() is not None:
            self.set()
        return SharedFlag, ()


@contextmanager
def hidden_worker() -> Iterator[None]:
    """Hide in this context, from annbatch's samplers, that this process is a worker."""
    if current_worker() is None:
        yield
        return
    # a private attribute; tests/test_workers.py fails if PyTorch renames it
    from torch.utils.data._utils import worker as torch_worker

    with _hiding:
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            yield
        finally:
            torch_worker._worker_info = info
