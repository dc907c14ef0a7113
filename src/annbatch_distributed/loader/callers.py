"""Callers: calls of frameworks that would silently read a loader wrongly.

A loader can't know who reads it, except by the code that calls it. These are the only such calls; each raises a
RuntimeError that names the right one. tests/frameworks fails if a framework renames a function.
"""

from __future__ import annotations

import sys
from types import FrameType

from annbatch_distributed.core.lanes import Remainder


def _caller(module: str, function: str | None = None) -> FrameType | None:
    """Return the frame that called the caller of this module, if it runs code of a module, or one of its functions."""
    # frame 0 is this function, 1 a function below, 2 the loader's method, 3 its caller
    frame = sys._getframe(3)
    is_module = frame.f_globals.get("__name__") == module
    return frame if is_module and function in (None, frame.f_code.co_name) else None


def refuse_dispatch() -> None:
    """Raise if Accelerate calls ``set_epoch`` for a ``DataLoader`` that it has prepared.

    Accelerate reads an ``IterableDataset`` on rank 0 and splits its batches, or reads on every rank and keeps a part of
    the batches. Rows would silently be missing.
    """
    if (frame := _caller("accelerate.data_loader")) is None:
        return
    raise RuntimeError(
        f"Accelerate's {type(frame.f_locals.get('self')).__name__}, which accelerator.prepare(DataLoader(loader)) "
        "returns, would shard the batches a second time, and some rows would never be read. Iterate over the loader "
        "itself, without a DataLoader; accelerator.prepare(loader) returns it unchanged."
    )


def refuse_evaluation(remainder: Remainder) -> None:
    """Raise if Hugging Face's ``Trainer`` evaluates, unless ``remainder`` is ``"drop"``.

    It weights the loss of each batch as if the batch were full, gathers predictions of equal batches, and counts
    repeated rows.
    """
    if remainder == "drop" or _caller("transformers.trainer", "evaluation_loop") is None:
        return
    raise RuntimeError(
        "Hugging Face's Trainer needs full batches without repeated rows when it evaluates or predicts, so under "
        f"remainder={remainder!r} its loss and predictions would be wrong. Pass remainder='drop', or override evaluate "
        "as in examples/transformers_trainer.py."
    )


def refuse_skipping() -> None:
    """Raise if Accelerate's ``skip_first_batches`` asks for the dataset.

    It would make its own ``DataLoader``, without epoch and state.
    """
    if _caller("accelerate.data_loader", "skip_first_batches") is None:
        return
    raise RuntimeError(
        "Accelerate's skip_first_batches can't be used with the DataLoader of to_dataloader(), because it would lose "
        "the epoch and the state. Call load_state_dict(state) with the state of the checkpoint instead. For Hugging "
        "Face's Trainer, also pass TrainingArguments(ignore_data_skip=True)."
    )
