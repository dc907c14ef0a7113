"""Loaders of sets of cells: the contents of their batches."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler

from annbatch_distributed import AlignedLoader, CellSets, DistributedSampler, MixedLoader, Rank, StatefulLoader
from tests.meeting import verdict

if TYPE_CHECKING:
    from pathlib import Path

SIZE, N_LINES, N_DRUGS, N_EACH = 8, 3, 4, 41
N_CELLS = N_LINES * N_DRUGS * N_EACH


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> DatasetCollection:
    """Write two shuffled datasets of 3 lines x 4 drugs (one is DMSO), with 41 cells of each.

    Each value of a cell is the number of the cell.
    """
    folder: Path = tmp_path_factory.mktemp("cells")
    obs = pd.DataFrame(
        {
            "line": np.repeat([*"ABC"], N_CELLS // N_LINES),
            "drug": np.tile(np.repeat(["DMSO", "x", "y", "z"], N_EACH), N_LINES),
        },
        index=[f"cell {number}" for number in range(N_CELLS)],
    )
    cells = ad.AnnData(np.repeat(np.arange(N_CELLS, dtype=np.float32)[:, None], 2, axis=1), obs=obs)
    cells.write_h5ad(folder / "cells.h5ad")
    written = DatasetCollection(folder / "cells.zarr").add_adatas(
        [folder / "cells.h5ad"], shuffle=True, rng=np.random.default_rng(0), dataset_size=300, shuffle_chunk_size=20
    )
    assert len([*written]) == 2
    return DatasetCollection(folder / "cells.zarr", mode="r")


def sets_of(collection: DatasetCollection, **options: Any) -> CellSets:
    defaults = {
        "by": ["line", "drug"],
        "set_size": SIZE,
        "chunk_size": 4,
        "controls": {"drug": "DMSO"},
        "match": ["line"],
    }
    return CellSets.from_obs(collection.obs(["line", "drug"]), **defaults | options)


def ranks(
    collection: DatasetCollection, n_ranks: int = 2, remainder: str = "drop", **options: Any
) -> list[StatefulLoader]:
    sets = sets_of(collection, remainder=remainder)
    defaults = {"batch_size": 2, "return_index": True, "sets": sets, "names": True}
    return [
        StatefulLoader.from_collection(collection, dist_info=Rank(rank, n_ranks), **defaults | options)
        for rank in range(n_ranks)
    ]


@pytest.mark.parametrize("remainder", ["drop", "keep", "pad"])
def test_batch_alternates_sets_and_controls(collection: DatasetCollection, remainder: str) -> None:
    """A batch has its first set, the controls of that set, its second set, and so on."""
    treated, n_batches = list[str](), 0
    for loader in ranks(collection, remainder=remainder):
        for batch in loader:
            obs, number, is_control = batch["obs"], batch["set"], batch["is_control"]
            n_batches += 1
            # values and obs are of the same cells
            assert [f"cell {int(value)}" for value in batch["X"][:, 0]] == obs.index.tolist()
            assert ("repeated" in batch) == (remainder == "pad")
            for which in range(number.max() + 1):
                is_here = number == which
                n_each = is_here.sum() // 2
                assert n_each == SIZE or (remainder == "keep" and n_each == N_EACH % SIZE)
                assert is_control[is_here].tolist() == [False] * n_each + [True] * n_each
                own, controls = obs[is_here & ~is_control], obs[is_here & is_control]
                assert len(own[["line", "drug"]].drop_duplicates()) == 1
                assert set(controls["drug"]) == {"DMSO"}
                assert set(controls["line"]) == set(own["line"])
            is_first = ~is_control & ~batch.get("repeated", np.zeros(len(obs), dtype=bool))
            treated += obs.index[is_first].tolist()
    n_sets = {"drop": N_EACH // SIZE}.get(remainder, -(-N_EACH // SIZE)) * N_LINES * (N_DRUGS - 1)
    assert n_batches == 2 * -(-n_sets // 4)
    expected = n_sets * SIZE if remainder == "drop" else N_EACH * N_LINES * (N_DRUGS - 1)
    assert len(treated) == len(set(treated)) == expected


def test_sets_can_be_reshaped(collection: DatasetCollection) -> None:
    for loader in ranks(collection, to="torch"):
        for batch in loader:
            n_sets = batch["set"].max() + 1
            x = batch["X"].reshape(n_sets, 2, SIZE, -1)  # set, (treated, control), cell, gene
            drugs = batch["obs"]["drug"].to_numpy().reshape(n_sets, 2, SIZE)
            assert (drugs[:, 1] == "DMSO").all()
            assert (drugs[:, 0] == drugs[:, 0, :1]).all()
            assert x.shape == (n_sets, 2, SIZE, 2)


def test_sets_are_reassigned_in_each_epoch(collection: DatasetCollection) -> None:
    loaders = ranks(collection)
    of_rank_0 = []
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        cells = loaders[0].cells_of(slice(None), "drug")
        assert [*cells] == ["step", "rank", "row", "set", "is_control", "dataset", "cell", "drug"]
        own = cells[~cells["is_control"]]
        assert not own["cell"].duplicated().any()
        of_rank_0.append({*own[own["rank"] == 0]["cell"]})
        for rank, loader in enumerate(loaders):
            for step, batch in enumerate(loader):
                here = cells[(cells["step"] == step) & (cells["rank"] == rank)]
                assert here["row"].tolist() == batch["index"].tolist()
                assert here["set"].tolist() == batch["set"].tolist()
                assert here["is_control"].tolist() == batch["is_control"].tolist()
    assert of_rank_0[0] != of_rank_0[1]
    assert loaders[0].cells_of([]).empty


def test_epoch_of_sets_is_checked_by_its_cells(collection: DatasetCollection) -> None:
    loaders = ranks(collection)
    for loader in loaders:
        assert sum(1 for _ in loader) == len(loader)
    assert set(verdict(loaders)) == {
        "epoch 0: 2 ranks have read 720 rows in 24 batches, as planned. Each of the 45 sets was read once"
    }
    (loader,) = ranks(collection, 1)
    read = [batch["index"] for batch in loader]
    read[3][0] += 1
    with pytest.raises(ValueError, match="720 rows in 23 batches as planned, but different rows"):
        loader.check_epoch_read(read)


def test_annbatchs_loader_reads_sets_without_marks(collection: DatasetCollection) -> None:
    """annbatch's Loader reads the same cells as a StatefulLoader, without the keys that mark them."""
    sampler = DistributedSampler(RandomSampler(1, 8, 4), dist_info=Rank(0, 2), sets=sets_of(collection), seed=0)
    options: dict[str, Any] = {"return_index": True, "preload_to_gpu": False}
    theirs = Loader(batch_sampler=copy.deepcopy(sampler), **options).use_collection(collection)
    ours = StatefulLoader(batch_sampler=sampler, **options).use_collection(collection)
    for one, other in zip(theirs, ours, strict=True):
        assert one["index"].tolist() == other["index"].tolist()
        assert other.keys() - one.keys() == {"set", "is_control"}
    assert "sets=<CellSets: 45 sets of 9 groups, 8 cells and 8 controls each>" in repr(sampler)
    wrong: Any
    for wrong in (collection.obs(["drug"]), "sets"):
        with pytest.raises(TypeError, match=r"sets must be CellSets, got .* Create them with CellSets.from_obs"):
            StatefulLoader.from_collection(collection, dist_info=Rank(0, 2), sets=wrong)


def test_mixture_lists_sets_of_its_sources(collection: DatasetCollection) -> None:
    """cells_of a mixture lists sets for the sources that have sets."""
    plain = StatefulLoader.from_collection(collection, dist_info=Rank(0, 2))
    mixture = MixedLoader({"sets": ranks(collection)[0], "cells": plain}, weights={"sets": 1, "cells": 1}, n_steps=4)
    cells = mixture.cells_of(slice(None), "drug")
    assert cells.loc[cells["source"] == "cells", "set"].isna().all()
    assert (cells[(cells["source"] == "sets") & cells["is_control"]]["drug"] == "DMSO").all()


def test_sets_of_aligned_modalities(collection: DatasetCollection) -> None:
    loader = AlignedLoader.from_collections(
        {"rna": collection, "protein": collection}, sets=sets_of(collection), dist_info=Rank(0, 2), batch_size=2
    )
    for batch in loader:
        for name in ("set", "is_control"):
            assert batch["rna"][name].tolist() == batch["protein"][name].tolist()
        assert batch["rna"]["X"].tolist() == batch["protein"]["X"].tolist()
        assert len(batch["rna"]["set"]) in (2 * SIZE, 4 * SIZE)


def test_sizes_follow_from_memory(collection: DatasetCollection) -> None:
    """Load requests fit into the memory, including rows in gaps.

    A row of 2 values has 8 bytes, and takes 4 times as much memory while it is read.
    """
    for max_gap in (0, 3, 64):
        sizes = []
        for n_rows in (300, 10_000):
            (loader,) = ranks(collection, 1, memory=n_rows * 8 * 4, max_gap=max_gap)
            requests = list(loader.sampler.sample(N_CELLS))
            sizes.append(max(sum(part.stop - part.start for part in request["requests"]) for request in requests))
            assert sizes[-1] <= 1.3 * n_rows
        assert 150 < sizes[0] < sizes[1]
    # a set may have 400 cells, but a group has only 41
    bags = sets_of(collection, set_size=400, remainder="keep")
    (loader,) = ranks(collection, 1, sets=bags, batch_size=1, memory=300 * 8 * 4, max_gap=0)
    assert loader.plan()._rows_held == 2 * 3
    assert ranks(collection, 1, memory=40 * 8 * 4, max_gap=0)[0].plan().rows_in_memory is None
    message = "one batch read .* rows, .* --group-by.* or max_gap=0"
    with pytest.raises(ValueError, match=message):
        ranks(collection, 1, memory=40 * 8 * 4)
    with pytest.raises(ValueError, match=r"can't be combined with sets, .*CellSets.from_obs\(mask="):
        ranks(collection, 1, mask=slice(0, 10))
