"""Jobs that can't run say why, in the same words on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler

from tests.samplers import IndexArrays, MaskBlind, NoBatchSize, batches, flat, job
from tests.strategies import POLICIES
from tests.test_wrapped import Localized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest


def labels(*runs: int) -> pd.Categorical:
    """Runs of labels: B, NK, T, B, NK, ..."""
    return pd.Categorical.from_codes(np.repeat(np.arange(len(runs)) % 3, runs), categories=["B", "NK", "T"])


def classes(*runs: int, **kwargs: Any) -> ClassSampler:
    return ClassSampler(4, 2, 4, classes=labels(*runs), num_samples=20, rng=np.random.default_rng(0), **kwargs)


@pytest.mark.parametrize(
    ("sampler", "n_obs", "options", "message"),
    [
        (RandomSampler(4, 2, 8, num_samples=26), 100, {}, r"num_samples \(26\) cannot exceed the observation range"),
        (RandomSampler(4, 2, 8, num_samples=26), 101, {"remainder": "keep"}, r"rank 0 of 4.*num_samples \(26\)"),
        (
            RandomSampler(4, 2, 8, drop_last=True),
            101,
            {"remainder": "exact"},
            "promises every row. Use drop_last=False",
        ),
        (
            RandomSampler(1, 1, 1),
            101,
            {"remainder": "exact"},
            "RandomSampler makes 25 of the 25 rows of rank 0, and 26 on rank 3",
        ),
        (classes(25, 25, 25, 25), 101, {}, "does not match loader n_obs"),
        (classes(26, 26, 26, 22), 100, {"remainder": "keep"}, r"rank 1 of 4, which are 25:50 .* chunk_size \(4\)"),
        (
            classes(50, 50, class_weights=np.array([1.0, 0.0, 0.0])),
            100,
            {"remainder": "keep"},
            "rank 2 of 4.*No class with positive weight",
        ),
    ],
)
def test_what_is_wrong_for_one_rank_is_the_same_error_on_all(
    sampler: Sampler, n_obs: int, options: Any, message: str
) -> None:
    raised = set()
    for rank in job(sampler, 4, **options):
        for ask in (rank.n_batches, rank.validate, rank.plan, rank.sample):
            with pytest.raises(ValueError, match=message) as error:
                ask(n_obs)
            raised.add(str(error.value))
    assert len(raised) == 1


def test_class_samplers_draw_in_every_epoch_from_one_stretch_each() -> None:
    for epoch in range(4):
        ranks = job(classes(26, 26, 26, 26), 3)
        for sampler in ranks:
            sampler.set_epoch(epoch)
            plan = sampler.plan(104)
            assert all(plan.shard(rank).rows.is_stretch for rank in range(3))
            assert set(flat(batches(sampler.sample(104)))) <= set(plan.shard(sampler.rank).rows)
        assert list(plan.dropped) == list(range(96, 104))


def test_annbatchs_random_sampler_still_promises_more_than_whole_chunks_make() -> None:
    """If this fails, annbatch has mended it: ``_refuse_short_draws`` is to go."""
    alone = RandomSampler(6, 2, 4, replacement=True, drop_last=True)
    assert (alone.n_batches(20), len(batches(alone.sample(20)))) == (5, 4)
    for rank in job(alone, 2):
        with pytest.raises(ValueError, match=r"chunks of 6 rows, which make 4 batches of the 5"):
            rank.n_batches(40)
    assert [len(batches(rank.sample(24))) for rank in job(alone, 2)] == [3, 3]


class Counting(MaskBlind):
    """Says what it is told when asked how many batches it gives."""

    def __init__(self, batch_size: int, count: Callable[[int], Any]) -> None:
        super().__init__(batch_size)
        self.count = count

    def n_batches(self, n_obs: int) -> Any:
        return self.count(n_obs)


@pytest.mark.parametrize(
    ("batch_size", "count", "n_obs", "policy", "message"),
    [
        (20, lambda n: 1 + 2 * max(0, n - 10), 21, "exact", "makes 1 of the 10 rows of rank 0, and 3 on rank 1"),
        (4, lambda n: n // 8 * 2, 44, "exact", "4 batches of 4 rows at most, and so leaves out some of its 22 rows"),
        (1, lambda n: 2 * n, 20, "exact", "makes 20 batches"),
        (4, lambda n: n // 2, 80, "pad", "makes 20 batches"),
    ],
)
def test_counts_that_cannot_be_made_equal_are_the_same_error_on_all_ranks_beforehand(
    batch_size: int, count: Any, n_obs: int, policy: Any, message: str
) -> None:
    raised = set()
    for rank in job(Counting(batch_size, count), 2, remainder=policy):
        with pytest.raises(ValueError, match=f"Counting .*{message}|Counting {message}") as error:
            rank.validate(n_obs)
        raised.add(str(error.value))
    assert len(raised) == 1


def test_where_a_count_cannot_be_known_it_raises() -> None:
    def unknown(n_obs: int) -> int:
        raise NotImplementedError("that depends")

    for rank in job(Counting(2, unknown), 2):
        with pytest.raises(NotImplementedError, match="that depends"):
            rank.n_batches(20)


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


@pytest.mark.parametrize("remainder", [None, "drop", "exact", "pad"])
def test_without_a_batch_size_equal_counts_are_not_promised(remainder: Any) -> None:
    with pytest.raises(ValueError, match=r"NoBatchSize has batch_size None.*enforce_equal_batches=False"):
        job(NoBatchSize(4), 2, remainder=remainder)


def test_without_a_batch_size_keep_works() -> None:
    ranks = job(NoBatchSize(4), 2, enforce_equal_batches=False)
    assert [rank.n_batches(19) for rank in ranks] == [len(batches(rank.sample(19))) for rank in ranks] == [3, 3]
    assert sorted(flat(flat(batches(rank.sample(19))) for rank in ranks)) == list(range(19))
    assert "no batch size" in str(ranks[0].plan(19))


def test_a_batch_size_below_1_is_an_error() -> None:
    with pytest.raises(ValueError, match="MaskBlind has batch_size 0"):
        job(MaskBlind(0), 2)


@pytest.mark.parametrize("batch_size", [8.0, float("nan"), True, "8", np.float32(8), np.bool_(True), 2.5])
def test_a_batch_size_that_is_no_integer_is_a_type_error(batch_size: Any) -> None:
    for policy in POLICIES:
        with pytest.raises(TypeError, match=r"MaskBlind has batch_size .* of type .*integer"):
            job(MaskBlind(batch_size), 2, remainder=policy)


class OfNumpys(IndexArrays):
    """Tells its batch size as one of numpy's integers."""

    def __init__(self, integer: Any, batch_size: int) -> None:
        super().__init__(batch_size)
        self.integer = integer

    @property
    def batch_size(self) -> Any:
        return self.integer(self._batch_size)


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int32, np.int64])
def test_a_batch_size_may_be_one_of_numpys_integers(integer: Any) -> None:
    """Whose arithmetic goes round at 128, for one: 3 ranks times 100 rows are 300."""
    ranks = job(OfNumpys(integer, 100), 3, remainder="exact")
    assert [rank.n_batches(700) for rank in ranks] == [len(batches(rank.sample(700))) for rank in ranks] == [3] * 3
    assert type(ranks[0].batch_size) is int
    with pytest.raises(ValueError, match="3 ranks times batch size 100 is 300"):
        job(OfNumpys(integer, 100), 3)[0].plan(250)


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (lambda n: n / 4 + 0.5, ValueError),
        (lambda n: float("nan"), ValueError),
        (lambda n: float("inf"), ValueError),
        (lambda n: -1, ValueError),
        (lambda n: -1.0, ValueError),
        (lambda n: 2**63, ValueError),
        (lambda n: 10.0**30, ValueError),
        (lambda n: None, TypeError),
        (lambda n: True, TypeError),
        (lambda n: np.bool_(True), TypeError),
        (lambda n: "5", TypeError),
        (lambda n: np.array([5]), TypeError),
        (lambda n: 5 + 0j, TypeError),
    ],
)
def test_a_number_of_batches_that_is_none_is_the_same_error_on_all_ranks_beforehand(count: Any, error: Any) -> None:
    raised = set()
    for policy in POLICIES:
        for rank in job(Counting(4, count), 2, remainder=policy):
            for ask in (rank.validate, rank.n_batches, rank.plan, rank.sample):
                with pytest.raises(
                    error, match=r"Counting.n_batches\(20\) must return how many batches it yie"
                ) as raise_:
                    ask(40)
                raised.add((policy, str(raise_.value)))
    assert len(raised) == len(POLICIES)


@pytest.mark.parametrize("kind", [np.ceil, lambda n: np.float32(np.ceil(n)), lambda n: np.int16(np.ceil(n))])
def test_a_number_of_batches_may_be_what_numpy_rounds(kind: Any) -> None:
    for policy in POLICIES:
        for rank in job(Counting(4, lambda n: kind(n / 4)), 2, remainder=policy):
            n_batches = rank.n_batches(42)
            assert type(n_batches) is int
            assert len(batches(rank.sample(42))) == n_batches
            assert rank.state_dict(batches_done=1)["segments"] == [[2, 1, 1]]
