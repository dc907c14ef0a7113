"""Labels of batches: those of pandas at the rows of the batch, in little memory, or an error."""

from __future__ import annotations

import pickle
import tracemalloc
from itertools import islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import AlignedLoader, CellSets, DistributedSampler, MixedLoader, Rank, StatefulLoader
from annbatch_distributed.collect import collect
from annbatch_distributed.loader.labels import Names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Numbers of cells of the files.
N_CELLS = 2_600, 1_700
RNG = np.random.default_rng(0)


def labels_of(n_cells: int, first: int) -> pd.DataFrame:
    """Make a column of each kind that ``collect`` writes."""
    numbers, is_missing = RNG.integers(0, 100, n_cells), RNG.random(n_cells) < 0.2
    return pd.DataFrame(
        {
            "donor": pd.Categorical([f"donor {number % 7}" for number in numbers]),
            "gap": pd.Categorical.from_codes(np.where(is_missing, -1, numbers % 3), ["ä", "b", "c"]),
            "stage": pd.Categorical.from_codes(numbers % 3, ["low", "mid", "high"], ordered=True),
            # codes of two bytes
            "clone": pd.Categorical([f"clone {number}" for number in np.arange(n_cells) % 300]),
            **{dtype: numbers.astype(dtype) for dtype in ("int8", "uint16", "int32", "int64", "float32", "float64")},
            "none": pd.Categorical([None] * n_cells),
            "nan": np.where(is_missing, np.nan, numbers),
            "flag": is_missing,
            "Int64": pd.array(np.where(is_missing, 2**60, numbers), dtype="Int64"),
            "boolean": pd.array(numbers > 50, dtype="boolean"),
        },
        index=[f"cell-{first + cell}" + "é" * (cell % 3) for cell in range(n_cells)],
    ).assign(
        Int64=lambda obs: obs["Int64"].mask(is_missing, pd.NA),
        boolean=lambda obs: obs["boolean"].mask(is_missing, pd.NA),
    )


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> DatasetCollection:
    """Collect two files to several datasets; each cell's value is the number in its name."""
    folder, first, paths = tmp_path_factory.mktemp("labels"), 0, []
    for n_cells in N_CELLS:
        obs = labels_of(n_cells, first)
        values = sp.csr_matrix((np.arange(first, first + n_cells) + 1.0)[:, None] * np.ones((1, 20)))
        paths.append(folder / f"{first}.h5ad")
        ad.AnnData(values.astype("float32"), obs=obs).write_h5ad(paths[-1])
        first += n_cells
    made = collect(paths, folder / "cells.zarr", memory="1MB", tell=lambda _: None)
    assert len(list(made)) > 2
    return made


def whole(collection: DatasetCollection) -> pd.DataFrame:
    """Read all labels by anndata."""
    return pd.concat([ad.io.read_elem(group["obs"]) for group in collection])


@pytest.fixture(scope="module")
def obs(collection: DatasetCollection) -> pd.DataFrame:
    return whole(collection)


def sampler(**options: Any) -> DistributedSampler:
    return DistributedSampler(
        RandomSampler(16, 8, 64), **{"dist_info": Rank(0, 1), "seed": 0, "remainder": "exact"} | options
    )


def loader(collection: DatasetCollection, *, names: bool = False, **options: Any) -> StatefulLoader:
    made = StatefulLoader(batch_sampler=sampler(**options), return_index=True, preload_to_gpu=False)
    return made.use_collection(collection, names=names)


def check(batches: Any, expected: pd.DataFrame, *, names: bool = False) -> None:
    """Compare the labels of batches with those of all cells; at least one batch."""
    batch = None
    for batch in batches:
        rows = np.asarray(batch["index"])
        own = expected.iloc[rows]
        pd.testing.assert_frame_equal(batch["obs"], own if names else own.set_axis(pd.Index(rows)))
    assert batch is not None


def of_sets(collection: DatasetCollection) -> StatefulLoader:
    obs = whole(collection)
    sets = CellSets.from_obs(obs, by="donor", set_size=4, chunk_size=2, seed=0, controls={"stage": "low"})
    return loader(collection, sets=sets)


def weighted(collection: DatasetCollection) -> StatefulLoader:
    return loader(collection, weights=collection.obs(["float32"])["float32"] + 1, num_samples=2_000)


def masked(collection: DatasetCollection) -> StatefulLoader:
    return loader(collection, mask=collection.obs(["donor"])["donor"] == "donor 3")


def resumed(collection: DatasetCollection) -> StatefulLoader:
    before = loader(collection, dist_info=Rank(0, 2))
    _ = [*islice(before, 5)]
    after = loader(collection, dist_info=Rank(1, 3))
    after.load_state_dict(before.state_dict())
    return after


def aligned(collection: DatasetCollection) -> Any:
    made = AlignedLoader.from_collections(
        {"rna": collection, "other": collection}, dist_info=Rank(0, 1), batch_size=32, return_index=True
    )
    return (batch[name] for batch in made for name in batch)


def mixed(collection: DatasetCollection) -> Any:
    sources = {name: loader(collection, seed=seed) for seed, name in enumerate("ab")}
    return MixedLoader(sources, weights={"a": 1, "b": 1}, n_steps=40, seed=0)


def workers(collection: DatasetCollection) -> Any:
    return loader(collection).to_dataloader(
        num_workers=2, multiprocessing_context="fork", persistent_workers=False, timeout=120
    )


def prefetching(collection: DatasetCollection) -> StatefulLoader:
    return StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), return_index=True, prefetch=2)


def copied(collection: DatasetCollection) -> StatefulLoader:
    return StatefulLoader.from_loader(loader(collection), return_index=True)


def pickled(collection: DatasetCollection) -> StatefulLoader:
    made = loader(collection)
    next(iter(made))
    copy: StatefulLoader = pickle.loads(pickle.dumps(made))
    return copy


KINDS: list[Callable[[DatasetCollection], Any]] = [
    loader, of_sets, weighted, masked, resumed, aligned, mixed, workers, prefetching, copied, pickled,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_those_of_pandas(
    kind: Callable[[DatasetCollection], Any], collection: DatasetCollection, obs: pd.DataFrame
) -> None:
    check(kind(collection), obs)


def test_names_are_the_index_where_they_are_asked_for(collection: DatasetCollection) -> None:
    theirs = Loader(batch_sampler=sampler(), preload_to_gpu=False).use_collection(collection)
    batches = zip(loader(collection, names=True), theirs, strict=True)
    for ours, their in batches:
        pd.testing.assert_frame_equal(ours["obs"], their["obs"])
        pd.testing.assert_frame_equal(ours["var"], their["var"])


def test_each_batch_has_the_labels_of_its_values(collection: DatasetCollection) -> None:
    for batch in loader(collection, names=True):
        values = batch["X"][:, 0].toarray().ravel()
        assert [f"cell-{value - 1:.0f}" for value in values] == [name.rstrip("é") for name in batch["obs"].index]


def test_labels_are_not_in_memory(tmp_path: Path) -> None:
    """Names and 14 columns, which take 76 bytes a cell there: below 20, with the chunks of the cells and the peak."""
    peaks = []
    for n_cells in (4_000, 4_000, 24_000):  # imports and caches are of the first one
        path = tmp_path / f"{n_cells}.zarr"
        if not path.exists():
            obs = labels_of(1_000, 0)
            obs = obs.iloc[np.arange(n_cells) % 1_000].set_axis([f"cell-{cell:020d}" for cell in range(n_cells)])
            values = sp.csr_matrix((np.ones(n_cells, "float32"), (np.arange(n_cells), np.zeros(n_cells, int))))
            ad.AnnData(values, obs=obs).write_h5ad(tmp_path / "cells.h5ad")
            collect(tmp_path / "cells.h5ad", path, tell=lambda _: None)
        written = DatasetCollection(zarr.open_group(path, mode="r"))
        tracemalloc.start()
        share = DistributedSampler(RandomSampler(64, 8, 128), dist_info=Rank(0, 2), seed=0)
        made = StatefulLoader(batch_sampler=share, preload_to_gpu=False).use_collection(written, names=False)
        assert len([*islice(made, 15)]) == 15
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 20 * 20_000  # it is below 5, but coverage allocates, too


def test_cells_of_has_names_and_columns(collection: DatasetCollection, obs: pd.DataFrame) -> None:
    made = loader(collection)
    cells = made.cells_of([0, 40], ["donor", "Int64"])
    assert cells["cell"].tolist() == obs.index[cells["row"]].tolist()
    expected = obs[["donor", "Int64"]].iloc[cells["row"]].set_axis(cells.index)
    pd.testing.assert_frame_equal(cells[["donor", "Int64"]], expected)
    with pytest.raises(KeyError, match=r"no columns tissue in obs. It has donor, gap"):
        made.cells_of(0, "tissue")


def test_identity_is_that_of_names_in_memory(collection: DatasetCollection) -> None:
    """A state of a loader with labels in memory resumes with labels that aren't."""
    held = StatefulLoader(batch_sampler=sampler(), preload_to_gpu=False)
    held.use_collection(collection, load_adata=ad.io.read_elem)
    assert loader(collection)._collection == held._collection


@pytest.mark.parametrize("column", ["donor/codes", "Int64/mask", "float64", "_index"])
def test_flipped_bit_raises_before_the_batch(column: str, tmp_path: Path) -> None:
    ad.AnnData(np.ones((2_600, 3), "float32"), obs=labels_of(2_600, 0)).write_h5ad(tmp_path / "cells.h5ad")
    made = loader(collect(tmp_path / "cells.h5ad", tmp_path / "cells.zarr", tell=lambda _: None), names=True)
    (file,) = (tmp_path / "cells.zarr" / "dataset_0" / "obs" / column / "c").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2 - 500] ^= 4
    file.write_bytes(content)
    seen, batches = set[int](), iter(made)
    message = rf"{file} is damaged: chunk \d+: its checksum is wrong. It has .* cells"
    with pytest.raises(OSError, match=message) as info:  # noqa: PT012 in any of the batches
        while True:
            seen |= {*next(batches)["index"].tolist()}
    chunk = int(str(info.value).split("chunk ")[1].split(":")[0])
    size = 256 if column == "_index" else 1_024
    assert not seen & {*range(chunk * size, (chunk + 1) * size)}


def test_error_of_damaged_pointers_names_cells_that_there_are(tmp_path: Path) -> None:
    """indptr has an entry more than cells: here, it is alone in the last chunk."""
    obs = pd.DataFrame({"depth": np.ones(1_024)}, index=[f"cell {cell}" for cell in range(1_024)])
    ad.AnnData(sp.csr_matrix(np.eye(1_024, dtype="float32")), obs=obs).write_h5ad(tmp_path / "cells.h5ad")
    made = loader(collect(tmp_path / "cells.h5ad", tmp_path / "cells.zarr", tell=lambda _: None))
    file = tmp_path / "cells.zarr" / "dataset_0" / "X" / "indptr" / "c" / "0"
    content = bytearray(file.read_bytes())
    content[4 * 1_024 + 4] ^= 1
    file.write_bytes(content)
    with pytest.raises(OSError, match=f"{file} is damaged: chunk 1: .* of the cells 1023 of dataset 0"):
        list(made)


@pytest.mark.parametrize("array", ["obs/donor/categories", "var/_index"])
def test_flipped_bit_of_categories_and_genes_raises(array: str, tmp_path: Path) -> None:
    ad.AnnData(np.ones((100, 3), "float32"), obs=labels_of(100, 0)).write_h5ad(tmp_path / "cells.h5ad")
    written = collect(tmp_path / "cells.h5ad", tmp_path / "cells.zarr", tell=lambda _: None)
    file = tmp_path / "cells.zarr" / "dataset_0" / array / "c" / "0"
    content = bytearray(file.read_bytes())
    content[8] ^= 1
    file.write_bytes(content)
    with (
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}),  # which doesn't verify it
        pytest.raises(OSError, match=f"{file} is damaged: chunk 0: its checksum is wrong"),
    ):
        loader(written)


def test_column_that_is_written_again_in_another_form_raises(tmp_path: Path) -> None:
    obs = pd.DataFrame({"depth": np.arange(3_000.0)}, index=[f"cell {cell}" for cell in range(3_000)])
    ad.AnnData(np.ones((3_000, 3), "float32"), obs=obs).write_h5ad(tmp_path / "cells.h5ad")
    made = loader(collect(tmp_path / "cells.h5ad", tmp_path / "cells.zarr", tell=lambda _: None))
    next(iter(made))
    file = tmp_path / "cells.zarr" / "dataset_0" / "obs" / "depth" / "c" / "0"
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(OSError, match="depth/c/0 is damaged: chunk 0: it isn't stored"):
        list(made)
    file.write_bytes(content[:-1])
    with pytest.raises(OSError, match=r"damaged, or was written again .* the checksum of its index is wrong"):
        list(made)
    file.write_bytes(content)
    check(made, whole(DatasetCollection(zarr.open_group(tmp_path / "cells.zarr", mode="r"))))


def in_memory(collection: DatasetCollection, *, names: bool) -> StatefulLoader:
    made = loader(collection, names=names)
    assert made._labels is None
    return made


def test_labels_of_other_collections_are_those_of_annbatch(tmp_path: Path) -> None:
    obs = labels_of(300, 0).assign(text=[f"text {cell}" for cell in range(300)])
    ad.AnnData(np.ones((300, 3), "float32"), obs=obs).write_h5ad(tmp_path / "cells.h5ad")
    written = DatasetCollection(tmp_path / "cells.zarr").add_adatas(
        [tmp_path / "cells.h5ad"], dataset_size=150, shuffle_chunk_size=50
    )
    theirs = Loader(batch_sampler=sampler(), preload_to_gpu=False, return_index=True).use_collection(written)
    made, n_cells = in_memory(written, names=False), 0
    for named, numbered, their in zip(in_memory(written, names=True), made, theirs, strict=True):
        pd.testing.assert_frame_equal(named["obs"], their["obs"])
        pd.testing.assert_frame_equal(numbered["obs"], their["obs"].set_axis(pd.Index(their["index"])))
        n_cells += len(their["obs"])
    assert n_cells == 300
    row = made.cells_of(0)
    assert row["cell"].tolist() == whole(written).index[row["row"]].tolist()


def joined(folder: Path, tables: list[pd.DataFrame]) -> DatasetCollection:
    """Join datasets that were collected one by one, as another tool may; they have one ``src_path``."""
    for number, obs in enumerate(tables):
        ad.AnnData(np.ones((len(obs), 3), "float32"), obs=obs).write_h5ad(folder / "cells.h5ad")
        collect(folder / "cells.h5ad", folder / f"{number}.zarr", tell=lambda _: None)
        if number:
            (folder / f"{number}.zarr" / "dataset_0").rename(folder / "0.zarr" / f"dataset_{number}")
    return opened_again(folder / "0.zarr")


def opened_again(path: Path) -> DatasetCollection:
    """Open a collection that was changed by hand."""
    for dataset in path.glob("dataset_*"):
        zarr.consolidate_metadata(str(dataset))
    (path / "zarr.json").unlink()
    zarr.open_group(path, mode="a")
    return DatasetCollection(zarr.open_group(path, mode="r"))


def kinds(*labels: str, ordered: bool = False) -> dict[str, Any]:
    return {"kind": pd.Categorical(["a", "b"] * 40, labels, ordered=ordered)}


#: Columns of two datasets whose labels can't be put together as they are stored.
DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "categories": [kinds("a", "b", "c"), kinds("a", "b", "d")],
    "order of categories": [kinds("a", "b"), kinds("b", "a")],
    "ordered": [kinds("a", "b"), kinds("a", "b", ordered=True)],
    "dtype": [{"kind": np.arange(80)}, {"kind": np.arange(80) / 2}],
    "order of columns": [kinds("a", "b") | {"depth": 1.0}, {"depth": 1.0} | kinds("a", "b")],
}


@pytest.mark.parametrize("difference", [None, *DIFFERENT])
def test_labels_that_differ_among_datasets_are_in_memory(difference: str | None, tmp_path: Path) -> None:
    """As pandas joins them."""
    columns = [kinds("a", "b")] * 2 if difference is None else DIFFERENT[difference]
    tables = [pd.DataFrame(own, index=[f"{number}-{cell}" for cell in range(80)]) for number, own in enumerate(columns)]
    written = joined(tmp_path, tables)
    made = loader(written, names=True)
    assert (made._labels is None) == (difference is not None)
    check(made, whole(written), names=True)


@pytest.mark.parametrize(("longest", "names"), [(0, True), (1, False)])
@pytest.mark.parametrize("is_in_memory", [False, True])
def test_datasets_may_have_more_categories(longest: int, names: bool, is_in_memory: bool, tmp_path: Path) -> None:
    """Labels have the categories of the dataset with most of them, if all others have the first of these."""
    tables = [pd.DataFrame(kinds("a", "b"), index=[f"{number}-{cell}" for cell in range(80)]) for number in range(2)]
    tables[longest]["kind"] = pd.Categorical([*"abcd"] * 20, [*"abcd"])
    if is_in_memory:
        tables = [table.assign(depth=depth) for table, depth in zip(tables, (1, 0.5), strict=True)]
    written = joined(tmp_path, tables)
    kind_of, n_cells = pd.concat([table["kind"].astype(object) for table in tables]), 0
    made = loader(written, names=names)
    assert (made._labels is None) == is_in_memory
    for batch in made:
        obs = batch["obs"]
        assert obs["kind"].cat.categories.tolist() == [*"abcd"]
        cells = obs.index if names else whole(written).index[obs.index]
        assert obs["kind"].tolist() == kind_of[cells].tolist()
        n_cells += len(obs)
    assert n_cells == 160


def test_names_that_are_only_read_together_are_in_memory(tmp_path: Path) -> None:
    """All names of a dataset would be read for each load request; without names, labels are read with the rows."""
    ad.AnnData(np.ones((100, 3), "float32"), obs=labels_of(100, 0)).write_h5ad(tmp_path / "cells.h5ad")
    collect(tmp_path / "cells.h5ad", tmp_path / "cells.zarr", tell=lambda _: None)
    obs: Any = zarr.open_group(tmp_path / "cells.zarr" / "dataset_0" / "obs", mode="a", use_consolidated=False)
    names = ad.io.read_elem(obs).index
    del obs["_index"]
    with ad.settings.override(allow_write_nullable_strings=True):
        ad.io.write_elem(obs, "_index", pd.array(names, dtype="string"))
    written = opened_again(tmp_path / "cells.zarr")
    check(in_memory(written, names=True), whole(written), names=True)
    made = loader(written, names=False)
    assert made._labels is not None
    check(made, whole(written))
    cells = made.cells_of(0)
    assert cells["cell"].tolist() == names[cells["row"]].tolist()


def test_columns_of_different_chunks_are_in_memory(tmp_path: Path) -> None:
    obs = pd.DataFrame({"depth": np.arange(3_000.0), "age": 3}, index=[f"cell {cell}" for cell in range(3_000)])
    written = joined(tmp_path, [obs])
    group: Any = zarr.open_group(tmp_path / "0.zarr" / "dataset_0" / "obs", mode="a", use_consolidated=False)
    attributes = {**group["depth"].attrs}
    depth = group.create_array(
        "depth", shape=3_000, dtype="f8", chunks=512, shards=3_072, compressors=None, overwrite=True
    )
    depth.attrs.update(attributes)
    depth[:] = np.arange(3_000.0)
    written = opened_again(tmp_path / "0.zarr")
    check(in_memory(written, names=True), whole(written), names=True)


def test_index_has_its_name(tmp_path: Path) -> None:
    ad.AnnData(np.ones((80, 3), "float32"), obs=labels_of(80, 0)).write_h5ad(tmp_path / "cells.h5ad")
    collect(tmp_path / "cells.h5ad", tmp_path / "cells.zarr", tell=lambda _: None)
    folder = tmp_path / "cells.zarr" / "dataset_0" / "obs"
    (folder / "_index").rename(folder / "barcode")
    zarr.open_group(folder, mode="a", use_consolidated=False).attrs["_index"] = "barcode"
    written = opened_again(tmp_path / "cells.zarr")
    made = loader(written, names=True)
    assert made._labels is not None
    assert whole(written).index.name == "barcode"
    check(made, whole(written), names=True)


def first_of(collection: DatasetCollection) -> tuple[Any, pd.DataFrame]:
    """Return the cells of the first dataset, and their labels with other names."""
    group: Any = next(iter(collection))
    obs: pd.DataFrame = ad.io.read_elem(group["obs"])
    return ad.io.sparse_dataset(group["X"]), obs.set_axis([f"more {name}" for name in obs.index])


def test_collection_that_is_added_after_a_dataset_has_labels_too(
    collection: DatasetCollection, obs: pd.DataFrame
) -> None:
    """All labels are in memory then."""
    made, more = StatefulLoader(batch_sampler=sampler(), return_index=True, preload_to_gpu=False), first_of(collection)
    made.add_dataset(*more, loader(collection).var)
    made.use_collection(collection)
    check(made, pd.concat([more[1], obs]), names=True)


def test_files_of_batches_need_the_column_in_all_datasets(collection: DatasetCollection) -> None:
    made = StatefulLoader(batch_sampler=sampler(), preload_to_gpu=False, return_file=True)
    cells, obs = first_of(collection)
    made.add_dataset(cells, obs.drop(columns="src_path"), loader(collection).var)
    with pytest.raises(ValueError, match="return_file=True needs the column src_path of obs"):
        made.use_collection(collection)


def test_dataset_that_is_added_later_has_labels_too(collection: DatasetCollection, obs: pd.DataFrame) -> None:
    """All labels are in memory then, as of others that look for them in annbatch's attribute."""
    made, more = loader(collection, names=True), first_of(collection)
    made.add_dataset(*more, made.var)
    assert made._labels is None
    check(made, pd.concat([obs, more[1]]), names=True)


def test_loader_takes_one_collection(collection: DatasetCollection) -> None:
    """Also if annbatch's loader has added it."""
    theirs = Loader(batch_sampler=sampler(), preload_to_gpu=False).use_collection(collection)
    for made in (loader(collection), StatefulLoader.from_loader(theirs)):
        with pytest.raises(RuntimeError, match="A loader takes one collection, and it has one"):
            made.use_collection(collection)


@given(data=st.data())
def test_names_are_those_of_pandas(data: st.DataObject, collection: DatasetCollection, obs: pd.DataFrame) -> None:
    group: Any = next(iter(collection))
    names, expected = Names(0, group["obs"]), obs.index[: group["X"].attrs["shape"][0]]
    rows: Any = data.draw(
        st.one_of(
            st.slices(len(expected)).map(lambda part: slice(part.start, part.stop)),
            st.lists(st.integers(0, len(expected) - 1), min_size=1).map(np.array),
        )
    )
    assert len(names) == len(expected)
    pd.testing.assert_index_equal(names[rows], expected[rows])
