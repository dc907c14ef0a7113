"""Callers: whether something is asking that would hand rows out a second time, or a trainer that counts steps.

annbatch's own ``DistributedSampler`` would share out the rows of a rank once more. accelerate's ``prepare`` makes of a
torch ``DataLoader`` something that reads an ``IterableDataset`` on rank 0 alone and cuts up what it read, or reads on
every rank and keeps a part of it. Rows would be missing, and nothing would say so: who calls is all there is to tell
them by.
"""

from __future__ import annotations

import sys
from typing import Any

from annbatch.samplers import DistributedSampler

_ACCELERATE = "accelerate.data_loader"
_TRAININGS = "lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop"


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


def check_not_skipped() -> None:
    """Raise a RuntimeError if accelerate's ``skip_first_batches`` calls the function that asks.

    It would go on with a ``DataLoader`` of its own, which knows nothing of epochs and states.
    """
    code, module = sys._getframe(2).f_code, sys._getframe(2).f_globals.get("__name__")
    if (module, code.co_name) != (_ACCELERATE, "skip_first_batches"):
        return
    raise RuntimeError(
        "accelerate's skip_first_batches can't skip batches of what to_dataloader() returns, whose epoch and state it "
        "would lose. Load the state that was saved with the checkpoint, load_state_dict(state): nothing is read twice "
        "then. Hugging Face's Trainer doesn't skip with TrainingArguments(ignore_data_skip=True)."
    )


def calling_trainer() -> Any:  # noqa: ANN401 Lightning's, which isn't imported
    """Return Lightning's ``Trainer`` whose training has called the caller, through others; None if none has."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") not in _TRAININGS:
        frame = frame.f_back
    return getattr(frame.f_locals.get("self"), "trainer", None)


def check_not_within_annbatchs() -> None:
    """Raise a ValueError if annbatch's own ``DistributedSampler`` has called the caller, directly or through others."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != DistributedSampler.__module__:
        frame = frame.f_back
    if frame.f_back is None:
        return
    raise ValueError(
        "An annbatch.samplers.DistributedSampler around one of annbatch_distributed shares out rows that are shared "
        "out already, and rows would never be read. Leave it out; for ranks within nodes, wrap the sampler in another "
        "annbatch_distributed.DistributedSampler."
    )
