"""Trainers: what Lightning's ``Trainer`` says of the training that a loader is read for.

Lightning counts the steps of an epoch, restores loaders too early to hold in some cases, and has options that a loader
can't obey unless it knows of them. Each function is for one of these; ``None`` stands for no trainer.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_all_are_asked_for", "errors_explained", "n_begun", "n_done", "overfits", "restore"]

#: Any trainer, by what it has, so that Lightning isn't imported; or none.
type Trainer = Any


def n_begun(trainer: Trainer) -> int | None:
    """Return how many steps of the epoch have begun; None if no training is running that could say so."""
    return int(_progress(trainer).ready) if trainer is not None and trainer.training else None


def n_done(trainer: Trainer) -> int:
    """Return how many steps of the epoch are done."""
    return int(_progress(trainer).processed)


def _progress(trainer: Trainer) -> Any:  # noqa: ANN401 Lightning's
    return trainer.fit_loop.epoch_loop.batch_progress.current


def overfits(trainer: Trainer) -> bool:
    """Whether every epoch is to have the batches of the first one."""
    return trainer is not None and trainer.training and trainer.overfit_batches > 0


def restore(trainer: Trainer) -> None:
    """Have a trainer that resumes load the states of loaders, if it hasn't.

    It loads them when it asks for its loaders, if it knows the checkpoint by then. Schedules that ask for
    ``trainer.estimated_stepping_batches`` have it ask earlier.
    """
    if trainer is not None and trainer.training and trainer.fit_loop.restarting:
        # Lightning has no public way; tests/frameworks/test_lightning.py notices if it changes
        trainer.fit_loop._load_combined_loader_states()


@contextmanager
def errors_explained(trainer: Trainer) -> Iterator[None]:
    """Say what to do under a trainer where a state can't be loaded."""
    try:
        yield
    except ValueError as error:
        if trainer is not None:
            error.add_note(
                "Lightning can't pass strict=False. If the collection or the batch size was changed on purpose, begin "
                "the epoch anew: 'Another collection or batch size' on the page about Lightning shows how."
            )
        raise


def check_all_are_asked_for(trainer: Trainer, n_batches: int) -> None:
    """Raise a RuntimeError if a trainer that doesn't limit its batches will ask for fewer than an epoch has."""
    if trainer is None or not trainer.training or trainer.overfit_batches > 0:
        return
    limit, n_asked = trainer.limit_train_batches, trainer.num_training_batches
    is_alone = len(trainer.fit_loop._combined_loader.flattened) == 1
    if isinstance(limit, float) and limit == 1.0 and is_alone and n_asked < n_batches:
        raise RuntimeError(
            f"Lightning will ask for {n_asked} batches, which it counted before, and this epoch has {n_batches}: the "
            "others would never be read. The number changes where an epoch is resumed on another number of devices. "
            "Pass Trainer(reload_dataloaders_every_n_epochs=1), and load the loader's state in load_state_dict of a "
            "LightningDataModule, which comes before Lightning counts."
        )
