"""Traits: what the shardings have to know of a sampler, and annbatch's interface doesn't tell.

A sampler's type decides, so that each question is a ``functools.singledispatch`` function: register an answer for the
type of a sampler of your own.
"""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler

from annbatch_distributed.passes.private_copy import first_generator

if TYPE_CHECKING:
    from annbatch.abc import Sampler


@singledispatch
def chunk_size(sampler: Sampler) -> int | None:
    """Return how many consecutive rows a sampler reads at a time; None if that isn't known.

    ``Shuffled()`` takes it for the size of its blocks.

    Parameters
    ----------
    sampler
        Any sampler.

    Examples
    --------
    >>> chunk_size(RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256))
    64
    """
    del sampler
    return None


@singledispatch
def n_draws(sampler: Sampler, n_rows: int) -> int | None:
    """Return how many samples a sampler draws with replacement in a pass; None if it doesn't draw with replacement.

    ``Independent()`` shares them out among the ranks.

    Parameters
    ----------
    sampler
        Any sampler.
    n_rows
        The number of rows to draw from; whether it draws with replacement must not depend on it.

    Examples
    --------
    >>> n_draws(RandomSampler(64, 32, 256, replacement=True), 20_000)
    20000
    >>> n_draws(RandomSampler(64, 32, 256), 20_000) is None
    True
    """
    del sampler, n_rows
    return None


@singledispatch
def set_draws(sampler: Sampler, n_draws: int) -> None:
    """Make a sampler draw so many samples in a pass: a rank's part of the job's.

    Parameters
    ----------
    sampler
        A private copy of a sampler for which :func:`n_draws` is registered, to be changed.
    n_draws
        How many samples.

    Raises
    ------
    TypeError
        If no function is registered for the sampler's type.
    """
    del n_draws
    msg = (
        f"How many samples a {type(sampler).__name__} draws can't be set, which sharding='independent' needs. Register "
        "a function for its type with annbatch_distributed.passes.set_draws."
    )
    raise TypeError(msg)


@singledispatch
def is_random(sampler: Sampler) -> bool:
    """Return whether a sampler's order may follow from a generator: it holds one, or leaves shuffling to others.

    Parameters
    ----------
    sampler
        Any sampler.
    """
    return first_generator(sampler) is not None or bool(sampler.shuffle)


@is_random.register(SequentialSampler)
def _sequential_is_random(sampler: SequentialSampler) -> bool:
    return sampler.shuffle  # it holds a generator all the same


@singledispatch
def n_ranks_within(sampler: Sampler) -> int | None:
    """Return how many ranks share out the rows that a wrapper is given which is wrapped again; None if it is none.

    Parameters
    ----------
    sampler
        Any sampler. What attributes it has says nothing: a sampler of a user's own may have a ``world_size`` too.
    """
    del sampler
    return None


@singledispatch
def rows_per_step(sampler: Sampler) -> int | None:
    """Return the rows of a rank that become a batch, or a batch on each rank within it, if those lose rows together."""
    return None if sampler.batch_size is None else int(sampler.batch_size)


def is_wrapper(sampler: Sampler) -> bool:
    """Return whether a sampler is a wrapper that is wrapped again, which reads a part of its rows on each rank."""
    return n_ranks_within(sampler) is not None


# annbatch's samplers don't make their settings public. They are looked at and set here, and what can't be told from
# counts alone in counts.py and promises.py; tests/passes/test_traits.py fails if one is renamed.


@chunk_size.register(ClassSampler)
@chunk_size.register(RandomSampler)
@chunk_size.register(SequentialSampler)
def _chunk_size(sampler: ClassSampler | RandomSampler | SequentialSampler) -> int:
    return sampler._chunk_size


@n_draws.register(ClassSampler)
def _n_draws_of_classes(sampler: ClassSampler, n_rows: int) -> int:
    del n_rows  # it is always told how many
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


@singledispatch
def drawable_classes(sampler: Sampler) -> tuple[frozenset[str], ...]:
    """Return the classes that a class sampler can draw from its rows, as the only one; nothing for other samplers.

    A wrapper that is wrapped again has them for each of its ranks.
    """
    del sampler
    return ()


@drawable_classes.register(ClassSampler)
def _drawable_classes(sampler: ClassSampler) -> tuple[frozenset[str], ...]:
    rows = sampler._rle_manager
    return (frozenset(map(str, rows._classes.categories[rows.codes])),)
