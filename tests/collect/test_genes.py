"""Genes of several files: which are the same gene, and what the collection knows about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from annbatch import DatasetCollection
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import AlignedLoader, Rank, StatefulLoader
from annbatch_distributed.collect import Problems, collect
from annbatch_distributed.collect.harmonize.files import File
from annbatch_distributed.collect.harmonize.genes import named
from annbatch_distributed.collect.matrices import Source
from tests.collect.test_files import quiet

#: Genes, of which some have the same name, one the name that anndata gives to a second one, and one no id.
FEATURES = [("a", "1"), ("b", "2"), ("b", "3"), ("b", "4"), ("b-1", "5"), ("c", "6"), ("c", "7"), ("c", None)]


def write(path: Path, features: list[tuple[str, str | None]], **columns: Any) -> Path:
    """Write a file of three cells whose counts are 10 and the ids of genes; features without an id have 100."""
    var = pd.DataFrame({"gene_ids": [one for _, one in features], **columns}, index=[name for name, _ in features])
    counts = np.tile([10 + int(one or 90) for _, one in features], (3, 1)).astype("float32")
    obs = pd.DataFrame(index=[f"{path.stem}{number}" for number in range(3)])
    ad.AnnData(sp.csr_matrix(counts), obs=obs, var=var).write_h5ad(path)
    return path


def values_of(collection: Any) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The values of a collection of one dataset, by cells and genes, and its ``var``."""
    (group,) = collection
    values, obs, var = (ad.io.read_elem(group[key]) for key in ("X", "obs", "var"))
    return pd.DataFrame(values.toarray() if sp.issparse(values) else values, obs.index, var.index), var


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from(FEATURES), unique=True)), min_size=1, max_size=4))
def test_genes_of_one_name_are_told_apart(files: list[tuple[bool, list[tuple[str, str | None]]]]) -> None:
    """Genes of files share a column if their names do, and their ids, if a file has several genes of this name."""
    inputs = []
    for number, (has_ids, features) in enumerate(files):
        ids = {"gene_ids": [one for _, one in features]} if has_ids else {}
        var = pd.DataFrame(ids, index=[name for name, _ in features], dtype=object)
        source = Source(Path(f"{number}.h5ad"), None)
        inputs.append(File(source, "X", pd.DataFrame(), var, np.dtype("f4"), False, None, [], [], [], []))
    names = [[name for name, _ in features] for _, features in files]
    repeated = {name for own in names for name in own if own.count(name) > 1}
    shared = {name for name in repeated if sum(name in own for own in names) > 1}
    if any(name in shared and not (has_ids and one) for has_ids, features in files for name, one in features):
        with pytest.raises(Problems, match=r"h5ad: \d gene names? of several genes, such as .* Add a column gene_ids"):
            named(inputs, None)
        return
    indexes, lines = named(inputs, None)
    assert bool(repeated) == any("of several genes" in line for line in lines)
    column_of: dict[Any, set[str]] = {}
    for number, ((_, features), index) in enumerate(zip(files, indexes, strict=True)):
        assert index.is_unique
        for place, ((name, one), column) in enumerate(zip(features, index, strict=True)):
            # in the only file with this name, genes are told apart without ids
            gene = (name, one if name in shared else (number, place) if name in repeated else None)
            column_of.setdefault(gene, set()).add(column)
            assert column == name or name in repeated
    assert all(len(columns) == 1 for columns in column_of.values())
    assert len(set.union(set(), *column_of.values())) == len(column_of)


def test_counts_go_to_genes_by_their_ids(tmp_path: Path) -> None:
    """Counts of genes of one name go to the column of their id, and var has the id."""
    first = write(tmp_path / "first.h5ad", [("a", "1"), ("b", "2"), ("b", "3")])
    second = write(tmp_path / "second.h5ad", [("b", "3"), ("a", "1"), ("b", "2")])
    values, var = values_of(collect([first, second], tmp_path / "cells.zarr", tell=quiet))
    assert var["gene_ids"].to_dict() == {"a": "1", "b": "2", "b-1": "3"}
    assert (values == [11, 12, 13]).all(axis=None)


def test_ids_that_contradict_names_are_warned_of(tmp_path: Path) -> None:
    """A name with different ids in files that have it once, and an id with different names, have a warning each."""
    first = write(tmp_path / "first.h5ad", [("a", "1"), ("b", "2"), ("c", "6")], genome=["x", "x", "x"])
    second = write(tmp_path / "second.h5ad", [("a", "1"), ("b", "3"), ("d", "6")], genome=["y", "y", "y"])
    lines: list[str] = []
    _, var = values_of(collect([first, second], tmp_path / "cells.zarr", tell=lines.append))
    assert [*var] == []
    (ids,) = (line for line in lines if "different gene_ids" in line)
    assert "1 gene name with different gene_ids in different files, and one column in the collection: b (2, 3)" in ids
    (names,) = (line for line in lines if "the same gene_ids" in line)
    assert names.endswith("columns of their own: c (6), d (6)")
    assert any("genes of several genomes, x (3), y (3)" in line for line in lines)


def test_feature_types_are_chosen(tmp_path: Path) -> None:
    """Antibodies are collected with a warning, and left out if a user names genes, also if a gene has their name."""
    types = ["Gene Expression", "Gene Expression", "Antibody Capture"]
    first = write(tmp_path / "first.h5ad", [("a", "1"), ("b", "2"), ("b", "3")], feature_types=types)
    second = write(tmp_path / "second.h5ad", [("b", "3"), ("b", "2"), ("a", "1")], feature_types=types[::-1])
    third = write(tmp_path / "third.h5ad", [("a", "1"), ("b", "2")])
    lines: list[str] = []
    values, var = values_of(collect([first, second], tmp_path / "all.zarr", tell=lines.append))
    assert (values == [11, 12, 13]).all(axis=None)
    assert var["feature_types"].to_dict() == {"a": types[0], "b": types[0], "b-1": types[2]}
    assert any(
        "several types, Antibody Capture (1), Gene Expression (2), and all are collected" in one for one in lines
    )
    lines.clear()
    genes = collect([first, second, third], tmp_path / "genes.zarr", feature_types=types[0], tell=lines.append)
    values, var = values_of(genes)
    assert (values == [11, 12]).all(axis=None)
    assert var["gene_ids"].to_dict() == {"a": "1", "b": "2"}
    assert any(f"no column feature_types in var of {third}: all features" in line for line in lines)
    with pytest.raises(Problems, match=r"feature_types: no file has Peaks. They have Antibody Capture \(1\), Gene"):
        collect([first, second], tmp_path / "none.zarr", feature_types=["Peaks"], tell=quiet)


def test_genes_are_matched_by_name(tmp_path: Path) -> None:
    """Values stay with the names of genes, whatever their order; only shared genes are kept under join="inner"."""
    genes = {"abcd": 1, "dcbe": 2, "bcd": 3}
    files = [
        write(tmp_path / f"{name}.h5ad", [(gene, str(10 * n + ord(gene))) for gene in name])
        for name, n in genes.items()
    ]
    expected = {f"{name}0": {gene: 10 + 10 * n + ord(gene) for gene in name} for name, n in genes.items()}
    for join, kept in (("outer", "abcde"), ("inner", "bcd")):
        lines: list[str] = []
        values, _ = values_of(collect(files, tmp_path / f"{join}.zarr", join=join, tell=lines.append))
        assert sorted(values) == [*kept]
        for cell, own in expected.items():
            assert values.loc[cell].to_dict() == {gene: own.get(gene, 0) for gene in kept}
        outer = "the genes of any file; genes that a file lacks are 0 in its cells"
        used = outer if join == "outer" else "the shared genes"
        assert f"genes: 3 in all files, 5 in any file; using {used}" in lines


def test_genes_without_a_common_name_are_an_error(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.h5ad", [(gene, "1") for gene in name]) for name in ("abcd", "wxyz", "dvwx")]
    with pytest.raises(Problems, match=r"no gene is in all files: .*abcd.h5ad has a, b, c, ..., and .* has w, x, y"):
        collect(files[:2], tmp_path / "cells.zarr", tell=quiet)
    values, _ = values_of(collect(files[:2], tmp_path / "cells.zarr", join="outer", tell=quiet))
    assert sorted(values) == [*"abcdwxyz"]
    lines: list[str] = []
    collect([files[0], files[2]], tmp_path / "other.zarr", tell=lines.append)
    assert any(f"WARNING: only 1 of the 4 genes of {files[0]} are in all files" in line for line in lines)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:])])
def test_damaged_table_of_measured_genes_raises(damage: Callable[[Path], object], tmp_path: Path) -> None:
    file = write(tmp_path / "a.h5ad", [("a", "1"), ("b", "2")])
    collection = collect(file, tmp_path / "cells.zarr", tell=quiet)
    damage(tmp_path / "cells.zarr" / "dataset_0" / "varm" / "measured" / "c" / "0" / "0")
    with pytest.raises(OSError, match="varm/measured"):
        StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), return_file=True)


def test_batches_tell_which_genes_were_measured(tmp_path: Path) -> None:
    """A gene that a file doesn't have is 0 in its cells, and not measured."""
    files = [write(tmp_path / f"{name}.h5ad", [(gene, "1") for gene in name]) for name in ("abcd", "cdef")]
    collection = collect(files, tmp_path / "cells.zarr", tell=quiet)
    loader = StatefulLoader.from_collection(
        collection, dist_info=Rank(0, 1), batch_size=4, return_file=True, names=True
    )
    assert list(loader.genes_measured.index) == list(map(str, files))
    n_cells = 0
    for batch in loader:
        names = np.array(["abcd", "cdef"])[batch["file"]]
        assert [name[:-1] for name in batch["obs"].index] == names.tolist()
        for name, mask in zip(names, loader.genes_measured.to_numpy()[batch["file"]], strict=True):
            assert "".join(loader.genes_measured.columns[mask]) == name
        n_cells += len(names)
    assert n_cells == 6
    again = AlignedLoader({"rna": loader}, batch_sampler=loader.sampler)
    assert "file" in next(iter(again))["rna"]
    plain = StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), batch_size=4)
    assert "file" not in next(iter(plain))
    with pytest.raises(ValueError, match="return_file=True"):
        _ = plain.genes_measured
    other = DatasetCollection(tmp_path / "other.zarr").add_adatas(files)
    with pytest.raises(ValueError, match="measured genes"):
        StatefulLoader.from_collection(other, dist_info=Rank(0, 1), batch_size=4, return_file=True)
