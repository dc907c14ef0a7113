"""Masks and labels with obs_names: in the order of the cells, or an error on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler

from annbatch_distributed import CellSets, DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.core.rows import Rows
from annbatch_distributed.loader import _annbatch, stateful

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"chunk_size": 4, "preload_nchunks": 2, "batch_size": 4}
DONORS = ["d1", "d2", "d3", "d4"]


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> DatasetCollection:
    """Write two datasets of cells of four donors, in a different order than in the files.

    Each donor has 20 cells, and each value of a cell is the number of its donor.
    """
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for number, donor in enumerate(DONORS, start=1):
        names = [f"{donor}-{cell}" for cell in range(20)]
        obs = pd.DataFrame({"donor": pd.Categorical([donor] * 20)}, index=names)
        paths.append(folder / f"{donor}.h5ad")
        ad.AnnData(np.full((20, 3), number, dtype="float32"), obs=obs).write_h5ad(paths[-1])
    collection = DatasetCollection(folder / "cells.zarr")
    collection.add_adatas(paths, shuffle_chunk_size=10, dataset_size=40, rng=np.random.default_rng(0))
    return collection


def in_order_of_files(obs: pd.DataFrame) -> pd.Series:
    """Flag the cells of the first donor, in the order of the files."""
    return obs.loc[[f"{donor}-{cell}" for donor in DONORS for cell in range(20)], "donor"] == "d1"


def read(collection: DatasetCollection) -> list[Any]:
    return [ad.io.read_elem(group) for group in collection]


def joined(collection: DatasetCollection) -> ad.AnnData:
    return ad.concat(read(collection))


def loader(mask: Any, rank: int = 0) -> StatefulLoader:
    sampler = DistributedSampler(RandomSampler(**SIZES), dist_info=Rank(rank, 2), seed=0, mask=mask)
    return StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)


USES: dict[str, Callable[[StatefulLoader], object]] = {
    "iter": iter,
    "len": len,
    "plan": StatefulLoader.plan,
    "check_ranks_agree": lambda given: given.check_ranks_agree(gather=lambda text: [text, text]),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("rank", [0, 1])
def test_mask_in_different_order_raises_before_reading(use: str, rank: int, shuffled: DatasetCollection) -> None:
    """A mask with obs_names in a different order raises on every rank."""
    obs = shuffled.obs()
    given = loader(in_order_of_files(obs), rank).use_collection(shuffled)
    first = f"row 0 of the collection is '{obs.index[0]}', but row 0 of mask is 'd1-0'"
    with pytest.raises(ValueError, match=r"mask\.reindex\(collection\.obs\(\)\.index\)") as raised:
        USES[use](given)
    assert "in a different order" in str(raised.value)
    assert first in str(raised.value)


def test_reordered_mask_raises_in_from_collection(shuffled: DatasetCollection) -> None:
    mask = in_order_of_files(shuffled.obs())
    with pytest.raises(ValueError, match="in a different order"):
        StatefulLoader.from_collection(shuffled, dist_info=Rank(0, 2), mask=mask)


def test_fix_in_message_selects_right_cells(shuffled: DatasetCollection) -> None:
    """The fix that the message suggests selects the right cells."""
    mask = in_order_of_files(shuffled.obs()).reindex(shuffled.obs().index)
    batches = list(loader(mask).use_collection(shuffled))
    assert {donor for batch in batches for donor in batch["obs"]["donor"]} == {"d1"}
    assert all((batch["X"] == 1).all() for batch in batches)


def without_columns(given: StatefulLoader, collection: DatasetCollection) -> StatefulLoader:
    """Copy a loader of cells without columns in obs, for which annbatch keeps no names."""
    cells = joined(collection)
    named = loader(None).add_adata(ad.AnnData(cells.X, obs=cells.obs[[]]))
    return StatefulLoader.from_loader(named, batch_sampler=given.sampler)


def in_parts(given: StatefulLoader, collection: DatasetCollection) -> StatefulLoader:
    for part in read(collection):
        given.add_dataset(part.X, part.obs)
    return given


WAYS: dict[str, Callable[[StatefulLoader, DatasetCollection], StatefulLoader]] = {
    "use_collection": lambda given, cells: given.use_collection(cells),
    "add_adata": lambda given, cells: given.add_adata(joined(cells)),
    "add_adatas": lambda given, cells: given.add_adatas(read(cells)),
    "add_dataset": in_parts,
    "add_datasets": lambda given, cells: given.add_datasets(
        [one.X for one in read(cells)], [one.obs for one in read(cells)]
    ),
    "from_loader": lambda given, cells: StatefulLoader.from_loader(
        Loader(**SIZES, preload_to_gpu=False).add_adata(joined(cells)), batch_sampler=given.sampler, return_index=True
    ),
    "from_loader of a StatefulLoader": without_columns,
}


@pytest.mark.parametrize("add", WAYS.values(), ids=WAYS)
def test_names_are_compared_however_datasets_are_added(
    add: Callable[[StatefulLoader, DatasetCollection], StatefulLoader], shuffled: DatasetCollection
) -> None:
    mask = shuffled.obs()["donor"] == "d1"
    read = [batch["index"].tolist() for batch in add(loader(mask), shuffled)]
    assert read == [batch["index"].tolist() for batch in loader(mask.to_numpy()).use_collection(shuffled)]
    with pytest.raises(ValueError, match="in a different order"):
        add(loader(in_order_of_files(shuffled.obs())), shuffled).plan()


def test_names_that_no_cell_has_are_named(shuffled: DatasetCollection) -> None:
    mask = shuffled.obs()["donor"] == "d1"
    mask.index = [*mask.index[:7], "x-1", *mask.index[8:]]
    with pytest.raises(ValueError, match=r"1 names that no cell of the collection has, such as 'x-1': row 7 of"):
        loader(mask).use_collection(shuffled).plan()


def test_names_that_repeat_are_compared_one_by_one(shuffled: DatasetCollection) -> None:
    obs = shuffled.obs()
    cells = joined(shuffled)
    cells.obs_names = [f"cell{number % 7}" for number in range(len(obs))]
    mask = cells.obs["donor"] == "d1"
    assert len(loader(mask).add_adata(cells).plan().selected) == 20
    swapped = mask.iloc[[1, 0, *range(2, len(obs))]]
    with pytest.raises(ValueError, match=r"row 0 .*'cell0'.*'cell1'.* create mask from collection\.obs\(\) itself"):
        loader(swapped).add_adata(cells).plan()


@pytest.mark.parametrize("kind", ["array", "default index", "default index of each dataset", "slice"])
def test_mask_without_names_is_by_position(kind: str, shuffled: DatasetCollection) -> None:
    flags = np.arange(80) < 40
    mask = {
        "array": flags,
        "default index": pd.Series(flags),
        "default index of each dataset": pd.Series(flags, index=[*range(40), *range(40)]),
        "slice": slice(0, 40),
    }[kind]
    assert list(loader(mask).use_collection(shuffled).plan().selected) == list(range(40))


def test_assigned_mask_is_compared(shuffled: DatasetCollection) -> None:
    """A mask that is assigned later is compared with the obs_names, too."""
    given = loader(None).use_collection(shuffled)
    assert len(given.plan().selected) == 80
    given.sampler.mask = in_order_of_files(shuffled.obs())
    with pytest.raises(ValueError, match="in a different order"):
        given.plan()


def test_mask_order_of_one_rank_raises_everywhere(shuffled: DatasetCollection) -> None:
    """If the mask of one rank is in a different order, every rank raises."""
    right = shuffled.obs()["donor"] == "d1"
    messages: list[str] = []

    def collect(text: str) -> list[str]:
        messages.append(text)
        return [text]

    wrong = loader(in_order_of_files(shuffled.obs()), rank=1).use_collection(shuffled)
    with pytest.raises(ValueError, match="different order"):
        wrong.check_ranks_agree(gather=collect)
    with pytest.raises(ValueError, match="in a different order"):
        loader(right).use_collection(shuffled).check_ranks_agree(gather=lambda text: [text, messages[0]])


def test_labels_of_a_composition_are_compared_by_name(shuffled: DatasetCollection) -> None:
    plan, obs = loader(None).use_collection(shuffled).plan(), shuffled.obs()
    assert plan.composition(obs["donor"])["rows"].sum().tolist() == [20, 20, 20, 20]
    by_position = plan.composition(obs["donor"].sort_values().to_numpy())
    assert by_position["rows"].sum().tolist() == [20, 20, 20, 20]
    with pytest.raises(ValueError, match=r"labels\.reindex\(collection\.obs\(\)\.index\)"):
        plan.composition(obs["donor"].sort_values())
    with pytest.raises(ValueError, match="index of a Series passed as labels"):
        plan.composition(obs["donor"].reset_index(drop=True).iloc[::-1])


@pytest.mark.parametrize("n_read", [3, 10])
def test_state_of_reordered_cells_names_the_cells(n_read: int, shuffled: DatasetCollection) -> None:
    """A state, of an epoch's middle or end, names the cells if a mask selects other rows in their new order."""
    cells = joined(shuffled)
    other = cells[np.random.default_rng(1).permutation(len(cells))]
    before, after = (
        loader((each.obs["donor"] != "d1").to_numpy()).add_adata(ad.AnnData(each.X, each.obs))
        for each in (cells, other)
    )
    for number, _ in enumerate(before, start=1):
        if number == n_read:
            break
    with pytest.raises(ValueError, match=r"the mask selects different rows\. .* The obs_names differ"):
        after.load_state_dict(before.state_dict())


def test_names_are_not_hashed(shuffled: DatasetCollection, monkeypatch: pytest.MonkeyPatch) -> None:
    """No argument has pandas look for something in the names of all cells, which takes memory for each of them."""
    obs = shuffled.obs(["donor"])
    weights = pd.Series(1.0, index=obs.index)
    flags = weights.cumsum() % 2 == 0
    looked_up: list[object] = []
    contains = pd.Index.__contains__

    def noted(index: pd.Index, name: object) -> bool:
        if index.equals(obs.index):
            looked_up.append(name)
        return bool(contains(index, name))

    monkeypatch.setattr(pd.Index, "__contains__", noted)
    given = StatefulLoader.from_collection(shuffled, dist_info=Rank(0, 2), mask=flags, weights=weights)
    given.plan().composition(obs["donor"])
    CellSets.from_obs(obs, by="donor", set_size=2, controls=flags, match="donor", mask=weights == 1, seed=0)
    Rows.from_indices(pd.Series(range(len(obs)), index=obs.index))
    assert looked_up == []


def test_rows_have_no_names_and_take_none() -> None:
    with pytest.raises(TypeError, match=r"got a Series with the index \['a', 'b'\].*Pass the Series itself as mask"):
        Rows.from_mask(pd.Series([True, False], index=["a", "b"]))
    assert Rows.from_mask(pd.Series([True, False])) == Rows.from_indices([0])


def test_cells_are_identified_once_per_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of cells are digested again only after a dataset was added, since progress bars call `len`."""
    digested = []

    def collection_of(loader: Any, names: Any) -> dict[str, Any]:
        digested.append(len(names))
        return _annbatch.collection_of(loader, names)

    monkeypatch.setattr(stateful, "collection_of", collection_of)
    whole = loader(None)
    states = []
    for n_datasets in (1, 2):
        whole.add_adata(ad.AnnData(np.zeros((20, 1)), obs=pd.DataFrame(index=[f"cell {n}" for n in range(20)])))
        states += [(len(whole), whole.state_dict()["identity"]) for _ in range(3)]
        assert digested == [1, 2][:n_datasets]
    assert [identity["datasets"] for _, identity in states] == [[[20, 1]]] * 3 + [[[20, 1]] * 2] * 3
    assert states[0][1]["cells"] != states[-1][1]["cells"]
