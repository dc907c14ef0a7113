"""Fingerprints tell settings apart, and nothing else."""

from __future__ import annotations

import datetime as dt
import logging
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from annbatch.samplers import ClassSampler, RandomSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.wrapped import fingerprint, private_copy
from tests.samplers import MaskBlind

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.rows import Rows

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
    ("sampler", "same"),
    [
        (RandomSampler(4, 2, 8), RandomSampler(4, 2, 8, mask=slice(3, 9), rng=np.random.default_rng(3))),
        (by_class(), by_class(mask=slice(5, 50))),
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
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.splitlines() == [fingerprint(Holding(held)) for held in HELD]


class Remote(MaskBlind):
    """Reads from somewhere where it has to say who it is."""

    def __init__(self, token: Any) -> None:
        super().__init__(4)
        self.token = token


@dataclass(frozen=True)
class ByToken:
    """Deals rows by what somewhere else says."""

    token: Any

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        del epoch, seed
        return rows


class Subclass(RandomSampler):
    """Holds more than annbatch's own."""

    def __init__(self, token: Any) -> None:
        super().__init__(4, 2, 8)
        self.token = token


def agreement(rank: DistributedSampler) -> list[str]:
    """What a rank says to the others, and hears from them."""
    said: list[str] = []

    def gather(text: str) -> list[str]:
        said.append(text)
        return [text, text]  # another one that is the same rank

    with pytest.raises(ValueError, match=r"The ranks of this job (don't agree|can't be compared)") as raised:
        rank.check_ranks_agree(64, gather=gather)
    return [*said, str(raised.value)]


SECRETS = ["hunter2", b"hunter2", ["hunter2"], {"hunter2": 1}, Path("hunter2"), Multiplied("hunter2")]


@pytest.mark.parametrize("secret", SECRETS)
def test_what_a_users_sampler_or_sharding_holds_is_never_written_out(secret: Any) -> None:
    known = RandomSampler(4, 2, 8)
    vars(known)["token"] = secret
    for wrapped in (Remote(secret), Subclass(secret), known, Holding(Remote(secret))):
        ranks = [DistributedSampler(wrapped, dist_info=Rank(rank, 2), sharding=ByToken(secret)) for rank in (0, 1)]
        state = ranks[0].state_dict(batches_done=0)
        heard: list[str] = []
        for rank in ranks:
            heard += agreement(rank)
        other = DistributedSampler(Remote("other"), dist_info=Rank(0, 2), sharding=ByToken("other"))
        with pytest.raises(ValueError, match="of a sampler with other settings") as raised:
            other.load_state_dict(state)
        assert "hunter2" not in "".join([str(state), *heard, str(raised.value)])


def test_what_a_sharding_holds_is_not_told_to_other_ranks_when_it_deals_wrongly() -> None:
    @dataclass(frozen=True)
    class Lying(ByToken):
        def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
            return super().__call__(rows, epoch=epoch, seed=seed).cyclic(0, 3)

    heard = agreement(DistributedSampler(Remote(1), dist_info=Rank(0, 2), sharding=Lying("hunter2")))
    assert "The sharding Lying must return each of the 64 rows" in heard[-1]
    assert "hunter2" not in "".join(heard)
