"""What a rank has read: it is compared with the plan and with the store, and each difference is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch import DatasetCollection

from annbatch_distributed import StatefulLoader
from annbatch_distributed.cli.job import Job, Read
from annbatch_distributed.cli.output import problems_of, read_of
from annbatch_distributed.cli.settings import Settings
from tests.cli.ranks import in_threads
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


def read(path: Path, given: Settings) -> list[list[Read]]:
    """Read as each rank, and return what each epoch has."""
    n_said: list[int] = []
    found = in_threads(Job(str(path), given), n_said.append)
    assert sum(n_said) == sum(one.n_rows for one in found)
    return [[one for one in found if one.epoch == epoch] for epoch in given.epochs]


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
    for ranks in read(collection, settings(remainder, epochs=2, virtual_ranks=virtual_ranks)):
        assert problems_of(ranks) == []
        assert "as planned. Each of the 3" in ranks[0].verdict
        assert ranks[0].verdict == ranks[1].verdict
        assert [one.rank for one in ranks] == [0, 1]
        assert all(one.rows_per_second > 0 < one.longest_wait for one in ranks)


def test_dense_cells_missing_values_and_reading_ahead_are_fine(dense: Path) -> None:
    (ranks,) = read(dense, settings("exact", read_ahead=1))
    assert problems_of(ranks) == []
    assert sum(one.n_compared for one in ranks) == 14  # one of each batch: 50 rows make 7


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
    "a batch that is left out": (leave_out, ["rank 1 ", "20 batches"]),
    "a batch that comes again": (again, ["rank 1 ", "22 batches"]),
    "a row of the other rank": (of_the_other_rank, ["rank 1 ", "other rows"]),
    "rows beyond the collection": (beyond, ["rank 1 ", "other rows"]),
    "values of other cells": (other_values, ["rank 1 has read other cells than the store has for 1 row: "]),
    "annotations of other cells": (other_annotations, ["rank 1 has read other cells than the store has for 1 row: "]),
    "a batch that is too large": (joined, ["rank 1 ", "20 batches"]),
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
    (ranks,) = read(collection, settings())
    problems = problems_of(ranks)
    assert problems
    assert all(text in "\n".join(problems) for text in expected)
    assert read_of(ranks)["problems"] == problems
    assert not read_of(ranks)["ok"]
