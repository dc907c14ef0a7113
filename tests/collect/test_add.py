"""Files that are added to a collection: new datasets next to the old ones, by the same rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection

from annbatch_distributed import Rank, StatefulLoader
from annbatch_distributed.cli import main
from annbatch_distributed.collect import Problems, collect
from annbatch_distributed.collect.write import datasets
from tests.collect.test_files import GENES, cells_of, collected, counts, quiet

if TYPE_CHECKING:
    from pathlib import Path


def write(
    path: Path, genes: list[str] = GENES, *, seed: int = 0, factor: int = 1, dtype: str = "float32", **obs: Any
) -> pd.DataFrame:
    """Write a file of 40 cells, and return its counts by the names of cells and genes."""
    cells = cells_of(path.stem, (counts(40, len(genes), seed) * factor).astype(dtype), genes, **obs)
    cells.write_h5ad(path)
    return cells.to_df()


@pytest.fixture
def old(tmp_path: Path) -> pd.DataFrame:
    """Write a collection of two files, and return its counts."""
    labels = {"kind": [*"ab"] * 20, "n": range(40), "depth": 0.5}
    tables = [write(tmp_path / f"{name}.h5ad", seed=seed, **labels) for seed, name in enumerate(("one", "two"))]
    collect([tmp_path / "one.h5ad", tmp_path / "two.h5ad"], tmp_path / "cells.zarr", tell=quiet)
    return pd.concat(tables)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def batches_of(collection: DatasetCollection, **options: Any) -> list[Any]:
    return list(StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), batch_size=16, **options))


def test_cells_are_added_and_others_stay(old: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells have their counts and labels, in new datasets; no file of an old one changes."""
    monkeypatch.setattr(datasets, "_SLICE", 5)
    before = files_in(tmp_path / "cells.zarr")
    new = write(tmp_path / "new.h5ad", GENES[:0:-1], seed=5, factor=300, dtype="int64", kind=[*"zb"] * 20, n=range(40))
    lines = list[str]()
    options: dict[str, Any] = {"memory": "5kB", "tell": lines.append}
    collection = collect(tmp_path / "new.h5ad", add_to=tmp_path / "cells.zarr", **options)
    after = files_in(tmp_path / "cells.zarr")
    assert {name: after[name] for name in before} == before
    assert len(list(collection)) > 2
    assert {path.name for path in tmp_path.iterdir()} == {"one.h5ad", "two.h5ad", "new.h5ad", "cells.zarr"}
    values, obs = collected(collection)
    expected = pd.concat([old, new]).fillna(0)
    pd.testing.assert_frame_equal(values.loc[expected.index, GENES], expected[GENES], check_dtype=False)
    assert obs.loc[new.index, "kind"].tolist() == [*"zb"] * 20
    assert obs.loc[new.index, "n"].tolist() == [*range(40)]
    assert obs.loc[new.index, "depth"].isna().all()
    assert obs.loc[new.index, "src_path"].unique().tolist() == [str(tmp_path / "new.h5ad")]
    genes = f"genes: the 12 of the collection, of which each file has at least {len(new.columns)}"
    assert genes in lines
    assert any(line.startswith("WARNING: no column depth in") for line in lines)
    assert f"{tmp_path / 'cells.zarr'}: added 40 cells of 1 file, 12 genes" in lines[-2]
    assert lines[-1].startswith("the new cells are after the others: pass sharding='shuffled' to loaders")
    # labels are read with the cells, in one dtype, and counts in the dtype of the files
    loader = StatefulLoader.from_collection(
        collection, dist_info=Rank(0, 1), batch_size=16, names=True, return_file=True
    )
    assert loader._labels is not None
    seen = list(loader)
    assert sum(len(batch["obs"]) for batch in seen) == 120
    for batch in seen:
        assert batch["X"].dtype == np.float32
        assert batch["obs"]["kind"].cat.categories.tolist() == [*"abz"]
        cells = batch["obs"].index
        np.testing.assert_array_equal(batch["X"].toarray(), expected.loc[cells, GENES])
        is_measured = loader.genes_measured.to_numpy()[batch["file"]]
        assert (is_measured[:, 0] == cells.str.startswith(("one", "two"))).all()
        assert is_measured[:, 1:].all()


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_cells_are_stored_in_the_form_of_the_others(form: str, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        cells = cells_of(name, counts(40, 12, seed) + (name == "a") * (form == "dense"), GENES)
        cells.X = cells.X.toarray() if (name == "a") == (form == "dense") else cells.X
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
    collect(tmp_path / "a.h5ad", tmp_path / "cells.zarr", tell=quiet)
    both = collect(tmp_path / "b.h5ad", add_to=tmp_path / "cells.zarr", tell=quiet)
    assert [isinstance(group["X"], zarr.Array) for group in both] == [form == "dense"] * 2
    assert {type(batch["X"]) for batch in batches_of(both)} == {np.ndarray if form == "dense" else sp.csr_matrix}


def test_genes_that_a_collection_lacks_are_left_out_or_an_error(old: pd.DataFrame, tmp_path: Path) -> None:
    new = write(tmp_path / "new.h5ad", [*GENES[6:], "x", "y"], kind=["a"] * 40, n=range(40))
    out, before = tmp_path / "cells.zarr", files_in(tmp_path / "cells.zarr")
    for join in (None, "outer"):
        with pytest.raises(Problems, match=r"new.h5ad: has 2 genes that .*cells.zarr lacks, such as x, y. Pass join='"):
            collect(tmp_path / "new.h5ad", add_to=out, join=join, tell=quiet)
        assert files_in(out) == before
    values, _ = collected(collect(tmp_path / "new.h5ad", add_to=out, join="inner", tell=quiet))
    expected = pd.concat([old, new]).fillna(0)[GENES]
    pd.testing.assert_frame_equal(values.loc[expected.index, GENES], expected, check_dtype=False)
    write(tmp_path / "others.h5ad", [gene.upper() for gene in GENES])
    with pytest.raises(Problems, match=r"others.h5ad: has no gene of .*cells.zarr, but GENE0, GENE1, GENE2"):
        collect(tmp_path / "others.h5ad", add_to=out, join="inner", tell=quiet)


@pytest.mark.parametrize(
    ("obs", "options", "message"),
    [
        (
            {"n": [None, *range(39)]},
            {},
            "n: has values of int64 in .*cells.zarr, and would have values of float64 with",
        ),
        ({"n": [*"ab"] * 20}, {}, "n: has values of int64 in .*, and would have labels \\(0, a, b\\) with"),
        ({"kind": ["a"] * 40}, {}, "n: has values of int64 in"),  # all are missing
        ({"n": range(40), "plate": ["p"] * 40}, {"obs": ["n"]}, "obs: can't be combined with add_to"),
        (
            {"n": range(40)},
            {"out": "more.zarr"},
            "out: either this or add_to must be the path of a collection, got both",
        ),
        (
            {"n": range(40)},
            {"add_to": None},
            "out: either this or add_to must be the path of a collection, got neither",
        ),
        ({"n": range(40)}, {"add_to": "s3://cells.zarr"}, "add_to='s3://cells.zarr': must be a local folder"),
        ({"n": range(40)}, {"add_to": "none.zarr"}, "add_to='none.zarr': must be a collection that collect has"),
        ({"n": range(40)}, {"group_by": ["plate"]}, "got plate. cells.zarr has kind, n, depth\n"),
        ({"kind": [True] * 40, "n": range(40)}, {}, "kind: booleans and values .* Write them in one dtype$"),
    ],
)
def test_what_cannot_be_added_is_refused(
    obs: dict[str, Any],
    options: dict[str, Any],
    message: str,
    old: pd.DataFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del old
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "new.h5ad", **obs)
    before, paths = files_in(tmp_path / "cells.zarr"), {*tmp_path.iterdir()}
    with pytest.raises(Problems, match=message):
        collect("new.h5ad", **{"add_to": "cells.zarr", "tell": quiet} | options)
    assert files_in(tmp_path / "cells.zarr") == before
    assert {*tmp_path.iterdir()} == paths


def test_cells_and_values_are_those_of_one_collection(old: pd.DataFrame, tmp_path: Path) -> None:
    """Names, files and columns of sheets, kinds of values, and dtypes of all files are checked as if collected once."""
    out, new = tmp_path / "cells.zarr", tmp_path / "new.h5ad"

    def refused(message: str, files: Any = new, **options: Any) -> None:
        with pytest.raises(Problems, match=message):
            collect(files, add_to=out, tell=quiet, **options)

    refused("one.h5ad: is in .*cells.zarr already. Leave it out", tmp_path / "one.h5ad", make_unique=True)
    new.write_bytes((tmp_path / "one.h5ad").read_bytes())
    refused(r"40 cell names repeated, such as one-0 in .*cells.zarr, .*new.h5ad\. If these .* pass make_unique=True")
    again = collect(new, add_to=out, make_unique=True, tell=quiet).obs()
    assert {*again.index} == {*old.index} | {f"new-one-{number}" for number in range(40)}
    collect(tmp_path / "two.h5ad", tmp_path / "two.zarr", tell=quiet)  # the name of a cell that is renamed may be taken
    cells = cells_of("x", counts(1, 12, 0), GENES, kind=["a"], n=[1])
    cells.obs_names = ["one-3"]
    (tmp_path / "more").mkdir()
    cells.write_h5ad(tmp_path / "more" / "new.h5ad")
    names = collect(tmp_path / "more" / "new.h5ad", add_to=out, make_unique=True, tell=quiet).obs().index
    assert "new-one-3-1" in names
    assert names.is_unique
    write(tmp_path / "large.h5ad", factor=2**24, n=range(40), seed=9)
    refused("float32 of the collection must hold the values of all files, got counts up", tmp_path / "large.h5ad")
    cells = ad.read_h5ad(tmp_path / "large.h5ad")
    cells.obs_names, cells.X = [f"log {name}" for name in cells.obs_names], cells.X.log1p()
    cells.write_h5ad(tmp_path / "log.h5ad")
    refused(
        r"same kind of values, got counts in .*cells.zarr \(X\); .* not integers in .*log.h5ad", tmp_path / "log.h5ad"
    )
    (tmp_path / "sheet.csv").write_text("path,n,plate\nlog.h5ad,3,p\n")
    refused("plate: .*cells.zarr has no such column. Leave it out, or collect all", tmp_path / "sheet.csv")
    DatasetCollection(out).add_adatas([tmp_path / "one.h5ad"], shuffle_chunk_size=5)
    refused(r"cells.zarr': must be a collection that collect has written, got KeyError", tmp_path / "large.h5ad")


def test_order_of_categories_and_flags_of_missing_values_stay(tmp_path: Path) -> None:
    """Ordered categories and columns with missing values keep their dtype, also if new cells miss none."""
    stage, flag = pd.Categorical([*"lmmh"] * 10, [*"lmh"], ordered=True), pd.array([True, None] * 20, dtype="boolean")
    write(tmp_path / "a.h5ad", stage=stage, flag=flag)
    collect(tmp_path / "a.h5ad", tmp_path / "cells.zarr", tell=quiet)
    write(tmp_path / "b.h5ad", stage=stage[:40], flag=[True] * 40)
    obs = collect(tmp_path / "b.h5ad", add_to=tmp_path / "cells.zarr", tell=quiet).obs()
    assert obs["stage"].cat.ordered
    assert obs["stage"].cat.categories.tolist() == [*"lmh"]
    assert obs["flag"].dtype == "boolean"
    assert obs["flag"].isna().sum() == 20
    # after the last one, an order goes on; before it, codes would change
    for name, categories, is_refused in (("c", "hx", False), ("d", "kl", True)):
        write(
            tmp_path / f"{name}.h5ad", stage=pd.Categorical([*categories] * 20, [*categories], ordered=True), flag=False
        )
        if is_refused:
            with pytest.raises(
                Problems, match=r"stage: has labels \(l < m < h < x\) in .* have labels \((k < l < m|l, m, h, x)"
            ):
                collect(tmp_path / f"{name}.h5ad", add_to=tmp_path / "cells.zarr", tell=quiet)
        else:
            more = collect(tmp_path / f"{name}.h5ad", add_to=tmp_path / "cells.zarr", tell=quiet)
            assert {tuple(batch["obs"]["stage"].cat.categories) for batch in batches_of(more)} == {(*"lmhx",)}


def test_each_addition_may_have_new_labels(old: pd.DataFrame, tmp_path: Path) -> None:
    """Labels of one addition stay in their places after the next one."""
    for name in ("z", "y"):
        write(tmp_path / f"{name}.h5ad", kind=[name] * 40, n=range(40))
        collection = collect(tmp_path / f"{name}.h5ad", add_to=tmp_path / "cells.zarr", tell=quiet)
    kinds = {name: [*"ab"][number % 2] for number, name in enumerate(old.index)}
    for batch in batches_of(collection, names=True):
        obs = batch["obs"]
        assert obs["kind"].cat.categories.tolist() == [*"abzy"]
        assert obs["kind"].tolist() == [kinds.get(name, name[0]) for name in obs.index]


def test_states_of_before_resume_at_the_end_of_an_epoch(old: pd.DataFrame, tmp_path: Path) -> None:
    """A running job reads on; a state within an epoch says that the collection has changed."""
    del old
    made = [
        StatefulLoader.from_collection(tmp_path / "cells.zarr", dist_info=Rank(0, 1), batch_size=16) for _ in range(2)
    ]
    batches = iter(made[0])
    next(batches)
    within = made[0].state_dict()
    write(tmp_path / "new.h5ad", n=range(40))
    assert main(["collect", str(tmp_path / "new.h5ad"), "--add-to", str(tmp_path / "cells.zarr")]) == 0
    assert len([*batches]) == 4
    at_end = made[0].state_dict()
    again = StatefulLoader.from_collection(tmp_path / "cells.zarr", dist_info=Rank(0, 1), batch_size=16)
    with pytest.raises(ValueError, match="collection"):
        again.load_state_dict(within)
    again.load_state_dict(at_end)
    assert sum(len(batch["obs"]) for batch in again) == 120
