"""Callers: whether a framework is asking that would hand rows out a second time, or put batches into batches.

accelerate's ``prepare`` makes of a torch ``DataLoader`` something that reads an ``IterableDataset`` on rank 0 alone and
cuts up what it read, or reads on every rank and keeps a part of it. Rows that were shared out already would be missing,
and nothing would say so. Both begin a pass, on every rank and before any row is read, with a call of ``set_epoch``: who
calls is all there is to tell them by.

torch's ``DataLoader`` puts what it is given into batches, unless it is told not to, and fails on the first one in a way
that names no batch size.
"""

from __future__ import annotations

import sys

_ACCELERATE = "accelerate.data_loader"
_DATALOADER = "torch.utils.data._utils.fetch"


def check_not_dispatched() -> None:
    """Raise if what accelerate's ``prepare`` has made of a ``DataLoader`` calls the function that asks this.

    Raises
    ------
    RuntimeError
        If it is accelerate that calls.
    """
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != _ACCELERATE:
        return
    arrived = type(caller.f_locals.get("self")).__name__
    msg = (
        "A StatefulLoader must be iterated over as it is: it reads this rank's share of the rows. Here accelerate's "
        f"{arrived}, which comes from accelerator.prepare(DataLoader(loader)), is about to share out its batches "
        "once more, and rows would never be read. Leave the DataLoader out, and iterate over the StatefulLoader "
        "itself; prepare(loader) returns it unchanged."
    )
    raise RuntimeError(msg)


def check_not_collated() -> None:
    """Raise if a torch ``DataLoader`` that would put batches into batches calls the function that asks this.

    Raises
    ------
    ValueError
        If it does, by torch's own rule: what a ``collate_fn`` of the user's makes of batches is the user's business.
    """
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != _DATALOADER or not caller.f_locals.get("auto_collation"):
        return
    if caller.f_locals.get("collate_fn") is sys.modules["torch.utils.data"].default_collate:
        msg = (
            "The loader makes the batches, but a DataLoader with a batch size of its own puts several of them into one "
            "(without one, torch takes 1). Pass batch_size=None: DataLoader(loader, batch_size=None, ...)."
        )
        raise ValueError(msg)
