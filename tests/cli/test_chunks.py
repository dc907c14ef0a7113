"""Chunks that a collection has lost are named; those that its writer left out are not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection
from annbatch.io import V1_ENCODING
from zarr.core.buffer.cpu import Buffer
from zarr.storage import MemoryStore, ZipStore

from annbatch_distributed.cli import main
from annbatch_distributed.cli.collection import lost_chunks
from tests.cli.page import PAGE, check_schema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

N_OBS = 100
ROWS = np.arange(N_OBS)
DENSE = np.arange(1, 3 * N_OBS + 1, dtype=np.float32).reshape(N_OBS, 3)
SPARSE = sp.csr_matrix(np.where(np.arange(3) == ROWS[:, None] % 3, 0, DENSE))


def cells_of(values: Any) -> ad.AnnData:
    """Cells with columns of which writers leave chunks out."""
    obs = pd.DataFrame(index=[f"cell {row}" for row in ROWS])
    obs["kind"] = pd.Categorical.from_codes(ROWS % 2 + 1, ["none has it", "even", "odd"])
    obs["one"] = pd.Categorical([""] * N_OBS)
    obs["zero"], obs["flag"] = 0 * ROWS, ROWS > 50
    obs["count"] = pd.array(ROWS, dtype="Int64")
    return ad.AnnData(values, obs=obs)


def write(folder: Path, name: str, values: Any) -> None:
    """Have annbatch write a collection of 60 and 40 cells, in shards of about 8."""
    cells_of(values).write_h5ad(folder / f"{name}.h5ad")  # which may stay open
    datasets = DatasetCollection(folder / f"{name}.zarr").add_adatas(
        [folder / f"{name}.h5ad"],
        n_obs_per_chunk=4,
        shard_size=8,
        dataset_size=60,
        shuffle_chunk_size=10,
        shuffle=False,
    )
    assert len(list(datasets)) == 2


def in_small_chunks(path: Path, zarr_format: Any) -> None:
    """Write a collection of one dataset with every array in chunks of 10, and without shards."""
    root = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    root.attrs.update(V1_ENCODING)
    with ad.settings.override(auto_shard_zarr_v3=False):
        ad.io.write_elem(root, "dataset_0", cells_of(SPARSE), dataset_kwargs={"chunks": (10,)})
    zarr.consolidate_metadata(root.store)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of collections that have all that their writers wrote."""
    folder = tmp_path_factory.mktemp("whole")
    first_gene = sp.csr_matrix(np.where([True, False, False], DENSE, 0))
    odd = {"no values": sp.csr_matrix(DENSE.shape, dtype=np.float32), "first gene": first_gene}
    for name, values in {"dense": DENSE, "sparse": SPARSE, **odd}.items():
        write(folder, name, values)
    for zarr_format in (2, 3):
        in_small_chunks(folder / f"format {zarr_format}.zarr", zarr_format)
    return folder


def without(path: Path, copy: Path, *lost: str) -> Path:
    """Copy a collection but for some files and folders."""
    shutil.copytree(path.with_suffix(".zarr"), copy)
    for name in lost:
        shutil.rmtree(copy / name) if (copy / name).is_dir() else (copy / name).unlink()
    return copy


def lost(collection: Path | zarr.Group) -> list[str]:
    group = zarr.open_group(collection, mode="r") if isinstance(collection, Path) else collection
    return lost_chunks(DatasetCollection(group))


@pytest.mark.parametrize("name", ["dense", "sparse", "no values", "first gene", "format 2", "format 3"])
def test_unwritten_chunks_are_not_lost(whole: Path, name: str) -> None:
    assert not list((whole / f"{name}.zarr").glob("dataset_0/obs/zero/c/*"))
    assert lost(whole / f"{name}.zarr") == []


@pytest.mark.parametrize(
    ("name", "array", "files"),
    [
        ("dense", "dataset_1/X", "c/2"),
        ("dense", "dataset_0/X", "c"),
        ("sparse", "dataset_0/X/data", "c/7"),
        ("sparse", "dataset_1/X/indices", "c/0"),
        ("sparse", "dataset_0/X/indptr", "c/3"),
        ("format 2", "dataset_0/X/data", "3"),
        ("format 3", "dataset_0/X/indptr", "c/10"),
        ("format 2", "dataset_0/obs/_index/values", "3"),
        ("sparse", "dataset_1/var/_index/values", "c"),
        ("dense", "dataset_1/obs/kind/categories", "c"),
    ],
)
def test_lost_chunks_are_named(whole: Path, tmp_path: Path, name: str, array: str, files: str) -> None:
    dataset, _, name_there = array.partition("/")
    path = without(whole / name, tmp_path / "cells.zarr", f"{array}/{files}")
    assert lost(path) == [f"{dataset} lacks chunks of {name_there}"]


def test_check_lists_arrays_with_lost_chunks(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each array with lost chunks has a line, and no epoch is read."""
    path = without(whole / "sparse", tmp_path / "cells.zarr", "dataset_0/X/indices/c/1", "dataset_0/X/data/c/1")
    for folder in (path / "dataset_1").rglob("c"):
        shutil.rmtree(folder)
    lacking = {
        "dataset_0": ["X/data", "X/indices"],
        "dataset_1": ["X/indptr", "X/data", "obs/_index/values", "var/_index/values"],
    }
    expected = [f"{dataset} lacks chunks of {name}" for dataset, names in lacking.items() for name in names]
    assert main(["check", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "n_obs": N_OBS,
        "ok": False,
        "problems": [*expected, "dataset_1 lacks chunks of obs/kind/categories"],
        "epochs": [],
    }
    check_schema("check", found)


def test_page_shows_output_for_lost_chunks(
    cells: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows what check prints for lost chunks."""
    without(cells, tmp_path / "copy.zarr", "dataset_0/X/data/c/0")
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r"```console\n\$ annbatch-distributed check copy.zarr\n((?:(?!```).*\n)+)```", PAGE)
    assert main(["check", "copy.zarr"]) == 1
    assert capsys.readouterr().out == shown


def test_chunks_are_missed_in_a_zip(whole: Path, tmp_path: Path) -> None:
    path = without(whole / "sparse", tmp_path / "cells.zarr", "dataset_1/X/data/c/2")
    with ZipStore(shutil.make_archive(str(tmp_path / "cells"), "zip", path), mode="r") as store:
        assert lost(zarr.open_group(store, mode="r")) == ["dataset_1 lacks chunks of X/data"]


class Stored(MemoryStore):
    """What a folder holds, in memory; its keys may not be listed."""

    def __init__(self, path: Path, lists: str) -> None:
        files = [file for file in path.rglob("*") if file.is_file()]
        super().__init__(
            {str(file.relative_to(path)): Buffer.from_bytes(file.read_bytes()) for file in files},
            read_only=True,
        )
        self.lists = lists

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        if self.lists == "an error":  # as a bucket may be that anybody can read
            raise PermissionError(prefix)
        if self.lists == "all":  # web servers list nothing
            async for key in super().list_prefix(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        if self.lists == "an error":
            raise PermissionError(prefix)
        if self.lists == "all":
            async for key in super().list_dir(prefix):
                yield key


def test_store_without_listing_has_no_lost_chunks(whole: Path, tmp_path: Path) -> None:
    """In a store that can't list its keys, no chunk counts as lost."""
    path = without(whole / "format 3", tmp_path / "cells.zarr", "dataset_0/X/data/c/2")
    found = {lists: lost(zarr.open_group(Stored(path, lists), mode="r")) for lists in ("all", "nothing", "an error")}
    assert found == {"all": ["dataset_0 lacks chunks of X/data"], "nothing": [], "an error": []}
