"""What a rank has read: it is compared with the plan and with the store, and each difference is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch import DatasetCollection

from annbatch_distributed import StatefulLoader, Tally
from annbatch_distributed.cli import reading
from annbatch_distributed.cli.cells import Cells
from annbatch_distributed.cli.output import Result
from annbatch_distributed.cli.reading import Read, RowSet, Some, readings
from annbatch_distributed.cli.settings import Settings
from tests.processes.configurations import N_OBS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from annbatch_distributed.sharding import Remainder

    type Batch = dict[str, Any]


def settings(
    remainder: Remainder = "drop", *, epochs: int = 1, virtual_ranks: int | None = None, read_ahead: int = 0
) -> Settings:
    return Settings(
        world_size=2,
        chunk_size=8,
        preload_nchunks=4,
        batch_size=8,
        is_random=True,
        remainder=remainder,
        sharding="shuffled",
        seed=0,
        virtual_ranks=virtual_ranks,
        mask=None,
        epochs=range(epochs),
        read_ahead=read_ahead,
    )


def read(path: Path, given: Settings) -> list[Result]:
    """Read as each rank, one after the other, and compare."""
    cells = Cells(str(path))
    n_said: list[int] = []
    found = [one for rank in range(2) for one in readings(cells, given, rank, begin=lambda: None, say=n_said.append)]
    assert sum(n_said) == sum(one.tally["n_rows"] for one in found)
    return [
        Result.of(plan, given, [one for one in found if one.epoch == plan.epoch]) for plan in given.plans(cells.n_obs)
    ]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path to a collection of dense cells in two data sets, with values that are missing."""
    folder = tmp_path_factory.mktemp("dense")
    obs = pd.DataFrame({"score": np.where(np.arange(100) % 3, 0.5, np.nan)}, index=np.arange(100).astype(str))
    obs["type"] = pd.Categorical(["a" if number % 5 else None for number in range(100)])
    obs["count"] = pd.array([number if number % 7 else None for number in range(100)], dtype="Int64")
    values = np.arange(200, dtype=np.float32).reshape(100, 2)
    values[7] = np.nan
    ad.AnnData(values, obs=obs).write_h5ad(folder / "cells.h5ad")
    path = folder / "cells.zarr"
    written = DatasetCollection(path).add_adatas([folder / "cells.h5ad"], dataset_size=60, shuffle_chunk_size=10)
    assert len(list(written)) == 2
    return path


@pytest.mark.parametrize(("remainder", "virtual_ranks"), [("drop", None), ("keep", None), ("exact", 6), ("pad", 2)])
def test_what_is_read_as_planned_is_fine_under_every_policy(
    collection: Path, remainder: Remainder, virtual_ranks: int | None
) -> None:
    results = read(collection, settings(remainder, epochs=2, virtual_ranks=virtual_ranks))
    for result in results:
        assert result.is_fine, result.problems
        assert "as planned. Each of the 3" in result.lines()[-1]
        assert [one.rank for one in result.read] == [0, 1]
        assert all(one.rows_per_second > 0 < one.longest_wait for one in result.read)


def test_dense_cells_missing_values_and_reading_ahead_are_fine(dense: Path) -> None:
    (result,) = read(dense, settings("exact", read_ahead=1))
    assert result.is_fine, result.problems
    assert sum(one.compared for one in result.read) == 14  # one of each batch: 50 rows make 7


def leave_out(number: int, batch: Batch) -> Iterator[Batch]:
    if number != 3:
        yield batch


def again(number: int, batch: Batch) -> Iterator[Batch]:
    yield batch
    if number == 3:
        yield batch


def of_the_other_rank(number: int, batch: Batch) -> Iterator[Batch]:
    index = batch["index"].copy()
    if number == 3:
        index[0] = OTHERS[0]
    yield {**batch, "index": index}


def beyond(number: int, batch: Batch) -> Iterator[Batch]:
    index = batch["index"].copy()
    if number == 3:
        index[:2] = N_OBS + 5, N_OBS
    yield {**batch, "index": index}


def other_values(number: int, batch: Batch) -> Iterator[Batch]:
    yield {**batch, "X": batch["X"][::-1]} if number == 3 else batch


def other_annotations(number: int, batch: Batch) -> Iterator[Batch]:
    obs = batch["obs"].assign(donor="d9") if number == 3 else batch["obs"]
    yield {**batch, "obs": obs}


def joined(number: int, batch: Batch) -> Iterator[Batch]:
    """Two batches as one."""
    if number == 3:
        HELD[:] = [batch]
    elif number == 4:
        index = np.concatenate([HELD[0]["index"], batch["index"]])
        yield {"index": index, "X": np.zeros((16, 4)), "obs": pd.concat([HELD[0]["obs"], batch["obs"]])}
    else:
        yield batch


HELD: list[Batch] = []
#: A row of the other rank's, once it is known.
OTHERS: list[int] = []

WRONG: dict[str, tuple[Callable[[int, Batch], Iterator[Batch]], list[str]]] = {
    "a batch that is left out": (leave_out, ["has not read 8 rows: ", "has read 20 batches, not 21"]),
    "a batch that comes again": (again, ["has read again 8 rows: ", "has read 22 batches, not 21"]),
    "a row of the other rank": (of_the_other_rank, ["has not read 1 row: ", "has read what is not its own, 1 row: "]),
    "rows beyond the collection": (beyond, ["has not read 2 rows: ", "not its own, 2 rows: 352, 347"]),
    "values of other cells": (other_values, ["has read other cells than the store has for 1 row: "]),
    "annotations of other cells": (other_annotations, ["has read other cells than the store has for 1 row: "]),
    "a batch that is too large": (
        joined,
        ["other cells than", "has read 20 batches, not 21", "has read a batch of 16 rows, with batch size 8"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_as_planned_is_found(collection: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    change, expected = WRONG[what]
    (plan,) = settings().plans(N_OBS)
    OTHERS[:] = [plan.shard(0).rows.to_array()[5].item()]
    as_they_are = StatefulLoader.__iter__

    def changed(self: StatefulLoader) -> Iterator[Batch]:
        for number, batch in enumerate(as_they_are(self)):
            yield from change(number, batch) if self.sampler.rank == 1 else [batch]

    monkeypatch.setattr(StatefulLoader, "__iter__", changed)
    (result,) = read(collection, settings())

    assert not result.is_fine
    assert len(result.problems) == len(expected)
    for problem, text in zip(result.problems, expected, strict=True):
        assert problem.startswith("rank 1 ")
        assert text in problem
    assert result.lines()[-1] == "epoch 0: what was read is not what was planned"
    assert result.as_json()["problems"] == result.problems


def test_an_epoch_that_nobody_has_read_is_not_as_planned() -> None:
    given = settings()
    (plan,) = given.plans(N_OBS)
    assert not Result.of(plan, given, []).is_fine


def test_rows_that_come_again_as_often_as_planned_but_others_are_found() -> None:
    given = settings("pad")
    (plan,) = given.plans(10)  # 16 rows in two batches, most of them twice on a rank
    whole = [row for rank in range(2) for row in plan.shard(rank).rows]
    assert sorted(set(whole)) == list(range(10))
    tally = Tally()
    rows = plan.shard(1).rows.to_array()
    rows[rows == rows[0]] = rows[1]
    tally.add(rows)
    one = Read(1, 0, tally.to_dict(), 1.0, 0.1)
    assert one.problems(plan, range(1, 2)) == ["rank 1 has read 8 rows, but not each as often as planned"]


def test_a_set_of_rows_knows_what_was_added_before_and_what_another_one_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_AT_ONCE", 4)  # parts of 32 rows
    rng = np.random.default_rng(0)
    for n_obs in (1, 7, 8, 9, 300):
        mine, its = (RowSet(n_obs) for _ in range(2))
        seen: list[set[int]] = [set(), set()]
        for which, rows in enumerate((mine, its)):
            for _ in range(3):
                added = rng.integers(n_obs, size=rng.integers(n_obs + 1))
                known = {row for row in added.tolist() if row in seen[which] or added.tolist().count(row) > 1}
                assert rows.add(added).tolist() == sorted(known)
                seen[which].update(added.tolist())
        left = sorted(seen[0] - seen[1])
        assert mine.without(its) == Some(len(left), tuple(left[:5]))
