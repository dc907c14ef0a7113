"""Rows by step: the rows reported for past and future steps are the rows of a real pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from tests.samplers import MaskBlind, batches
from tests.test_resume import N_OBS, random

if TYPE_CHECKING:
    from collections.abc import Iterator

#: For each step and rank, the rows of the batch.
type Read = dict[tuple[int, int], list[int]]


def reported(sampler: DistributedSampler, n_obs: int, steps: Any = slice(None), **options: Any) -> Read:
    """The rows that a sampler reports for some steps."""
    frame = sampler.rows_of(n_obs, steps, **options)
    assert list(frame) == ["step", "rank", "row"]
    keys = list(zip(frame["step"], frame["rank"], strict=True))
    assert keys == sorted(keys)
    return {key: rows.tolist() for key, rows in frame.groupby(["step", "rank"])["row"]}


def test_rows_of_finished_pass_are_its_own() -> None:
    """`rows_of` returns the rows of the finished pass until the next pass starts, also in a different process."""
    sampler, elsewhere = random(), random()
    sampler.set_epoch(3)
    read = {(step, 0): rows for step, rows in enumerate(batches(sampler.sample(N_OBS)))}
    elsewhere.load_state_dict(sampler.state_dict(batches_done=12))
    for one in (sampler, elsewhere):
        assert reported(one, N_OBS, ranks=0) == reported(one, N_OBS, ranks=[0]) == read


class Recording(MaskBlind):
    """A sampler that records the number of rows of each stream that is run."""

    runs: ClassVar[list[int]] = []

    def _sample(self, n_obs: int) -> Iterator[Any]:
        self.runs.append(n_obs)
        yield from super()._sample(n_obs)


def test_only_streams_of_requested_ranks_are_run() -> None:
    """`rows_of` runs only the streams of the requested ranks."""
    # 97 rows on 3 ranks: 32, 32 and 33
    sampler = DistributedSampler(Recording(4), dist_info=Rank(0, 3), remainder="keep")
    Recording.runs.clear()
    assert set(sampler.rows_of(97, [0, 2], ranks=2)["rank"]) == {2}
    assert Recording.runs == [33]
    sampler.rows_of(97, [0, 2])
    assert Recording.runs[1:] == [32, 32, 33]


def test_steps_and_ranks_select_rows() -> None:
    """Steps and ranks select rows; a step outside the epoch raises `IndexError`."""
    sampler = random()
    whole = reported(sampler, N_OBS)
    assert set(whole) == {(step, rank) for step in range(12) for rank in range(2)}
    for steps, expected in (
        (3, [3]),
        ([5, 2, 5], [2, 5]),
        (slice(10, 99), [10, 11]),
        (range(0), []),
        (slice(-1, None), [11]),
    ):
        assert reported(sampler, N_OBS, steps) == {key: rows for key, rows in whole.items() if key[0] in expected}
    assert reported(sampler, N_OBS, 3, ranks=[1]) == {(3, 1): whole[3, 1]}
    assert reported(sampler, N_OBS, 3, ranks=[]) == {}
    with pytest.raises(IndexError, match="The epoch has no step 12: it has 12 steps, counted from 0"):
        sampler.rows_of(N_OBS, [3, 12])
    with pytest.raises(TypeError, match="Steps must be integers"):
        sampler.rows_of(N_OBS, [3.5])
    with pytest.raises(TypeError, match="epoch must be an integer"):
        sampler.rows_of(N_OBS, 3, epoch=1.5)


def cells(n_rows: int, first: int, **columns: Any) -> ad.AnnData:
    """Cells whose names are their numbers."""
    obs = pd.DataFrame(columns, index=[f"cell {number}" for number in range(first, first + n_rows)])
    return ad.AnnData(np.arange(first, first + n_rows, dtype="float32")[:, None], obs=obs)


def loader() -> StatefulLoader:
    """A rank with two datasets of different columns."""
    empty = StatefulLoader(batch_sampler=random(), preload_to_gpu=False)
    donors = pd.Categorical([*"ab"] * 20)
    return empty.add_adatas([cells(40, 0, donor=donors, depth=1.5), cells(56, 40, donor=pd.Categorical([*"c"] * 56))])


def test_columns_named_like_ours_get_a_suffix() -> None:
    """Columns of `obs` that have the name of one of our columns get the suffix `_obs`."""
    sampler = DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 1), seed=0)
    obs = pd.DataFrame({"row": [*"AABB"], "cell": 7, "well": 1}, index=[*"wxyz"])
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False).add_adata(
        ad.AnnData(np.zeros((4, 1)), obs=obs)
    )
    frame = loader.cells_of(0)
    assert list(frame)[5:] == ["row_obs", "cell_obs", "well"]
    assert [*frame["row_obs"]] == ["AABB"[row] for row in frame["row"]]
    assert list(loader.cells_of(0, "row"))[5:] == ["row_obs"]


def test_cells_have_their_dataset_and_columns() -> None:
    """`cells_of` returns the dataset, name and columns of each cell."""
    annotated = loader()
    frame = annotated.cells_of(slice(2, 5), ["donor"])
    rows = annotated.sampler.rows_of(N_OBS, slice(2, 5))
    assert list(frame) == ["step", "rank", "row", "dataset", "cell", "donor"]
    pd.testing.assert_frame_equal(frame[["step", "rank", "row"]], rows)
    assert frame["cell"].tolist() == [f"cell {row}" for row in frame["row"]]
    assert frame["dataset"].tolist() == [int(row >= 40) for row in frame["row"]]
    assert frame["donor"].tolist() == ["c" if row >= 40 else "ab"[row % 2] for row in frame["row"]]
    assert list(annotated.cells_of(0))[5:] == ["donor", "depth"]
    assert list(annotated.cells_of(0, []))[5:] == []
    assert list(annotated.cells_of([]))[:5] == ["step", "rank", "row", "dataset", "cell"]
    with pytest.raises(KeyError, match=r"Dataset 1 has no columns depth in obs\. It has donor"):
        annotated.cells_of(slice(None), "depth")


def test_cells_without_names_have_none() -> None:
    nameless = StatefulLoader(batch_sampler=random(), preload_to_gpu=False).add_dataset(
        np.zeros((N_OBS, 2), dtype="float32")
    )
    frame = nameless.cells_of(0)
    assert list(frame) == ["step", "rank", "row", "dataset", "cell"]
    assert frame["cell"].isna().all()
