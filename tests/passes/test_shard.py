"""Any sampler runs on one shard's rows; those that need global rows through a registered function."""

# What mypy is told to ignore: these samplers are given, or keep, attributes that annbatch's classes don't declare.

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, WeightedClassSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.passes.shard import localize, needs_global_rows
from annbatch_distributed.rows import Rows
from tests.samplers import MaskBlind, batches, flat, request_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest

LABELS = pd.Categorical.from_codes(np.repeat([0, 1, 0, 2], 25), categories=["B", "NK", "T"])


def class_sampler(cls: type[ClassSampler] = ClassSampler, **kwargs: object) -> ClassSampler:
    return cls(5, 2, 5, classes=LABELS, num_samples=500, rng=np.random.default_rng(0), **kwargs)


@pytest.mark.parametrize("cls", [ClassSampler, WeightedClassSampler])
def test_a_class_sampler_draws_the_classes_of_its_rows_only(cls: type[ClassSampler]) -> None:
    rows = Rows((range(40, 55), range(80, 100)))  # NK, B, T
    local = localize(class_sampler(cls), rows, 100)
    drawn = flat(request_rows(request) for request in local.sample(len(rows)))
    assert set(drawn) <= set(range(len(rows)))
    read = LABELS[rows.to_global(np.array(drawn))]
    assert set(read) == {"B", "NK", "T"}


def test_class_weights_are_those_of_the_classes_in_its_rows() -> None:
    weights = np.array([0.0, 1.0, 3.0])
    rows = Rows((range(25, 100),))
    local = localize(class_sampler(class_weights=weights), rows, 100)
    drawn = np.array(flat(request_rows(request) for request in local.sample(len(rows))))
    counts = pd.Series(LABELS[rows.to_global(drawn)]).value_counts()
    assert counts["B"] == 0
    # 100 groups of a class each: 25 of NK expected, with a standard deviation of 4.3
    assert 5 * 8 < counts["NK"] < 5 * 47


def test_a_mask_that_cannot_be_assigned_is_an_error_that_names_the_sampler() -> None:
    class Fixed(MaskBlind):
        mask = property(lambda self: slice(0, 8))

    for rank in range(2):
        with pytest.raises(TypeError, match=r"Fixed has the mask slice\(0, 8, None\), which can't be assigned"):
            DistributedSampler(Fixed(2), dist_info=Rank(rank, 2)).n_batches(20)


def test_a_sampler_without_a_mask_reads_everything() -> None:
    class Maskless(MaskBlind):
        mask = None  # type: ignore[assignment]  # no mask, as users may have it

    assert str(DistributedSampler(Maskless(2), dist_info=Rank(0, 2)).plan(20).window) == "0:20"


def test_a_class_sampler_that_is_being_iterated_can_be_shared_out() -> None:
    sampler = class_sampler()
    open_pass = iter(sampler.sample(100))
    next(open_pass)
    for mask in (slice(0, 50), [slice(0, 25), slice(75, 100)]):
        wrapped = DistributedSampler(sampler, dist_info=Rank(0, 1), mask=mask)
        assert wrapped.n_batches(100) == len(batches(wrapped.sample(100)))


def test_labels_of_another_number_of_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"classes length \(100\) does not match loader n_obs \(101\)"):
        localize(class_sampler(), Rows((range(25, 75),)), 101)


class Weighted(MaskBlind):
    """A user's sampler with a weight for each row of the collection: it reads the rows with a positive one."""

    def __init__(self, weights: np.ndarray) -> None:
        super().__init__(batch_size=1)
        self.weights = weights

    def n_batches(self, n_obs: int) -> int:
        return int((self.weights > 0).sum())

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        for row in np.flatnonzero(self.weights > 0):
            yield {"requests": [slice(int(row), int(row) + 1)], "splits": [np.arange(1)]}


def test_a_users_sampler_that_needs_global_rows_runs_once_registered() -> None:
    sampler = Weighted(np.arange(8) % 2)
    ranks = [DistributedSampler(sampler, dist_info=Rank(rank, 2)) for rank in range(2)]
    with pytest.raises(RuntimeError, match=r"Weighted was given the rows \[0, 4\) and asked for rows from \[5, 6\)"):
        list(ranks[0].sample(8))

    @localize.register(Weighted)
    def localize_weighted(sampler: Weighted, rows: Rows, n_obs: int) -> Weighted:
        return Weighted(sampler.weights[rows.to_array()])

    assert needs_global_rows(sampler)
    ranks = [DistributedSampler(sampler, dist_info=Rank(rank, 2)) for rank in range(2)]
    assert [flat(map(request_rows, rank.sample(8))) for rank in ranks] == [[1, 3], [5, 7]]


def test_what_a_sampler_holds_for_each_row_is_gone_through_once_for_all_passes_over_the_same_rows() -> None:
    class Counted(Weighted):
        """Says how often it was made to run on some rows."""

    narrowed = []

    @localize.register(Counted)
    def localize_counted(sampler: Counted, rows: Rows, n_obs: int) -> Counted:
        narrowed.append(str(rows))
        return Counted(rows.take(sampler.weights))

    mask = np.arange(40) % 3 > 0
    sampler = DistributedSampler(Counted(np.arange(40) % 2), dist_info=Rank(0, 1), mask=mask, remainder="keep")
    sampler.plan(40)
    planned = len(narrowed)
    read = [flat(map(request_rows, sampler.sample(40))) for _ in range(3)]
    assert read == [[row for row in range(40) if row % 3 and row % 2]] * 3
    assert len(narrowed) == planned + 1
    sampler.mask = np.arange(40) % 3 > 1
    assert flat(map(request_rows, sampler.sample(40))) == [5, 11, 17, 23, 29, 35]


def test_class_samplers_draw_the_rows_of_their_classes_that_a_mask_selects() -> None:
    labels = pd.Categorical.from_codes(np.repeat([0, 1, 0, 1], 250), categories=["B", "T"])
    chosen = np.arange(1000) % 10 > 0
    sampler = ClassSampler(10, 4, 20, classes=labels, num_samples=400, rng=np.random.default_rng(0))
    for options in ({"sharding": "independent"}, {"sharding": "contiguous"}):
        for rank in range(2):
            distributed = DistributedSampler(sampler, dist_info=Rank(rank, 2), mask=chosen, seed=0, **options)
            drawn = [batch for _ in range(2) for batch in batches(distributed.sample(1000))]
            rows = np.array(flat(drawn))
            assert chosen[rows].all()
            assert {*labels[rows]} == {"B", "T"}
            assert all(len(set(labels[batch])) == 1 for batch in drawn)
