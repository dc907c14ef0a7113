"""Numbers of batches, as samplers promise them and as ranks get them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler

from tests.samplers import Counting, MaskBlind, NoBatchSize, batches, flat, job
from tests.strategies import POLICIES
from tests.test_wrapped import Localized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest


def test_class_samplers_draw_in_every_epoch_from_one_stretch_each() -> None:
    classes = pd.Categorical(np.repeat([*"BNTB"], 26))
    for epoch in range(4):
        ranks = job(ClassSampler(4, 2, 4, classes=classes, num_samples=20), 3)
        for sampler in ranks:
            sampler.set_epoch(epoch)
            plan = sampler.plan(104)
            assert all(plan.shard(rank).rows.is_contiguous for rank in range(3))
            assert set(flat(batches(sampler.sample(104)))) <= set(plan.shard(sampler.rank).rows)
        assert list(plan.dropped) == list(range(96, 104))


def test_annbatchs_random_sampler_still_promises_more_than_whole_chunks_make() -> None:
    """If this fails, annbatch has mended it: ``_refuse_short_draws`` is to go."""
    alone = RandomSampler(6, 2, 4, replacement=True, drop_last=True)
    assert (alone.n_batches(20), len(batches(alone.sample(20)))) == (5, 4)
    for rank in job(alone, 2):
        with pytest.raises(ValueError, match=r"chunks of 6 rows and yields only 4 of the 5 batches"):
            rank.n_batches(40)
    assert [len(batches(rank.sample(24))) for rank in job(alone, 2)] == [3, 3]


def test_ranks_of_as_many_rows_can_have_other_counts_if_a_sampler_needs_global_rows() -> None:
    uneven = Localized(np.array([1, 1, 1, 0, 1, 0, 0, 0]))
    for rank, n_batches in zip(job(uneven, 2, remainder="keep"), (3, 1), strict=True):
        assert rank.n_batches(8) == len(batches(rank.sample(8))) == n_batches
    for policy in ("drop", "pad", "exact"):
        for rank in job(uneven, 2, remainder=policy):
            with pytest.raises(ValueError, match="Localized"):
                rank.n_batches(8)


class Growing(MaskBlind):
    """Makes smaller batches in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def n_batches(self, n_obs: int) -> int:
        return (n_obs // 2) if self.epoch else (n_obs // 4)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        size = 2 if self.epoch else 4
        for start in range(0, n_obs - size + 1, size):
            yield {"requests": [slice(start, start + size)], "splits": [np.arange(size)]}


def test_a_sampler_with_epochs_of_its_own_is_counted_in_each_of_them() -> None:
    for sampler in job(Growing(4), 2, remainder="keep"):
        for epoch, n_batches in ((0, 5), (1, 10), (0, 5)):
            sampler.set_epoch(epoch)
            assert sampler.n_batches(40) == len(batches(sampler.sample(40))) == n_batches


def test_without_a_batch_size_keep_works() -> None:
    ranks = job(NoBatchSize(4), 2, enforce_equal_batches=False)
    assert [rank.n_batches(19) for rank in ranks] == [len(batches(rank.sample(19))) for rank in ranks] == [3, 3]
    assert sorted(flat(flat(batches(rank.sample(19))) for rank in ranks)) == list(range(19))
    assert "no batch size" in str(ranks[0].plan(19))


@pytest.mark.parametrize("kind", [np.ceil, lambda n: np.float32(np.ceil(n)), lambda n: np.int16(np.ceil(n))])
def test_a_number_of_batches_may_be_what_numpy_rounds(kind: Any) -> None:
    for policy in POLICIES:
        for rank in job(Counting(4, lambda n: kind(n / 4)), 2, remainder=policy):
            n_batches = rank.n_batches(42)
            assert type(n_batches) is int
            assert len(batches(rank.sample(42))) == n_batches
            assert rank.state_dict(batches_done=1)["segments"] == [[2, 1, 1]]
