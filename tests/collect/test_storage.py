"""The form in which collections store counts, and in which loaders yield them."""

from __future__ import annotations

import math
import shutil
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import annbatch
import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection
from hypothesis import example, given
from hypothesis import strategies as st

from annbatch_distributed import AlignedLoader, Rank, StatefulLoader, suggest_sizes
from annbatch_distributed.collect import Problems, collect, matrices
from tests.collect.test_files import GENES, cells_of, collected, counts, quiet


def file_of(folder: Path, values: Any, name: str = "cells") -> Path:
    path = folder / f"{name}.h5ad"
    cells_of(name, values, GENES[: values.shape[1]]).write_h5ad(path)
    return path


def stored_in(collection: DatasetCollection) -> zarr.Group:
    (group,) = collection
    return group["X"]  # type: ignore[return-value]  # of sparse cells


@pytest.mark.parametrize(
    ("most", "dtype", "stored"),
    [
        (255, "float32", "uint8"),
        (256, "float32", "int16"),
        (32_767, "int64", "int16"),
        (32_768, "int64", "int32"),
        (2**31, "int64", "int64"),
        (3, "uint8", "uint8"),
        (3.5, "float32", "float32"),
        (-3, "float64", "float64"),
    ],
)
def test_counts_are_stored_in_smallest_dtype(most: float, dtype: str, stored: str, tmp_path: Path) -> None:
    """Counts are stored in the smallest dtype that holds all of them, and yielded in the dtype of the files."""
    values = counts(40, 6, 0).astype(dtype)
    values[-1, -1] = most
    lines: list[str] = []
    collection = collect(file_of(tmp_path, values), tmp_path / "cells.zarr", tell=lines.append)
    read, _ = collected(collection)
    assert read.to_numpy().dtype == stored
    np.testing.assert_array_equal(
        read.sort_index(key=lambda index: index.str.len() * 1_000 + index.str[6:].astype(int)), values
    )
    assert f"stored as {stored}" in lines[-1]
    assert (f"yield as {dtype}" in lines[-1]) == (stored != dtype)
    loader = StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), batch_size=16)
    assert {batch["X"].dtype for batch in loader} == {np.dtype(dtype)}


#: Values that some dtypes hold and others round: counts, values that are not integers, and negative ones.
ODD_VALUES: list[list[float]] = [
    [1, 255, 2**24 + 1, 2**31, 2**53 + 1, 2**63 + 1, 2.0**60],
    [0.1, 0.5, float(np.float32(0.1)), math.inf],
    [-1, -(2**24) - 1, -(2**53) - 1, -0.1],
]
DTYPES = ["uint8", "int16", "int64", "uint64", "float32", "float64"]


def holds(dtype: str, value: float) -> bool:
    """Return True if a dtype holds a value exactly."""
    with np.errstate(all="ignore"):
        return bool(np.array([value]).astype(dtype)[0].item() == value)


@st.composite
def files_of_one_kind(draw: st.DrawFn) -> list[tuple[str, list[float]]]:
    """The dtype of each file, and some values of one kind that it holds."""
    odd = draw(st.sampled_from(ODD_VALUES))
    files = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3)):
        fitting = [value for value in odd if holds(dtype, value)]
        files.append((dtype, draw(st.lists(st.sampled_from(fitting), max_size=3)) if fitting else []))
    return files


@given(files=files_of_one_kind())
@example(files=[("int64", [-(2**53) - 1]), ("float64", [-0.1])])
def test_no_value_is_rounded(files: list[tuple[str, list[float]]]) -> None:
    """Whatever dtypes files have, and wherever their values are, all of them are stored and yielded as they are."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrices, "_N_SAMPLED", 1)  # rows 0, 3 and 6 of 7
        expected: dict[str, float] = {}
        for number, (dtype, own) in enumerate(files):
            column = np.zeros((7, 1), dtype)
            column[[1, 2, 4][: len(own)], 0] = own
            cells_of(str(number), column, GENES[:1]).write_h5ad(f"{folder}/{number}.h5ad")
            expected |= {f"{number}-{row}": value.item() for row, value in enumerate(column[:, 0])}
        try:
            collection = collect(sorted(Path(folder).glob("*.h5ad")), f"{folder}/cells.zarr", tell=quiet)
        except Problems as problems:
            assert "integers must be below 2**53 in files of different dtypes" in str(problems)  # noqa: PT017 or none
            return
        stored, _ = collected(collection)
        yielded = stored.astype(stored_in(collection).attrs.get("file_dtype", stored.dtypes.iloc[0]))
        for values in (stored, yielded):
            assert values[GENES[0]].to_dict() == expected


def test_chosen_dtype_is_stored(tmp_path: Path) -> None:
    """A chosen dtype is stored and yielded, and must hold the values."""
    values = counts(40, 6, 0)
    values[0, 0] = 300
    file = file_of(tmp_path, values)
    collection = collect(file, tmp_path / "float.zarr", dtype="float32", tell=quiet)
    assert stored_in(collection)["data"].dtype == np.float32
    assert "file_dtype" not in stored_in(collection).attrs
    with pytest.raises(Problems, match="dtype='uint8': must hold the values of all files, got counts up to 300"):
        collect(file, tmp_path / "uint8.zarr", dtype="uint8", tell=quiet)
    file = file_of(tmp_path, np.log1p(values), "logged")
    with pytest.raises(Problems, match=r"dtype='int32': must hold .* got values that are not counts"):
        collect(file, tmp_path / "int32.zarr", dtype="int32", tell=quiet)


def test_chunks_and_compression(tmp_path: Path) -> None:
    """A chunk has the mean number of values of 16 cells, or 256 names; any compression has the same values."""
    values = counts(200, 12, 0)
    file, sizes, whole = file_of(tmp_path, values), {}, []
    for compression in ("lz4", "zstd", "none"):
        lines: list[str] = []
        path = tmp_path / f"{compression}.zarr"
        collection = collect(file, path, compression=compression, tell=lines.append)
        data: Any = stored_in(collection)["data"]
        assert data.chunks == (int(16 * np.count_nonzero(values) / 200),)
        assert len(data.compressors) == 1 + (compression != "none")  # with the checksum
        names: Any = zarr.open_array(path / "dataset_0" / "obs" / "_index", mode="r")
        assert names.chunks == (256,)
        sizes[compression] = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        assert f", {sizes[compression] / 1e6:,.1f} MB; stored as uint8" in lines[-1]
        whole.append(collected(collection)[0])
    assert all(one.equals(whole[0]) for one in whole)


@pytest.mark.parametrize(
    ("density", "dtype", "is_dense"),
    [(0.55, "counts", True), (0.45, "counts", False), (0.85, "float32", True), (0.75, "float32", False)],
)
def test_dense_files_stay_dense_where_that_takes_less_space(
    density: float, dtype: str, is_dense: bool, tmp_path: Path
) -> None:
    """A sparse matrix also stores an index of each value: one byte for few genes, as for a count."""
    rng = np.random.default_rng(0)
    values = (rng.random((300, 12)) < density) * rng.integers(1, 9, (300, 12)).astype("float32")
    values = values if dtype == "counts" else values * np.float32(0.7)
    obs = pd.DataFrame({"cell_type": ["B"] * 300}, index=[f"cell {number}" for number in range(300)])
    paths = [tmp_path / f"{name}.h5ad" for name in "ab"]
    for path, rows in zip(paths, (slice(0, 100), slice(100, None)), strict=True):
        ad.AnnData(values[rows], obs=obs[rows], var=pd.DataFrame(index=GENES[:12])).write_h5ad(path)
    lines: list[str] = []
    collection = collect(paths, tmp_path / "cells.zarr", memory="1MB", tell=lines.append)
    stored = [group["X"] for group in collection]
    assert {isinstance(one, zarr.Array) for one in stored} == {is_dense}
    assert ("stored as dense" in lines[-1]) == is_dense
    read, _ = collected(collection)
    np.testing.assert_array_equal(read.loc[obs.index], values)
    loader = StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), batch_size=32, names=True)
    assert {(type(batch["X"]), batch["X"].dtype) for batch in loader} == {
        (np.ndarray if is_dense else sp.csr_matrix, np.dtype("float32"))
    }
    # files in different layouts
    ad.AnnData(sp.csr_matrix(values[:100]), obs=obs[:100], var=pd.DataFrame(index=GENES[:12])).write_h5ad(paths[0])
    mixed = collect(paths, tmp_path / "mixed.zarr", tell=quiet)
    assert not any(isinstance(group["X"], zarr.Array) for group in mixed)


@pytest.mark.parametrize(
    ("join", "density", "is_dense"), [("outer", 0.7, False), ("inner", 0.7, True), ("inner", 0.35, False)]
)
def test_genes_of_the_collection_decide_what_is_dense(
    join: Any, density: float, is_dense: bool, tmp_path: Path
) -> None:
    """Genes that a file lacks are 0 in its cells, and genes that are left out don't count."""
    values = (np.random.default_rng(0).random((50, 8)) < density).astype("float32")
    for name, genes in (("a", GENES[:8]), ("b", GENES[4:])):
        obs = pd.DataFrame(index=[f"{name}{number}" for number in range(50)])
        ad.AnnData(values, obs=obs, var=pd.DataFrame(index=genes)).write_h5ad(tmp_path / f"{name}.h5ad")
    collection = collect([tmp_path / "a.h5ad", tmp_path / "b.h5ad"], tmp_path / "c.zarr", join=join, tell=quiet)
    assert isinstance(stored_in(collection), zarr.Array) == is_dense


def test_anndata_and_annbatch_read_what_is_stored(tmp_path: Path) -> None:
    values = counts(64, 6, 0)
    collect(file_of(tmp_path, values), tmp_path / "cells.zarr", tell=quiet)
    cells = ad.io.read_zarr(tmp_path / "cells.zarr" / "dataset_0")
    assert cells.X.dtype == np.uint8
    assert "measured" in cells.varm
    loader = annbatch.Loader(batch_size=16, chunk_size=16, preload_nchunks=2, preload_to_gpu=False)
    loader.use_collection(DatasetCollection(tmp_path / "cells.zarr", mode="r"))
    batches = [batch["X"] for batch in loader]
    assert {batch.dtype for batch in batches} == {np.dtype(np.uint8)}
    assert sum(batch.shape[0] for batch in batches) == 64


def test_annbatch_adds_files_to_a_collection(tmp_path: Path) -> None:
    """annbatch adds files to a collection of collect as to its own, and all cells are read and resumed."""
    first, second = counts(40, 6, 0), counts(30, 6, 1) + 300  # of which the stored uint8 holds none
    cells_of("b", second, GENES[:6]).write_h5ad(tmp_path / "b.h5ad")
    collect(file_of(tmp_path, first), tmp_path / "cells.zarr", tell=quiet)
    DatasetCollection(tmp_path / "cells.zarr").add_adatas([tmp_path / "b.h5ad"], shuffle_chunk_size=10)
    opened = DatasetCollection(tmp_path / "cells.zarr", mode="r")
    values, obs = collected(opened)
    assert len(obs) == 70
    for name, own in (("cells", first), ("b", second)):
        np.testing.assert_array_equal(values.loc[[f"{name}-{row}" for row in range(len(own))]], own)
    loader = annbatch.Loader(batch_size=16, chunk_size=16, preload_nchunks=2, preload_to_gpu=False)
    assert sum(batch["X"].shape[0] for batch in loader.use_collection(opened)) == 70
    options: dict[str, Any] = {"dist_info": Rank(0, 1), "batch_size": 8, "names": True}
    killed = StatefulLoader.from_collection(opened, **options)
    read = [batch["obs"].index for batch, _ in zip(killed, range(4), strict=False)]
    resumed = StatefulLoader.from_collection(opened, **options)
    resumed.load_state_dict(killed.state_dict(batches_done=4))
    read += [batch["obs"].index for batch in resumed]
    assert sorted(chain(*read)) == sorted(obs.index)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of a sparse and of a dense collection of uint8 whose files had float32; dense cells are written by hand."""
    folder = tmp_path_factory.mktemp("stored")
    paths = {form: folder / f"{form}.zarr" for form in ("sparse", "dense")}
    collect(file_of(folder, counts(96, 6, 0)), paths["sparse"], tell=quiet)
    shutil.copytree(paths["sparse"], paths["dense"])
    group: Any = zarr.open_group(paths["dense"] / "dataset_0", mode="r+", use_consolidated=False)
    ad.io.write_elem(group, "X", _dense(ad.io.read_elem(group["X"])).astype("uint8"))
    group["X"].attrs["file_dtype"] = "float32"
    zarr.consolidate_metadata(paths["dense"])
    return paths


#: Name of zarr's own codecs, and of those in Rust.
ZARR, ZARRS = "zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs.ZarrsCodecPipeline"


@pytest.mark.parametrize(
    ("to", "form", "codecs", "prefetch"),
    # any two values of two parameters are in a case
    [
        (None, "sparse", ZARRS, 0),
        (None, "dense", ZARR, 1),
        ("torch", "sparse", ZARR, 0),
        ("torch", "dense", ZARRS, 1),
        ("jax", "sparse", ZARRS, 1),
        ("jax", "dense", ZARR, 0),
    ],
)
def test_loader_yields_dtype_of_files(
    path_of: dict[str, Path], to: str | None, form: str, codecs: str, prefetch: int
) -> None:
    """Values come in the dtype of the files, or in the one that is asked for, however they are read."""
    with zarr.config.set({"codec_pipeline.path": codecs}):
        opened = DatasetCollection(path_of[form], mode="r")
        stored = next(iter(opened))["X"]
        assert isinstance(stored, zarr.Array) == (form == "dense")
        expected = _dense(ad.io.read_elem(stored))
        for dtype in (None, "float64", "int16"):
            options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
            if to == "jax" and dtype == "float64":
                continue  # JAX has no float64 by default
            loader = StatefulLoader.from_collection(
                opened, dist_info=Rank(0, 1), batch_size=16, to=to, prefetch=prefetch, return_index=True, **options
            )
            for batch in loader:
                assert str(batch["X"].dtype).removeprefix("torch.") == (dtype or "float32")
                np.testing.assert_array_equal(_dense(batch["X"]), expected[np.asarray(batch["index"])])


def _dense(values: Any) -> Any:
    values = values.to_dense() if hasattr(values, "to_dense") else values
    values = values.todense() if hasattr(values, "todense") else values
    return np.asarray(values)


def test_dtype_must_hold_values_and_be_one_of_numbers(tmp_path: Path) -> None:
    values = counts(32, 6, 0)
    values[3, 3] = 300
    opened = collect(file_of(tmp_path, values), tmp_path / "cells.zarr", tell=quiet)
    options: dict[str, Any] = {"dist_info": Rank(0, 1), "batch_size": 16}
    with pytest.raises(ValueError, match=r"dtype='uint8' must hold all values of X, got 300\. Pass a larger"):
        list(StatefulLoader.from_collection(opened, dtype="uint8", **options))
    with pytest.raises(ValueError, match="dtype='float16' is for dense cells"):
        list(StatefulLoader.from_collection(opened, dtype="float16", **options))
    for dtype, message in (("flaot32", "must be the name of a dtype"), ("U3", "must be of integers or floats")):
        with pytest.raises(TypeError, match=message):
            StatefulLoader.from_collection(opened, dtype=dtype, **options)
    loader = StatefulLoader.from_collection(opened, dtype="int32", **options)
    copy = StatefulLoader.from_loader(loader)
    assert next(iter(copy))["X"].dtype == np.int32
    aligned = AlignedLoader.from_collections({"rna": tmp_path / "cells.zarr"}, **options)
    assert next(iter(aligned))["rna"]["X"].dtype == np.float32


def test_sizes_count_values_as_loaded(tmp_path: Path) -> None:
    """Sizes that fit into memory count values in the dtype of the files."""
    file = file_of(tmp_path, sp.csr_matrix(counts(400, 12, 0)).toarray())
    small = collect(file, tmp_path / "small.zarr", tell=quiet)
    whole = collect(file, tmp_path / "whole.zarr", dtype="float32", tell=quiet)
    for memory in ("20kB", "60kB"):
        sizes = [suggest_sizes(one, memory=memory, batch_size=16, store_chunk=16) for one in (small, whole)]
        assert sizes[0] == sizes[1]
