"""The generator for (root seed, epoch, stream, pass): randomness keyed by coordinates.

A *root seed* stands for the job's randomness: the user's seed, or a number drawn from the wrapped sampler's generator.
The coordinates stand side by side in numpy's seed sequence. Nothing is added up, so that (seed 0, epoch 1) and
(seed 1, epoch 0) differ, and nothing depends on how often something was called.
"""

from __future__ import annotations

import copy

import numpy as np

from annbatch_distributed.integers import integer

__all__ = ["draw_root_seed", "generator"]


def draw_root_seed(rng: np.random.Generator | None) -> int:
    """Return the root seed that the wrapped sampler's generator stands for, without advancing it.

    It is what annbatch 0.3.1 draws to spawn the generators of its workers. None stands for fresh entropy from the
    operating system.
    """
    if rng is not None and not isinstance(rng, np.random.Generator):
        raise TypeError(
            f"A root seed is drawn from a numpy.random.Generator or None, got {rng!r}. Make one with default_rng(...)."
        )
    source = np.random.default_rng() if rng is None else copy.deepcopy(rng)
    return int(source.integers(np.iinfo(np.int64).max))


def generator(root_seed: int, *, stream: int, epoch: int, passes: int = 0) -> np.random.Generator:
    """Return the generator of a pass over one stream; all arguments are integers of at least 0.

    ``passes`` is the number of passes that were begun since the epoch was set.

    In the first pass of epoch 0 it is, bit for bit, annbatch 0.3.1's ``default_rng([rank, root_seed])``: numpy pads a
    seed sequence with zeros. Later passes go in as a spawn key, which numpy keeps apart from the rest. Within a job all
    coordinates give different generators. Root seeds of 2^32 and more take two words of the sequence, so that such a
    root seed may share a generator with another job's smaller one in a later epoch.

    >>> generator(7, stream=1, epoch=0).random() == np.random.default_rng([1, 7]).random()
    True
    >>> generator(0, stream=0, epoch=1).random() == generator(1, stream=0, epoch=0).random()
    False
    """
    for name, value in {"root_seed": root_seed, "stream": stream, "epoch": epoch, "passes": passes}.items():
        integer(name, value, least=0)
    key = (passes,) if passes else ()
    return np.random.default_rng(np.random.SeedSequence([stream, root_seed, epoch], spawn_key=key))
