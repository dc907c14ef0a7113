"""Workers: which worker of a torch ``DataLoader`` this process is, if any.

annbatch's samplers would divide their rows among the workers. Here the lanes are divided, so it is hidden from them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from multiprocessing.context import get_spawning_popen

from annbatch_distributed.lanes import Worker

#: What is hidden is hidden from all threads, so that they take turns.
_hiding = threading.RLock()


def _hide_anew() -> None:
    """In a process that was forked, nobody is left to let go of what another thread held."""
    global _hiding  # noqa: PLW0603 a lock can't be told to forget its holder
    _hiding = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hide_anew)


def current_worker() -> Worker | None:
    """Return which worker this process is; None if it is none.

    A process becomes a worker after it was started, so that the answer is for the call at hand only.
    """
    torch = sys.modules.get("torch")  # in a worker, torch has been imported
    if torch is None:
        return None
    with _hiding:
        info = torch.utils.data.get_worker_info()
    return None if info is None else Worker(info.id, info.num_workers)


def base_seed() -> int:
    """Return the seed that torch has drawn for all workers of this iteration, in one of them."""
    import torch

    with _hiding:
        info = torch.utils.data.get_worker_info()
    assert info is not None
    # torch seeds worker w with its base seed + w
    return (info.seed - info.id) % (1 << 62)


class SharedFlag:
    """A flag that this process shares with the processes that it starts, in anonymous memory that a fork inherits.

    A spawned process has none of that memory: being pickled for one sets the flag, as it may then set its own.
    """

    def __init__(self) -> None:
        self._memory = mmap(-1, 1)

    @property
    def is_set(self) -> bool:
        """True once this process, or one that it started, has set it."""
        return self._memory[0] != 0

    def set(self) -> None:
        """Set the flag, in all processes."""
        self._memory[0] = 1

    def clear(self) -> None:
        """Clear the flag, in all processes."""
        self._memory[0] = 0

    def __reduce__(self) -> tuple[type[SharedFlag], tuple[()]]:
        # multiprocessing says so while it pickles for a process that it spawns
        if get_spawning_popen() is not None:
            self.set()
        return SharedFlag, ()


@contextmanager
def worker_info_hidden(worker: Worker | None) -> Iterator[None]:
    """Have torch say in this context that this process is no worker, to annbatch's samplers in particular.

    ``worker`` is what :func:`current_worker` has returned: if it is None, there is nothing to hide.
    """
    if worker is None:
        yield
        return
    # torch has no public way to set this; tests/test_workers.py notices if it is kept elsewhere
    from torch.utils.data._utils import worker as torchs

    with _hiding:
        info, torchs._worker_info = torchs._worker_info, None
        try:
            yield
        finally:
            torchs._worker_info = info
