"""What a rank has read: it is compared with the plan and with the store, and each difference is found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.cli import check, main
from tests.cli.ranks import in_threads
from tests.processes.configurations import N_OBS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    type Batch = dict[str, Any]

OPTIONS = "--chunk-size=8", "--preload-nchunks=4", "--batch-size=8", "--sharding=shuffled"


@pytest.fixture(autouse=True)
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_streamed", in_threads)


def checked(path: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> list[dict[str, Any]]:
    """Check a collection, and return what each epoch has."""
    capsys.readouterr()
    assert main(["check", str(path), "--json", *OPTIONS, *options]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0)
    epochs: list[dict[str, Any]] = found["epochs"]
    return epochs


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path to a collection of dense cells in two data sets, with values that are missing."""
    folder = tmp_path_factory.mktemp("dense")
    obs = pd.DataFrame({"score": np.where(np.arange(100) % 3, 0.5, np.nan)}, index=np.arange(100).astype(str))
    obs["type"] = pd.Categorical(["a" if number % 5 else None for number in range(100)])
    obs["count"] = pd.array([number if number % 7 else None for number in range(100)], dtype="Int64")
    values = np.arange(200, dtype=np.float32).reshape(100, 2)
    values[::3] = np.nan
    ad.AnnData(values, obs=obs).write_h5ad(folder / "cells.h5ad")
    path = folder / "cells.zarr"
    written = DatasetCollection(path).add_adatas([folder / "cells.h5ad"], dataset_size=60, shuffle_chunk_size=10)
    assert len(list(written)) == 2
    return path


@pytest.mark.parametrize("policy", ["drop", "keep", "exact --virtual-ranks=6", "pad --virtual-ranks=2"])
def test_what_is_read_as_planned_is_fine_under_every_policy(
    collection: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--remainder={policy} --epoch=3 --epochs=2".split()
    epochs = checked(collection, capsys, *options)
    assert [(epoch["epoch"], epoch["ok"], epoch["problems"]) for epoch in epochs] == [(3, True, []), (4, True, [])]
    for epoch in epochs:
        assert [rank["rank"] for rank in epoch["ranks"]] == [0, 1]
        assert all(rank["rows_per_second"] > 0 <= rank["longest_wait"] for rank in epoch["ranks"])
    assert main(["check", str(collection), *OPTIONS, *options]) == 0
    text = capsys.readouterr().out
    assert text.count("as planned. Each of the 3") == 2
    assert text.endswith("\n2 of 2 epochs were read as planned\n")


def test_dense_cells_missing_values_and_reading_ahead_are_fine(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (epoch,) = checked(dense, capsys, "--remainder=exact", "--read-ahead=1")
    assert [rank["cells_compared"] for rank in epoch["ranks"]] == [7, 7]  # one of each batch: 50 rows make 7


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
        sampler = DistributedSampler(RandomSampler(8, 4, 8), dist_info=Rank(0, 2), sharding="shuffled", seed=0)
        index[0] = sampler.plan(N_OBS).shard(0).rows.to_array()[5]
    yield {**batch, "index": index}


def beyond(number: int, batch: Batch) -> Iterator[Batch]:
    index = batch["index"].copy()
    if number == 3:
        index[:4] = N_OBS + 5
    yield {**batch, "index": index}


def other_values(number: int, batch: Batch) -> Iterator[Batch]:
    yield {**batch, "X": batch["X"][::-1]} if number == 3 else batch


def other_annotations(number: int, batch: Batch) -> Iterator[Batch]:
    obs = batch["obs"].assign(donor="d9") if number == 3 else batch["obs"]
    yield {**batch, "obs": obs}


WRONG: dict[str, tuple[Callable[[int, Batch], Iterator[Batch]], str]] = {
    "a batch that is left out": (leave_out, "20 batches"),
    "a batch that comes again": (again, "22 batches"),
    "a row of the other rank": (of_the_other_rank, "other rows"),
    "rows beyond the collection": (beyond, "other rows"),
    "values of other cells": (other_values, "has read other cells than the store has for rows "),
    "annotations of other cells": (other_annotations, "has read other cells than the store has for rows "),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_as_planned_is_found(
    collection: Path, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, expected = WRONG[what]
    as_they_are = StatefulLoader.__iter__

    def changed(self: StatefulLoader) -> Iterator[Batch]:
        for number, batch in enumerate(as_they_are(self)):
            yield from change(number, batch) if self.sampler.rank == 1 else [batch]

    monkeypatch.setattr(StatefulLoader, "__iter__", changed)
    (epoch,) = checked(collection, capsys, code=1)
    assert not epoch["ok"]
    assert any("rank 1 " in problem and expected in problem for problem in epoch["problems"])
    assert main(["check", str(collection), *OPTIONS]) == 1
    assert capsys.readouterr().out.endswith("\n".join(epoch["problems"]) + "\n")
