"""Composition of shards by label, compared with counting the rows one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import RandomSampler
from hypothesis import assume, given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank
from tests.strategies import Job, jobs


@given(jobs(), st.integers(0, 3), st.integers(1, 5))
def test_composition_counts_the_labels_of_each_shard(drawn: Job, epoch: int, n_labels: int) -> None:
    """The composition counts the labels of each rank's rows, and their distance from the window's."""
    labels = np.array([f"d{label}" for label in np.random.default_rng(epoch).integers(n_labels, size=drawn.n_obs)])
    sampler = drawn.ranks()[0]
    sampler.set_epoch(epoch)
    try:
        plan = sampler.plan(drawn.n_obs)
    except ValueError:
        assume(False)
    table = plan.composition(labels)
    assert list(table.index) == list(range(drawn.world_size))
    window = Counter(labels[list(plan.selected)].tolist())
    for rank in range(drawn.world_size):
        own = Counter(labels[list(plan.shard(rank).rows)].tolist())
        assert {label: int(n) for label, n in table["rows"].loc[rank].items() if n} == own
        parts = [own[label] / own.total() - window[label] / window.total() for label in window] if own else []
        assert table["distance"][rank] == pytest.approx(sum(map(abs, parts)) / 2 if own else 0.5)


def plan_of(n_obs: int = 100) -> Any:
    return DistributedSampler(RandomSampler(5, 2, 5), dist_info=Rank(0, 2)).plan(n_obs)


def test_labels_may_be_of_any_kind() -> None:
    donors = np.repeat(["a", "b", "c"], [60, 20, 20])
    expected = [[50, 0, 0], [10, 20, 20]]
    for labels in (
        donors,
        donors.tolist(),
        pd.Series(donors),
        pd.Categorical(donors),
        pd.Series(pd.Categorical(donors)),
        pd.Index(donors),
    ):
        table = plan_of().composition(labels)
        assert table["rows"].to_numpy().tolist() == expected
        assert list(table["rows"].columns) == ["a", "b", "c"]
        assert table["distance"].tolist() == pytest.approx([0.4, 0.4])


def test_missing_label_has_its_own_column() -> None:
    """Rows without a label have their own column; a label without rows counts 0."""
    codes = np.repeat([0, -1, 2], [60, 20, 20]).astype(np.int8)
    table = plan_of().composition(pd.Categorical.from_codes(codes, categories=["a", "b", "c"]))
    assert table["rows"].to_numpy().tolist() == [[50, 0, 0, 0], [10, 0, 20, 20]]
    assert list(table["rows"].columns[:3]) == ["a", "b", "c"]
    assert pd.isna(table["rows"].columns[3])
