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

from annbatch_distributed.cli import chunks, main
from tests.cli.page import PAGE, not_named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

N_OBS = 100
ROWS = np.arange(N_OBS)
#: Without a zero, and with two values or more in each row.
DENSE = np.arange(1, 3 * N_OBS + 1, dtype=np.float32).reshape(N_OBS, 3)
SPARSE = sp.csr_matrix(np.where(np.arange(3) == ROWS[:, None] % 3, 0, DENSE))
#: The same, with so many columns that all values could be of one row.
WIDE = sp.csr_matrix((SPARSE.data, SPARSE.indices, SPARSE.indptr), shape=(N_OBS, 1_000))


def cells_of(values: Any, columns: dict[str, Any] | None = None) -> ad.AnnData:
    obs = pd.DataFrame(columns or {}, index=[f"cell {row}" for row in ROWS])
    obs["score"] = ROWS + 0.5
    obs["kind"] = pd.Categorical.from_codes(ROWS % 2 + 1, ["none has it", "even", "odd"])
    return ad.AnnData(values, obs=obs)


def written(folder: Path, values: Any, columns: dict[str, Any] | None = None) -> Path:
    """Have annbatch write a collection of 60 and 40 cells, in shards of about 8."""
    folder.mkdir()
    cells_of(values, columns).write_h5ad(folder / "cells.h5ad")
    data_sets = DatasetCollection(folder / "cells.zarr").add_adatas(
        [folder / "cells.h5ad"], n_obs_per_chunk=4, shard_size=8, dataset_size=60, shuffle_chunk_size=10, shuffle=False
    )
    assert len(list(data_sets)) == 2
    return folder / "cells.zarr"


def in_small_chunks(path: Path, zarr_format: Any) -> None:
    """Write a collection of one data set with every array in chunks of 10, and without shards."""
    root = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    root.attrs.update(V1_ENCODING)
    with ad.settings.override(auto_shard_zarr_v3=False):
        ad.io.write_elem(root, "dataset_0", cells_of(SPARSE), dataset_kwargs={"chunks": (10,)})
    zarr.consolidate_metadata(root.store)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of collections that have all that their metadata promise."""
    folder = tmp_path_factory.mktemp("whole")
    for name, values in (("dense", DENSE), ("sparse", SPARSE), ("wide", WIDE)):
        written(folder / "written", values).rename(folder / name)
        shutil.rmtree(folder / "written")
    for zarr_format in (2, 3):
        in_small_chunks(folder / f"format {zarr_format}", zarr_format)
    return folder


def without(path: Path, copy: Path, *lost: str) -> Path:
    """Copy a collection but for some files and folders."""
    shutil.copytree(path, copy)
    for name in lost:
        shutil.rmtree(copy / name) if (copy / name).is_dir() else (copy / name).unlink()
    return copy


def opened(path: Path) -> zarr.Group:
    return zarr.open_group(path, use_consolidated=False)


def lost(group: zarr.Group | Path) -> list[str]:
    return chunks.lost(DatasetCollection(opened(group) if isinstance(group, Path) else group))


@pytest.mark.parametrize("name", ["dense", "sparse", "wide", "format 2", "format 3"])
def test_nothing_is_missed_in_a_collection_that_has_all_its_chunks(whole: Path, name: str) -> None:
    assert lost(whole / name) == []


#: The collection, the array, the files and folders that are deleted, and how many chunks are lost of how many.
LOST = {
    "a shard of dense cells": ("dense", "dataset_1/X", ["c/2"], "1 of 5"),
    "dense cells": ("dense", "dataset_0/X", ["c"], "8 of 8"),
    "a shard of values": ("sparse", "dataset_0/X/data", ["c/7"], "1 of 8"),
    "values": ("sparse", "dataset_0/X/data", ["c"], "8 of 8"),
    "shards of indices": ("sparse", "dataset_1/X/indices", ["c/0", "c/3"], "2 of 5"),
    "the first pointers": ("sparse", "dataset_0/X/indptr", ["c/0"], "1 of 4"),
    "pointers in between": ("sparse", "dataset_0/X/indptr", ["c/1"], "1 of 4"),
    "pointers in between, of many columns": ("wide", "dataset_0/X/indptr", ["c/1"], "1 of 4"),
    "the last pointers": ("sparse", "dataset_0/X/indptr", ["c/3"], "1 of 4"),
    "pointers": ("sparse", "dataset_0/X/indptr", ["c"], "4 of 4"),
    "names of cells": ("dense", "dataset_0/obs/_index/values", ["c"], "1 of 1"),
    "names of genes": ("sparse", "dataset_1/var/_index/values", ["c"], "1 of 1"),
    "categories": ("dense", "dataset_1/obs/kind/categories", ["c"], "1 of 1"),
    "a chunk of names": ("format 2", "dataset_0/obs/_index/values", ["3"], "1 of 10"),
    "a chunk of codes": ("format 3", "dataset_0/obs/kind/codes", ["c/3"], "1 of 10"),
    "chunks of numbers": ("format 2", "dataset_0/obs/score", ["0", "7"], "2 of 10"),
    "a chunk of values": ("format 2", "dataset_0/X/data", ["3"], "1 of 20"),
    "a chunk of indices": ("format 2", "dataset_0/X/indices", ["19"], "1 of 20"),
    "a chunk of pointers": ("format 3", "dataset_0/X/indptr", ["c/10"], "1 of 11"),
}


@pytest.mark.parametrize("what", LOST)
def test_lost_chunks_are_named_and_counted(whole: Path, tmp_path: Path, what: str) -> None:
    name, array, files, count = LOST[what]
    data_set, _, name_there = array.partition("/")
    path = without(whole / name, tmp_path / "cells.zarr", *(f"{array}/{file}" for file in files))
    assert lost(path) == [f"{data_set} lacks {count} chunks of {name_there}"]


def test_each_array_that_has_lost_chunks_is_a_line_and_no_epoch_is_read(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = without(whole / "sparse", tmp_path / "cells.zarr", "dataset_0/X/indices/c/1", "dataset_0/X/data/c/1")
    for folder in (path / "dataset_1").rglob("c"):
        shutil.rmtree(folder)
    expected = [
        "dataset_0 lacks 1 of 8 chunks of X/indices",
        "dataset_0 lacks 1 of 8 chunks of X/data",
        "dataset_1 lacks 3 of 3 chunks of X/indptr",
        "dataset_1 lacks 5 of 5 chunks of X/data",
        "dataset_1 lacks 1 of 1 chunks of obs/_index/values",
        "dataset_1 lacks 1 of 1 chunks of var/_index/values",
        "dataset_1 lacks 1 of 1 chunks of obs/kind/categories",
    ]
    assert main(["check", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {"n_obs": N_OBS, "ok": False, "problems": expected, "epochs": []}
    assert not_named(found) == set()


def test_the_page_shows_what_is_printed_of_lost_chunks(
    cells: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(cells, tmp_path / "copy.zarr", "dataset_0/X/data/c/0")
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r"```console\n\$ annbatch-distributed check copy.zarr\n((?:(?!```).*\n)+)```", PAGE)
    assert main(["check", "copy.zarr"]) == 1
    assert capsys.readouterr().out == shown


def zeros_in(rows: slice | list[int]) -> Any:
    values = DENSE.copy()
    values[rows] = 0
    return values


def stored_zeros() -> sp.csr_matrix:
    values = SPARSE.copy()
    values.data[16:48] = 0
    values.data[100] = 0
    return values


LEFT_OUT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "cells of zeros": (zeros_in([3, *range(16, 40)]), {}, "dataset_0/X/c/3/0"),
    "one category": (DENSE, {"one": pd.Categorical(["a"] * N_OBS)}, "dataset_0/obs/one/codes/c/0"),
    "the category without a name": (DENSE, {"one": pd.Categorical([""] * N_OBS)}, "dataset_0/obs/one/categories/c/0"),
    "a column of zeros": (SPARSE, {"zero": 0 * ROWS}, "dataset_1/obs/zero/c/0"),
    "a column of False": (SPARSE, {"flag": ROWS < 0}, "dataset_1/obs/flag/c/0"),
    "a column whose values are all there": (DENSE, {"n": pd.array(ROWS, dtype="Int64")}, "dataset_0/obs/n/mask/c/0"),
    "a column without a value": (
        DENSE,
        {"n": pd.array([pd.NA] * N_OBS, dtype="boolean")},
        "dataset_0/obs/n/values/c/0",
    ),
    "all values in the first column": (
        sp.csr_matrix(np.where([True, False, False], DENSE, 0)),
        {},
        "dataset_0/X/indices/c/0",
    ),
    "empty rows": (sp.csr_matrix(zeros_in(slice(0, 50))), {}, "dataset_0/X/indptr/c/0"),
    "stored values of zero": (stored_zeros(), {}, "dataset_0/X/data/c/1"),
    "no value at all": (sp.csr_matrix(DENSE.shape, dtype=np.float32), {}, "dataset_0/X/indptr/c/0"),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_the_writer_left_out_is_not_lost(tmp_path: Path, what: str) -> None:
    values, columns, left_out = LEFT_OUT[what]
    path = written(tmp_path / "cells", values, columns)
    assert (path / left_out).parents[left_out.count("/c/")].exists()
    assert not (path / left_out).exists()
    assert lost(path) == []


def test_a_chunk_of_indices_is_believed_if_no_row_has_two_values_in_it(whole: Path, tmp_path: Path) -> None:
    path = without(whole / "format 2", tmp_path / "cells.zarr")
    cells: Any = opened(path)["dataset_0/X"]
    # 10 rows of a single value, two of two each, and rows without any
    pointers = np.minimum(np.arange(N_OBS + 1), 10)
    pointers[60:] += 2
    pointers[61:] += 2
    cells["indptr"][:] = pointers
    for name in ("indices", "data"):
        cells[name].resize(14)
    cells["data"][:] = 1
    cells["indices"][:10] = 0
    cells["indices"][10:] = [0, 1, 0, 1]
    assert not (path / "dataset_0/X/indices/0").exists()
    assert lost(path) == []
    (path / "dataset_0/X/indices/1").unlink()
    assert len(lost(path)) == 1


@pytest.mark.parametrize("fill", [7, np.nan])
def test_the_fill_value_is_that_of_the_array(whole: Path, tmp_path: Path, fill: float) -> None:
    group = opened(without(whole / "dense", tmp_path / "cells.zarr"))
    cells = group["dataset_0"].create_array(
        "X", shape=(60, 3), chunks=(10, 3), dtype="float32", fill_value=fill, overwrite=True
    )
    cells[10:] = DENSE[10:60]
    cells[33] = 0
    assert lost(group) == ["dataset_0 lacks 1 of 6 chunks of X"]
    cells[44] = fill
    assert lost(group) == []


@pytest.mark.parametrize("what", ["codes", "strings"])
def test_a_chunk_of_a_column_is_believed_if_others_hold_the_fill_value(whole: Path, tmp_path: Path, what: str) -> None:
    path = without(whole / "format 3", tmp_path / "cells.zarr")
    array = "dataset_0/obs/kind/codes"
    if what == "strings":
        array = "dataset_0/obs/names"
        options = {"chunks": (10,), "shards": None}
        ad.io.write_elem(
            opened(path)["dataset_0/obs"], "names", ROWS.astype(str).astype(object), dataset_kwargs=options
        )
        obs: Any = opened(path)["dataset_0/obs"]
        obs.attrs["column-order"] = ["names"]
    (path / array / "c/3").unlink()
    assert lost(path) == [f"dataset_0 lacks 1 of 10 chunks of {array.removeprefix('dataset_0/')}"]
    opened(path)[array][55] = "" if what == "strings" else 0
    assert lost(path) == []


def test_only_a_whole_cell_of_zeros_makes_missing_cells_believable(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_AT_ONCE", 1)  # a shard has two chunks
    group = opened(without(whole / "dense", tmp_path / "cells.zarr", "dataset_0/X/c/2"))
    group["dataset_0/X"][53, :2] = 0
    assert lost(group) == ["dataset_0 lacks 1 of 8 chunks of X"]
    group["dataset_0/X"][53] = 0
    assert lost(group) == []


def test_chunks_of_several_sizes_are_left_out(whole: Path, tmp_path: Path) -> None:
    group = opened(without(whole / "dense", tmp_path / "cells.zarr"))
    with zarr.config.set({"array.rectilinear_chunks": True}):
        group["dataset_0"].create_array("X", shape=(60, 3), chunks=[[20, 40], [3]], dtype="float32", overwrite=True)
        assert lost(group) == []


def test_chunks_are_missed_in_a_zip(whole: Path, tmp_path: Path) -> None:
    path = without(whole / "sparse", tmp_path / "cells.zarr", "dataset_1/X/data/c/2")
    with ZipStore(shutil.make_archive(str(tmp_path / "cells"), "zip", path), mode="r") as store:
        assert lost(zarr.open_group(store, mode="r")) == ["dataset_1 lacks 1 of 5 chunks of X/data"]


class Stored(MemoryStore):
    """What a folder holds, in memory, where it is noted which keys are read."""

    def __init__(self, path: Path, prefix: str = "", lists: str = "all") -> None:
        files = [file for file in path.rglob("*") if file.is_file()]
        contents = {f"{prefix}{file.relative_to(path)}": Buffer.from_bytes(file.read_bytes()) for file in files}
        super().__init__(contents, read_only=True)
        self.lists = lists
        self.read: list[str] = []

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        self.read.append(Path(key).name)
        return await super().get(key, *arguments, **options)

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        if self.lists == "an error":  # as a bucket may be that anybody can read
            raise PermissionError(prefix)
        if self.lists == "all":  # web servers list nothing
            async for key in super().list_prefix(prefix):
                yield key


def test_chunks_are_missed_in_a_group_of_a_store_and_only_metadata_are_read_otherwise(
    whole: Path, tmp_path: Path
) -> None:
    store = Stored(whole / "dense", "of/several/")
    assert lost(zarr.open_group(store, path="of/several", mode="r")) == []
    assert len(store.read) > 1
    assert not [name for name in store.read if name.isdigit()]
    store = Stored(without(whole / "dense", tmp_path / "cells.zarr", "dataset_1/X/c/2"), "of/several/")
    assert lost(zarr.open_group(store, path="of/several", mode="r")) == ["dataset_1 lacks 1 of 5 chunks of X"]


def test_in_a_store_that_does_not_list_nothing_is_missed(whole: Path, tmp_path: Path) -> None:
    path = without(whole / "dense", tmp_path / "cells.zarr", "dataset_1/X/c/2")
    found = {
        lists: lost(zarr.open_group(Stored(path, lists=lists), mode="r")) for lists in ("all", "nothing", "an error")
    }
    assert list(map(len, found.values())) == [1, 0, 0]
