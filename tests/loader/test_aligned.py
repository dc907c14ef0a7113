"""AlignedLoader: the same cells of several modalities in each batch."""

from __future__ import annotations

import json
import multiprocessing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler

from annbatch_distributed import AlignedLoader, DistributedSampler, Rank, StatefulLoader

if TYPE_CHECKING:
    from pathlib import Path

N_OBS = 60
NAMES = [f"cell {row}" for row in range(N_OBS)]


def sampler(rank: int = 0, world_size: int = 2, **options: Any) -> DistributedSampler:
    wrapped = RandomSampler(4, 2, 4)
    return DistributedSampler(
        wrapped, **{"dist_info": Rank(rank, world_size), "seed": 0, "remainder": "exact"} | options
    )


def store(n_genes: int = 1, sizes: tuple[int, ...] = (N_OBS,), names: Any = NAMES, **options: Any) -> Loader[Any, Any]:
    """Create an annbatch Loader of datasets of these sizes, in which each value is the number of its row."""
    loader = Loader(**{"chunk_size": 4, "preload_nchunks": 2, "batch_size": 4, "preload_to_gpu": False} | options)
    bounds = np.cumsum([0, *sizes])
    for start, stop in pairwise(bounds):
        values = np.repeat(np.arange(start, stop, dtype=float)[:, None], n_genes, axis=1)
        obs = None if names is None else pd.DataFrame({"donor": np.arange(start, stop) % 3}, index=names[start:stop])
        loader.add_dataset(values, obs)
    return loader


def test_batch_has_same_cells_of_each_store() -> None:
    """Each batch has the same cells of every modality, even if the datasets and options of the modalities differ."""
    sparse = Loader(chunk_size=4, preload_nchunks=2, batch_size=4, preload_to_gpu=False, to="torch")
    sparse.add_dataset(sp.csr_matrix(np.arange(1.0, N_OBS + 1)[:, None]), pd.DataFrame(index=NAMES))
    modalities = {"rna": store(3, (20, 40), return_index=True), "protein": store(2, (7, 30, 23)), "atac": sparse}
    for prefetch in (0, 2):
        loader = AlignedLoader(modalities, batch_sampler=sampler(), prefetch=prefetch)
        alone = StatefulLoader.from_loader(store(return_index=True), batch_sampler=sampler())
        batches = list(loader)
        assert len(batches) == len(loader)
        for batch, expected in zip(batches, alone, strict=True):
            rows = expected["index"].tolist()
            assert batch["rna"]["index"].tolist() == batch["rna"]["X"][:, 0].tolist() == rows
            assert batch["protein"]["X"].tolist() == [[row, row] for row in rows]
            assert batch["protein"]["index"] is None
            assert torch.is_tensor(batch["atac"]["X"])
            assert batch["atac"]["X"].to_dense()[:, 0].tolist() == [row + 1 for row in rows]
            assert list(batch["protein"]["obs"].index) == [NAMES[row] for row in rows]


@pytest.mark.filterwarnings("ignore:About .* of the draws of a batch are copies")
def test_weights_draw_same_cells_of_each_store() -> None:
    """Both modalities yield the cells that the weights draw, as often."""
    weights = np.arange(N_OBS, dtype=float)
    loader = AlignedLoader(
        {"rna": store(3, (20, 40)), "protein": store(2)}, batch_sampler=sampler(weights=weights, num_samples=90)
    )
    pairs = [(batch["rna"]["X"][:, 0].tolist(), batch["protein"]["X"][:, 0].tolist()) for batch in loader]
    assert all(rna == protein for rna, protein in pairs)
    expected = loader.sampler.rows_of(N_OBS, slice(None), ranks=loader.sampler.rank)["row"]
    assert [row for rna, _ in pairs for row in rna] == expected.tolist()


def test_loaders_of_modalities_give_data_and_options() -> None:
    """An AlignedLoader takes the data and options of loaders, ignores their samplers and leaves them unchanged."""
    rna = StatefulLoader.from_loader(store(), batch_sampler=sampler(1), prefetch=1, return_index=True)
    next(iter(rna))
    state = rna.state_dict()
    loader = AlignedLoader({"rna": rna, "protein": store(2)}, batch_sampler=sampler(0))
    assert loader.prefetch == 1
    assert [batch["rna"]["index"].tolist() for batch in loader] == [
        batch["protein"]["X"][:, 0].tolist() for batch in AlignedLoader({"protein": store()}, batch_sampler=sampler(0))
    ]
    assert rna.state_dict() == state
    assert loader.modalities["protein"].n_var == 2


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"sizes": (N_OBS - 1,)}, "rna has 60 cells and protein has 59"),
        ({"names": NAMES[::-1]}, "row 0 is 'cell 0' in rna and 'cell 59' in protein"),
        (
            {"names": [*NAMES[:41], "x", *NAMES[42:]], "sizes": (10, 50)},
            "row 41 is 'cell 41' in rna and 'x' in protein",
        ),
    ],
)
def test_different_cells_are_named(other: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"but {problem}"):
        AlignedLoader({"rna": store(sizes=(33, 27)), "protein": store(**other)}, batch_sampler=sampler())


def test_cells_without_names_are_compared_by_number() -> None:
    with pytest.warns(UserWarning, match="cells of image have no names"):
        loader = AlignedLoader({"image": store(names=None), "rna": store()}, batch_sampler=sampler())
    assert loader.cells_of(0, "donor", ranks=0)["cell"].notna().all()
    with pytest.raises(ValueError, match="rna has 60 cells and image has 59"):
        AlignedLoader({"image": store(names=None, sizes=(59,)), "rna": store()}, batch_sampler=sampler())


def test_arguments_of_an_aligned_loader_are_checked() -> None:
    for modalities, batch_sampler, error, message in (
        ({}, sampler(), ValueError, "at least one modality, got none"),
        ({"rna": store()}, RandomSampler(4, 2, 4), TypeError, "must be a DistributedSampler"),
        ({"rna": [1, 2]}, sampler(), TypeError, "must be an annbatch Loader"),
        ({"source": store()}, sampler(), ValueError, "must not have the name 'source'"),
    ):
        with pytest.raises(error, match=message):
            AlignedLoader(modalities, batch_sampler=batch_sampler)
    with pytest.raises(ValueError, match="at least one modality, got none"):
        AlignedLoader.from_collections({}, dist_info=Rank(0, 1))
    mask = pd.Series(True, index=NAMES[::-1])
    with pytest.raises(ValueError, match="in a different order"):
        AlignedLoader({"rna": store()}, batch_sampler=sampler(mask=mask))


def test_state_is_of_all_modalities() -> None:
    """A state of different modalities, or of different cells, is refused."""
    loader = AlignedLoader({"rna": store(3), "protein": store(2)}, batch_sampler=sampler())
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["identity"]["datasets"] == {"rna": [[60, 3]], "protein": [[60, 2]]}
    swapped = AlignedLoader({"protein": store(2), "rna": store(3)}, batch_sampler=sampler())
    swapped.load_state_dict(state)
    for modalities, difference in (
        ({"rna": store(3), "protein": store(4)}, "datasets.protein"),
        ({"rna": store(3)}, "datasets.protein"),
        ({name: store(n, names=NAMES[::-1]) for name, n in (("rna", 3), ("protein", 2))}, "cells.digest"),
    ):
        other = AlignedLoader(modalities, batch_sampler=sampler())
        with pytest.raises(ValueError, match=difference):
            other.load_state_dict(state)


def test_rows_are_known_from_any_store() -> None:
    """check_epoch_read needs return_index in only one of the modalities."""
    modalities = {"rna": store(), "protein": store(return_index=True)}
    loader = AlignedLoader(modalities, batch_sampler=sampler(0, 1))
    batches = loader.to_dataloader(num_workers=1, multiprocessing_context="fork", persistent_workers=False)
    assert len(list(batches)) == len(loader)
    assert "Each of the 60 rows was read once" in batches.check_epoch_read()


@pytest.fixture(scope="module")
def multiome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two collections of the same cells in the same order; the first has the proteins in obsm, too."""
    folder = tmp_path_factory.mktemp("multiome")
    rng = np.random.default_rng(0)
    n_obs = 3_000
    obs = pd.DataFrame(index=[f"cell {row}" for row in range(n_obs)])
    numbers = np.arange(1, n_obs + 1, dtype="float32")[:, None]
    rna = ad.AnnData(sp.csr_matrix(numbers * (rng.random((n_obs, 20)) < 0.5)), obs=obs)
    rna.obsm["protein"] = numbers
    protein = ad.AnnData(np.repeat(numbers, 3, axis=1), obs=obs)
    for name, cells in (("rna", rna), ("protein", protein)):
        cells.write_h5ad(folder / f"{name}.h5ad")
        written = DatasetCollection(folder / f"{name}.zarr")
        written.add_adatas([folder / f"{name}.h5ad"], rng=np.random.default_rng(0), dataset_size=1_250)
    return folder


def collections(folder: Path) -> dict[str, DatasetCollection]:
    return {name: DatasetCollection(folder / f"{name}.zarr", mode="r") for name in ("rna", "protein")}


@pytest.mark.filterwarnings("ignore:Only `X`")
def test_collections_are_aligned_with_sizes_that_fit(multiome: Path) -> None:
    rows: list[float] = []
    for rank in range(2):
        options = {"dist_info": Rank(rank, 2), "batch_size": 100, "seed": 1}
        loader = AlignedLoader.from_collections(collections(multiome), **options)
        for batch in loader:
            numbers = batch["protein"]["X"][:, 0]
            assert (batch["rna"]["X"].max(axis=1).toarray()[:, 0] == numbers).all()
            rows += numbers.tolist()
        half = AlignedLoader.from_collections(collections(multiome), memory=1 << 17, **options)
        alone = StatefulLoader.from_collection(collections(multiome)["rna"], memory=1 << 17, **options)
        requests = [each.plan()._rows_held or 0 for each in (half, alone, loader)]
        assert 0 < requests[0] < requests[1] <= requests[2]
    assert sorted(rows) == list(range(1, 3_001))


def load_protein(group: Any) -> ad.AnnData:
    return ad.AnnData(group["obsm/protein"], obs=ad.io.read_elem(group["obs"]))


@pytest.mark.filterwarnings("ignore:Only `X`")
def test_one_collection_is_several_modalities(multiome: Path) -> None:
    both = {"rna": (collection := collections(multiome)["rna"]), "protein": collection}
    loader = AlignedLoader.from_collections(both, load_adata={"protein": load_protein}, dist_info=Rank(0, 1))
    for batch in loader:
        assert (batch["rna"]["X"].max(axis=1).toarray()[:, 0] == batch["protein"]["X"][:, 0]).all()
    with pytest.raises(ValueError, match="names of modalities, rna, protein, got atac"):
        AlignedLoader.from_collections(both, load_adata={"atac": load_protein}, dist_info=Rank(0, 1))


@pytest.mark.filterwarnings("ignore:Only `X`")
def test_spawned_workers_read_aligned_modalities(multiome: Path) -> None:
    loader = AlignedLoader.from_collections(collections(multiome), dist_info=Rank(0, 1), return_index=True)
    batches = loader.to_dataloader(num_workers=1, multiprocessing_context=multiprocessing.get_context("spawn"))
    rows = [batch["rna"]["index"] for batch in batches]
    assert sorted(np.concatenate(rows).tolist()) == list(range(3_000))
    assert "Each of the 3,000 rows was read once" in batches.check_epoch_read()
