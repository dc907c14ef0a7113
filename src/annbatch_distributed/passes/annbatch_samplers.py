"""annbatch's own samplers: what they are set to, and the answers that are registered for their types.

annbatch has no public way to read or set most of it. The private names that stand in for it are used here and in
counts.py and nowhere else; tests/passes/test_annbatch_samplers.py fails if annbatch renames or drops one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pandas as pd
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler

from annbatch_distributed.passes.shard import localize
from annbatch_distributed.passes.traits import (
    chunk_size,
    drawable_classes,
    is_random,
    n_draws,
    rows_per_request,
    set_draws,
)

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.rows import Rows

__all__ = [
    "SETTINGS",
    "has_fixed_n_samples",
    "is_annbatchs_own",
    "is_restricted",
    "labels_and_weights",
    "restrict_by_mask",
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


def is_annbatchs_own(sampler: Sampler) -> bool:
    """Whether a sampler is one of annbatch's own, which stay within their mask and never write into what they yielded.

    Their subclasses may not.
    """
    return type(sampler) in SETTINGS


def is_restricted(sampler: Sampler, rows: Rows) -> bool:
    """Whether a sampler is restricted to the rows of a shard by its mask: a class sampler, to one stretch.

    This is a shortcut: a mask gives bit for bit the requests that local rows and their translation give, and labels
    need not be copied.
    """
    return isinstance(sampler, ClassSampler) and is_annbatchs_own(sampler) and len(rows.starts) == 1


def restrict_by_mask(sampler: Sampler, rows: Rows) -> None:
    """Restrict a private copy of a class sampler to the global rows of a stretch.

    Its ``sample`` then takes the collection's ``n_obs``, and gives global rows.
    """
    _close_passes(cast("ClassSampler", sampler))
    sampler.mask = slice(int(rows.starts[0]), int(rows.stops[0]))


def has_fixed_n_samples(sampler: Sampler) -> bool:
    """Whether a ``RandomSampler`` was given the number of rows to draw."""
    return isinstance(sampler, RandomSampler) and sampler._num_samples is not None


def labels_and_weights(sampler: ClassSampler) -> dict[str, Any]:
    """Return what the table of runs of a class sampler follows from, beside its mask."""
    runs = sampler._rle_manager
    return {"classes": runs._classes, "weights": runs._weights}


@localize.register(ClassSampler)
def _localize_class_sampler(sampler: ClassSampler, rows: Rows, n_obs: int) -> ClassSampler:
    sampler.validate(n_obs)  # one label per row of the collection
    _close_passes(sampler)
    labels: pd.Categorical = sampler._rle_manager._classes
    codes = rows.take(labels.codes)
    sampler._n_obs = len(codes)
    sampler._rle_manager._classes = pd.Categorical.from_codes(codes, dtype=labels.dtype)
    sampler.mask = slice(0, len(codes))  # looks for the runs of each class again
    return sampler


def _close_passes(sampler: ClassSampler) -> None:
    sampler._num_open_passes = 0  # the original may have been copied with one open


@chunk_size.register(ClassSampler)
@chunk_size.register(RandomSampler)
@chunk_size.register(SequentialSampler)
def _chunk_size(sampler: ClassSampler | RandomSampler | SequentialSampler) -> int:
    return sampler._chunk_size


@rows_per_request.register(ClassSampler)
@rows_per_request.register(RandomSampler)
@rows_per_request.register(SequentialSampler)
def _rows_per_request(sampler: ClassSampler | RandomSampler | SequentialSampler) -> int:
    return sampler._chunk_size * sampler._preload_nchunks


@n_draws.register(ClassSampler)
def _n_draws_of_classes(sampler: ClassSampler, n_rows: int) -> int:
    del n_rows  # it is always given the number
    return _without_the_last(sampler, sampler._num_samples)


@n_draws.register(RandomSampler)
def _n_draws_of_random(sampler: RandomSampler, n_rows: int) -> int | None:
    return _without_the_last(sampler, sampler._num_samples or n_rows) if sampler._replacement else None


def _without_the_last(sampler: ClassSampler | RandomSampler, n_draws: int) -> int:
    return n_draws // sampler.batch_size * sampler.batch_size if sampler._drop_last else n_draws


@set_draws.register(ClassSampler)
@set_draws.register(RandomSampler)
def _set_draws(sampler: ClassSampler | RandomSampler, n_draws: int) -> None:
    sampler._num_samples = n_draws


@is_random.register(SequentialSampler)
def _sequential_is_random(sampler: SequentialSampler) -> bool:
    return sampler.shuffle  # it holds a generator all the same


@drawable_classes.register(ClassSampler)
def _drawable_classes(sampler: ClassSampler) -> tuple[frozenset[str], ...]:
    runs = sampler._rle_manager
    return (frozenset(map(str, runs._classes.categories[runs.codes])),)
