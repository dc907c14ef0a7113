"""What annbatch's interface doesn't say of a sampler, and sharing out its rows takes.

A sampler of a user's own says it in attributes of these names, as far as it has them:

===========================  ==========================================================================================
``chunk_size``               how many consecutive rows it reads at a time
``n_draws(n_rows)``          how many samples it draws with replacement of so many rows; None if it draws without
``set_draws(n_draws)``       draws so many from now on: a rank's part of the samples of the job
``localize(rows, n_obs)``    narrows what it holds for each of the ``n_obs`` rows down to the rows of a shard
``settings()``               a dict of what its batches follow from, where that is less than all that it holds
===========================  ==========================================================================================

Of annbatch's own samplers it is known here, by private names: tests/test_known.py fails if annbatch changes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler

from annbatch_distributed.copies import attributes, first_generator

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

    from annbatch_distributed.rows import Rows

__all__ = [
    "SETTINGS",
    "can_set_draws",
    "chunk_size",
    "drawable_classes",
    "is_annbatchs_own",
    "is_random",
    "localize",
    "n_draws",
    "needs_global_rows",
    "reads_every_row",
    "rows_per_request",
    "set_draws",
    "settings",
]

_SHARED = ("_batch_size", "_chunk_size", "_drop_last", "_num_samples", "_preload_nchunks")
_OF_CHUNKS = (*_SHARED, "_in_memory_size", "_replacement", "_shuffle")
_OF_CLASSES = (*_SHARED, "_n_obs")

#: For each type, the attributes that its batches follow from, beside the mask, the generator, and labels and weights.
#: They are listed so that an attribute that a later annbatch adds doesn't make every saved state another sampler's.
SETTINGS: dict[type[Sampler], tuple[str, ...]] = {
    RandomSampler: _OF_CHUNKS,
    SequentialSampler: _OF_CHUNKS,
    ClassSampler: _OF_CLASSES,
    WeightedClassSampler: _OF_CLASSES,
}
_ANNBATCHS = (RandomSampler, SequentialSampler, ClassSampler)


def _own(sampler: Sampler, name: str) -> Callable[..., Any] | None:
    """Return a method that a sampler has for this package; None if it has none."""
    method = getattr(sampler, name, None)
    return method if callable(method) else None


def is_annbatchs_own(sampler: Sampler) -> bool:
    """Whether a sampler is one of annbatch's own, whose load requests are right; those of subclasses may not be."""
    return type(sampler) in SETTINGS


def chunk_size(sampler: Sampler) -> int | None:
    """Return how many consecutive rows a sampler reads at a time; None if that isn't known.

    >>> chunk_size(RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256))
    64
    """
    size: int | None = getattr(sampler, "chunk_size", None)
    return sampler._chunk_size if size is None and isinstance(sampler, _ANNBATCHS) else size


def rows_per_request(sampler: Sampler) -> int | None:
    """Return how many rows a sampler asks for in a load request at most; None if that isn't known."""
    return sampler._chunk_size * sampler._preload_nchunks if isinstance(sampler, _ANNBATCHS) else None


def n_draws(sampler: Sampler, n_rows: int) -> int | None:
    """Return how many samples a sampler draws with replacement of some rows; None if it doesn't.

    >>> n_draws(RandomSampler(64, 32, 256, replacement=True), 20_000)
    20000
    >>> n_draws(RandomSampler(64, 32, 256), 20_000) is None
    True
    """
    if own := _own(sampler, "n_draws"):
        drawn: int | None = own(n_rows)
        return drawn
    if isinstance(sampler, ClassSampler):
        drawn = sampler._num_samples
    elif isinstance(sampler, RandomSampler) and sampler._replacement:
        drawn = sampler._num_samples or n_rows
    else:
        return None
    return drawn // sampler.batch_size * sampler.batch_size if sampler._drop_last else drawn


def can_set_draws(sampler: Sampler) -> bool:
    """Whether a sampler can be made to draw another number of samples."""
    return isinstance(sampler, ClassSampler | RandomSampler) or _own(sampler, "set_draws") is not None


def set_draws(sampler: Sampler, n_draws: int) -> None:
    """Make a private copy of a sampler draw a number of samples in a pass."""
    if own := _own(sampler, "set_draws"):
        own(n_draws)
    else:
        assert isinstance(sampler, ClassSampler | RandomSampler)
        sampler._num_samples = n_draws


def reads_every_row(sampler: Sampler) -> bool:
    """Whether a sampler is meant to read all of its rows once, rather than to draw some of them."""
    has_fixed_number = isinstance(sampler, RandomSampler) and sampler._num_samples is not None
    return not has_fixed_number and n_draws(sampler, 1) is None


def is_random(sampler: Sampler) -> bool:
    """Whether a sampler's order may follow from a generator: it holds one, or leaves shuffling to others."""
    if isinstance(sampler, SequentialSampler):  # it holds a generator all the same
        return sampler.shuffle
    return first_generator(sampler) is not None or bool(sampler.shuffle)


def drawable_classes(sampler: Sampler) -> frozenset[str] | None:
    """Return the classes that a class sampler can draw from its rows; None for other samplers."""
    if not isinstance(sampler, ClassSampler):
        return None
    runs = sampler._rle_manager
    return frozenset(map(str, runs._classes.categories[runs.codes]))


def needs_global_rows(sampler: Sampler) -> bool:
    """Whether a sampler holds something for each row, so that it matters which rows a shard has, not only how many."""
    return isinstance(sampler, ClassSampler) or _own(sampler, "localize") is not None


def localize(sampler: Sampler, rows: Rows, n_obs: int) -> None:
    """Make a private copy of a sampler run on the local rows of a shard, and take ``len(rows)`` for ``n_obs``.

    A ValueError if it can't run on these rows; a TypeError if its mask can't be assigned.
    """
    if own := _own(sampler, "localize"):
        own(rows, n_obs)
    elif isinstance(sampler, ClassSampler):
        sampler.validate(n_obs)  # one label per row of the collection
        sampler._num_open_passes = 0  # the original may have been copied with one open
        labels: pd.Categorical = sampler._rle_manager._classes
        codes = rows.take(labels.codes)
        sampler._n_obs = len(codes)
        sampler._rle_manager._classes = pd.Categorical.from_codes(codes, dtype=labels.dtype)
        sampler.mask = slice(0, len(codes))  # looks for the runs of each class again
    else:
        mask: object = sampler.mask  # which a user's sampler may have of any type
        if mask is None or (isinstance(mask, slice) and mask == slice(0, None)):
            return
        try:
            sampler.mask = slice(0, None)
        except AttributeError as error:
            raise TypeError(
                f"{type(sampler).__name__} has the mask {sampler.mask}, which can't be assigned. To run on a rank's "
                "rows it must take another one; give it a setter for mask."
            ) from error


def settings(sampler: Sampler) -> dict[str, Any]:
    """Return what a sampler's batches follow from, by name: all that it holds, unless it says so or is annbatch's."""
    if own := _own(sampler, "settings"):
        held: dict[str, Any] = own()
        return held
    names = SETTINGS.get(type(sampler))
    held = attributes(sampler) if names is None else {name: getattr(sampler, name) for name in names}
    if not isinstance(sampler, ClassSampler):
        return held
    # without what follows from labels, weights and mask, and what counts passes
    held = {name: part for name, part in held.items() if name not in ("_rle_manager", "_num_open_passes")}
    return held | {"classes": sampler._rle_manager._classes, "weights": sampler._rle_manager._weights}
