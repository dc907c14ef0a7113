"""Callers: whether a framework is asking that would hand rows out a second time.

accelerate's ``prepare`` makes of a torch ``DataLoader`` something that reads an ``IterableDataset`` on rank 0 alone and
cuts up what it read, or reads on every rank and keeps a part of it. Rows that were shared out already would be missing,
and nothing would say so. Both begin a pass, on every rank and before any row is read, with a call of ``set_epoch``: who
calls is all there is to tell them by.
"""

from __future__ import annotations

import sys

__all__ = ["check_not_dispatched"]

_ACCELERATE = "accelerate.data_loader"


def check_not_dispatched() -> None:
    """Raise a RuntimeError if what accelerate's ``prepare`` made of a ``DataLoader`` calls the function that asks."""
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != _ACCELERATE:
        return
    arrived = type(caller.f_locals.get("self")).__name__
    raise RuntimeError(
        "A StatefulLoader must be iterated over as it is: it reads this rank's share of the rows. Here accelerate's "
        f"{arrived}, which comes from accelerator.prepare(DataLoader(loader)), is about to share out its batches "
        "once more, and rows would never be read. Leave the DataLoader out, and iterate over the StatefulLoader "
        "itself; prepare(loader) returns it unchanged."
    )
