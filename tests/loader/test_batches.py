"""Batches of a StatefulLoader: the same values, dtypes and forms as annbatch's, for every dtype that annbatch takes."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import anndata as ad
import jax
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
import zarr
from annbatch import Loader, write_sharded
from annbatch.samplers import RandomSampler
from annbatch.utils import CSRContainer
from zarr.storage import LocalStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.loader import stateful
from annbatch_distributed.loader.batches import in_framework, rows_at

if TYPE_CHECKING:
    from pathlib import Path

N_OBS, N_VAR = 50, 11
RNG = np.random.default_rng(0)
VALUES = RNG.integers(0, 100, (N_OBS, N_VAR)) * (RNG.random((N_OBS, N_VAR)) < 0.5)
VALUES[[3, 40, 41]] = 0
OBS = pd.DataFrame(
    {"cell_type": pd.Categorical(RNG.choice(["B", "T"], N_OBS)), "age": RNG.integers(9, size=N_OBS)},
    index=[f"cell {number}" for number in range(N_OBS)],
)
DTYPES = "bool", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of stored cells, which all tests read."""
    return tmp_path_factory.mktemp("batches")


def cells(dtype: str, layout: str, folder: Path) -> list[ad.AnnData]:
    """Create two datasets of cells, in memory or stored."""
    parts = []
    for rows in (slice(0, 30), slice(30, None)):
        values: Any = VALUES[rows].astype(dtype)
        if "sparse" in layout:
            values = sp.csr_matrix(values)
        if "stored" in layout:
            path = folder / f"{dtype}, {layout}, {rows.start}"
            if not path.exists():
                options: Any = {"compressors": None if "uncompressed" in layout else "auto"}
                group = zarr.open_group(LocalStore(path))
                write_sharded(group, ad.AnnData(values), n_obs_per_chunk=4, shard_size=16, **options)
            array: Any = zarr.open_group(LocalStore(path), mode="r")["X"]
            values = array if isinstance(array, zarr.Array) else ad.io.sparse_dataset(array)
        parts.append(ad.AnnData(values, obs=OBS[rows]))
    return parts


def arrays_in(values: Any) -> list[Any]:
    """Return the arrays of a batch: of a matrix or a tensor of SciPy, NumPy, PyTorch or JAX."""
    if isinstance(values, torch.Tensor) and values.layout == torch.sparse_csr:
        return [values.values().numpy(), values.col_indices().numpy(), values.crow_indices().numpy()]
    if hasattr(values, "indptr"):
        return [np.asarray(values.data), np.asarray(values.indices), np.asarray(values.indptr)]
    return [np.asarray(values)]


def both(adatas: list[ad.AnnData], **options: Any) -> list[list[dict[str, Any]]]:
    """Return the batches of a StatefulLoader, and the batches of annbatch's Loader."""
    return [[*loader_of(kind, adatas, **options)] for kind in (StatefulLoader, Loader)]


def loader_of(kind: Any, adatas: list[ad.AnnData], **options: Any) -> Any:
    sampler = DistributedSampler(RandomSampler(4, 6, 8), dist_info=Rank(0, 1), seed=0, remainder="exact")
    return kind(batch_sampler=sampler, preload_to_gpu=False, **options).add_adatas(adatas)


@pytest.mark.parametrize(
    ("dtype", "place"),
    [
        *((dtype, "stored") for dtype in DTYPES),
        # a dtype of each size
        *product(["bool", "uint16", "float32", "int64"], ["in memory", "stored, uncompressed"]),
    ],
)
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_batches_are_those_of_annbatch(dtype: str, layout: str, place: str, folder: Path) -> None:
    adatas = cells(dtype, f"{layout}, {place}", folder)
    # each framework has dtypes of each size
    for to in (None, ("torch", "jax")[DTYPES.index(dtype) % 2]):
        batches, others = both(adatas, to=to, return_index=True)
        assert len(batches) == len(others) == 7
        for ours, theirs in zip(batches, others, strict=True):
            assert ours.keys() == theirs.keys()
            assert type(ours["X"]) is type(theirs["X"])
            assert ours["X"].shape == theirs["X"].shape
            for one, other in zip(arrays_in(ours["X"]), arrays_in(theirs["X"]), strict=True):
                assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
            np.testing.assert_array_equal(ours["index"], theirs["index"])
            for name in ("obs", "var"):
                pd.testing.assert_frame_equal(ours[name], theirs[name])


@pytest.mark.parametrize(
    ("place", "prefetch"), [("in memory", 0), ("stored", 0), ("stored", 1), ("stored, uncompressed", 1)]
)
@pytest.mark.parametrize("layout", ["sparse", "dense"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_stored_rows_are_plain_and_have_the_same_values(
    dtype: str, layout: str, place: str, prefetch: int, folder: Path
) -> None:
    """Under dtype="stored", in NumPy, PyTorch and JAX; PyTorch makes them dense."""
    adatas = cells(dtype, f"{layout}, {place}", folder)
    for to in (None, "torch", "jax"):
        options = {"to": to, "prefetch": prefetch}
        plain = [*loader_of(StatefulLoader, adatas, dtype="stored", **options)]
        widened = [*loader_of(StatefulLoader, adatas, **options)]
        assert len(plain) == len(widened) == 7
        for batch, other in zip(plain, widened, strict=True):
            x, expected = batch["X"], other["X"]
            assert tuple(x.shape) == tuple(expected.shape)
            assert len(x) == expected.shape[0]
            if layout == "dense":
                assert type(x) is type(expected)
                np.testing.assert_array_equal(np.asarray(x), np.asarray(expected))
                continue
            for part, whole in zip((x.data, x.indices, x.indptr), arrays_in(expected), strict=True):
                np.testing.assert_array_equal(np.asarray(part), whole)
            dtypes = [str(part.dtype).removeprefix("torch.") for part in (x.data, x.indices, x.indptr)]
            assert dtypes == [dtype, "uint8", "int32"]  # of 11 genes
            if to == "torch":
                np.testing.assert_array_equal(x.to("cpu", non_blocking=True).to_dense(), expected.to_dense())
                assert x.to_dense(torch.float64).dtype == torch.float64


def test_stored_rows_have_indices_for_many_genes() -> None:
    rows = sp.csr_matrix(([1, 2], [0, 300], [0, 1, 2]), shape=(2, 301))
    container = CSRContainer((rows.data, rows.indices, rows.indptr), rows.shape, rows.dtype)
    x: Any = in_framework(rows_at(container, np.array([1, 0]), None, is_plain=True), "torch")
    assert x.indices.dtype == torch.uint16
    np.testing.assert_array_equal(x.to_dense(), rows.toarray()[::-1])


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_jax_arrays_have_the_stored_values(layout: str, prefetch: int) -> None:
    """Batches for JAX have the values of the collection, in its 32 bits or in 64, or raise if they can't."""
    for dtype, kept, lost in (
        ("int64", 2**31 - 1, 2**31),
        ("uint64", 2**32 - 1, 2**32),
        ("float64", 0.5, 0.1),
        ("float64", np.inf, 1e300),
    ):
        for value, is_kept in ((kept, True), (lost, False)):
            x = np.zeros((48, 3), dtype)
            x[7, 1] = value
            if dtype == "float64":
                x[9, 2] = np.nan
            adata = ad.AnnData(sp.csr_matrix(x) if layout == "sparse" else x)
            loader = loader_of(StatefulLoader, [adata], to="jax", prefetch=prefetch, return_index=True)
            with jax.enable_x64(not is_kept):
                for batch in loader:
                    read = batch["X"].todense() if layout == "sparse" else batch["X"]
                    np.testing.assert_array_equal(np.asarray(read), x[batch["index"]])
            loader.set_epoch(0)
            if not is_kept:
                with pytest.raises(ValueError, match=r"JAX holds values of X as .*32, which can't hold .*Pass dtype="):
                    list(loader)


@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_annbatch_makes_the_same_batches_of_load_requests(
    layout: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preload_to_gpu, annbatch makes the batches of each load request, in the dtype of the loader."""
    adatas = cells("uint8", f"{layout}, stored", folder)
    for prefetch in (0, 2):
        loader = loader_of(StatefulLoader, adatas, to="torch", dtype="float32", prefetch=prefetch)
        expected = [*loader]
        loader.set_epoch(0)
        with monkeypatch.context() as patched:
            patched.setattr(stateful, "preloads_to_gpu", lambda _: True)
            batches = [*loader]
        for one, other in zip(batches, expected, strict=True):
            assert one["X"].dtype == other["X"].dtype == torch.float32
            np.testing.assert_array_equal(one["X"].to_dense(), other["X"].to_dense())
            pd.testing.assert_frame_equal(one["obs"], other["obs"])


def test_changing_a_batch_changes_no_other(folder: Path) -> None:
    """Batches of a load request may be changed, as by scaling in place."""
    adatas = cells("float32", "sparse, stored", folder)
    for batch, other in zip(*(loader_of(StatefulLoader, adatas, to="torch") for _ in range(2)), strict=True):
        np.testing.assert_array_equal(batch["X"].to_dense(), other["X"].to_dense())
        pd.testing.assert_frame_equal(batch["obs"], other["obs"])
        batch["X"].values().mul_(0)
        batch["obs"]["age"] = -1


@pytest.mark.parametrize("max_gap", [0, 64])
def test_dtype_must_hold_values_of_batches_only(max_gap: int) -> None:
    """Values of rows in gaps, which are read and discarded, need not fit the dtype."""
    values = np.ones((100, 4), dtype="float32")
    values[1::2] = 1_000
    options = {"dist_info": Rank(0, 1), "seed": 0, "mask": np.arange(100) % 2 == 0, "max_gap": max_gap}
    sampler = DistributedSampler(RandomSampler(8, 2, 4), **options)
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, dtype="uint8").add_adata(ad.AnnData(values))
    assert sum(batch["X"].sum() for batch in loader) == 48 * 4  # 12 full batches
    loader.sampler.mask = slice(None)
    with pytest.raises(ValueError, match=r"dtype='uint8' must hold all values of X, got 1000\.0"):
        list(loader)


@pytest.mark.parametrize("dtype", [None, np.dtype("float64")])
def test_no_rows_make_an_empty_batch(dtype: Any) -> None:
    rows = sp.csr_matrix(VALUES.astype("uint8"))
    container = CSRContainer((rows.data, rows.indices, rows.indptr), rows.shape, rows.dtype)
    batch = rows_at(container, np.array([], dtype=np.intp), dtype)
    assert (batch.shape, batch.nnz, batch.dtype) == ((0, N_VAR), 0, dtype or np.uint8)
    assert rows_at(VALUES, np.array([], dtype=np.intp), dtype).shape == (0, N_VAR)
