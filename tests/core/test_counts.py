"""Numbers of batches that samplers promise and ranks yield."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler

from tests.core.test_wrapped import Localized
from tests.samplers import Counting, MaskBlind, NoBatchSize, batches, flat, job
from tests.strategies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest


def test_class_samplers_read_one_contiguous_range_each() -> None:
    """The class sampler of each rank samples from one contiguous range in every epoch."""
    classes = pd.Categorical(np.repeat([*"BNTB"], 26))
    for epoch in range(4):
        ranks = job(ClassSampler(4, 2, 4, classes=classes, num_samples=20), 3)
        for sampler in ranks:
            sampler.set_epoch(epoch)
            plan = sampler.plan(104)
            assert all(plan.shard(rank).rows.is_contiguous for rank in range(3))
            assert set(flat(batches(sampler.sample(104)))) <= set(plan.shard(sampler.rank).rows)
        assert list(plan.dropped) == list(range(96, 104))


def test_annbatch_still_overstates_batches_with_replacement() -> None:
    """If this fails, annbatch has fixed its count of batches: remove ``refuse_short_draws``."""
    alone = RandomSampler(6, 2, 4, replacement=True, drop_last=True)
    assert (alone.n_batches(20), len(batches(alone.sample(20)))) == (5, 4)
    for rank in job(alone, 2):
        with pytest.raises(ValueError, match=r"chunks of 6 rows and yields only 4 of the 5 batches"):
            rank.n_batches(40)
    assert [len(batches(rank.sample(24))) for rank in job(alone, 2)] == [3, 3]


def test_shards_of_equal_size_can_differ_in_batches() -> None:
    """A sampler of global rows can make different numbers of batches of equal shards; only `keep` allows that."""
    uneven = Localized(np.array([1, 1, 1, 0, 1, 0, 0, 0]))
    for rank, n_batches in zip(job(uneven, 2, remainder="keep"), (3, 1), strict=True):
        assert rank.n_batches(8) == len(batches(rank.sample(8))) == n_batches
    for policy in ("drop", "pad", "exact"):
        for rank in job(uneven, 2, remainder=policy):
            with pytest.raises(ValueError, match="Localized"):
                rank.n_batches(8)


class Growing(MaskBlind):
    """A sampler whose batches are smaller from epoch 1 on."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def n_batches(self, n_obs: int) -> int:
        return (n_obs // 2) if self.epoch else (n_obs // 4)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        size = 2 if self.epoch else 4
        for start in range(0, n_obs - size + 1, size):
            yield {"requests": [slice(start, start + size)], "splits": [np.arange(size)]}


def test_batches_of_samplers_with_epochs_are_recounted() -> None:
    """The batches of a sampler that has its own `set_epoch` are counted in each epoch."""
    for sampler in job(Growing(4), 2, remainder="keep"):
        for epoch, n_batches in ((0, 5), (1, 10), (0, 5)):
            sampler.set_epoch(epoch)
            assert sampler.n_batches(40) == len(batches(sampler.sample(40))) == n_batches


def test_keep_works_without_a_batch_size() -> None:
    """`keep` accepts a sampler that has no batch size."""
    ranks = job(NoBatchSize(4), 2, enforce_equal_batches=False)
    assert [rank.n_batches(19) for rank in ranks] == [len(batches(rank.sample(19))) for rank in ranks] == [3, 3]
    assert sorted(flat(flat(batches(rank.sample(19))) for rank in ranks)) == list(range(19))
    assert "no batch size" in str(ranks[0].plan(19))


@pytest.mark.parametrize("remainder", ["drop", "keep", "exact"])
def test_sampler_without_batches_has_an_empty_epoch(remainder: Any) -> None:
    """A sampler that yields no batch for a shard has 0 batches under every policy that can't repeat rows."""
    for rank in job(RandomSampler(4, 4, 16, num_samples=10, drop_last=True), 2, remainder=remainder):
        assert rank.n_batches(1000) == len(list(rank.sample(1000))) == 0


@pytest.mark.parametrize("kind", [np.ceil, lambda n: np.float32(np.ceil(n)), lambda n: np.int16(np.ceil(n))])
def test_number_of_batches_may_be_a_numpy_number(kind: Any) -> None:
    """A sampler's number of batches may be a NumPy number; ours is an `int`."""
    for policy in POLICIES:
        for rank in job(Counting(4, lambda n: kind(n / 4)), 2, remainder=policy):
            n_batches = rank.n_batches(42)
            assert type(n_batches) is int
            assert len(batches(rank.sample(42))) == n_batches
            assert rank.state_dict(batches_done=1)["segments"] == [[2, 1, 1]]
