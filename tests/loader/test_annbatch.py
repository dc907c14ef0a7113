"""StatefulLoader.from_loader, and the private attributes of annbatch's loaders that it reads."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.loader._annbatch import options_of, preloads_to_gpu, shapes_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N_OBS, N_VAR = 61, 5
SIZES = {"chunk_size": 4, "preload_nchunks": 2, "batch_size": 4}


def cells(n_obs: int = N_OBS, *, is_sparse: bool = False) -> ad.AnnData:
    """Create cells whose values are numbered row by row, with a column in obs."""
    values = np.arange(n_obs * N_VAR, dtype="float32").reshape(n_obs, N_VAR)
    obs = pd.DataFrame({"cell_type": pd.Categorical(["B", "T", "NK"] * n_obs)[:n_obs]}, index=map(str, range(n_obs)))
    var = pd.DataFrame(index=[f"gene {number}" for number in range(N_VAR)])
    return ad.AnnData(sp.csr_matrix(values) if is_sparse else values, obs=obs, var=var)


def in_memory(_: Path, **options: Any) -> Loader:
    return Loader(**SIZES, **options).add_adata(cells())


def sparse_in_memory(_: Path, **options: Any) -> Loader:
    return Loader(**SIZES, **options).add_adata(cells(is_sparse=True)).add_adata(cells(7, is_sparse=True))


def dense_on_disk(folder: Path, **options: Any) -> Loader:
    group = zarr.open_group(folder / "dense.zarr")
    ad.io.write_elem(group, "X", cells().X)
    return Loader(**SIZES, **options).add_dataset(group["X"])


def collection(folder: Path, **options: Any) -> Loader:
    if not (folder / "cells.zarr").exists():
        cells(is_sparse=True).write_h5ad(folder / "cells.h5ad")
        DatasetCollection(folder / "cells.zarr").add_adatas([folder / "cells.h5ad"], shuffle=False)
    return Loader(**SIZES, **options).use_collection(DatasetCollection(folder / "cells.zarr", mode="r"))


SOURCES: list[Callable[..., Loader]] = [in_memory, sparse_in_memory, dense_on_disk, collection]


def sampler(rank: int = 1) -> DistributedSampler:
    return DistributedSampler(RandomSampler(**SIZES), dist_info=Rank(rank, 2), seed=0)


def check_same(batches: Any, others: Any) -> None:
    """Check that two loaders yield the same batches, and more than three."""
    n_batches = 0
    for batch, other in zip_longest(batches, others):
        assert batch.keys() == other.keys()
        assert type(batch["X"]) is type(other["X"])
        dense = [each["X"].to_dense() if isinstance(each["X"], torch.Tensor) else each["X"] for each in (batch, other)]
        dense = [each.toarray() if sp.issparse(each) else np.asarray(each) for each in dense]
        np.testing.assert_array_equal(*dense)
        for name in ("obs", "var"):
            assert (batch[name] is None) == (other[name] is None)
            if batch[name] is not None:
                pd.testing.assert_frame_equal(batch[name], other[name])
        assert (batch["index"] is None) == (other["index"] is None)
        if batch["index"] is not None:
            np.testing.assert_array_equal(batch["index"], other["index"])
        n_batches += 1
    assert n_batches > 3


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("options", "prefetch"), [({}, 1), ({"return_index": True, "to": "torch"}, 0)])
def test_from_loader_yields_same_batches_as_annbatch(
    source: Callable[..., Loader], options: dict[str, Any], prefetch: int, tmp_path: Path
) -> None:
    """StatefulLoader.from_loader yields the same batches as annbatch's loader with the same sampler."""
    plain = source(tmp_path, preload_to_gpu=False, **options)
    loader = StatefulLoader.from_loader(plain, batch_sampler=sampler(), prefetch=prefetch)
    reference = source(tmp_path, preload_to_gpu=False, **options)
    reference._batch_sampler = sampler()
    assert (loader.n_obs, loader.n_var) == (plain.n_obs, plain.n_var)
    check_same(loader, reference)
    # the same from a StatefulLoader, for a different rank
    reference._batch_sampler = sampler(0)
    check_same(StatefulLoader.from_loader(loader, batch_sampler=sampler(0)), reference)


@pytest.mark.parametrize("source", SOURCES)
def test_from_loader_leaves_source_loader_unchanged(source: Callable[..., Loader], tmp_path: Path) -> None:
    """Neither loader changes when data is added to the other one."""
    plain, same = (source(tmp_path, preload_to_gpu=False, return_index=True) for _ in range(2))
    loader = StatefulLoader.from_loader(plain, batch_sampler=sampler())
    if source is in_memory:
        loader.add_adata(cells(3))
        assert (loader.n_obs, plain.n_obs) == (N_OBS + 3, N_OBS)
        plain.add_adata(cells(2))
        same.add_adata(cells(2))
        assert (loader.n_obs, plain.n_obs) == (N_OBS + 3, N_OBS + 2)
    open_iterator = iter(loader)
    next(open_iterator)
    check_same(plain, same)


def test_from_loader_copies_options() -> None:
    """Options that are not passed are copied from the source loader."""
    plain = Loader(**SIZES, return_index=True, to="torch", preload_to_gpu=False).add_adata(cells())
    ahead = StatefulLoader.from_loader(plain, batch_sampler=sampler(), prefetch=2)
    assert StatefulLoader.from_loader(ahead).batch_sampler is ahead.batch_sampler
    again = StatefulLoader.from_loader(ahead, batch_sampler=sampler())
    assert again._prefetch == 2
    check_same(ahead, again)
    other = next(iter(StatefulLoader.from_loader(ahead, prefetch=0, return_index=False, to=None)))
    assert other["index"] is None
    assert not isinstance(other["X"], torch.Tensor)


def test_from_loader_copies_unknown_attributes() -> None:
    """Attributes that a later version of annbatch adds are copied, not shared."""
    plain = Loader(**SIZES, preload_to_gpu=False).add_adata(cells())
    vars(plain)["_obsm"] = {"pca": [1]}
    loader = StatefulLoader.from_loader(plain, batch_sampler=sampler())
    again = StatefulLoader.from_loader(loader, batch_sampler=sampler())
    vars(loader)["_obsm"]["umap"] = [2]
    assert vars(plain)["_obsm"] == vars(again)["_obsm"] == {"pca": [1]}
    assert again._pass is None


class Own(Loader):
    """A subclass of annbatch's Loader."""


class OwnStateful(StatefulLoader):
    """A subclass of StatefulLoader."""


@pytest.mark.parametrize("wrong", [None, 3, "cells.zarr", Own(**SIZES, preload_to_gpu=False), [], Loader])
def test_it_is_made_of_a_loader(wrong: Any) -> None:
    with pytest.raises(TypeError, match="must be an annbatch Loader"):
        StatefulLoader.from_loader(wrong, batch_sampler=sampler())


def test_from_loader_of_subclass_makes_subclass() -> None:
    """from_loader of a subclass makes an instance of the subclass."""
    loader = OwnStateful.from_loader(Loader(**SIZES, preload_to_gpu=False).add_adata(cells()), batch_sampler=sampler())
    assert type(loader) is type(OwnStateful.from_loader(loader)) is OwnStateful
    with pytest.raises(TypeError, match="must be an annbatch Loader"):
        StatefulLoader.from_loader(loader)


@pytest.mark.parametrize("wrong", [None, RandomSampler(**SIZES), 3])
def test_its_sampler_is_a_distributed_one(wrong: Any) -> None:
    plain = Loader(**SIZES, preload_to_gpu=False).add_adata(cells())
    with pytest.raises(TypeError, match="must be a DistributedSampler"):
        StatefulLoader.from_loader(plain, batch_sampler=wrong)


@pytest.mark.filterwarnings("ignore:Adding dataset with dtype")
@given(st.lists(st.sampled_from(["float32", "float64", "int32"]), min_size=1, max_size=4), st.booleans())
def test_datasets_share_dtypes_as_in_annbatch(dtypes: list[str], is_sparse: bool) -> None:
    """A loader finds datasets of different dtypes in the same cases as annbatch, in whichever order they are added."""
    plain = Loader(**SIZES, preload_to_gpu=False)
    loader = StatefulLoader(batch_sampler=sampler(), preload_to_gpu=False)
    for dtype in dtypes:
        of_dtype = cells(is_sparse=is_sparse)
        of_dtype.X = of_dtype.X.astype(dtype)
        assert plain.add_adata(of_dtype)._dtypes_homogeneous == loader.add_adata(of_dtype)._dtypes_homogeneous


def test_private_attributes_of_annbatch_exist(tmp_path: Path) -> None:
    """If this fails, annbatch has renamed or added private attributes: see loader/_annbatch.py."""
    loader = collection(tmp_path, preload_to_gpu=False, return_index=True, to="torch")
    list(loader)
    assert shapes_of(loader) == [(N_OBS, N_VAR)]
    assert not preloads_to_gpu(loader)
    assert options_of(loader) == {"return_index": True, "preload_to_gpu": False, "to": "torch"}
    assert vars(loader).keys() == {
        "_batch_sampler",
        "_num_open_iters",
        "_return_index",
        "_preload_to_gpu",
        "_to",
        "_collection_added",
        "_dtypes_homogeneous",
        "_obs",
        "_shapes",
        "_sparse_dataset_elem_cache",
        "_train_datasets",
        "_var",
    }
