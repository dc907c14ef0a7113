"""Workers: which worker of a torch ``DataLoader`` this process is, if any.

annbatch's samplers ask torch the same, and divide their rows among the workers. Here that has been done before, so that
they are run as if there were no workers.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class Worker(NamedTuple):
    """A worker process of a torch ``DataLoader``."""

    id: int
    """Which of the workers, from 0."""
    n_workers: int
    """How many there are."""
    seed: int
    """What torch has drawn for all of them: another number in every iteration, unless they are persistent."""


def current() -> Worker | None:
    """Return which worker this process is; None if it is none."""
    torch = sys.modules.get("torch")  # in a worker, torch has been imported
    info = torch.utils.data.get_worker_info() if torch is not None else None
    return None if info is None else Worker(info.id, info.num_workers, info.seed - info.id)


def undivided() -> AbstractContextManager[None]:
    """Let whoever asks torch in this context hear that there are no workers."""
    return nullcontext() if current() is None else _hidden()


@contextmanager
def _hidden() -> Iterator[None]:
    # torch has no public way to set this; tests/test_workers.py notices if it is kept elsewhere
    from torch.utils.data._utils import worker

    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
