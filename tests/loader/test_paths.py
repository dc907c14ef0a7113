"""Every way of reading yields the values of the arrays, for datasets of every kind.

annbatch copies arrays and sparse matrices in memory. It reads stored arrays with zarr if the codecs are zarr's, if the
store is not a local disk, or if the datasets have different dtypes. This package reads the other stored arrays, on a
local disk, with zarrs.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection, Loader, write_sharded
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import LocalStore, MemoryStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader, suggest_sizes
from annbatch_distributed.loader._annbatch import n_rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    type Values = np.ndarray[Any, Any]

pytestmark = pytest.mark.filterwarnings("ignore:Adding dataset with dtype")

CODECS = {"zarr": "zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs": "zarrs.ZarrsCodecPipeline"}
#: Names of the folders of examples.
NUMBERS = count()


@contextmanager
def codecs(name: str) -> Iterator[None]:
    with zarr.config.set({"codec_pipeline.path": CODECS[name], "array.rectilinear_chunks": True}):
        yield


def store_of(kind: str, folder: Path) -> Any:
    return MemoryStore() if kind == "memory" else LocalStore(folder / str(next(NUMBERS)))


@st.composite
def values(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> Values:
    """Generate values with some zeros, and often with whole rows of zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    filled = rng.integers(1, 100, shape) * (rng.random(shape) < draw(st.sampled_from([0, 0.3, 0.9])))
    filled[rng.random(shape[0]) < 0.2] = 0
    return filled.astype(dtype)


def several_types(*choices: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(choices), min_size=1, max_size=3)


def read(datasets: list[Any], expected: list[Values], seed: int, prefetch: int) -> None:
    """Read rows with replacement, and compare each batch with the values of the datasets."""
    whole = np.concatenate([one.astype(np.result_type(*expected)) for one in expected])
    if not len(whole):
        return
    chunk_size = min(5, len(whole))
    rng = np.random.default_rng(seed)
    sampler = RandomSampler(chunk_size, 16, 4, replacement=True, num_samples=4 * len(whole), rng=rng)
    loader = StatefulLoader(
        batch_sampler=DistributedSampler(sampler, dist_info=Rank(0, 1), sharding="independent"),
        return_index=True,
        preload_to_gpu=False,
        prefetch=prefetch,
    )
    for one in datasets:
        loader.add_dataset(one)
    n_read = 0
    for batch in loader:
        got = batch["X"].toarray() if sp.issparse(batch["X"]) else batch["X"]
        np.testing.assert_array_equal(got, whole[batch["index"]])
        n_read += len(batch["index"])
    assert n_read == 4 * len(whole)


def dense(draw: st.DrawFn, store: Any, name: str, filled: Values) -> tuple[Any, bool]:
    """Store rows in any chunks. Return the array, and True if each stored chunk or shard has whole rows."""
    layout: dict[str, Any]
    rows, *columns = (draw(st.integers(1, size + 3)) for size in filled.shape)
    if draw(st.booleans()):
        columns = list(filled.shape[1:])
    match draw(st.sampled_from(["chunks", "shards", "zarr 2", "several sizes"])):
        case "shards":  # shards may have all columns even if their chunks don't
            shards = rows * draw(st.integers(1, 3)), *(size * draw(st.integers(1, 2)) for size in columns)
            layout, stored = {"chunks": (rows, *columns), "shards": shards}, shards[1:]
        case "several sizes" if len(filled) > 1:
            cut = draw(st.integers(1, len(filled) - 1))
            layout, stored = {"chunks": ([cut, len(filled) - cut], *([n] for n in filled.shape[1:]))}, filled.shape[1:]
        case kind:
            layout, stored = {"chunks": (rows, *columns), "zarr_format": 2 if kind == "zarr 2" else 3}, tuple(columns)
    zarr.create_array(store, name=name, shape=filled.shape, dtype=filled.dtype, **layout)
    if filled.size:
        with codecs("zarr"):  # zarrs can't write to every store
            zarr.open_array(store, path=name, mode="r+")[:] = filled
    is_whole = all(size >= n_columns for size, n_columns in zip(stored, filled.shape[1:], strict=True))
    return zarr.open_array(store, path=name, mode="r"), is_whole


@pytest.mark.filterwarnings("ignore:Array is unsupported by ZarrsCodecPipeline")
@given(data=st.data(), dtypes=several_types("float32", "float64", "int8", "uint16", "bool"))
@pytest.mark.parametrize("store", ["local", "memory"])
@pytest.mark.parametrize("codec", CODECS)
def test_stored_arrays_are_read_exactly_or_refused(
    codec: str, store: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtypes: list[str]
) -> None:
    """Arrays are read with their exact values, or refused when they are added."""
    columns = data.draw(st.sampled_from([(1,), (7,), (3, 4)]))
    n_rows = data.draw(st.lists(st.sampled_from([0, 1, 2, 23]), min_size=len(dtypes), max_size=len(dtypes)))
    filled = [data.draw(values((n, *columns), dtype)) for n, dtype in zip(n_rows, dtypes, strict=True)]
    with codecs(codec):
        where = store_of(store, tmp_path_factory.getbasetemp())
        pairs = [dense(data.draw, where, str(number), one) for number, one in enumerate(filled)]
        arrays, are_whole = [one for one, _ in pairs], [is_whole for _, is_whole in pairs]
        if all(are_whole):
            read(arrays, filled, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 1)))
            return
        for add in ("add_datasets", "add_dataset"):
            loader = StatefulLoader(batch_sampler=DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1)))
            with pytest.raises(ValueError, match="must have all columns"):
                _ = loader.add_datasets(arrays) if add == "add_datasets" else list(map(loader.add_dataset, arrays))


def sparse(store: Any, name: str, rows: sp.csr_matrix, indices: str, indptr: str, chunk: int) -> Any:
    group = zarr.create_group(store, path=name)
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(rows.shape)})
    parts = {"data": rows.data, "indices": rows.indices.astype(indices), "indptr": rows.indptr.astype(indptr)}
    for part, array in parts.items():
        layout = {} if part == "indptr" else {"chunks": (chunk,), "shards": (3 * chunk,)}
        group.create_array(part, shape=array.shape, dtype=array.dtype, **layout)
        if array.size:
            with codecs("zarr"):
                zarr.open_array(store, path=f"{name}/{part}", mode="r+")[:] = array
    return ad.io.sparse_dataset(zarr.open_group(store, path=name, mode="r"))


def doubled(rows: sp.csr_matrix) -> sp.csr_matrix:
    """Store each value of a row twice, in the same column."""
    indices = np.repeat(rows.indices, 2)
    return sp.csr_matrix((np.repeat(rows.data, 2), indices, rows.indptr * 2), shape=rows.shape)


@given(data=st.data(), dtypes=several_types("float32", "float64", "int16", "bool"))
@pytest.mark.parametrize(("codec", "store"), [("zarr", "memory"), ("zarrs", "local"), ("zarrs", "in memory")])
def test_sparse_rows_of_all_dtypes_are_exact(
    codec: str, store: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtypes: list[str]
) -> None:
    """Sparse rows of all dtypes are read with their exact values."""
    matrices, filled = [], []
    kind = data.draw(st.sampled_from([sp.csr_matrix, sp.csr_array]))
    where = store_of(store, tmp_path_factory.getbasetemp())
    with codecs(codec):
        for number, dtype in enumerate(dtypes):
            one = data.draw(values((data.draw(st.sampled_from([0, 1, 40])), 9), dtype))
            rows = sp.csr_matrix(one)
            if dtype != "bool" and data.draw(st.booleans()):
                rows, one = doubled(rows), 2 * one
            indices = data.draw(st.sampled_from(["uint8", "int32", "int64"]))
            smallest = np.min_scalar_type(rows.nnz).name
            indptr = data.draw(st.sampled_from([smallest, "int32", "int64", "uint64"]))
            if store == "in memory":
                matrices.append(kind(rows))
            else:
                matrices.append(sparse(where, str(number), rows, indices, indptr, data.draw(st.integers(1, 60))))
            filled.append(one)
        read(matrices, filled, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 1)))


@given(data=st.data(), dtypes=several_types("float32", "float64", "int8"))
def test_arrays_in_memory_are_read_as_they_are(data: st.DataObject, dtypes: list[str]) -> None:
    columns = data.draw(st.sampled_from([(1,), (7,), (3, 4)]))
    filled = [data.draw(values((data.draw(st.sampled_from([0, 1, 23])), *columns), dtype)) for dtype in dtypes]
    read([np.asfortranarray(one) for one in filled], filled, data.draw(st.integers(0, 9)), 0)


@pytest.fixture(scope="module")
def by_columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a collection from a file with a CSC matrix, which annbatch keeps as CSC."""
    folder = tmp_path_factory.mktemp("csc")
    ad.AnnData(sp.csc_matrix(np.eye(30, 7, dtype="float32"))).write_h5ad(folder / "cells.h5ad")
    DatasetCollection(folder / "cells.zarr").add_adatas([folder / "cells.h5ad"], shuffle_chunk_size=10)
    return folder / "cells.zarr"


def test_csc_matrices_are_refused(by_columns: Path) -> None:
    """CSC matrices are refused by every function that takes data."""
    collection = DatasetCollection(by_columns, mode="r")
    group: Any = next(iter(collection))
    loader = StatefulLoader(batch_sampler=DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1)))
    in_memory = sp.csc_matrix(np.eye(3))
    asks = [
        lambda: loader.use_collection(collection),
        lambda: loader.use_collection(collection, load_adata=ad.io.read_elem),
        lambda: loader.add_adata(ad.AnnData(in_memory)),
        lambda: loader.add_adatas([ad.AnnData(in_memory)]),
        lambda: loader.add_dataset(in_memory),
        lambda: loader.add_datasets([ad.io.sparse_dataset(group["X"])]),
        lambda: suggest_sizes(collection, 2),
        lambda: n_rows_of(group["X"], "X"),
    ]
    for ask in asks:
        with pytest.raises(TypeError, match="got a CSC matrix"):
            ask()
    assert loader.n_obs == 0


def test_refused_dataset_leaves_loader_unchanged(tmp_path: Path) -> None:
    """A refused dataset leaves the loader unchanged."""
    group = zarr.open_group(tmp_path / "cells.zarr")
    write_sharded(group, ad.AnnData(np.ones((30, 7), dtype="float32")), n_obs_per_chunk=8)
    cut = zarr.create_array(MemoryStore(), shape=(30, 7), chunks=(8, 4), dtype="float32")
    whole: Any = group["X"]
    loader = StatefulLoader(
        batch_sampler=DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1)), preload_to_gpu=False
    ).add_dataset(whole)
    message = r"of X of dataset 2 must have all columns.* got chunks of \(8, 4\) for the shape \(30, 7\)"
    with pytest.raises(ValueError, match=message + r".* in chunks of \(8, 7\)"):
        loader.add_datasets([whole, cut])
    assert loader.n_obs == 30
    assert sum(len(batch["X"]) for batch in loader) == 28
    theirs = Loader(batch_size=4, chunk_size=4, preload_nchunks=2, preload_to_gpu=False).add_dataset(cut)
    with pytest.raises(ValueError, match="X of dataset 0"):
        StatefulLoader.from_loader(theirs, batch_sampler=loader.sampler)


@pytest.mark.parametrize("pipeline", CODECS)
@pytest.mark.parametrize("how", ["sparse collection", "dense collection", "array"])
def test_relative_path_survives_chdir(
    how: str, pipeline: str, collection: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A relative path leads to the same cells after os.chdir."""
    monkeypatch.chdir(collection.parent)
    sampler = DistributedSampler(RandomSampler(8, 1, 8), dist_info=Rank(0, 1), seed=0)
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
    with codecs(pipeline):
        if how == "sparse collection":
            loader.use_collection(DatasetCollection(collection.name, mode="r"))
        else:
            monkeypatch.chdir(tmp_path)
            data = np.arange(1.0, 99.0).reshape(-1, 1)
            if how == "dense collection":
                ad.AnnData(data).write_h5ad("cells.h5ad")
                DatasetCollection("cells.zarr").add_adatas(["cells.h5ad"], shuffle=False)
                loader.use_collection(DatasetCollection("cells.zarr", mode="r"))
            else:
                zarr.create_array("X", data=data)
                loader.add_dataset(zarr.open_array("X", mode="r"))
        batches = iter(loader)
        next(batches)
        monkeypatch.chdir("/")
        for batch in batches:
            cells = batch["X"].toarray() if how == "sparse collection" else batch["X"]
            assert cells[:, 0].tolist() == (batch["index"] + 1).tolist()
