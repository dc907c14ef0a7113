"""Workers: which worker of a torch ``DataLoader`` this process is, if any.

annbatch's samplers would divide their rows among the workers. Here the lanes are divided, so it is hidden from them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    return (info.seed - info.id) % (1 << 62)


def n_started() -> int:
    """Return how many processes this one has started that may be workers."""
    return _n_started


def note_started() -> None:
    """Note that one is being started, if that is what something is pickled for."""
    if get_spawning_popen() is not None:
        _count_started()


def _count_started() -> None:
    global _n_started  # noqa: PLW0603 it is of the process
    _n_started += 1


_n_started = 0
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_count_started)


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
