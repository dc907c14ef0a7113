"""Processes that another one has started, and that end with it."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process


def follow_parent() -> None:
    """End this process as soon as its parent has ended, and leave Ctrl-C to the parent."""
    # a terminal sends Ctrl-C to all processes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # else a process whose parent was killed would wait for ever
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
