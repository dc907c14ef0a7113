"""Trainers: what Lightning's ``Trainer`` says of a training, to a loader that it is read for.

Lightning counts the steps of an epoch, restores loaders too early to hold in some cases, and has options that a loader
can't obey unless it knows of them. Each function is for one of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Any trainer, by what it has, so that Lightning isn't imported.
type Trainer = Any


def trains_on(trainer: Trainer | None, loader: object) -> bool:
    """Whether a trainer is training on the batches of a loader, by itself or by a ``DataLoader`` around it."""
    return trainer is not None and trainer.training and any(_within(own) is loader for own in _loaders(trainer))


def _loaders(trainer: Trainer) -> list[Any]:
    # Lightning has no public way; tests/frameworks/test_lightning_options.py notices if it changes
    return list(trainer.fit_loop._combined_loader.flattened)


def _within(loader: Any) -> Any:  # noqa: ANN401 whatever Lightning is given
    return getattr(loader, "dataset", loader)


def n_begun(trainer: Trainer) -> int:
    """Return how many steps of the epoch have begun."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def n_done(trainer: Trainer) -> int:
    """Return how many steps of the epoch are done."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def overfits(trainer: Trainer) -> bool:
    """Whether every epoch is to have the batches of the first one."""
    return bool(trainer.overfit_batches > 0)


def restore(trainer: Trainer) -> None:
    """Have a trainer that resumes load the states of its loaders, if it hasn't.

    It loads them when it asks for its loaders, if it knows the checkpoint by then. Schedules that ask for
    ``trainer.estimated_stepping_batches`` have it ask earlier.
    """
    if trainer.fit_loop.restarting:
        trainer.fit_loop._load_combined_loader_states()


def check_all_are_asked_for(trainer: Trainer, n_batches: int) -> None:
    """Raise a RuntimeError if a trainer that doesn't limit its batches will ask for fewer than an epoch has."""
    limit, n_asked = trainer.limit_train_batches, trainer.num_training_batches
    is_limited = overfits(trainer) or not isinstance(limit, float) or limit < 1
    if not is_limited and len(_loaders(trainer)) == 1 and n_asked < n_batches:
        raise RuntimeError(
            f"Lightning will ask for {n_asked} batches, which it counted before, and this epoch has {n_batches}: the "
            "others would never be read. The number changes where an epoch is resumed on another number of devices. "
            "Pass Trainer(reload_dataloaders_every_n_epochs=1), and load the loader's state in load_state_dict of a "
            "LightningDataModule, which comes before Lightning counts."
        )


@contextmanager
def errors_explained(trainer: Trainer | None) -> Iterator[None]:
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
