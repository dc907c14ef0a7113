"""Callers: whether a framework is asking that would hand rows out a second time, or put batches into batches.

accelerate's ``prepare`` makes of a torch ``DataLoader`` something that reads an ``IterableDataset`` on rank 0 alone and
cuts up what it read, or reads on every rank and keeps a part of it. Rows that were shared out already would be missing,
and nothing would say so. Both begin a pass, on every rank and before any row is read, with a call of ``set_epoch``: who
calls is all there is to tell them by.

torch's ``DataLoader`` puts what it is given into batches, unless it is told not to, and fails on the first one in a way
that names no batch size.

torchdata's ``StatefulDataLoader`` resumes what has no state by reading the next pass and leaving out as many batches as
were done in another one.
"""

from __future__ import annotations

import sys

__all__ = ["check_not_collated", "check_not_dispatched", "is_fast_forwarded"]

_ACCELERATE = "accelerate.data_loader"
_DATALOADER = "torch.utils.data._utils.fetch"
_STATEFUL_DATALOADER = "torchdata.stateful_dataloader"


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


def check_not_collated() -> None:
    """Raise a ValueError if a torch ``DataLoader`` that would put batches into batches calls the function that asks.

    It would by torch's own rule: what a ``collate_fn`` of the user's makes of batches is the user's business.
    """
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != _DATALOADER or not caller.f_locals.get("auto_collation"):
        return
    if caller.f_locals.get("collate_fn") is sys.modules["torch.utils.data"].default_collate:
        raise ValueError(
            "The loader makes the batches, but a DataLoader with a batch size of its own puts several of them into one "
            "(without one, torch takes 1). Pass batch_size=None: DataLoader(loader, batch_size=None, ...)."
        )


def is_fast_forwarded() -> bool:
    """Whether annbatch's ``Loader`` begins a pass by the function that asks, for torchdata's ``StatefulDataLoader``."""
    caller = sys._getframe(2)
    if _STATEFUL_DATALOADER not in sys.modules or caller.f_globals.get("__name__") != "annbatch.loader":
        return False
    while caller := caller.f_back:  # type: ignore[assignment]  # None ends it
        if str(caller.f_globals.get("__name__")).startswith(_STATEFUL_DATALOADER):
            return True
    return False
