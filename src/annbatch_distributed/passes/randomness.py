"""The generator for (root, epoch, rank, pass): randomness keyed by coordinates.

A *root* stands for the job's randomness: the user's seed, or a number drawn from the wrapped sampler's generator. The
coordinates stand side by side in numpy's seed sequence. Nothing is added up, so that (seed 0, epoch 1) and
(seed 1, epoch 0) differ, and nothing depends on how often something was called.
"""

from __future__ import annotations

import copy

import numpy as np

from annbatch_distributed.sharding.integers import integer


def draw_root(rng: np.random.Generator | None) -> int:
    """Return the root that a generator stands for, without advancing it.

    Parameters
    ----------
    rng
        The wrapped sampler's generator; None means fresh entropy from the operating system.

    Raises
    ------
    TypeError
        If it is none.

    Notes
    -----
    What annbatch 0.3.1 draws to spawn the generators of its workers.
    """
    if rng is not None and not isinstance(rng, np.random.Generator):
        msg = f"A root is drawn from a numpy.random.Generator or None, got {rng!r}. Make one with default_rng(...)."
        raise TypeError(msg)
    source = np.random.default_rng() if rng is None else copy.deepcopy(rng)
    return int(source.integers(np.iinfo(np.int64).max))


def generator(root: int, *, rank: int, epoch: int, passes: int = 0, segment: int = 0) -> np.random.Generator:
    """Return the generator of one rank's pass over its shard.

    Parameters
    ----------
    root
        What the job's randomness begins from, within ``[0, 2**63)``.
    rank, epoch
        Whose generator, and in which epoch.
    passes
        How many passes this rank has begun since the epoch was set.
    segment
        How many times the epoch went on with another number of ranks.

    Raises
    ------
    TypeError, ValueError
        If one of them is no integer of at least 0.

    Notes
    -----
    In the first pass of epoch 0 it is, bit for bit, annbatch 0.3.1's ``default_rng([rank, root])``: numpy pads a seed
    sequence with zeros. Later passes go in as a spawn key, which numpy keeps apart from the rest. Within a job all
    coordinates give different generators. Roots of 2^32 and more take two words of the sequence, so that such a root
    may share a generator with another job's smaller root in a later epoch.

    Examples
    --------
    >>> generator(7, rank=1, epoch=0).random() == np.random.default_rng([1, 7]).random()
    True
    >>> generator(0, rank=0, epoch=1).random() == generator(1, rank=0, epoch=0).random()
    False
    """
    for name, value in (("root", root), ("rank", rank), ("epoch", epoch), ("passes", passes), ("segment", segment)):
        integer(name, value, least=0)
    key = (passes, segment) if segment else (passes,) if passes else ()
    return np.random.default_rng(np.random.SeedSequence([rank, root, epoch], spawn_key=key))
