"""Files as labs have them: a sheet of them, counts in different places, and what can't be collected."""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import mudata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from annbatch import DatasetCollection

from annbatch_distributed import Rank, StatefulLoader
from annbatch_distributed.collect import Problems, collect

if TYPE_CHECKING:
    from pathlib import Path

GENES = [f"gene{number}" for number in range(12)]


def quiet(line: str) -> None:
    """Say nothing."""


def counts(n_cells: int, n_genes: int, seed: int) -> Any:
    return np.random.default_rng(seed).poisson(0.7, (n_cells, n_genes)).astype("float32")


def cells_of(donor: str, values: Any, genes: list[str], **obs: Any) -> ad.AnnData:
    index = [f"{donor}-{number}" for number in range(len(values))]
    return ad.AnnData(sp.csr_matrix(values), obs=pd.DataFrame(obs, index=index), var=pd.DataFrame(index=genes))


@pytest.fixture
def study(tmp_path: Path) -> dict[str, Any]:
    """Write three files of a study and their sheet; the counts of each by cell and gene."""
    folder = tmp_path / "lab [2] é"
    folder.mkdir()
    truth: dict[str, Any] = {}

    one = counts(30, 12, 1)
    genes = [*GENES[:10], "twice", "twice"]
    a = cells_of("a", one.astype("int32"), genes, stage=pd.Categorical([*"lmh"] * 10, [*"lmh"], ordered=True))
    a.obs["type"], a.obs["id"] = pd.Categorical(["T cell", "B cell", None] * 10), np.arange(30) + 2**60 + 1
    a.uns["seen"] = 1
    a.write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        for place in ("uns/other", "obsm/other", "layers/other"):
            file.create_group(place).attrs.update({"encoding-type": "of-others", "encoding-version": "1"})
    truth["a"] = pd.DataFrame(one, a.obs_names, [*GENES[:10], "twice", "twice-1"])

    two = counts(20, 8, 2)
    b = cells_of("b", np.log1p(two), GENES[:8], celltype=["Tcell", "B cell"] * 10, sex=["female"] * 20)
    b.layers["counts"] = sp.csr_matrix(two)
    b.write_h5ad(folder / "b 2.h5ad")
    truth["b"] = pd.DataFrame(two, b.obs_names, GENES[:8])

    three = counts(25, 9, 3)
    c = cells_of("c", three, GENES[3:], type=["Unknown"] * 25)
    c.raw = c.copy()
    c = c[:, :4].copy()
    c.X = np.random.default_rng(0).normal(size=c.shape).astype("float32")
    c.write_h5ad(tmp_path / "c.h5ad")
    truth["c"] = pd.DataFrame(three, [f"c-{number}" for number in range(25)], GENES[3:])

    lines = "path,counts,donor,sex\na.h5ad,X,A,\nlab [2] é/b 2.h5ad,counts,B,\nc.h5ad,raw,C,male\n"
    (tmp_path / "samples.csv").write_text(lines)
    (tmp_path / "labels.csv").write_text("column,from,to\ntype,Tcell,T cell\ntype,Unknown,\n")
    return truth


def collected(collection: DatasetCollection) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All values and annotations of a collection, by the names of cells."""
    groups = [*collection]
    whole = [
        pd.DataFrame(
            np.asarray(_dense(ad.io.read_elem(group["X"]))),
            index=ad.io.read_elem(group["obs"]).index,
            columns=ad.io.read_elem(group["var"]).index,
        )
        for group in groups
    ]
    return pd.concat(whole), collection.obs()


def _dense(values: Any) -> Any:
    if isinstance(values, np.ndarray):
        return values
    indices, bounds = values.indices.astype(np.int64), values.indptr.astype(np.int64)
    return sp.csr_matrix((values.data, indices, bounds), shape=values.shape).toarray()


def test_sheet_of_a_study_is_one_collection(study: dict[str, Any], tmp_path: Path) -> None:
    """Each cell of a study has its counts by the names of genes, and its labels, from one sheet and one call."""
    lines: list[str] = []
    options = {"rename": {"celltype": "type"}, "labels": tmp_path / "labels.csv", "tell": lines.append}
    collection = collect(tmp_path / "samples.csv", tmp_path / "cells.zarr", **options)
    values, obs = collected(collection)
    expected = pd.concat(study.values()).fillna(0)
    pd.testing.assert_frame_equal(
        values.loc[expected.index, expected.columns], expected, check_names=False, check_dtype=False
    )
    donors = obs.index.str[0].str.upper()
    assert (obs["donor"].astype(str) == donors).all()
    assert obs["type"].cat.categories.tolist() == ["B cell", "T cell"]
    assert obs.loc[["a-0", "a-1", "b-0", "b-1"], "type"].tolist() == ["T cell", "B cell"] * 2
    assert obs["type"].isna().sum() == 10 + 25
    assert (obs.loc[donors == "B", "sex"] == "female").all()
    assert (obs.loc[donors == "C", "sex"] == "male").all()
    assert obs.loc[donors == "A", "sex"].isna().all()
    assert obs["stage"].cat.ordered
    assert obs["stage"].cat.categories.tolist() == [*"lmh"]
    assert obs.loc["a-4", "id"] == 2**60 + 5
    assert obs["id"].isna().sum() == 45
    text = "\n".join(lines)
    assert "WARNING: " in text
    assert "stage: 3 values (l < m < h), in only 1 of 3 files, missing in 45 cells" in lines
    assert "1 gene name of several genes (twice), which are numbered, such as twice and twice-1" in text
    assert re.findall(r"float32, from (.*)|int32, from (.*)", text) != []
    loader = StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), batch_size=16)
    batch = next(iter(loader))
    assert batch["obs"]["id"].dtype == "Int64"
    assert (batch["obs"]["id"].isna() == (batch["obs"]["donor"] != "A")).all()


def test_counts_are_read_from_the_first_place(study: dict[str, Any], tmp_path: Path) -> None:
    """Without a sheet, each file has its counts in the first place of the list that it has."""
    files = [tmp_path / "a.h5ad", tmp_path / "lab [2] é" / "b 2.h5ad", tmp_path / "c.h5ad"]
    with pytest.raises(Problems) as raised:
        collect(files, tmp_path / "cells.zarr", tell=quiet)
    assert "all files must have the same kind of values, got counts in " in str(raised.value)
    assert f"values that are not integers in {files[1]} (X); negative values in {files[2]} (X)" in str(raised.value)
    assert "The files also have counts, other, raw. Pass the places of" in str(raised.value)
    values, _ = collected(collect(files, tmp_path / "cells.zarr", layer=["counts", "raw", "X"], tell=quiet))
    expected = pd.concat(study.values()).fillna(0)
    assert (values.loc[expected.index, expected.columns] == expected).all(axis=None)


def test_problems_of_all_files_are_one_error(study: dict[str, Any], tmp_path: Path) -> None:
    """One error has every problem of every file, and no value was read to its end for it."""
    del study
    (tmp_path / "cut.h5ad").write_bytes((tmp_path / "c.h5ad").read_bytes()[:4_000])
    (tmp_path / "packed.h5ad").write_bytes(gzip.compress((tmp_path / "c.h5ad").read_bytes()))
    with h5py.File(tmp_path / "of_10x.h5", "w") as file:
        file.create_group("matrix")
    names = ["a.h5ad", "cut.h5ad", "packed.h5ad", "of_10x.h5", "none.h5ad", "c.h5ad"]
    options: dict[str, Any] = {"obs": ["type", "plate"], "group_by": ["donor"], "rename": {"tpye": "type2"}}
    options["labels"] = pd.DataFrame({"column": ["plant"], "from": ["x"], "to": ["y"]})
    with pytest.raises(Problems) as raised:
        collect([tmp_path / name for name in names], tmp_path / "cells.zarr", layer="counts", tell=quiet, **options)
    problems = "\n".join(raised.value.args)
    for message in (
        "a.h5ad: has no counts, but layer other, X. Name one of these, as in layer=['other'], or",
        "cut.h5ad: can't be read as h5ad: OSError",
        "packed.h5ad: can't be read as h5ad: it is compressed as a whole. Run gunzip",
        "of_10x.h5: can't be read as h5ad: it has no obs and var, but matrix. It is a 10x file",
        "none.h5ad: no such file",
        "c.h5ad: has no counts, but X, raw",
        "group_by: columns must be kept, got donor. Pass obs=['type', 'plate', 'donor']",
        "labels: columns must be kept, got plant. Pass obs=['type', 'plate', 'plant']",
    ):
        assert message in problems
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("cells")) == []
    with pytest.raises(Problems) as raised:
        collect([tmp_path / "a.h5ad", tmp_path / "c.h5ad"], tmp_path / "cells.zarr", tell=quiet, **options)
    assert "obs: no file has columns plate. They have id, stage, type" in raised.value.args
    assert "rename: no file has columns tpye. They have id, stage, type" in raised.value.args


def test_columns_of_a_sheet_are_kept(study: dict[str, Any], tmp_path: Path) -> None:
    """The columns of a sheet are kept whatever --obs names, and a warning names files without a named column."""
    lines = list[str]()
    sheet = tmp_path / "samples.csv"
    collection = collect(sheet, tmp_path / "out.zarr", layer=["X"], obs=["type"], memory="1GB", tell=lines.append)
    obs = collection.obs(["type", "donor", "sex"])
    assert obs["donor"].value_counts().to_dict() == {"A": 30, "B": 20, "C": 25}
    assert obs["sex"].value_counts().to_dict() == {"female": 20, "male": 25}
    assert "stage" not in collection.obs()
    collection = collect(sheet, tmp_path / "sheet.zarr", layer=["X"], obs=[], memory="1GB", tell=quiet)
    assert sorted(collection.obs().columns) == ["donor", "sex", "src_path"]
    assert [bool(re.match(r"WARNING: no column type in .*b 2\.h5ad\. ", line)) for line in lines].count(True) == 1


@pytest.mark.parametrize(
    ("sheet", "message"),
    [
        ("file,donor\na.h5ad,A\n", "samples.csv: a sample sheet must have a column path, got file, donor"),
        ("path,donor\n", "a sample sheet must have a line for each file, got none"),
        ("path,donor\na.h5ad,A\n,B\n", "each line must have a path, got none in line 3"),
        ("path,donor\na.h5ad,A\na.h5ad,B\n", "files must be different, got "),
        ("path,counts\na.h5ad,spliced\n", "a.h5ad: has no spliced, but layer other, X"),
        ("path,src_path\na.h5ad,x\n", "a sample sheet must not have a column src_path"),
    ],
)
def test_wrong_sheet_is_refused(study: dict[str, Any], sheet: str, message: str, tmp_path: Path) -> None:
    del study
    (tmp_path / "samples.csv").write_text(sheet)
    with pytest.raises(Problems) as raised:
        collect(tmp_path / "samples.csv", tmp_path / "cells.zarr", tell=quiet)
    assert message in str(raised.value)


def test_zarr_folders_and_modalities_are_files(tmp_path: Path) -> None:
    """A zarr folder of anndata, a modality of an h5mu file and an h5ad file in columns have the same cells."""
    values = counts(20, 5, 4)
    expected = {}
    for name in ("a", "b", "c"):
        cells = cells_of(name, values, GENES[:5], kind=[*"xy"] * 10)
        expected[name] = pd.DataFrame(values, cells.obs_names, GENES[:5])
        if name == "a":
            cells.write_zarr(tmp_path / "a.zarr")
        elif name == "b":
            with h5py.File(tmp_path / "b.h5mu", "w") as file:
                for modality in ("rna", "protein"):
                    ad.io.write_elem(file.require_group("mod"), modality, cells)
        else:
            cells.X = sp.csc_matrix(cells.X)
            cells.write_h5ad(tmp_path / "c.h5ad")
    files = [f"{tmp_path}/a.zarr", f"{tmp_path}/b.h5mu#rna", f"{tmp_path}/c.h5ad"]
    with pytest.raises(
        Problems, match=r"b.h5mu: must name a modality of the file, as in .*b.h5mu#protein, got protein"
    ):
        collect([files[0], f"{tmp_path}/b.h5mu"], tmp_path / "cells.zarr", tell=quiet)
    collection = collect(files, tmp_path / "cells.zarr", tell=quiet)
    read, obs = collected(collection)
    whole = pd.concat(expected.values())
    assert (read.loc[whole.index, whole.columns] == whole).all(axis=None)
    assert sorted(obs["src_path"].unique()) == files


@pytest.mark.parametrize("suffix", ["h5mu", "zarr"])
def test_labels_of_all_modalities_are_kept(suffix: str, tmp_path: Path) -> None:
    """A modality has its own counts, and labels that muon has for all modalities, by the names of its cells."""
    rna = cells_of("x", counts(20, 5, 0), GENES[:5], n_counts=np.arange(20))
    protein = cells_of("x", counts(20, 3, 1), ["p1", "p2", "p3"])[[*range(19, 4, -1)]].copy()
    both = mudata.MuData({"rna": rna, "protein": protein})
    assert both.obs_names[0] == "x-0"
    both.obs = both.obs.iloc[:18].reindex(both.obs_names).assign(kind=pd.Categorical([*"ab"] * 10), flag=[True] * 20)
    both.write(tmp_path / "study.h5mu") if suffix == "h5mu" else both.write_zarr(tmp_path / "study.zarr")
    labels = both.obs["kind"]
    for modality, n_cells in (("rna", 20), ("protein", 15)):
        collection = collect(f"{tmp_path}/study.{suffix}#{modality}", tmp_path / f"{modality}.zarr", tell=quiet)
        values, obs = collected(collection)
        own = both[modality].to_df()
        assert (values.loc[own.index, own.columns] == own).all(axis=None)
        assert {*obs} == {"kind", "flag", "src_path", *(["n_counts"] if modality == "rna" else [])}
        assert len(values) == len(obs) == n_cells
        assert obs["kind"].to_dict() == labels[obs.index].to_dict()
        assert obs["flag"].dtype == bool
    if suffix == "h5mu":
        with h5py.File(tmp_path / "study.h5mu", "r+") as file:
            names = ad.io.read_elem(file["obs"]).index.to_numpy(dtype=object)
            ad.io.write_elem(file["obs"], file["obs"].attrs["_index"], np.where(names == "x-0", "x-1", names))
        with pytest.raises(Problems, match="obs of all modalities must have each cell of the modality once"):
            collect(f"{tmp_path}/study.h5mu#rna", tmp_path / "twice.zarr", tell=quiet)
        assert collect(f"{tmp_path}/study.h5mu#rna", tmp_path / "own.zarr", obs="n_counts", tell=quiet).obs().shape


def test_counts_of_different_dtypes_become_float32(tmp_path: Path) -> None:
    """Loaders yield the dtype of the files, or float32 if files with counts have different ones; zeros don't decide."""
    for name, dtypes, expected in (
        ("ints", ("int32", "int32"), "int32"),
        ("mixed", ("int32", "float32"), "float32"),
        ("double", ("float64", "float64"), "float64"),
        ("half", ("float16", "float16"), "float32"),
        ("zeros", ("int32", "float32"), "int32"),
    ):
        files = []
        for number, dtype in enumerate(dtypes):
            values = counts(10, 4, number) * (name != "zeros" or number == 0)
            cells = ad.AnnData(values.astype(dtype), obs=pd.DataFrame(index=[f"{number}-{cell}" for cell in range(10)]))
            cells.write_h5ad(tmp_path / f"{name}{number}.h5ad")
            files.append(tmp_path / f"{name}{number}.h5ad")
        collection = collect(files, tmp_path / f"{name}.zarr", tell=quiet)
        loader = StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), batch_size=16)
        assert {batch["X"].dtype for batch in loader} == {np.dtype(expected)}


def test_kinds_of_values_are_not_mixed(tmp_path: Path) -> None:
    """A file with negative values has no counts, even if these are the last of its integers."""
    values = counts(40, 4, 0)
    files = []
    for name, change in (("counts", 0), ("last", -1), ("zeros", 0)):
        own = values * (name != "zeros")
        own[-1, -1] += change * 20
        cells_of(name, own, GENES[:4]).write_h5ad(tmp_path / f"{name}.h5ad")
        files.append(tmp_path / f"{name}.h5ad")
    with pytest.raises(Problems, match=r"got counts in .*counts.h5ad \(X\); negative values in .*last.h5ad \(X\)"):
        collect(files[:2], tmp_path / "cells.zarr", tell=quiet)
    collect([files[0], files[2]], tmp_path / "cells.zarr", tell=quiet)


def test_repeated_columns_after_renaming_are_refused(study: dict[str, Any], tmp_path: Path) -> None:
    del study
    with pytest.raises(Problems, match="obs has two columns type after they were renamed"):
        collect(tmp_path / "a.h5ad", tmp_path / "cells.zarr", rename={"stage": "type"}, tell=quiet)


def test_values_that_are_no_counts_are_named(tmp_path: Path) -> None:
    """The line of a file says what its values are, and what is not collected."""
    values = counts(30, 4, 0)
    changes: dict[str, tuple[Any, str]] = {
        "logged": (np.log1p(values), "float32. WARNING: not all values are integers; they look log-normalized"),
        "scaled": (values - values.mean(), " values are negative, as after scaling"),
        "unknown": (np.where(values > 1, np.nan, values), "float32. WARNING: 22 values are NaN"),
        "half": (values.astype("float16"), "4 genes, float32"),
    }
    for name, (changed, expected) in changes.items():
        cells = ad.AnnData(changed)
        cells.layers["raw"] = cells.obsm["X_pca"] = cells.X
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
        lines: list[str] = []
        collect(tmp_path / f"{name}.h5ad", tmp_path / f"{name}.zarr", tell=lines.append)
        assert lines[0].endswith(expected)
        assert "not collected: layer raw (1 file), obsm X_pca (1 file)" in lines
