"""What is known of annbatch's samplers, and of those of users once registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler

from annbatch_distributed.passes.traits import chunk_size, drawable_classes, n_draws, set_draws
from tests.samplers import MaskBlind, batches, flat

if TYPE_CHECKING:
    from annbatch.abc import Sampler

LABELS = pd.Categorical(np.repeat(["B", "NK", "T"], [20, 20, 60]))


def class_sampler(cls: type[ClassSampler] = ClassSampler, **kwargs: object) -> ClassSampler:
    return cls(4, 3, 6, classes=LABELS, num_samples=50, **kwargs)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (RandomSampler(4, 3, 6), 4),
        (SequentialSampler(5, 2, 5), 5),
        (class_sampler(), 4),
        (MaskBlind(4), None),
    ],
)
def test_the_chunk_size_is_the_one_that_the_sampler_was_given(sampler: Sampler, expected: int | None) -> None:
    assert chunk_size(sampler) == expected


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (class_sampler(), 50),
        (class_sampler(WeightedClassSampler), 50),
        (RandomSampler(4, 3, 6, replacement=True), 100),
        (RandomSampler(4, 3, 6, replacement=True, num_samples=30), 30),
    ],
)
def test_what_draws_with_replacement_tells_how_much_and_draws_as_much_as_it_is_set_to(
    sampler: Sampler, expected: int
) -> None:
    assert n_draws(sampler, 100) == expected
    assert len(flat(batches(sampler.sample(100)))) == expected
    set_draws(sampler, 24)
    assert n_draws(sampler, 100) == len(flat(batches(sampler.sample(100)))) == 24


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(4, 3, 6),
        RandomSampler(4, 3, 6, num_samples=30),
        SequentialSampler(4, 3, 6),
        MaskBlind(4),
    ],
)
def test_other_samplers_make_no_draws(sampler: Sampler) -> None:
    assert n_draws(sampler, 100) is None


def test_what_is_not_registered_cannot_be_set() -> None:
    with pytest.raises(TypeError, match=r"How many samples a MaskBlind draws can't be set.*passes\.set_draws"):
        set_draws(MaskBlind(4), 3)


def test_the_classes_that_can_be_drawn_are_those_with_a_weight_in_the_mask() -> None:
    weights = np.array([1.0, 0.0, 2.0])
    assert drawable_classes(class_sampler()) == (frozenset(["B", "NK", "T"]),)
    assert drawable_classes(class_sampler(class_weights=weights)) == (frozenset(["B", "T"]),)
    assert drawable_classes(class_sampler(class_weights=weights, mask=slice(10, 40))) == (frozenset(["B"]),)
    assert drawable_classes(RandomSampler(4, 3, 6)) == ()
