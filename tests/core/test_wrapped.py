"""Wrapped samplers: facts about them, their private copies and their descriptions."""

from __future__ import annotations

import copy
import datetime as dt
import inspect
import json
import logging
import re
import threading
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from annbatch.samplers import ClassSampler, RandomSampler, WeightedClassSampler

from annbatch_distributed import DistributedSampler, Rank, Shuffled
from annbatch_distributed.core.rows import Rows
from annbatch_distributed.core.sharding import Contiguous, Independent
from annbatch_distributed.core.wrapped import (
    SETTINGS,
    SHARED_BYTES,
    chunk_size,
    description,
    first_generator,
    is_annbatchs_own,
    localize,
    n_draws,
    needs_global_rows,
    private_copy,
    samplers_in,
    settings,
)
from tests.samplers import Locked, MaskBlind, Uncopyable, batches, flat, job, request_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest


LABELS = pd.Categorical.from_codes(np.repeat([0, 1, 0, 2], 25), categories=["B", "NK", "T"])
WEIGHTS = np.array([1.0, 2.0, 3.0])


def made(kind: Any) -> Any:
    if issubclass(kind, ClassSampler):
        return kind(5, 2, 5, classes=LABELS, num_samples=50, class_weights=WEIGHTS)
    return kind(5, 2, 5)


class Own(RandomSampler):
    """A custom sampler."""


@pytest.mark.parametrize("kind", SETTINGS)
def test_annbatch_keeps_settings_under_the_known_names(kind: type[Sampler]) -> None:
    """If this fails, annbatch has renamed, removed or added an attribute that this package reads or sets."""
    sampler = made(kind)
    # attributes that follow from the settings and the type
    derived = {"_in_memory_size", "_num_samples", "_replacement", "_shuffle", "_mask"}
    if isinstance(sampler, ClassSampler):
        derived = {"_n_obs", "_rle_manager", "_num_open_passes"}
    assert set(vars(sampler)) == {*SETTINGS[kind], *derived, "_rng"}
    assert sampler._chunk_size == 5
    if not isinstance(sampler, ClassSampler):
        assert sampler._in_memory_size == 10
        assert sampler._num_samples is None
        assert not sampler._replacement
        assert sampler._shuffle == (kind is RandomSampler)
        return
    assert (sampler._num_samples, sampler._n_obs, sampler._num_open_passes) == (50, 100, 0)
    assert sampler._rle_manager._classes is LABELS
    assert sampler._rle_manager._weights.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", SETTINGS)
def test_description_names_the_arguments_of_the_constructor(kind: type[Sampler]) -> None:
    """A sampler can be created from its description, except for labels and weights, which are digests."""
    described = description(made(kind))
    assert described.pop("type") == f"annbatch.samplers.{kind.__name__}"
    arguments = set(inspect.signature(kind).parameters) - {"mask", "rng"}
    assert described.keys() == arguments
    digests = {name: value for name, value in described.items() if isinstance(value, str)}
    assert digests.keys() == arguments & {"classes", "class_weights"}
    labels = {"classes": LABELS, "class_weights": WEIGHTS} if digests else {}
    assert description(kind(**(described | labels))) == description(made(kind))


@pytest.mark.parametrize("kind", SETTINGS)
def test_description_ignores_attributes_that_annbatch_adds_later(kind: type[Sampler]) -> None:
    before, later = made(kind), made(kind)
    later._added = 7
    assert description(later) == description(before)
    saved = DistributedSampler(before, dist_info=Rank(0, 2), seed=0).state_dict(batches_done=1)
    again = DistributedSampler(later, dist_info=Rank(0, 2), seed=0)
    again.load_state_dict(saved)
    assert again.batches_done == 1


def test_description_covers_all_attributes_of_subclasses() -> None:
    one: Any = Own(5, 2, 5)
    other: Any = Own(5, 2, 5)
    other.added = 7
    assert description(one) != description(other)
    assert not is_annbatchs_own(one)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in SETTINGS for name in SETTINGS[kind]])
def test_description_differs_for_every_setting(kind: type[Sampler], name: str) -> None:
    one, other = made(kind), made(kind)
    setattr(other, name, 1 - getattr(one, name) if isinstance(getattr(one, name), bool) else 17)
    assert description(one) != description(other)


@pytest.mark.parametrize("kind", [ClassSampler, WeightedClassSampler])
def test_description_differs_for_labels_and_weights(kind: type[ClassSampler]) -> None:
    relabeled = LABELS.rename_categories(["X", "NK", "T"])
    others = [
        kind(5, 2, 5, classes=relabeled, num_samples=50, class_weights=WEIGHTS),
        kind(5, 2, 5, classes=LABELS, num_samples=50, class_weights=np.array([1.0, 2.0, 4.0])),
        kind(5, 2, 5, classes=LABELS, num_samples=50),
    ]
    assert len({json.dumps(description(one)) for one in [*others, made(kind)]}) == 4


def class_sampler(cls: type[ClassSampler] = ClassSampler, **kwargs: object) -> ClassSampler:
    return cls(5, 2, 5, classes=LABELS, num_samples=500, rng=np.random.default_rng(0), **kwargs)


def test_localized_class_sampler_keeps_class_weights() -> None:
    weights = np.array([0.0, 1.0, 3.0])
    rows = Rows((range(25, 100),))
    local = class_sampler(class_weights=weights)
    localize(local, rows, 100)
    sampled = np.array(flat(request_rows(request) for request in local.sample(len(rows))))
    counts = pd.Series(LABELS[rows.to_global(sampled)]).value_counts()
    assert counts["B"] == 0
    # 100 groups of a class each: 25 of NK expected, with a standard deviation of 4.3
    assert 5 * 8 < counts["NK"] < 5 * 47


def test_mask_without_setter_raises_naming_the_sampler() -> None:
    class Fixed(MaskBlind):
        mask = property(lambda self: slice(0, 8))

    for rank in range(2):
        with pytest.raises(TypeError, match=r"Fixed.mask must be assignable"):
            DistributedSampler(Fixed(2), dist_info=Rank(rank, 2)).n_batches(20)


def test_sampler_without_mask_reads_all_rows() -> None:
    class Maskless(MaskBlind):
        mask = None  # type: ignore[assignment]  # no mask, as in a custom sampler

    assert str(DistributedSampler(Maskless(2), dist_info=Rank(0, 2)).plan(20).selected) == "0:20"


def test_class_sampler_can_be_wrapped_while_iterated() -> None:
    sampler = class_sampler()
    open_pass = iter(sampler.sample(100))
    next(open_pass)
    for mask in (slice(0, 50), [slice(0, 25), slice(75, 100)]):
        wrapped = DistributedSampler(sampler, dist_info=Rank(0, 1), mask=mask)
        assert wrapped.n_batches(100) == len(batches(wrapped.sample(100)))


class Weighted(MaskBlind):
    """A custom sampler with a weight for each row of the collection, which reads the rows with positive weights."""

    def __init__(self, weights: np.ndarray) -> None:
        super().__init__(batch_size=1)
        self.weights = weights

    def n_batches(self, n_obs: int) -> int:
        return int((self.weights > 0).sum())

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        for row in np.flatnonzero(self.weights > 0):
            yield {"requests": [slice(int(row), int(row) + 1)], "splits": [np.arange(1)]}


class Localized(Weighted):
    """A sampler with the method `localize`, which selects the weights of a shard."""

    def localize(self, rows: Rows, n_obs: int) -> None:
        assert len(self.weights) == n_obs
        self.weights = rows.take(self.weights)


def test_sampler_with_row_values_needs_localize() -> None:
    ranks = job(Weighted(np.arange(8) % 2), 2)
    with pytest.raises(RuntimeError, match=r"Weighted must yield rows within \[0, 4\), .* got rows of \[5, 6\)"):
        list(ranks[0].sample(8))
    sampler = Localized(np.arange(8) % 2)
    assert needs_global_rows(sampler)
    assert [flat(map(request_rows, rank.sample(8))) for rank in job(sampler, 2)] == [[1, 3], [5, 7]]
    masked = job(sampler, 1, mask=np.arange(8) > 2)
    assert [flat(map(request_rows, masked[0].sample(8))) for _ in range(2)] == [[3, 5, 7]] * 2
    assert len(sampler.weights) == 8


class Declaring(RandomSampler):
    """A sampler whose own methods answer differently than annbatch's types."""

    chunk_size = 5

    def n_draws(self, n_rows: int) -> int:
        return 3 * n_rows

    def settings(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size}


def test_methods_of_a_sampler_override_its_type() -> None:
    sampler: Any = Declaring(4, 2, 8)
    assert (chunk_size(sampler), n_draws(sampler, 7), settings(sampler)) == (5, 21, {"batch_size": 8})
    sampler.added = 7
    assert description(sampler) == description(Declaring(4, 2, 8)) != description(Declaring(4, 2, 4))


def test_attributes_that_are_no_methods_are_ignored() -> None:
    sampler: Any = MaskBlind(4)
    for name in ("n_draws", "set_draws", "localize", "settings"):
        setattr(sampler, name, 3)
    assert sorted(flat(flat(batches(rank.sample(8))) for rank in job(sampler, 2))) == list(range(8))


def test_class_sampler_samples_within_its_mask() -> None:
    """A class sampler samples only rows of the mask, of one class in each batch."""
    labels = pd.Categorical.from_codes(np.repeat([0, 1, 0, 1], 250), categories=["B", "T"])
    chosen = np.arange(1000) % 10 > 0
    sampler = ClassSampler(10, 4, 20, classes=labels, num_samples=400, rng=np.random.default_rng(0))
    for options in ({"sharding": "independent"}, {"sharding": "contiguous"}):
        for rank in range(2):
            distributed = DistributedSampler(sampler, dist_info=Rank(rank, 2), mask=chosen, seed=0, **options)
            sampled = [batch for _ in range(2) for batch in batches(distributed.sample(1000))]
            rows = np.array(flat(sampled))
            assert chosen[rows].all()
            assert {*labels[rows]} == {"B", "T"}
            assert all(len(set(labels[batch])) == 1 for batch in sampled)


def test_copy_shares_labels_of_many_rows() -> None:
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
def test_copy_shares_only_large_arrays(big: Any) -> None:
    sampler: Any = RandomSampler(1, 1, 1)
    small = np.zeros(3)
    sampler.content = {"by": [(big, small)]}
    copied = private_copy(sampler)
    [(copied_big, copied_small)] = copied.content["by"]
    assert np.shares_memory(np.asarray(copied_big), np.asarray(big))
    assert not np.shares_memory(copied_small, small)
    assert copied.rng is not sampler.rng


def test_copy_copies_small_pandas_objects() -> None:
    """Writing into a Series or a table of the sampler doesn't change its copy."""
    sampler: Any = RandomSampler(1, 1, 1)
    sampler.content = [pd.Series([1.0]), pd.DataFrame({"donor": [1.0]}), pd.Categorical(["a"])]
    copied = private_copy(sampler)
    for one, original in zip(copied.content, sampler.content, strict=True):
        assert type(one) is type(original)
        assert not np.shares_memory(
            *(part.codes if hasattr(part, "codes") else part.to_numpy() for part in (one, original))
        )


def test_copy_shares_locks_and_copies_the_rest_once() -> None:
    sampler: Any = Locked(4, 2, 8)
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


def test_copy_of_a_sampler_that_forbids_copies() -> None:
    sampler: Any = Uncopyable(4, 2, 8)
    for forbidden in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError):
            forbidden(sampler)
    copied = private_copy(sampler)
    copied.mask = slice(3, 5)
    assert (type(copied), sampler.mask) == (Uncopyable, slice(0, None))
    assert copied.rng is not sampler.rng
    assert copied._Uncopyable__hidden == [1]
    assert copied._Uncopyable__hidden is not sampler._Uncopyable__hidden


def test_copy_copies_samplers_in_containers() -> None:
    outer: Any = MaskBlind(2)
    outer.inner = {"by name": [Locked(4, 2, 8)]}
    copied = private_copy(outer)
    [inner], [original] = copied.inner["by name"], outer.inner["by name"]
    assert inner is not original
    assert inner.rng is not original.rng
    assert inner.lock is original.lock


def test_copy_of_a_sampler_whose_deepcopy_returns_itself() -> None:
    class Itself(RandomSampler):
        def __deepcopy__(self, memo: dict[int, Any]) -> Itself:
            return self

    sampler: Any = Itself(4, 2, 8)
    assert private_copy(sampler) is not sampler


def test_shared_array_is_read_only_in_the_copy() -> None:
    sampler: Any = RandomSampler(1, 1, 1)
    sampler.order = np.arange(SHARED_BYTES)
    copied = private_copy(sampler)
    with pytest.raises(ValueError, match="read-only"):
        np.random.default_rng(0).shuffle(copied.order)
    sampler.order[0] = 7


def test_copy_shares_an_array_of_unknown_size() -> None:
    class Closed:
        @property
        def nbytes(self) -> int:
            msg = "the file is closed"
            raise RuntimeError(msg)

    sampler: Any = RandomSampler(1, 1, 1)
    sampler.content = Closed()
    assert isinstance(private_copy(sampler).content, Closed)


class Unmakeable:
    """An object that can't be created from the arguments in its pickle."""

    def __init__(self, parts: list[int]) -> None:
        self.parts = parts

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (Unmakeable, ())


def test_copy_shares_objects_with_a_broken_pickle() -> None:
    """An object with a broken pickle is shared; samplers, containers and arrays next to it are still copied."""
    sampler: Any = RandomSampler(4, 2, 8)
    sampler.content = [Unmakeable([1]), np.zeros(3), MaskBlind(2), np.random.default_rng(0)]
    for rng in (None, np.random.default_rng(1)):
        copied = private_copy(sampler, rng)
        broken, array, inner, generator = copied.content
        assert broken is sampler.content[0]
        assert not np.shares_memory(array, sampler.content[1])
        assert inner is not sampler.content[2]
        assert generator is not sampler.content[3]
        assert copied.rng is not sampler.rng
    assert samplers_in(sampler) == [sampler, sampler.content[2]]


def test_copy_of_a_frozen_sampler() -> None:
    """A frozen dataclass, with or without slots, is copied attribute by attribute."""
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


def test_copy_keeps_functions_classes_and_singletons() -> None:
    """Functions, classes, modules and singletons are the same objects in the copy, also lambdas and local classes."""
    sampler: Any = RandomSampler(4, 2, 8)
    numbers: list[int] = []
    sampler.content = [lambda row: row, len, type(sampler), np, np.add, ..., re.compile("a"), logging.getLogger("a")]
    copied = private_copy(sampler)
    assert all(one is other for one, other in zip(copied.content, sampler.content, strict=True))
    sampler.content = numbers.append
    private_copy(sampler).content(7)
    assert numbers == []  # a method's object is copied with it


def test_copy_replaces_each_generator_consistently() -> None:
    sampler: Any = RandomSampler(1, 1, 1, rng=np.random.default_rng(0))
    sampler.helper = [sampler.rng]
    sampler.own = sampler.same = np.random.default_rng(1)
    rng = np.random.default_rng(2)
    copied = private_copy(sampler, rng)
    assert copied.own is copied.same is not rng
    assert copied.rng is copied.helper[0] is rng
    first, second = copied.own.random(), private_copy(sampler, np.random.default_rng(2)).own.random()
    assert first == second
    assert first not in (rng.random(), np.random.default_rng(1).random())
    unseeded = private_copy(sampler)
    assert unseeded.rng is unseeded.helper[0] is not sampler.rng
    assert first_generator(sampler) is sampler.rng
    sampler.rng = None
    assert first_generator(sampler) in (sampler.own, sampler.helper[0])
    assert first_generator(MaskBlind(2)) is None


DESCRIPTIONS = Path(__file__).with_name("descriptions.json")
CELL_TYPES = pd.Categorical(np.repeat(["B", "T"], [20, 30]))


def by_class(labels: pd.Categorical = CELL_TYPES, **kwargs: Any) -> ClassSampler:
    return ClassSampler(4, 2, 4, classes=labels, num_samples=40, **kwargs)


class Holding(MaskBlind):
    """A sampler with an attribute of any type."""

    def __init__(self, held: Any) -> None:
        super().__init__(4)
        self.held = held


class Multiplied:
    """A callable object with an attribute."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, number: int) -> int:
        return self.by * number

    def divided(self, number: int) -> float:
        return number / self.by


class SimpleMask:
    """An object with a mask that isn't a sampler."""

    def __init__(self, mask: int) -> None:
        self._mask = mask


class Color(Enum):
    RED = 1
    GREEN = 2


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
#: Values of an attribute that are all different.
DIFFERENT: list[Any] = [
    None,
    1,
    1.0,
    "a",
    np.int8(3),
    np.float64(0.5),
    [1, 2],
    [2, 1],
    (1, [2]),
    {"a": 1},
    {"a": 2},
    {1, 2},
    frozenset({3}),
    slice(0, 3),
    range(4),
    np.arange(3),
    np.arange(3.0),
    np.arange(4),
    np.arange(3)[::-1],
    np.array([1, "a"], dtype=object),
    CELL_TYPES,
    CELL_TYPES.rename_categories(["X", "Y"]),
    pd.Series([1, 2]),
    pd.Series([1, 3]),
    pd.DataFrame({"a": [1]}),
    np.dtype("int8"),
    len,
    Multiplied,
    Multiplied(2),
    Multiplied(3),
    Multiplied(2).__call__,
    Multiplied(2).divided,
    partial(int, base=2),
    partial(int, base=3),
    Path("a"),
    deque([7]),
    dt.date(2026, 1, 1),
    Decimal("0.5"),
    torch.zeros(2),
    torch.ones(2),
    np.array(["2026-01-01"], dtype="datetime64[D]"),
    np.array(["a", "b"], dtype=np.dtypes.StringDType()),
    np.array(None, dtype=object),
    pd.DataFrame({"b": [1]}),
    pd.DataFrame({"a": [[1]]}),
    SimpleMask(1),
    SimpleMask(2),
    CYCLE,
    MaskBlind(3),
    MaskBlind(4),
    {1: "a"},
    {"1": "a"},
    Color.RED,
    Color.GREEN,
    json,
    logging,
    frozenset("abcdefgh"),
    cache(by_class),
    cache(made),
]


def test_description_differs_for_different_attributes_only() -> None:
    """Samplers with different attributes have different descriptions; a copy has the description of its sampler."""
    described = [description(Holding(value)) for value in DIFFERENT]
    assert len({one["digest"] for one in described}) == len(DIFFERENT)
    assert described == [description(private_copy(Holding(value))) for value in DIFFERENT]


def all_descriptions() -> list[dict[str, Any]]:
    """Describe samplers and shardings of every kind."""
    shardings = [Contiguous(), Independent(), Shuffled(), Shuffled(np.int64(64)), ByToken("a"), by_token]
    samplers = [*map(made, SETTINGS), RandomSampler(np.int8(4), 2, 8), Own(5, 2, 5), *map(Holding, DIFFERENT)]
    return [description(one) for one in [*shardings, *samplers]]


def test_descriptions_are_equal_in_any_process() -> None:
    """Descriptions equal the descriptions in ``descriptions.json``, which a different process wrote.

    To update the file: ``python -c "from tests.core.test_wrapped import *; write_descriptions()"``.
    """
    assert all_descriptions() == json.loads(DESCRIPTIONS.read_text())


def write_descriptions() -> None:
    """Write the descriptions of all kinds of samplers and shardings to the file of the test."""
    DESCRIPTIONS.write_text("[\n" + ",\n".join(map(json.dumps, all_descriptions())) + "\n]\n")


@pytest.mark.parametrize(
    ("sampler", "same"),
    [
        (RandomSampler(4, 2, 8), RandomSampler(4, 2, 8, mask=slice(3, 9), rng=np.random.default_rng(3))),
        (by_class(), by_class(mask=slice(5, 50))),
        (Own(4, 2, 8), Own(4, 2, 8, mask=slice(3, 9), rng=np.random.default_rng(3))),
        (Holding({"a": 1, "b": 2}), Holding({"b": 2, "a": 1})),
        (Holding(threading.Lock()), Holding(threading.Lock())),
        (Holding(logging.getLogger("a")), Holding(logging.getLogger("b"))),
    ],
)
def test_description_ignores_generators_masks_and_locks(sampler: Sampler, same: Sampler) -> None:
    assert description(sampler) == description(same)


def test_description_ignores_an_open_pass() -> None:
    sampler = by_class()
    before = description(sampler)
    open_pass = iter(sampler.sample(50))
    next(open_pass)
    assert description(sampler) == before


def test_description_ignores_caches_of_a_path() -> None:
    path = Path("a") / "b"
    before = description(Holding(path))
    hash(path)
    str(path)
    assert description(Holding(path)) == before


def test_description_is_equal_in_spawned_processes() -> None:
    """A spawned process imports the script under a different module name."""
    kind: Any = type("Sampler", (MaskBlind,), {"__module__": "__main__"})
    spawned: Any = type("Sampler", (MaskBlind,), {"__module__": "__mp_main__"})
    assert description(spawned(4)) == description(kind(4))
    assert description(kind(4))["type"] == "__main__.Sampler"


class Remote(MaskBlind):
    """A sampler with a token to authenticate at a remote store."""

    def __init__(self, token: Any) -> None:
        super().__init__(4)
        self.token = token


@dataclass(frozen=True)
class ByToken:
    """A sharding with a token to authenticate at a remote service."""

    token: Any

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        del epoch, seed
        return rows


def by_token(rows: Rows, *, epoch: int, seed: int | None) -> Rows:
    """Keep the order."""
    del epoch, seed
    return rows


class Subclass(RandomSampler):
    """A subclass of annbatch's sampler with an attribute of its own."""

    def __init__(self, token: Any) -> None:
        super().__init__(4, 2, 8)
        self.token = token


def agreement(rank: DistributedSampler) -> list[str]:
    """The text that a rank sends, and the message of its error."""
    texts: list[str] = []

    def gather(text: str) -> list[str]:
        texts.append(text)
        return [text, text]  # a second process with the same rank

    with pytest.raises(ValueError, match=r"The ranks of this job (don't agree|can't be compared)") as raised:
        rank.check_ranks_agree(64, gather=gather)
    return [*texts, str(raised.value)]


SECRETS = ["hunter2", b"hunter2", ["hunter2"], {"hunter2": 1}, Path("hunter2"), Multiplied("hunter2")]


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_of_samplers_and_shardings_are_never_shown(secret: Any) -> None:
    plain = RandomSampler(4, 2, 8)
    vars(plain)["token"] = secret
    for wrapped in (Remote(secret), Subclass(secret), plain, Holding(Remote(secret))):
        ranks = [DistributedSampler(wrapped, dist_info=Rank(rank, 2), sharding=ByToken(secret)) for rank in (0, 1)]
        state = ranks[0].state_dict(batches_done=0)
        texts: list[str] = []
        for rank in ranks:
            texts += agreement(rank)
        other = DistributedSampler(Remote("other"), dist_info=Rank(0, 2), sharding=ByToken("other"))
        with pytest.raises(ValueError, match="by a sampler with different settings") as raised:
            other.load_state_dict(state)
        assert "hunter2" not in "".join([str(state), *texts, str(raised.value)])


def test_secrets_of_a_wrong_sharding_are_never_shown() -> None:
    @dataclass(frozen=True)
    class Lying(ByToken):
        def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
            return super().__call__(rows, epoch=epoch, seed=seed).cyclic(0, 3)

    texts = agreement(DistributedSampler(Remote(1), dist_info=Rank(0, 2), sharding=Lying("hunter2")))
    assert "The sharding Lying must return each of the 64 rows" in texts[-1]
    assert "hunter2" not in "".join(texts)
