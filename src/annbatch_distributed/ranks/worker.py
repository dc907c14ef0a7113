"""Workers: which worker of a torch ``DataLoader`` this process is, if any.

annbatch's samplers ask torch the same, and divide their rows among the workers. Here that has been done before, so that
they are run as if there were no workers.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


#: What is hidden is hidden from all threads, so that they take turns.
_hiding = threading.RLock()


def _hide_anew() -> None:
    """In a process that was forked, nobody is left to let go of what another thread held."""
    global _hiding  # noqa: PLW0603 a lock can't be told to forget its holder
    _hiding = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hide_anew)


class Worker(NamedTuple):
    """A worker process of a torch ``DataLoader``."""

    id: int
    """Which of the workers, from 0."""
    n_workers: int
    """How many there are."""


def current() -> Worker | None:
    """Return which worker this process is; None if it is none."""
    torch = sys.modules.get("torch")  # in a worker, torch has been imported
    if torch is None:
        return None
    with _hiding:
        info = torch.utils.data.get_worker_info()
    return None if info is None else Worker(info.id, info.num_workers)


def undivided() -> AbstractContextManager[None]:
    """Let whoever asks torch in this context hear that there are no workers."""
    return nullcontext() if current() is None else _hidden()


@contextmanager
def _hidden() -> Iterator[None]:
    # torch has no public way to set this; tests/test_workers.py notices if it is kept elsewhere
    from torch.utils.data._utils import worker

    with _hiding:
        info, worker._worker_info = worker._worker_info, None
        try:
            yield
        finally:
            worker._worker_info = info
