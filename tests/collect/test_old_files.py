"""Old files: their counts and labels are read as anndata 0.6 and 0.7 wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from annbatch_distributed.collect import collect
from tests.collect.test_files import GENES, collected, counts, quiet

# anndata warns of each element, and the command leaves its warnings out
pytestmark = pytest.mark.filterwarnings("ignore:.* was written with")

N_CELLS = 12
#: Code of the kind of each cell, of which -1 is a missing one, and the kinds, which aren't in alphabetical order.
CODES, KINDS = np.array([2, 0, -1, 1] * 3, dtype=np.int8), ["T", "NK", "B"]
LABELS = ["B", "T", None, "NK"] * 3
NAMES = [f"cell{number}" for number in range(N_CELLS)]


def assert_collected(file: Path, out: Path, expected: pd.DataFrame, **options: Any) -> pd.DataFrame:
    """Collect a file, compare the counts and kinds of its cells, and return ``obs`` in the order of the file."""
    values, obs = collected(collect(file, out, tell=quiet, **options))
    pd.testing.assert_frame_equal(values.loc[NAMES], expected, check_names=False, check_dtype=False)
    assert sorted(obs.index) == sorted(NAMES)
    obs = obs.loc[NAMES]
    assert [None if pd.isna(kind) else kind for kind in obs["kind"]] == LABELS
    assert obs["kind"].cat.categories.tolist() == KINDS
    return obs


def sparse_group(group: h5py.Group, values: Any) -> h5py.Group:
    """Write the arrays of a CSR matrix, without attributes."""
    matrix = sp.csr_matrix(values)
    for name in ("data", "indices", "indptr"):
        group[name] = getattr(matrix, name)
    return group


def table_of_07(file: h5py.File, place: str, names: list[str], columns: dict[str, Any]) -> h5py.Group:
    """Write a table as anndata 0.7 wrote it: strings and numbers are plain datasets."""
    table = file.create_group(place)
    strings: Any = h5py.string_dtype()
    attributes = {"encoding-type": "dataframe", "encoding-version": "0.1.0", "_index": "names"}
    table.attrs.update(attributes)
    table.attrs.create("column-order", [*columns], dtype=strings)
    for name, column in {"names": names, **columns}.items():
        is_text = isinstance(column[0], str)
        table.create_dataset(name, data=column, dtype=strings if is_text else None)
    return table


@pytest.mark.parametrize("is_ordered", [False, True])
def test_files_of_anndata_07_are_read(is_ordered: bool, tmp_path: Path) -> None:
    """Labels are codes, with a reference to their categories in a group of their own."""
    values = counts(N_CELLS, 4, 0)
    with h5py.File(tmp_path / "old.h5ad", "w") as file:
        attributes = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": values.shape}
        sparse_group(file.create_group("X"), values).attrs.update(attributes)
        columns = {"kind": CODES, "donor": [f"d{number % 2}" for number in range(N_CELLS)], "age": np.arange(N_CELLS)}
        obs = table_of_07(file, "obs", NAMES, columns)
        kinds = obs.create_dataset("__categories/kind", data=KINDS, dtype=h5py.string_dtype())
        kinds.attrs["ordered"] = np.bool_(is_ordered)
        obs["kind"].attrs["categories"] = kinds.ref
        types = ["Gene Expression", "Antibody Capture"] * 2
        table_of_07(file, "var", GENES[:4], {"gene_ids": [*"wxyz"], "feature_types": types})
    expected = pd.DataFrame(values, NAMES, GENES[:4])
    chosen = collect(tmp_path / "old.h5ad", tmp_path / "g.zarr", feature_types=["Gene Expression"], tell=quiet)
    var: Any = ad.io.read_elem(next(iter(chosen))["var"])
    assert var["gene_ids"].to_dict() == {GENES[0]: "w", GENES[2]: "y"}
    found = assert_collected(tmp_path / "old.h5ad", tmp_path / "cells.zarr", expected)
    assert {*found} == {"kind", "donor", "age", "src_path"}
    assert found["kind"].cat.ordered == is_ordered
    assert found["donor"].tolist() == ["d0", "d1"] * 6
    assert found["age"].tolist() == [*range(N_CELLS)]


def test_labels_of_all_modalities_may_be_of_anndata_07(tmp_path: Path) -> None:
    values = counts(N_CELLS, 4, 0)
    with h5py.File(tmp_path / "old.h5mu", "w") as file:
        obs = table_of_07(file, "obs", NAMES, {"kind": CODES})
        kinds = obs.create_dataset("__categories/kind", data=KINDS, dtype=h5py.string_dtype())
        kinds.attrs["ordered"] = np.bool_(False)
        obs["kind"].attrs["categories"] = kinds.ref
        attributes = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": values.shape}
        sparse_group(file.create_group("mod/rna/X"), values).attrs.update(attributes)
        table_of_07(file["mod/rna"], "obs", NAMES, {"age": np.arange(N_CELLS)})
        table_of_07(file["mod/rna"], "var", GENES[:4], {"mean": values.mean(0)})
    found = assert_collected(
        Path(f"{tmp_path}/old.h5mu#rna"), tmp_path / "cells.zarr", pd.DataFrame(values, NAMES, GENES[:4])
    )
    assert {*found} == {"age", "kind", "src_path"}


def table_of_06(names: list[str], columns: dict[str, Any]) -> Any:
    """Return a table as anndata 0.6 wrote it: an array of tuples, of which the first field has the names."""
    arrays = {"index": np.array(names, dtype="S"), **{name: np.array(own) for name, own in columns.items()}}
    table = np.empty(len(names), [(name, own.dtype) for name, own in arrays.items()])
    for name, own in arrays.items():
        table[name] = own
    return table


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_files_of_anndata_06_are_read(form: str, tmp_path: Path) -> None:
    """Tables are arrays of tuples, the categories of labels are in ``uns``, and ``raw`` has names with a dot."""
    values, raw = counts(N_CELLS, 3, 0), counts(N_CELLS, 5, 1)
    with h5py.File(tmp_path / "old.h5ad", "w") as file:
        for place, own in (("X", values), ("raw.X", raw)):
            if form == "sparse":
                attributes = {"h5sparse_format": "csr", "h5sparse_shape": own.shape}
                sparse_group(file.create_group(place), own).attrs.update(attributes)
            else:
                file[place] = own
        file["obs"] = table_of_06(NAMES, {"kind": CODES, "age": np.arange(N_CELLS)})
        file["uns/kind_categories"] = np.array(KINDS, dtype="S")
        file["var"] = table_of_06(GENES[1:4], {"mean": values.mean(0)})
        file["raw.var"] = table_of_06(GENES[:5], {"mean": raw.mean(0)})
    for place, expected in (
        ("X", pd.DataFrame(values, NAMES, GENES[1:4])),
        ("raw", pd.DataFrame(raw, NAMES, GENES[:5])),
    ):
        found = assert_collected(tmp_path / "old.h5ad", tmp_path / f"{place}.zarr", expected, layer=place)
        assert found["age"].tolist() == [*range(N_CELLS)]
