"""A private copy shares large arrays and what can't be copied, and nothing else."""

# What mypy is told to ignore: these samplers are given, or keep, attributes that annbatch's classes don't declare.

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler

from annbatch_distributed.wrapped import SHARED_BYTES, first_generator, private_copy
from tests.samplers import Locked, MaskBlind, Uncopyable


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
    sampler.held = {"by": [(big, small)]}  # type: ignore[attr-defined]  # an attribute of this test's sampler
    copied = private_copy(sampler)
    [(copied_big, copied_small)] = copied.held["by"]  # type: ignore[attr-defined]  # an attribute of this test's sampler
    assert np.shares_memory(np.asarray(copied_big), np.asarray(big))
    assert copied_small is not small
    assert copied.rng is not sampler.rng


def test_what_cannot_be_copied_is_shared_and_the_rest_copied_once() -> None:
    sampler = Locked(4, 2, 8)
    with pytest.raises(TypeError):
        copy.deepcopy(sampler)
    copied = private_copy(sampler)
    assert copied.lock is sampler.lock
    assert copied.nested == [copied.settings, sampler.lock]
    assert copied.nested[0] is copied.settings
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
    assert copied._Uncopyable__hidden == [1]  # type: ignore[attr-defined]  # an attribute of this test's sampler
    assert copied._Uncopyable__hidden is not sampler._Uncopyable__hidden  # type: ignore[attr-defined]  # an attribute that the test has added


def test_a_sampler_within_one_that_cannot_be_copied_is_copied_too() -> None:
    outer = MaskBlind(2)
    outer.inner = {"by name": [Locked(4, 2, 8)]}  # type: ignore[attr-defined]  # an attribute of this test's sampler
    copied = private_copy(outer)
    [inner], [original] = copied.inner["by name"], outer.inner["by name"]  # type: ignore[attr-defined]  # an attribute that the test has added
    assert inner is not original
    assert inner.rng is not original.rng
    assert inner.lock is original.lock


def test_a_sampler_that_gives_itself_for_a_copy_is_copied_all_the_same() -> None:
    class Itself(RandomSampler):
        def __deepcopy__(self, memo: dict[int, Any]) -> Itself:
            return self

    sampler = Itself(4, 2, 8)
    assert private_copy(sampler) is not sampler


def test_a_large_array_cannot_be_written_through_the_copy() -> None:
    sampler = RandomSampler(1, 1, 1)
    sampler.order = np.arange(SHARED_BYTES)  # type: ignore[attr-defined]  # an attribute of this test's sampler
    copied = private_copy(sampler)
    with pytest.raises(ValueError, match="read-only"):
        np.random.default_rng(0).shuffle(copied.order)  # type: ignore[attr-defined]  # an attribute of this test's sampler
    sampler.order[0] = 7  # type: ignore[attr-defined]  # an attribute of this test's sampler


def test_an_array_that_cannot_tell_its_size_is_no_reason_to_fail() -> None:
    class Closed:
        @property
        def nbytes(self) -> int:
            msg = "the file is closed"
            raise RuntimeError(msg)

    sampler = RandomSampler(1, 1, 1)
    sampler.held = Closed()  # type: ignore[attr-defined]  # an attribute of this test's sampler
    assert isinstance(private_copy(sampler).held, Closed)  # type: ignore[attr-defined]  # an attribute of this test's sampler


def test_every_generator_is_replaced_by_one_of_its_own_and_the_same_one_by_the_same() -> None:
    sampler = RandomSampler(1, 1, 1, rng=np.random.default_rng(0))
    sampler.helper, sampler.own = [sampler.rng], np.random.default_rng(1)  # type: ignore[attr-defined]  # an attribute that the test has added
    rng = np.random.default_rng(2)
    copied = private_copy(sampler, rng)
    assert copied.rng is copied.helper[0] is rng  # type: ignore[attr-defined]  # an attribute of this test's sampler
    first, second = copied.own.random(), private_copy(sampler, np.random.default_rng(2)).own.random()  # type: ignore[attr-defined]  # an attribute that the test has added
    assert first == second
    assert first not in (rng.random(), np.random.default_rng(1).random())
    kept = private_copy(sampler)
    assert kept.rng is kept.helper[0] is not sampler.rng  # type: ignore[attr-defined]  # an attribute of this test's sampler
    assert first_generator(sampler) is sampler.rng
    sampler.rng = None
    assert first_generator(sampler) in (sampler.own, sampler.helper[0])  # type: ignore[attr-defined]  # an attribute of this test's sampler
    assert first_generator(MaskBlind(2)) is None
