"""Lightning: the position of a ``Trainer`` in its epoch, and its options that a loader must respect.

A loader calls :func:`training_on` when a pass begins, which returns the training that is about to read the loader.
Lightning counts the steps of an epoch, so a state that is saved within a step, by a signal or an error, resumes with
the batch of that step.

Lightning doesn't pass its trainer to loaders. Unless ``dist_info`` is the trainer, it is looked up among the callers.
Attributes with an underscore are private; tests/frameworks/test_lightning_options.py fails if Lightning changes one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Training", "errors_explained", "training_on"]

_FIT_LOOPS = "lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop"

#: Beginnings of the names of Lightning's modules.
_LIGHTNING = "lightning.pytorch.", "pytorch_lightning."

#: Any trainer, so that Lightning isn't imported.
type Trainer = Any


class Training:
    """Training by a ``Trainer`` in its current epoch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._n_ready = 0

    @property
    def _batches(self) -> Any:  # noqa: ANN401 Lightning's counts of the epoch
        return self._trainer.fit_loop.epoch_loop.batch_progress.current

    @property
    def _loaders(self) -> list[Any]:
        return list(self._trainer.fit_loop._combined_loader.flattened)

    def reads(self, loader: object) -> bool:
        """Return True if the trainer trains on a loader, or on a ``DataLoader`` of the loader."""
        # the dataset of a DataLoader may be the loader
        return bool(self._trainer.training) and any(getattr(each, "dataset", each) is loader for each in self._loaders)

    def note_step(self) -> None:
        """Note that the batch of the next step is about to be yielded."""
        self._n_ready = int(self._batches.ready)

    @property
    def is_within_step(self) -> bool:
        """True if the step of the last yielded batch isn't done."""
        return int(self._batches.processed) <= self._n_ready

    @property
    def overfits(self) -> bool:
        """True if every epoch must have the batches of the first epoch."""
        return bool(self._trainer.overfit_batches > 0)

    def restore(self) -> None:
        """Load the states of the loaders, if the trainer resumes and hasn't loaded them.

        The trainer loads them when it makes its loaders, if it knows the checkpoint by then. Schedules that use
        ``trainer.estimated_stepping_batches`` make it create the loaders earlier.
        """
        if self._trainer.fit_loop.restarting:
            self._trainer.fit_loop._load_combined_loader_states()

    def check_all_are_read(self, n_batches: int, n_done: int) -> None:
        """Raise a RuntimeError if the trainer would not read all batches of an epoch after the ``n_done`` first.

        A trainer doesn't read batches that it counts as done. Without a limit, it reads as many batches as it counted.
        """
        if self._batches.ready and not n_done and not _is_fetching():
            raise RuntimeError(
                "The loader that the trainer reads was iterated over in a hook, and the state of the training would be "
                "lost. Iterate over a second loader of the same cells there, which has its own sampler."
            )
        # several loaders may start again at any step
        if len(self._loaders) == 1 and self._batches.ready and not n_done:
            raise RuntimeError(
                f"Lightning counts {self._batches.ready} batches of this epoch as done, but the loader starts at the "
                f"first of its {n_batches} batches, so {self._batches.ready} batches would never be read. The "
                "checkpoint has no state of this loader within the epoch, or was saved at the end of a smaller epoch. "
                "Make Lightning count from 0: see 'With a different collection or batch size' on the page about "
                "Lightning."
            )
        # a limit of 1.0 means all batches; other limits, such as 0.5 or 100, are the user's choice
        limit, n_asked = self._trainer.limit_train_batches, self._trainer.num_training_batches
        is_limited = self.overfits or not isinstance(limit, float) or limit < 1
        if not is_limited and len(self._loaders) == 1 and n_asked < n_batches:
            raise RuntimeError(
                f"Lightning will read {n_asked} batches, which it counted earlier, but this epoch has {n_batches}, so "
                "some would never be read. The number changes if an epoch resumes on a different number of devices. "
                "Pass Trainer(reload_dataloaders_every_n_epochs=1), and load the state of the loader in "
                "load_state_dict of a LightningDataModule, before Lightning counts."
            )


def training_on(loader: object, trainer: object) -> Training | None:
    """Return the training that is about to read a loader, with its states restored; None if there is none.

    ``trainer`` is the object in ``dist_info``, which may not be a trainer.
    """
    trainer = trainer if hasattr(trainer, "fit_loop") else _calling_trainer()
    if trainer is None or not (training := Training(trainer)).reads(loader):
        return None
    training.restore()
    return training


def _calling_trainer() -> Trainer | None:
    """Return the trainer whose fit loop is among the callers; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    # upwards from here to the fit loop, or to the end of the stack
    while frame is not None and frame.f_globals.get("__name__") not in _FIT_LOOPS:
        frame = frame.f_back
    return None if frame is None else getattr(frame.f_locals.get("self"), "trainer", None)


def _is_fetching() -> bool:
    """Return True if the trainer itself asks for batches, and not a hook that it calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_LIGHTNING):
        frame = frame.f_back
    return frame is None or str(frame.f_globals["__name__"]).endswith((".combined_loader", ".fetchers"))


@contextmanager
def errors_explained(trainer: object) -> Iterator[None]:
    """Add a note to errors of loading a state under a trainer."""
    try:
        yield
    except ValueError as error:
        if hasattr(trainer, "fit_loop") or _calling_trainer() is not None:
            error.__notes__ = []  # without the note on strict=False, which Lightning can't pass
            error.add_note(
                "If you changed the collection or the batch size on purpose, restart the epoch: see 'With a different "
                "collection or batch size' on the page about Lightning."
            )
        raise
