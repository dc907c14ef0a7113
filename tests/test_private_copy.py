"""A private copy shares large arrays and what can't be copied, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler

from annbatch_distributed.private_copy import SHARED_BYTES, private_copy
from tests.samplers import Locked, Uncopyable


def test_labels_of_many_rows_are_shared() -> None:
    codes = np.repeat(np.arange(10, dtype=np.int8), SHARED_BYTES // 5)
    labels = pd.Categorical.from_codes(codes, categories=list("abcdefghij"))
    sampler = ClassSampler(64, 4, 64, classes=labels, num_samples=64)
    copied = private_copy(sampler)
    assert np.shares_memory(copied._rle_manager._classes.codes, codes)
    assert not np.shares_memory(copy.deepcopy(sampler)._rle_manager._classes.codes, codes)


@pytest.mark.parametrize(
    "big",
    [
        np.zeros(SHARED_BYTES, dtype=np.int8),
        pd.Series(np.zeros(SHARED_BYTES, dtype=np.int8)),
        pd.DataFrame({"donor": np.zeros(SHARED_BYTES, dtype=np.int8)}),
    ],
    ids=lambda big: type(big).__name__,
)
def test_large_arrays_are_shared_however_deep_and_small_ones_copied(big: Any) -> None:
    sampler = RandomSampler(1, 1, 1)
    small = np.zeros(3)
    sampler.held = {"by": [(big, small)]}  # type: ignore[attr-defined]
    copied = private_copy(sampler)
    [(copied_big, copied_small)] = copied.held["by"]  # type: ignore[attr-defined]
    assert copied_big is big
    assert copied_small is not small
    assert copied.rng is not sampler.rng


def test_what_cannot_be_copied_is_shared_and_the_rest_copied_once() -> None:
    sampler = Locked(4, 2, 8)
    with pytest.raises(TypeError):
        copy.deepcopy(sampler)
    copied = private_copy(sampler)
    assert copied.lock is sampler.lock
    assert copied.nested is sampler.nested
    assert copied.settings == [1, 2]
    assert copied.settings is copied.same_settings
    assert copied.settings is not sampler.settings
    assert copied.in_slot == [3]
    assert copied.in_slot is not sampler.in_slot
    assert copied.rng is not sampler.rng


def test_a_sampler_that_refuses_to_be_copied_is_copied_all_the_same() -> None:
    sampler = Uncopyable(4, 2, 8)
    for forbidden in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError):
            forbidden(sampler)
    copied = private_copy(sampler)
    copied.mask = slice(3, 5)
    assert (type(copied), sampler.mask) == (Uncopyable, slice(0, None))
    assert copied.rng is not sampler.rng
