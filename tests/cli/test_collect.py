"""Collections that are made of h5ad files: each cell of each file, with its values by the names of genes."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from annbatch import DatasetCollection
from annbatch.samplers import SequentialSampler

from annbatch_distributed import AlignedLoader, DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.cli import main
from annbatch_distributed.collect import Problems, collect
from tests.cli.page import PAGE
from tests.processes.launch import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N = 30


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Run a command, and return what it prints, and the lines of what is wrong."""
    assert main(list(map(str, arguments))) == code
    out, err = capsys.readouterr()
    # annbatch writes bars to stderr
    wrong = [line for line in err.splitlines() if line.startswith("annbatch-distributed: ")]
    assert bool(wrong) == bool(code)
    return out + "\n".join(wrong)


def counts(file: int, n_genes: int) -> Any:
    """Counts that say which file, cell and gene they are of; some are 0."""
    values = 10_000 * file + 100 * np.arange(N)[:, None] + np.arange(1, n_genes + 1) + 0.0
    return np.where(np.arange(N)[:, None] % 3 == 0, 0, values).astype("float32")


def write(folder: Path) -> dict[str, ad.AnnData]:
    """Write files as people have them; return what each holds."""

    def made(file: int, genes: str, **obs: Any) -> ad.AnnData:
        names = [f"cell {file}-{number}" for number in range(N)]
        cells = ad.AnnData(counts(file, len(genes)), obs=pd.DataFrame(obs, index=names))
        cells.var_names = list(genes)
        return cells

    kinds = np.array(["B", "T", None], dtype=object)[np.arange(N) % 3]
    files = {
        "rows": made(0, "abcd", cell_type=pd.Categorical(kinds), donor=["d0"] * N),
        "columns": made(1, "dcbe", cell_type=pd.Categorical(["NK"] * N), donor=["d1"] * N, age=np.arange(N)),
        "texts": made(2, "bcd", cell_type=["T"] * N, donor=["d0"] * N),
        "old": made(3, "bcda", donor=["d3"] * N),
    }
    for name, cells in files.items():
        stored = cells.copy()
        stored.layers["raw"] = stored.X.astype("int64") * 2
        stored.X = {"rows": sp.csr_matrix, "columns": sp.csc_matrix}.get(name, np.asarray)(stored.X)
        if name != "old":
            stored.write_h5ad(folder / f"{name}.h5ad")
    with h5py.File(folder / "old.h5ad", "w") as file:  # as anndata 0.6 wrote it
        old = files["old"]
        file["X"] = old.X
        rows = [(name.encode(), donor.encode()) for name, donor in zip(old.obs_names, old.obs["donor"], strict=True)]
        file["obs"] = np.array(rows, dtype=[("index", "S12"), ("donor", "S2")])
        file["var"] = np.array([(name.encode(),) for name in old.var_names], dtype=[("index", "S1")])
    return files


def read(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The values and the annotations of all cells of a collection, by their names."""
    sampler = DistributedSampler(SequentialSampler(16, 2, 16), dist_info=Rank(0, 1), remainder="exact")
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
    collection = DatasetCollection(path, mode="r")
    loader.use_collection(collection)
    batches = list(loader)
    values = np.concatenate([sp.csr_matrix(batch["X"]).toarray() for batch in batches])
    obs = pd.concat([batch["obs"] for batch in batches])
    (group, *_) = collection
    genes = ad.io.read_elem(group["var"]).index
    return pd.DataFrame(values, index=obs.index, columns=genes), obs


def test_page_shows_output_of_collect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runpy.run_path(str(ROOT / "examples/from_h5ad/files.py"))["main"](tmp_path / "h5ad")
    (command, text), *_ = re.findall(r"\$ annbatch-distributed (collect .*)\n((?:(?!```).*\n)+)```", PAGE)
    monkeypatch.chdir(tmp_path)
    assert said(capsys, *command.split()) == text


@pytest.mark.parametrize("join", ["outer", "inner"])
def test_collect_matches_genes_by_name(join: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each cell has its values under the names of its genes."""
    files = write(tmp_path)
    paths = [tmp_path / f"{name}.h5ad" for name in files]
    text = said(capsys, "collect", *paths, "--out", tmp_path / "cells.zarr", "--join", join)
    values, obs = read(tmp_path / "cells.zarr")
    kept = list("abcde") if join == "outer" else list("bcd")
    assert sorted(values.columns) == kept
    expected = pd.concat([cells.to_df() for cells in files.values()])[kept if join == "outer" else list("bcd")]
    pd.testing.assert_frame_equal(
        values.loc[expected.index, kept], expected.fillna(0).astype("float32"), check_names=False
    )
    assert sorted(obs["cell_type"].cat.categories) == ["B", "NK", "T"]
    assert obs["cell_type"].isna().sum() == N // 3 + N
    assert obs.loc["cell 0-1", "cell_type"] == "T"
    assert obs.loc["cell 3-4", "donor"] == "d3"
    assert obs.loc["cell 1-7", "age"] == 7
    assert obs["age"].isna().sum() == 3 * N
    assert obs.loc["cell 2-3", "src_path"] == str(tmp_path / "texts.h5ad")
    assert list(obs.index) != [name for cells in files.values() for name in cells.obs_names]  # they are shuffled
    used = "the genes of any file" if join == "outer" else "the shared genes"
    assert f"genes: 3 in all files, 5 in any file; using {used}" in text
    assert "cell_type: 3 values (B, T, NK), in only 3 of 4 files, missing in 40 cells" in text
    assert "donor: 3 values (d0, d1, d3), none missing" in text
    assert f"{tmp_path / 'cells.zarr'}: 120 cells of 4 files, {len(kept)} genes" in text
    assert {path.name for path in tmp_path.iterdir()} == {"cells.zarr", *(path.name for path in paths)}
    assert "src_path" in said(capsys, "plan", tmp_path / "cells.zarr", "--by", "src_path", "--batch-size", 8)


def test_collect_reads_layer_and_chosen_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts are read from a layer, and only the chosen columns are kept."""
    files = write(tmp_path)
    options = "--layer", "raw", "--obs", "donor", "--out", tmp_path / "cells.zarr"
    said(capsys, "collect", tmp_path / "rows.h5ad", tmp_path / "columns.h5ad", *options)
    values, obs = read(tmp_path / "cells.zarr")
    assert values.loc["cell 1-1", "c"] == 2 * files["columns"].to_df().loc["cell 1-1", "c"]
    assert sorted(obs.columns) == ["donor", "src_path"]


def test_collect_refuses_to_mix_counts_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts are found in a layer, raw or X of each file, and not mixed with other values."""
    expected = []
    for number, name in enumerate(("x", "layer", "raw")):
        cells = ad.AnnData(counts(number, 3), obs=pd.DataFrame(index=[f"{name} {cell}" for cell in range(N)]))
        cells.var_names = list("abc")
        expected.append(cells.to_df())
        if name == "layer":
            cells.layers["raw"] = cells.X
        elif name == "raw":
            cells.raw = cells.copy()
            cells = cells[:, :2].copy()
        if name != "x":
            cells.X = np.log1p(cells.X)
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
    command = (
        "collect",
        *(tmp_path / f"{name}.h5ad" for name in ("x", "layer", "raw")),
        "--out",
        tmp_path / "cells.zarr",
    )
    line = said(capsys, *command, code=2)
    assert "all files must have the same kind of values, got counts in" in line
    assert "The files also have raw. Pass --layer with the places" in line
    text = said(capsys, *command, "--layer", "raw", "--layer", "X")
    assert re.findall(r", from (.*)", text) == ["X", "layer raw", "raw"]
    values, _ = read(tmp_path / "cells.zarr")
    whole = pd.concat(expected)
    pd.testing.assert_frame_equal(values.loc[whole.index, list("abc")], whole, check_names=False)


def test_texts_that_are_no_labels_are_made_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    command = "collect", tmp_path / "rows.h5ad", tmp_path / "columns.h5ad", "--out", tmp_path / "cells.zarr"
    text = said(capsys, *command, "--na-values", "T", "Unknown")
    assert "cell_type: 2 values (B, NK), missing in 20 cells\n" in text
    assert "WARNING: --na-values: no cell has 'Unknown'\n" in text
    assert "'T'" not in text
    _, obs = read(tmp_path / "cells.zarr")
    assert obs.loc["cell 0-0", "cell_type"] == "B"
    assert obs["cell_type"].isna().sum() == 20


def test_collect_unites_categories_of_any_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns have categories of any dtype, and may be missing in a file."""
    for number in (1, 2):
        cells = ad.AnnData(counts(number, 3) * (number == 1))  # no values say nothing about counts
        cells.obs_names = [f"{number}-{cell}" for cell in range(N)]
        cells.obs["cluster"] = pd.Categorical(np.arange(N) % 3)
        cells.obs["is_doublet"] = pd.Categorical(np.arange(N) % 2 == 0)
        cells.obs["kind"] = pd.Categorical(["Unknown" if number == 1 else "B"] * N)
        cells.write_h5ad(tmp_path / f"{number}.h5ad")
    command = "collect", tmp_path / "1.h5ad", tmp_path / "2.h5ad", "--out", tmp_path / "cells.zarr"
    text = said(capsys, *command, "--na-values", "Unknown")
    assert "kind: 1 value (B), missing in 30 cells" in text
    assert "cluster: 3 values (0, 1, 2), none missing" in text
    _, obs = read(tmp_path / "cells.zarr")
    assert obs.loc["1-4", "cluster"] == "1"
    assert obs["kind"].notna().sum() == N


def test_make_unique_renames_repeated_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Repeated `obs_names` become unique with --make-unique."""
    for name in ("one", "two"):
        cells = ad.AnnData(counts(1, 3))
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
    command = "collect", tmp_path / "one.h5ad", tmp_path / "two.h5ad", "--out", tmp_path / "cells.zarr"
    assert f"{N} cell names repeated" in said(capsys, *command, code=2)
    said(capsys, *command, "--make-unique")
    values, _ = read(tmp_path / "cells.zarr")
    assert sorted(values.index) == sorted(f"{name}-{number}" for name in ("one", "two") for number in range(N))


def test_collect_error_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Input that can't be collected is one line on stderr, and no file is left behind."""
    write(tmp_path)
    (tmp_path / "damaged.h5ad").write_text("damaged")
    (tmp_path / "link.zarr").symlink_to(tmp_path / "gone")
    empty = ad.AnnData(np.zeros((0, 3), dtype="float32"))
    empty.write_h5ad(tmp_path / "empty.h5ad")
    with h5py.File(tmp_path / "of_10x.h5", "w") as file:
        file.create_group("matrix")
    rows, out = tmp_path / "rows.h5ad", tmp_path / "cells.zarr"
    before = set(tmp_path.iterdir())
    for arguments, message in (
        ((tmp_path / "damaged.h5ad",), "damaged.h5ad: can't be read as h5ad: OSError"),
        ((tmp_path / "of_10x.h5",), "scanpy.read_10x_h5"),
        ((tmp_path / "empty.h5ad",), "the files have no cells"),
        ((tmp_path / "nothing.h5ad",), "nothing.h5ad: no such file"),
        ((rows, "--obs", "age"), "--obs: no file has columns age. They have cell_type, donor"),
        ((rows, "--rename", "age"), "--rename: must be OLD=NEW, got 'age'"),
        ((rows, "--labels", tmp_path / "none.csv"), "none.csv: can't be read as a file of labels: [Errno 2]"),
        (
            (rows, "--rename", "donor=d", "donor=e"),
            "must have one new name, got another one in donor=d",
        ),
        ((rows, rows), "files must be different"),
        ((rows, "--out", "s3://atlas/cells.zarr"), "--out s3://atlas/cells.zarr: must be a local folder"),
        ((rows, "--out", tmp_path / "none" / "cells.zarr"), "cells.zarr: No such file or directory"),
        ((rows, "--out", tmp_path / "link.zarr"), "link.zarr: already exists, a broken link"),
        ((rows, "--memory", "lots"), "--memory: must be a size above 0, such as 4GB, got 'lots'"),
        ((rows, "--memory", "0"), "--memory: must be a size above 0"),
        ((rows, "--group-by", "age"), "--group-by age: obs has no such column. It has cell_type, donor"),
        ((tmp_path / "columns.h5ad", "--group-by", "age"), "--group-by age: must be a column of labels"),
        ((rows, "--obs", "donor", "--group-by", "cell_type"), "got cell_type. Add them to --obs"),
    ):
        assert message in said(capsys, "collect", "--out", out, *arguments, code=2)
        assert set(tmp_path.iterdir()) == before
    both = said(capsys, "collect", tmp_path / "damaged.h5ad", tmp_path / "nothing.h5ad", "--out", out, code=2)
    assert len(both.splitlines()) == 2
    # before a file is read as a whole
    told = said(capsys, "collect", rows, "--layer", "counts", "--out", out, code=2)
    assert f"annbatch-distributed: {rows}: has no counts, but layer raw, X. Name one of these with --layer" in told
    (tmp_path / "again.h5ad").write_bytes(rows.read_bytes())
    again = said(capsys, "collect", rows, tmp_path / "again.h5ad", "--out", out, code=2)
    assert "30 cell names repeated" in again
    assert f"in {rows}, {tmp_path / 'again.h5ad'}." in again
    out.mkdir()
    assert f"--out {out}: already exists. Pass a new path" in said(capsys, "collect", rows, "--out", out, code=2)


def test_python_has_the_problems_and_lines_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Python, problems are one error with a message for each, and lines go to ``tell``, in names of arguments."""
    paths = [tmp_path / "one.h5ad", tmp_path / "two.h5ad"]
    with pytest.raises(Problems) as raised:
        collect(paths, tmp_path / "cells.zarr")
    assert raised.value.args == tuple(f"{path}: no such file" for path in paths)
    assert str(raised.value) == "\n".join(raised.value.args)
    assert not [*tmp_path.iterdir()]
    lines = list[str]()
    out = tmp_path / "cells.zarr"
    collect(of_obs(tmp_path, "one", kind=["B", "nan"] * (N // 2)), out, na_values=["x"], tell=lines.append)
    stored = "stored as dense int16, which loaders of this package yield as float32, and annbatch's Loader as stored"
    stored += " (dtype float32 stores that)"
    assert lines[1:] == [
        "genes: 3 in all files, 3 in any file; using the genes of any file",
        "kind: 2 values (B, nan), none missing",
        "WARNING: labels that may stand for missing ones: kind nan. If they do, pass na_values nan",
        "WARNING: na_values: no cell has 'x'",
        f"{out}: 30 cells of 1 file, 3 genes, 0.0 MB; {stored}",
    ]
    assert not capsys.readouterr().out


def test_labels_like_missing_values_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels such as "nan" are kept, with a warning that names the option to treat them as missing."""
    cells = ad.AnnData(np.ones((4, 2), dtype="float32"))
    cells.obs["kind"], cells.obs["donor"] = ["nan", "B", "Unknown", "T"], ["a", "a", "b", "b"]
    cells.write_h5ad(tmp_path / "cells.h5ad")
    command = "collect", tmp_path / "cells.h5ad", "--obs", "kind", "donor", "--out"
    text = said(capsys, *command, tmp_path / "kept.zarr")
    assert text.count("WARNING") == 1
    assert "pass --na-values Unknown nan" in text
    assert "WARNING" not in said(capsys, *command, tmp_path / "cells.zarr", "--na-values", "Unknown", "nan")


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A full disk is one line on stderr, and no file is left behind."""
    write(tmp_path)
    before = set(tmp_path.iterdir())
    # no file may be larger than 1 KB, as if the disk were full; what measures coverage can't write its own, either
    code = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)); "
    code += "from annbatch_distributed.cli import main; os._exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "collect", str(tmp_path / "rows.h5ad"), "--out", str(tmp_path / "c.zarr")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "File too large; nothing was written to" in done.stderr.splitlines()[-1]
    assert set(tmp_path.iterdir()) == before


def of_obs(path: Path, name: str, n_cells: int = N, genes: str = "abc", **obs: Any) -> Path:
    """Write a file of some columns of obs."""
    index = pd.Index([f"{name}-{cell}" for cell in range(n_cells)], name="barcode")
    cells = ad.AnnData(counts(1, len(genes))[:n_cells], obs=pd.DataFrame(obs, index=index))
    cells.var_names = list(genes)
    cells.write_h5ad(path / f"{name}.h5ad")
    return path / f"{name}.h5ad"


def test_columns_have_one_type_in_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that are equal are one label, and a column that a file lacks is missing there, whatever its type."""
    clusters = np.arange(N) % 3
    nullable = pd.Series(clusters, dtype="Int64").mask(clusters == 2)
    first = of_obs(
        tmp_path,
        "one",
        cluster=pd.Categorical(clusters),
        plate=nullable.to_numpy(float),
        is_doublet=clusters == 0,
        is_cell=clusters >= 0,
        kind=["True"] * N,
        barcode=[f"one-{cell}" for cell in range(N)],
    )
    cells = ad.read_h5ad(first)
    cells.obs["plate"] = nullable.array
    cells.write_h5ad(first)
    second = of_obs(
        tmp_path, "two", cluster=clusters.astype(str).astype(object), is_cell=clusters >= 0, kind=["true"] * N
    )
    text = said(capsys, "collect", first, second, "--out", tmp_path / "cells.zarr")
    assert "cluster: 3 values (0, 1, 2), none missing" in text
    assert "WARNING: labels that may be the same: kind 'True' and 'true'. If they are, pass --labels FILE" in text
    assert "is_cell: booleans, none missing" in text
    obs = DatasetCollection(tmp_path / "cells.zarr", mode="r").obs()
    one, two = (obs[obs.index.str.startswith(name)] for name in ("one", "two"))
    assert len(one) == len(two) == N
    assert one["is_doublet"].sum() == (clusters == 0).sum()
    assert two[["is_doublet", "plate", "barcode"]].isna().all(axis=None)
    assert one["plate"].isna().sum() == N // 3
    assert sorted(one["plate"].dropna().unique()) == [0, 1]
    assert one.loc["one-4", "barcode"] == "one-4"


def test_genes_without_a_common_name_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = of_obs(tmp_path, "one", genes="abcd"), of_obs(tmp_path, "two", genes="wxyz")
    third = of_obs(tmp_path, "three", genes="dvwx")
    command = "collect", first, second, "--out", tmp_path / "cells.zarr"
    assert f"no gene is in all files: {first} has a, b, c, ..., and {second} has w, x, y, ..." in said(
        capsys, *command, code=2
    )
    said(capsys, *command, "--join", "outer")
    text = said(capsys, "collect", first, third, "--out", tmp_path / "other.zarr")
    assert f"WARNING: only 1 of the 4 genes of {first} are in all files" in text


def test_batches_tell_which_genes_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gene that a file doesn't have is 0 in its cells, and not measured."""
    files = [of_obs(tmp_path, "one", genes="abcd"), of_obs(tmp_path, "two", genes="cdef")]
    said(capsys, "collect", *files, "--out", tmp_path / "cells.zarr")
    collection = DatasetCollection(tmp_path / "cells.zarr", mode="r")
    loader = StatefulLoader.from_collection(
        collection, dist_info=Rank(0, 1), batch_size=8, return_file=True, names=True
    )
    assert list(loader.genes_measured.index) == list(map(str, files))
    n_cells = 0
    for batch in loader:
        names = np.array(["one", "two"])[batch["file"]]
        assert [name.partition("-")[0] for name in batch["obs"].index] == names.tolist()
        for name, mask in zip(names, loader.genes_measured.to_numpy()[batch["file"]], strict=True):
            assert "".join(loader.genes_measured.columns[mask]) == {"one": "abcd", "two": "cdef"}[name]
        n_cells += len(names)
    assert n_cells == 2 * N
    again = AlignedLoader({"rna": loader}, batch_sampler=loader.sampler)
    assert "file" in next(iter(again))["rna"]
    plain = StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), batch_size=8)
    assert "file" not in next(iter(plain))
    with pytest.raises(ValueError, match="return_file=True"):
        _ = plain.genes_measured
    other = DatasetCollection(tmp_path / "other.zarr").add_adatas(files)
    with pytest.raises(ValueError, match="measured genes"):
        StatefulLoader.from_collection(other, dist_info=Rank(0, 1), batch_size=8, return_file=True)


def test_files_with_same_name_differ_by_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files with the same name are distinguished by their folders."""
    files = []
    for folder in ("s1", "s2"):
        (tmp_path / folder).mkdir()
        files.append(of_obs(tmp_path / folder, "adata", sample=[folder] * N))
    said(capsys, "collect", *files, "--out", tmp_path / "cells.zarr", "--make-unique", "--obs", "sample", "sample")
    obs = DatasetCollection(tmp_path / "cells.zarr", mode="r").obs()
    assert list(obs) == ["sample", "src_path"]
    assert (obs.index.str.split("-").str[0] == obs["sample"]).all()
    assert (obs["src_path"].map(lambda path: path.split("/")[-2]) == obs["sample"].astype(object)).all()


def test_values_that_are_no_counts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Callable[[Any], Any]] = {
        "logged": np.log1p,
        "scaled": lambda x: x - x.mean(),
        "unknown": lambda x: np.where(x > 9_000, np.nan, x),
        "half": lambda x: np.minimum(x, 500).astype("float16"),
    }
    for name, change in changes.items():
        file = of_obs(tmp_path, name)
        cells = ad.read_h5ad(file)
        cells.X = change(cells.X)
        cells.layers["raw"] = cells.obsm["X_pca"] = cells.X
        cells.write_h5ad(file)
        text = said(capsys, "collect", file, "--out", tmp_path / f"{name}.zarr")
        assert "not collected: layer raw (1 file), obsm X_pca (1 file)" in text
        expected = {
            "logged": "float32; not all values are integers; they look log-normalized",
            "scaled": " values are negative, as after scaling",
            "unknown": "values are NaN",
            "half": "3 genes, float32\n",
        }
        assert expected[name] in text


def test_own_column_of_paths_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = of_obs(tmp_path, "one", src_path=["x"] * N, donor=["d"] * N)
    command = "collect", file, "--out", tmp_path / "cells.zarr"
    for options in ((), ("--obs", "src_path")):
        assert "obs must not have a column src_path" in said(capsys, *command, *options, code=2)
    said(capsys, *command, "--obs", "donor")


def test_cells_are_grouped_for_class_samplers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = of_obs(tmp_path, "one", kind=[*"ABC"] * (N // 3))
    said(capsys, "collect", file, "--out", tmp_path / "cells.zarr", "--group-by", "kind")
    kinds = DatasetCollection(tmp_path / "cells.zarr", mode="r").obs(["kind"])["kind"]
    assert kinds.tolist() == sorted([*"ABC"] * (N // 3))
