"""A private copy shares large arrays and what can't be copied, and nothing else."""

# What mypy is told to ignore: these samplers are given, or keep, attributes that annbatch's classes don't declare.

from __future__ import annotations

import copy
import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler

from annbatch_distributed.wrapped import SHARED_BYTES, first_generator, private_copy, samplers_in
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
    assert not np.shares_memory(copied_small, small)
    assert copied.rng is not sampler.rng


def test_small_pandas_objects_are_copied() -> None:
    """Writing into a Series or a table of the sampler leaves its copy as it is."""
    sampler = RandomSampler(1, 1, 1)
    sampler.held = [pd.Series([1.0]), pd.DataFrame({"donor": [1.0]}), pd.Categorical(["a"])]  # type: ignore[attr-defined]  # an attribute of this test's sampler
    copied = private_copy(sampler)
    for one, original in zip(copied.held, sampler.held, strict=True):  # type: ignore[attr-defined]  # an attribute of this test's sampler
        assert type(one) is type(original)
        assert not np.shares_memory(
            *(part.codes if hasattr(part, "codes") else part.to_numpy() for part in (one, original))
        )


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


class Unmakeable:
    """Says of itself what it is made of, but can't be made of that."""

    def __init__(self, parts: list[int]) -> None:
        self.parts = parts

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (Unmakeable, ())


def test_object_that_cannot_be_made_again_is_shared() -> None:
    """An object whose pickle is broken is shared; samplers, containers and arrays are copied all the same."""
    sampler = RandomSampler(4, 2, 8)
    sampler.held = [Unmakeable([1]), np.zeros(3), MaskBlind(2), np.random.default_rng(0)]  # type: ignore[attr-defined]  # an attribute of this test's sampler
    for rng in (None, np.random.default_rng(1)):
        copied = private_copy(sampler, rng)
        broken, array, inner, generator = copied.held  # type: ignore[attr-defined]  # an attribute of this test's sampler
        assert broken is sampler.held[0]  # type: ignore[attr-defined]  # an attribute of this test's sampler
        assert not np.shares_memory(array, sampler.held[1])  # type: ignore[attr-defined]  # an attribute of this test's sampler
        assert inner is not sampler.held[2]  # type: ignore[attr-defined]  # an attribute of this test's sampler
        assert generator is not sampler.held[3]  # type: ignore[attr-defined]  # an attribute of this test's sampler
        assert copied.rng is not sampler.rng
    assert samplers_in(sampler) == [sampler, sampler.held[2]]  # type: ignore[attr-defined]  # an attribute of this test's sampler


def test_sampler_that_cannot_be_changed_is_copied() -> None:
    """A frozen dataclass, and one whose instances have slots only, are copied by their attributes."""
    for options in ({}, {"slots": True}):

        @dataclass(frozen=True, **options)
        class Frozen(MaskBlind):
            numbers: list[int]
            _batch_size: int = 2
            _per_request: int = 2

        sampler = Frozen([1])
        copied = private_copy(sampler)
        assert copied == sampler
        assert copied.numbers is not sampler.numbers


def test_objects_that_exist_once_stay_the_same() -> None:
    """Functions, classes, modules and singletons are the same in the copy, lambdas and local classes too."""
    sampler = RandomSampler(4, 2, 8)
    numbers: list[int] = []
    sampler.held = [lambda row: row, len, type(sampler), np, np.add, ..., re.compile("a"), logging.getLogger("a")]  # type: ignore[attr-defined]  # an attribute of this test's sampler
    copied = private_copy(sampler)
    assert all(one is other for one, other in zip(copied.held, sampler.held, strict=True))  # type: ignore[attr-defined]  # an attribute of this test's sampler
    sampler.held = numbers.append  # type: ignore[attr-defined]  # an attribute of this test's sampler
    private_copy(sampler).held(7)  # type: ignore[attr-defined]  # an attribute of this test's sampler
    assert numbers == []  # a method's object is copied with it


def test_every_generator_is_replaced_by_one_of_its_own_and_the_same_one_by_the_same() -> None:
    sampler = RandomSampler(1, 1, 1, rng=np.random.default_rng(0))
    sampler.helper = [sampler.rng]  # type: ignore[attr-defined]  # an attribute that the test has added
    sampler.own = sampler.same = np.random.default_rng(1)  # type: ignore[attr-defined]  # an attribute that the test has added
    rng = np.random.default_rng(2)
    copied = private_copy(sampler, rng)
    assert copied.own is copied.same is not rng  # type: ignore[attr-defined]  # an attribute of this test's sampler
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
