"""Fingerprints tell settings apart, and nothing else."""

from __future__ import annotations

import datetime as dt
import logging
import subprocess
import sys
import threading
from collections import deque
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.fingerprint import fingerprint
from annbatch_distributed.private_copy import private_copy
from tests.samplers import MaskBlind

if TYPE_CHECKING:
    from annbatch.abc import Sampler

LABELS = pd.Categorical(np.repeat(["B", "T"], [20, 30]))


def by_class(labels: pd.Categorical = LABELS, **kwargs: Any) -> ClassSampler:
    return ClassSampler(4, 2, 4, classes=labels, num_samples=40, **kwargs)


class Holding(MaskBlind):
    """Holds anything."""

    def __init__(self, held: Any) -> None:
        super().__init__(4)
        self.held = held


class Multiplied:
    """Something that can be called, and holds something."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, number: int) -> int:
        return self.by * number


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
HELD: list[Any] = [
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
    LABELS,
    LABELS.rename_categories(["X", "Y"]),
    pd.Series([1, 2]),
    pd.Series([1, 3]),
    pd.DataFrame({"a": [1]}),
    np.dtype("int8"),
    len,
    Multiplied,
    Multiplied(2),
    Multiplied(3),
    Multiplied(2).__call__,
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
    {"_mask": 1},
    {"_mask": 2},
    CYCLE,
    MaskBlind(3),
    MaskBlind(4),
]


def test_samplers_that_hold_other_things_have_other_fingerprints_and_equal_things_the_same() -> None:
    texts = [fingerprint(Holding(held)) for held in HELD]
    assert len(set(texts)) == len(HELD)
    assert texts == [fingerprint(private_copy(Holding(held))) for held in HELD]


@pytest.mark.parametrize(
    ("sampler", "other"),
    [
        (RandomSampler(4, 2, 8), RandomSampler(4, 2, 4)),
        (RandomSampler(4, 2, 8), RandomSampler(4, 2, 8, drop_last=True)),
        (RandomSampler(4, 2, 8), SequentialSampler(4, 2, 8)),
        (by_class(), by_class(class_weights=np.array([1.0, 2.0]))),
        (by_class(), by_class(pd.Categorical(np.repeat(["B", "T"], [21, 29])))),
        (
            DistributedSampler(RandomSampler(4, 2, 8), dist_info=Rank(0, 2), seed=0),
            DistributedSampler(RandomSampler(4, 2, 8), dist_info=Rank(0, 2), seed=1),
        ),
    ],
)
def test_other_settings_are_another_fingerprint(sampler: Sampler, other: Sampler) -> None:
    assert fingerprint(sampler) != fingerprint(other)


@pytest.mark.parametrize(
    ("sampler", "same"),
    [
        (RandomSampler(4, 2, 8), RandomSampler(4, 2, 8, mask=slice(3, 9), rng=np.random.default_rng(3))),
        (by_class(), by_class(mask=slice(5, 50))),
        (
            DistributedSampler(RandomSampler(4, 2, 8), dist_info=Rank(0, 2), seed=0),
            DistributedSampler(RandomSampler(4, 2, 8), dist_info=Rank(1, 2), seed=0),
        ),
        (Holding(threading.Lock()), Holding(threading.Lock())),
        (Holding(logging.getLogger("a")), Holding(logging.getLogger("b"))),
    ],
)
def test_generators_masks_ranks_and_what_cannot_be_described_make_no_difference(
    sampler: Sampler, same: Sampler
) -> None:
    assert fingerprint(sampler) == fingerprint(same)


def test_a_pass_that_is_open_makes_no_difference() -> None:
    sampler = by_class()
    before = fingerprint(sampler)
    open_pass = iter(sampler.sample(50))
    next(open_pass)
    assert fingerprint(sampler) == before


def test_a_path_that_was_used_makes_no_difference() -> None:
    path = Path("a") / "b"
    before = fingerprint(Holding(path))
    hash(path)
    str(path)
    assert fingerprint(Holding(path)) == before


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    code = "from tests.test_fingerprint import *; print(*map(fingerprint, map(Holding, HELD)), sep='\\n')"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert there.stdout.splitlines() == [fingerprint(Holding(held)) for held in HELD]
