"""Odd files and arguments: the right values, or a problem that names them."""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from annbatch_distributed.collect import Problems, collect
from tests.collect.test_files import GENES, cells_of, collected, counts, quiet

if TYPE_CHECKING:
    from pathlib import Path


def file_of(path: Path, n_cells: int = 6, seed: int = 0, **obs: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    cells = cells_of(path.stem, counts(n_cells, 4, seed), GENES[:4])
    cells.obs = cells.obs.assign(**obs)
    cells.write_h5ad(path)
    return path


def test_renamed_cells_are_unique_whatever_files_are_called(tmp_path: Path) -> None:
    """Cells of different files have different names, even if the names of files and cells join to the same ones."""
    for name, cell in (("a", "b-1"), ("a-b", "1"), ("p/q/x", "1"), ("q/p/x", "1"), ("s1/x", "1"), ("s2/x", "1")):
        cells = ad.AnnData(counts(1, 4, 0), obs=pd.DataFrame(index=[cell]))
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
    for pair in (("a", "a-b"), ("p/q/x", "q/p/x"), ("s1/x", "s2/x")):
        files = [tmp_path / f"{name}.h5ad" for name in pair]
        out = tmp_path / f"{pair[0].replace('/', '-')}.zarr"
        names = collect(files, out, make_unique=True, tell=quiet).obs().index
        assert names.is_unique
    assert sorted(names) == ["s1-1", "s2-1"]  # files of one name are named by their folders
    files = [file_of(tmp_path / f"{name}.h5ad", n_cells) for name, n_cells in (("u", 1), ("v", 3), ("w", 2))]
    obs = collect(files, tmp_path / "sizes.zarr", make_unique=True, tell=quiet).obs()
    for file, n_cells in zip(files, (1, 3, 2), strict=True):
        own = obs.index[obs["src_path"] == str(file)]
        assert sorted(own) == [f"{file.stem}-{file.stem}-{number}" for number in range(n_cells)]


def test_x_and_raw_are_not_layers(tmp_path: Path) -> None:
    """X and raw are the file's own, even if a layer has the same name."""
    cells: Any = cells_of("a", counts(6, 4, 0), GENES[:4])
    cells.raw = cells.copy()
    expected = cells.to_df()
    cells.layers["X"], cells.layers["raw"] = cells.X * 3, cells.X * 5
    cells.X = cells.X * 2
    cells.write_h5ad(tmp_path / "a.h5ad")
    for layer, factor in (("X", 2), ("raw", 1)):
        values, _ = collected(collect(tmp_path / "a.h5ad", tmp_path / f"{layer}.zarr", layer=layer, tell=quiet))
        assert (values.loc[expected.index, expected.columns] == factor * expected).all(axis=None)


def test_arguments_may_be_single_names(tmp_path: Path) -> None:
    """A single name is a list of one, and a missing label of a table is a missing value."""
    file = file_of(tmp_path / "a.h5ad", type=["Unknown", "no", "B", "b", "B", "B"], n=[*range(6)])
    labels = pd.DataFrame({"column": ["type", "type"], "from": ["b", "no"], "to": ["B", np.nan]})
    options: dict[str, Any] = {"obs": "type", "group_by": ["type", "type"], "na_values": "Unknown", "labels": labels}
    obs = collect(file, tmp_path / "cells.zarr", tell=quiet, **options).obs()
    assert [*obs] == ["type", "src_path"]
    assert obs["type"].astype(object).where(obs["type"].notna(), None).tolist() == [*"BBBB", None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "abc"}, "memory must be a number of bytes or a string such as '4GB', got 'abc'"),
        ({"memory": "0"}, "memory must be at least 1, got 0"),
        ({"join": "left"}, "join must be one of None, 'outer', 'inner', got 'left'"),
        ({"dtype": "uint16"}, "dtype must be one of None, 'uint8'"),
        ({"compression": "gzip"}, "compression must be one of 'lz4', 'zstd', 'none', got 'gzip'"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"rename": {"typ": "type"}}, "rename: no file has columns typ"),
        ({"rename": {"type": "zarr.json"}}, "must not have a column zarr.json, which zarr can't store"),
        ({"rename": {"type": ".."}}, r"must not have a column \.\., which zarr can't store"),
        ({"rename": {"type": "src_path"}}, "must not have a column src_path, which a collection uses for the file"),
        ({"group_by": ["n"]}, "group_by: n must be a column of labels, got numbers or booleans"),
        ({"group_by": ["age"]}, "group_by: obs has no column age. It has type, n"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = file_of(tmp_path / "a.h5ad", type=["B"] * 6, n=[*range(6)])
    with pytest.raises(ValueError, match=message):
        collect(file, tmp_path / "cells.zarr", tell=quiet, **options)
    with pytest.raises(Problems, match="files must have at least one file, got none"):
        collect([], tmp_path / "cells.zarr", tell=quiet)


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_damaged_matrices_are_refused(form: str, tmp_path: Path) -> None:
    """Indices beyond the matrix, an indptr that ends early, and missing arrays are problems, not lost values."""
    for damage, message in (
        ("indices", "indices"),
        ("indptr", "indptr must end with the number of values"),
        ("missing", "X must have data, indices and indptr"),
    ):
        path = tmp_path / f"{damage}.h5ad"
        cells = cells_of("a", counts(9, 4, 0), GENES[:4])
        cells.X = sp.csc_matrix(cells.X) if form == "csc" else cells.X
        cells.write_h5ad(path)
        with h5py.File(path, "r+") as file:
            if damage == "indices":
                file["X/indices"][1] = 77
            elif damage == "indptr":
                file["X/indptr"][-1] = file["X/indptr"][-1] - 1
            else:
                del file["X/indptr"]
        with pytest.raises(Problems, match=f"{damage}.h5ad: .*{message}"):
            collect(path, tmp_path / "cells.zarr", tell=quiet)


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_repeated_entries_are_added(form: str, tmp_path: Path) -> None:
    """Entries of one cell and gene are one value, also if it doesn't fit into the dtype that holds each of them."""
    values = counts(9, 4, 0)
    values[0] = [200, 100, 0, 0]
    cells = cells_of("a", values if form == "csr" else values.T[:, :4], GENES[:4])
    expected = cells.to_df()
    cells.X = sp.csc_matrix(cells.X) if form == "csc" else cells.X
    cells.write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        file["X/indices"][1] = 0  # the second entry of the first row, or column
    expected.iloc[0, 0], expected.iloc[(0, 1) if form == "csr" else (1, 0)] = 300, 0
    found, _ = collected(collect(tmp_path / "a.h5ad", tmp_path / "cells.zarr", tell=quiet))
    assert (found.loc[expected.index] == expected).all(axis=None)


def test_numbers_of_obs_are_never_rounded(tmp_path: Path) -> None:
    """Whole numbers that floats don't hold are refused next to large floats, of which some digits may be lost."""
    files = [file_of(tmp_path / "a.h5ad", n=[2**53 + 1] * 6), file_of(tmp_path / "b.h5ad", n=[2.0**60] * 6)]
    with pytest.raises(Problems, match=r"n: whole numbers above .* and fractions have no common dtype"):
        collect(files, tmp_path / "cells.zarr", tell=quiet)


def test_counts_are_never_rounded(tmp_path: Path) -> None:
    """Counts that a float dtype can't hold are refused, and those of files with different dtypes too."""
    for name, dtype, most in (("large", "int64", 2**24 + 1), ("small", "float32", 3), ("huge", "int64", 2**53 + 1)):
        values = counts(4, 4, 0).astype(dtype)
        values[0, 0] = most
        cells_of(name, values, GENES[:4]).write_h5ad(tmp_path / f"{name}.h5ad")
    files = {name: tmp_path / f"{name}.h5ad" for name in ("large", "small", "huge")}
    with pytest.raises(
        Problems, match="dtype='float32': must hold the values of all files, got counts up to 16,777,217"
    ):
        collect(files["large"], tmp_path / "one.zarr", dtype="float32", tell=quiet)
    with pytest.raises(Problems, match=r"integers must be below 2\*\*53 in files of different dtypes, got 9,007,"):
        collect([files["huge"], files["small"]], tmp_path / "two.zarr", tell=quiet)
    collect([files["large"], files["small"]], tmp_path / "three.zarr", tell=quiet)


def test_files_without_cells_or_genes(tmp_path: Path) -> None:
    """A zarr folder without cells has a line, and a file without genes is named together with another file."""
    cells_of("none", counts(0, 4, 0), GENES[:4]).write_zarr(tmp_path / "none.zarr")
    lines: list[str] = []
    collect([tmp_path / "none.zarr", file_of(tmp_path / "a.h5ad")], tmp_path / "cells.zarr", tell=lines.append)
    assert any("none.zarr: 0 cells, 4 genes" in line for line in lines)
    cells_of("empty", np.zeros((3, 0), "float32"), []).write_h5ad(tmp_path / "empty.h5ad")
    for files in ([tmp_path / "empty.h5ad", tmp_path / "a.h5ad"], [tmp_path / "a.h5ad", tmp_path / "empty.h5ad"]):
        with pytest.raises(Problems, match=r"no gene is in all files: .* has (none|gene0).* has (none|gene0)"):
            collect(files, tmp_path / "more.zarr", tell=quiet)
    with pytest.raises(Problems, match=r"empty\.h5ad: has no genes"):
        collect(tmp_path / "empty.h5ad", tmp_path / "more.zarr", tell=quiet)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"cells", mtime=0), "it is compressed as a whole. Run gunzip"),
        (b"PK\x03\x04...", "it is a zip archive. Run unzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "pointer of Git LFS, not the data"),
        (b"\n<!DOCTYPE html><html>", "it is a web page or XML, not the data"),
        (b'{"message": "expired"}', "it is JSON, such as an error of a server"),
        (b"", "it is empty, not the data. Download the file again"),
        (b"\x89HDF but cut off", "OSError"),
    ],
)
def test_other_content_is_described(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.h5ad").write_bytes(content)
    with pytest.raises(Problems, match=f"a.h5ad: can't be read as h5ad: .*{re.escape(message)}"):
        collect(tmp_path / "a.h5ad", tmp_path / "cells.zarr", tell=quiet)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["matrix", "row_attrs/Gene", "col_attrs/CellID"], "It is a loom file: read it with anndata.io.read_loom()"),
        (["matrix/barcodes", "matrix/features/id"], "It is a 10x file: read it with scanpy.read_10x_h5()"),
        (["GRCh38/barcodes", "GRCh38/genes"], "It is a 10x file: read it with scanpy.read_10x_h5()"),
        (["assays/RNA/counts", "cell.names"], "It is an h5Seurat file: convert it in R"),
        (["table/values"], "Write it with anndata"),
    ],
)
def test_other_layouts_are_described(keys: list[str], message: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        for key in keys:
            file[key] = np.zeros(2)
    with pytest.raises(Problems, match=f"has no obs and var, but .*{re.escape(message)}"):
        collect(tmp_path / "a.h5ad", tmp_path / "cells.zarr", tell=quiet)
    (tmp_path / "run" / "matrix.mtx.gz").parent.mkdir()
    (tmp_path / "run" / "matrix.mtx.gz").touch()
    with pytest.raises(Problems, match=r"it is a folder of 10x. Read it with scanpy.read_10x_mtx\(\)"):
        collect(tmp_path / "run", tmp_path / "cells.zarr", tell=quiet)


def test_sheets_of_spreadsheets_are_read(tmp_path: Path) -> None:
    """Spaces around names, a byte order mark and tabs are no part of a sheet, but NA is a label."""
    file_of(tmp_path / "a.h5ad", donor=["x"] * 6)
    for name, text in (
        ("a.csv", "\ufeffpath, donor,\na.h5ad , NA ,\n"),
        ("a.tsv", "path\tdonor\tage\na.h5ad\tNA\n"),
    ):
        (tmp_path / name).write_text(text)
        lines: list[str] = []
        obs = collect(tmp_path / name, tmp_path / f"{name}.zarr", tell=lines.append).obs()
        assert set(obs["donor"]) == {"NA"}
        assert "donor: from the sample sheet, not from obs, in 1 file" in lines
    for text, message in (
        ("path,donor,donor\na.h5ad,x,y\n", "the columns of a sample sheet must be different"),
        ("path;donor\na.h5ad;x\n", "a sample sheet must be separated by commas, got 'path;donor'"),
        ("path,,donor\na.h5ad,x,y\n", "column 2 of a sample sheet must have a name"),
        ("path,CD4/CD8\na.h5ad,x\n", "must not have a column CD4/CD8, which zarr can't store. Rename it in the sheet"),
        ("path,counts\na.h5ad,x\n", "has no x, but X. Name one of these, as in layer=.*, or in the column counts"),
        ("path,donor\na.h5ad,x,y\n", "can't be read as a sample sheet: .* Put values with commas in quotes"),
        ("", "can't be read as a sample sheet"),
    ):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(Problems, match=message):
            collect(tmp_path / "b.csv", tmp_path / "cells.zarr", tell=quiet)


def test_files_of_labels_are_exact(tmp_path: Path) -> None:
    """Blanks are part of a label to replace, unused labels are named, and a line with a comma too many is refused."""
    file, labels = file_of(tmp_path / "a.h5ad", type=["B ", "B", " B", "T", "T", "T"]), tmp_path / "labels.csv"
    labels.write_text("column,from,to\ntype,B ,B\ntype, B,B\ntype,T\ntype,NK ,NK\n")
    lines: list[str] = []
    obs = collect(file, tmp_path / "cells.zarr", labels=labels, tell=lines.append).obs()
    assert [line for line in lines if "WARNING" in line] == ["WARNING: labels: no cell has 'NK ' in type"]
    assert obs["type"].value_counts(dropna=False).to_dict() == {"B": 3, np.nan: 3}
    for text, message in (
        ("column,from,to\ntype,B,T,\n", "can't be read as a file of labels: .* Put values with commas in quotes"),
        ("column;from;to\ntype;B;T\n", "a file of labels must be separated by commas"),
        ("column,from\ntype,B\n", "labels: must have the columns column, from and to, got no to"),
        ("column,from,to\ntype,B,b\ntype,B,\n", "labels: 'B' of type must become one label, got several"),
    ):
        labels.write_text(text)
        with pytest.raises(Problems, match=message):
            collect(file, tmp_path / "more.zarr", labels=labels, tell=quiet)
