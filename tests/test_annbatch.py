"""Load requests are bit for bit equal to annbatch's own DistributedSampler, wherever both are defined."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import annbatch.samplers
import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler
from hypothesis import assume, event, given

from annbatch_distributed import DistributedSampler, Rank
from tests.strategies import Job, jobs

if TYPE_CHECKING:
    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest


def same(ours: list[LoadRequest], theirs: list[LoadRequest]) -> bool:
    """Return True if two streams are equal, slice for slice and index for index."""
    return len(ours) == len(theirs) and all(
        list(one["requests"]) == list(other["requests"])
        and len(one["splits"]) == len(other["splits"])
        and all(np.array_equal(a, b) for a, b in zip(one["splits"], other["splits"], strict=True))
        for one, other in zip(ours, theirs, strict=True)
    )


def compare(sampler: Sampler, n_obs: int, world_size: int, **kwargs: bool) -> None:
    for rank in range(world_size):
        theirs = annbatch.samplers.DistributedSampler(sampler, dist_info=partial(tuple, (rank, world_size)), **kwargs)
        ours = DistributedSampler(sampler, dist_info=Rank(rank, world_size), **kwargs)
        read = list(ours.sample(n_obs))
        assert ours.n_batches(n_obs) == theirs.n_batches(n_obs)
        assert same(read, list(theirs.sample(n_obs)))
        assert not same(read, list(ours.sample(n_obs))) or not ours.shuffle or ours.n_batches(n_obs) < 3
    assert (ours.batch_size, ours.shuffle) == (theirs.batch_size, theirs.shuffle)


LABELS = pd.Categorical.from_codes(np.resize(np.repeat([0, 1, 2], 500), 10_000), categories=["B", "NK", "T"])
SAMPLERS = {
    "random": lambda **kw: RandomSampler(64, 32, 256, **kw),
    "random, drop_last": lambda **kw: RandomSampler(64, 32, 256, drop_last=True, **kw),
    "replacement": lambda **kw: RandomSampler(64, 32, 256, replacement=True, **kw),
    "replacement, num_samples": lambda **kw: RandomSampler(64, 32, 256, replacement=True, num_samples=3_000, **kw),
    "num_samples": lambda **kw: RandomSampler(64, 32, 256, num_samples=1_000, **kw),
    "single rows": lambda **kw: RandomSampler(1, 512, 256, **kw),
    "sequential": lambda **_: SequentialSampler(64, 32, 256),
    "class": lambda **kw: ClassSampler(64, 32, 256, classes=LABELS, num_samples=3_000, **kw),
    "weighted class": lambda **kw: WeightedClassSampler(
        64, 32, 256, classes=LABELS, num_samples=3_000, class_weights=np.array([1.0, 0.0, 5.0]), **kw
    ),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("is_equal", [True, False])
def test_first_pass_equals_annbatchs(kind: str, world_size: int, is_equal: bool) -> None:
    """The first pass of epoch 0 equals annbatch's under `drop`, and under `keep` if the ranks divide the rows."""
    compare(SAMPLERS[kind](rng=np.random.default_rng(3)), 10_000, world_size, enforce_equal_batches=is_equal)


@given(jobs(kinds=("random", "sequential", "class", "weighted-class", "random-replacement", "random-num-samples")))
def test_any_valid_job_equals_annbatchs(drawn: Job) -> None:
    """Jobs of any size without a mask and a seed have the same load requests, if both libraries can run them."""
    drawn = drawn.plain or drawn  # annbatch can't slice by NumPy's unsigned integers
    equal = drawn.options["remainder"] == "drop"
    assume(equal or drawn.n_obs % drawn.world_size == 0)
    try:
        for rank in range(drawn.world_size):
            ours = DistributedSampler(
                drawn.sampler, dist_info=Rank(rank, drawn.world_size), enforce_equal_batches=equal
            )
            ours.validate(drawn.n_obs)
    except ValueError:
        event("can't run")
        return
    event("runs")
    for rank in range(drawn.world_size):
        theirs = annbatch.samplers.DistributedSampler(
            drawn.sampler, dist_info=partial(tuple, (rank, drawn.world_size)), enforce_equal_batches=equal
        )
        ours = DistributedSampler(drawn.sampler, dist_info=Rank(rank, drawn.world_size), enforce_equal_batches=equal)
        assert same(list(ours.sample(drawn.n_obs)), list(theirs.sample(drawn.n_obs)))


def test_tutorial_has_39_batches_on_each_rank() -> None:
    """The collection of annbatch's tutorial, 20,000 rows, has 39 batches on each of two ranks."""
    sampler = RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256)
    ranks = [DistributedSampler(sampler, dist_info=Rank(rank, 2)) for rank in range(2)]
    assert [sum(len(request["splits"]) for request in rank.sample(20_000)) for rank in ranks] == [39, 39]


@pytest.mark.parametrize("world_size", [1, 8])
def test_astropt_epoch_is_exact_in_13242_steps(world_size: int) -> None:
    """8,474,566 rows in global batches of 640: the table of astroPT's pull request 72."""
    n_obs, batch_size = 8_474_566, 640 // world_size
    sampler = RandomSampler(chunk_size=batch_size, preload_nchunks=128, batch_size=batch_size)
    seen = np.zeros(n_obs, dtype=np.int8)
    for rank in range(world_size):
        steps = 0
        for request in DistributedSampler(sampler, dist_info=Rank(rank, world_size), remainder="exact").sample(n_obs):
            steps += len(request["splits"])
            rows = np.concatenate([np.arange(part.start, part.stop) for part in request["requests"]])
            np.add.at(seen, rows[np.concatenate(request["splits"])], 1)
        assert steps == 13_242
    assert (seen == 1).all()
