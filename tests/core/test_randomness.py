"""Random generators: every combination of rank, root and epoch has its own."""

from __future__ import annotations

from itertools import product

import numpy as np

from annbatch_distributed.core.config import draw_root_seed
from annbatch_distributed.core.stream import generator


def test_different_coordinates_are_different_generators() -> None:
    coordinates = list(product(range(4), range(4), range(4)))
    states = {generator(root, stream=rank, epoch=epoch).integers(2**63) for root, rank, epoch in coordinates}
    assert len(states) == len(coordinates)


def test_equal_coordinates_are_equal_generators() -> None:
    """Equal coordinates have generators of the same numbers."""
    draws = [generator(7, stream=2, epoch=1).random(5).tolist() for _ in range(2)]
    assert draws[0] == draws[1]


def test_first_epoch_has_annbatchs_generator() -> None:
    """Epoch 0 has annbatch's generator; epoch 1 has a different one."""
    for root in (0, 7, 2**40, draw_root_seed(np.random.default_rng(0))):
        theirs = np.random.default_rng([3, root])
        assert generator(root, stream=3, epoch=0).bit_generator.state == theirs.bit_generator.state
        assert generator(root, stream=3, epoch=1).bit_generator.state != theirs.bit_generator.state


def test_root_does_not_advance_the_generator() -> None:
    """Deriving the root seed from a generator doesn't advance the generator."""
    rng = np.random.default_rng(5)
    assert draw_root_seed(rng) == draw_root_seed(rng) == rng.integers(np.iinfo(np.int64).max)
    assert draw_root_seed(rng) != draw_root_seed(np.random.default_rng(5))


def test_root_is_random_without_a_generator() -> None:
    """Every root seed is different without a generator."""
    assert draw_root_seed(None) != draw_root_seed(None)
