"""What a loader needs of Lightning's ``Trainer``: how far a training is, and options that a loader must obey.

A loader asks once, when a pass begins: :func:`training_on` returns the training that is about to read it. Lightning
counts the steps of an epoch, so a state that is saved within a step, by a signal or an error, leads to its batch.

Lightning passes no trainer to the loaders that it reads. If ``dist_info`` doesn't name it, it is found as the caller.
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

#: Any trainer, so that Lightning isn't imported.
type Trainer = Any


class Training:
    """A training by a ``Trainer``, in the epoch that it is in."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._n_begun = 0

    @property
    def _batches(self) -> Any:  # noqa: ANN401 Lightning's counts of the epoch
        return self._trainer.fit_loop.epoch_loop.batch_progress.current

    @property
    def _loaders(self) -> list[Any]:
        return list(self._trainer.fit_loop._combined_loader.flattened)

    def reads(self, loader: object) -> bool:
        """Return True if the training is on batches of a loader, by itself or through a ``DataLoader`` around it."""
        # a DataLoader around a loader has it as its dataset
        return bool(self._trainer.training) and any(getattr(one, "dataset", one) is loader for one in self._loaders)

    def note_step(self) -> None:
        """Note that the batch of the step that comes next is about to be yielded."""
        self._n_begun = int(self._batches.ready)

    @property
    def is_within_step(self) -> bool:
        """True if the step of the batch that was yielded last isn't done."""
        return int(self._batches.processed) <= self._n_begun

    @property
    def is_at_beginning(self) -> bool:
        """True if no step of the epoch was begun."""
        return not self._batches.ready

    @property
    def overfits(self) -> bool:
        """True if every epoch is to have the batches of the first one."""
        return bool(self._trainer.overfit_batches > 0)

    def restore(self) -> None:
        """Load the states of the loaders, if the trainer resumes and hasn't.

        It loads them when it asks for its loaders, if it knows the checkpoint by then. Schedules that ask for
        ``trainer.estimated_stepping_batches`` make it ask earlier.
        """
        if self._trainer.fit_loop.restarting:
            self._trainer.fit_loop._load_combined_loader_states()

    def check_all_are_read(self, n_batches: int, n_done: int) -> None:
        """Raise a RuntimeError if the trainer would read too few of an epoch's batches, of which ``n_done`` are done.

        It doesn't ask for batches that it counts as done, nor for more than it has counted, if it has no limit.
        """
        # several loaders may begin again at any step
        if len(self._loaders) == 1 and self._batches.ready and not n_done:
            raise RuntimeError(
                f"Lightning counts {self._batches.ready} batches of this epoch as done, and the loader begins it with "
                f"the first: as many of its {n_batches} batches would never be read. The checkpoint has no state of "
                "this loader within an epoch, or is of an epoch's last batch and of fewer cells. Have Lightning count "
                "from 0: 'Another collection or batch size' on the page about Lightning shows how."
            )
        # a limit such as 0.5 or 100 is the user's, and means fewer batches; 1.0 is all
        limit, n_asked = self._trainer.limit_train_batches, self._trainer.num_training_batches
        is_limited = self.overfits or not isinstance(limit, float) or limit < 1
        if not is_limited and len(self._loaders) == 1 and n_asked < n_batches:
            raise RuntimeError(
                f"Lightning will ask for {n_asked} batches, which it counted before, and this epoch has {n_batches}: "
                "the others would never be read. The number changes where an epoch is resumed on another number of "
                "devices. Pass Trainer(reload_dataloaders_every_n_epochs=1), and load the loader's state in "
                "load_state_dict of a LightningDataModule, which comes before Lightning counts."
            )


def training_on(loader: object, trainer: object) -> Training | None:
    """Return the training that is about to read a loader, with its states restored; None if none is.

    ``trainer`` is the object that ``dist_info`` names, which may be something else than a trainer.
    """
    trainer = trainer if hasattr(trainer, "fit_loop") else _calling_trainer()
    if trainer is None or not (training := Training(trainer)).reads(loader):
        return None
    training.restore()
    return training


def _calling_trainer() -> Trainer | None:
    """Return the trainer whose fit loop has called, through other functions; None if none has."""
    frame: FrameType | None = sys._getframe(1)
    # upwards from here to the fit loop, or to the end of the stack
    while frame is not None and frame.f_globals.get("__name__") not in _FIT_LOOPS:
        frame = frame.f_back
    return None if frame is None else getattr(frame.f_locals.get("self"), "trainer", None)


@contextmanager
def errors_explained(trainer: object) -> Iterator[None]:
    """Explain what to do under a trainer if a state can't be loaded."""
    try:
        yield
    except ValueError as error:
        if hasattr(trainer, "fit_loop") or _calling_trainer() is not None:
            error.__notes__ = []  # of strict=False, which Lightning can't pass
            error.add_note(
                "If the collection or the batch size was changed on purpose, restart the epoch: 'Another collection or "
                "batch size' on the page about Lightning shows how."
            )
        raise
