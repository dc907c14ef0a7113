"""Traits: what the shardings have to know of a sampler, and annbatch's interface doesn't tell.

A sampler's type decides, so that each question is a ``functools.singledispatch`` function: register an answer for the
type of a sampler of your own. Those of annbatch's own samplers are in :mod:`annbatch_samplers`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

from annbatch_distributed.passes.private_copy import first_generator

if TYPE_CHECKING:
    from annbatch.abc import Sampler

__all__ = [
    "chunk_size",
    "drawable_classes",
    "is_random",
    "n_draws",
    "rows_per_request",
    "set_draws",
]


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
    >>> from annbatch.samplers import RandomSampler
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
    >>> from annbatch.samplers import RandomSampler
    >>> n_draws(RandomSampler(64, 32, 256, replacement=True), 20_000)
    20000
    >>> n_draws(RandomSampler(64, 32, 256), 20_000) is None
    True
    """
    del sampler, n_rows
    return None


@singledispatch
def set_draws(sampler: Sampler, n_draws: int) -> None:
    """Make a sampler draw a number of samples in a pass: a rank's part of the samples of the job.

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
    raise TypeError(
        f"How many samples a {type(sampler).__name__} draws can't be set, which sharding='independent' needs. "
        "Register a function for its type with "
        "annbatch_distributed.passes.set_draws."
    )


@singledispatch
def is_random(sampler: Sampler) -> bool:
    """Return whether a sampler's order may follow from a generator: it holds one, or leaves shuffling to others."""
    return first_generator(sampler) is not None or bool(sampler.shuffle)


@singledispatch
def rows_per_request(sampler: Sampler) -> int | None:
    """Return how many rows a sampler asks for in a load request at most; None if that isn't known."""
    del sampler
    return None


@singledispatch
def drawable_classes(sampler: Sampler) -> tuple[frozenset[str], ...]:
    """Return the classes that a class sampler can draw from its rows, as the only one; nothing for other samplers."""
    del sampler
    return ()
