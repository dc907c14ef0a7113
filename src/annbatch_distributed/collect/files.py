"""Files: what h5ad files, zarr folders and h5mu files hold, read element by element.

What isn't collected isn't read, so that it may have any encoding. A file is a group of h5py or zarr with the same keys.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import zarr

from annbatch_distributed.collect.entries import Entry, why_no_column
from annbatch_distributed.collect.formats import hint_of_keys, hint_of_path
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.values import Kind, dtype_of, is_sparse, kind_of, sampled, shape_of
from annbatch_distributed.core.values import few

#: A group of h5py or zarr, or an array of one.
type Node = Any
#: Encodings of anndata that strings may have.
_STRINGS = {"string-array", "nullable-string-array", "categorical"}


class File(NamedTuple):
    """Contents of a file, except its values."""

    entry: Entry
    place: str
    """Place of the values that are collected: ``X``, ``raw``, or ``layer NAME``."""
    obs: pd.DataFrame
    """Columns of ``obs`` that are kept."""
    var: pd.DataFrame
    """Names of its genes, and the columns of ``var`` that are strings."""
    dtype: np.dtype[Any]
    """Dtype in which its values are read."""
    is_dense: bool
    """True for a dense matrix, False for a sparse one."""
    kind: Kind | None
    """Kind of its values, as far as some of them tell; None if these are all 0."""
    columns: list[str]
    """Names of all columns of ``obs``, after they were renamed."""
    renamed: list[str]
    """Earlier names of the columns that were renamed."""
    replaced: list[str]
    """Columns of ``obs`` that the sample sheet replaces."""
    others: list[str]
    """Parts that are not collected, such as layers and ``obsm``."""

    @property
    def genes(self) -> pd.Index[Any]:
        """Names of its genes."""
        return self.var.index


@contextmanager
def opened(entry: Entry) -> Iterator[Node]:
    """Open a file, or a modality of it, as a group; raises Problems if it can't be read."""
    path = entry.path
    if not path.exists():
        raise Problems(f"{entry}: no such file")
    try:
        whole: Node = zarr.open_group(path, mode="r") if path.is_dir() else h5py.File(path, "r")
    except Exception as error:  # zarr and h5py raise many types for damaged data
        hint = hint_of_path(path) or f"{type(error).__name__}: {error}"
        raise Problems(f"{entry}: can't be read as h5ad: {hint}") from error
    try:
        yield _modality(entry, whole)
    finally:
        if isinstance(whole, h5py.File):
            whole.close()


def _modality(entry: Entry, whole: Node) -> Node:
    if "mod" in whole:
        names = [*whole["mod"]]
        if entry.modality not in names:
            raise Problems(
                f"{entry}: must name a modality of the file, as in {entry.path}#{names[0]}, got {_all(names)}"
            )
        return whole["mod"][entry.modality]
    if "obs" not in whole or "var" not in whole:
        raise Problems(
            f"{entry}: can't be read as h5ad: it has no obs and var, but {_all([*whole])}. {hint_of_keys(whole)}"
        )
    return whole


def inspected(entry: Entry, *, columns: Sequence[str] | None, rename: Mapping[str, str]) -> File:
    """Return the contents of a file; raises Problems with all that it has."""
    with opened(entry) as group:
        try:
            return _inspected(entry, group, columns, rename)
        except Problems:
            raise
        except Exception as error:  # h5py, zarr and anndata raise many types for damaged or unknown elements
            raise Problems(f"{entry}: can't be read: {type(error).__name__}: {error}") from error


def _inspected(entry: Entry, group: Node, columns: Sequence[str] | None, rename: Mapping[str, str]) -> File:
    layers = [*group.get("layers", ())]
    places = {
        **{name: f"layer {name}" for name in layers},
        # after the layers, one of which may have the same name
        **({"X": "X"} if _has(group, "X") else {}),
        **({"raw": "raw"} if _has(group, "raw") or "raw.X" in group else {}),
    }
    place = next((places[name] for name in entry.places if name in places), None)
    problems = list[str]()
    if place is None:
        wanted = " or ".join(entry.places)
        problems.append(
            f"{entry}: has no {wanted}, but {_all([*places.values()])}. Name one of these with --layer, "
            "or in the column counts of the sample sheet"
        )
    tables = _tables(entry, group)
    of_modality = _columns_of(tables["obs"])
    own_names = [*of_modality, *_labels_of_all(entry, group, of_modality)]
    renamed = [rename.get(name, name) for name in own_names]
    kept = [name for name in dict.fromkeys([*renamed, *entry.labels]) if columns is None or name in columns]
    for name in kept:
        if renamed.count(name) > 1:
            problems.append(f"{entry}: obs has two columns {name} after --rename. Leave one out")
        if why := why_no_column(name):
            problems.append(
                f"{entry}: obs must not have a column {name}, {why}. Rename it, as in --rename "
                f"{shlex.quote(name)}=NEW, or choose columns with --obs"
            )
    if problems:
        raise Problems(*problems)
    assert place is not None
    cells = _names_of(tables["obs"])
    obs = pd.DataFrame(index=cells)
    for name in kept:
        if name in entry.labels:
            obs[name] = pd.Categorical([entry.labels[name]] * len(cells))
        else:
            own = own_names[renamed.index(name)]
            is_own = own in of_modality
            obs[name] = _column(entry, tables["obs"], own) if is_own else _column_of_all(entry, group, own, cells)
    of_genes = tables["raw" if place == "raw" else "var"]
    genes = _names_of(of_genes)
    values = values_at(group, place)
    if is_sparse(values) and not {"data", "indices", "indptr"} <= {*values}:
        raise Problems(f"{entry}: {place} must have data, indices and indptr, got {_all([*values])}")
    if shape_of(values) != (len(cells), len(genes)):
        raise Problems(
            f"{entry}: {place} must have {len(cells):,} cells and {len(genes):,} genes, as its obs and var, got "
            f"{shape_of(values)}"
        )
    some = sampled(values)
    if some.dtype.kind not in "iufb":
        raise Problems(f"{entry}: {place} must have numbers, got values of {some.dtype}")
    others = [*(places[name] for name in places if name != "X"), *(f"obsm {key}" for key in group.get("obsm", ()))]
    return File(
        entry=entry,
        place=place,
        obs=obs,
        var=pd.DataFrame(_strings_of(of_genes), index=genes, dtype=object),
        dtype=dtype_of(some.dtype),
        is_dense=not is_sparse(values),
        kind=kind_of(some),
        columns=[*dict.fromkeys([*renamed, *entry.labels])],
        renamed=[name for name in own_names if name in rename],
        replaced=[name for name in entry.labels if name in renamed and name in kept],
        others=[part for part in others if part != place],
    )


def values_at(group: Node, place: str) -> Node:
    """Return the values at a place of a file, which are an array, or a group of the arrays of a sparse matrix."""
    if place == "raw":
        return group["raw/X"] if "raw" in group else group["raw.X"]
    return group[f"layers/{place.removeprefix('layer ')}"] if place.startswith("layer ") else group["X"]


def _has(group: Node, key: str) -> bool:
    """Return True if a group has an element that isn't None."""
    return key in group and group[key].attrs.get("encoding-type") != "null"


def _tables(entry: Entry, group: Node) -> dict[str, Any]:
    """Return ``obs`` and ``var``, and ``raw`` for the one of ``.raw``: as groups, or as tables of old files."""
    if isinstance(group["obs"], h5py.Dataset):  # of anndata before 0.7
        cells: Any = ad.read_h5ad(entry.path, backed="r")
        tables = {"obs": cells.obs, "var": cells.var, **({} if cells.raw is None else {"raw": cells.raw.var})}
        cells.file.close()
        return tables
    obs = group["obs"]
    if obs.attrs["encoding-version"] == "0.1.0":  # of anndata 0.7, whose categories are not with their columns
        obs = ad.io.read_elem(obs)
    raw = {"raw": group["raw/var"]} if _has(group, "raw") else {}
    return {"obs": obs, "var": group["var"], **raw}


def _columns_of(table: Any) -> list[str]:  # noqa: ANN401 a group or a DataFrame
    return list(map(str, table.columns if isinstance(table, pd.DataFrame) else table.attrs["column-order"]))


def _names_of(table: Any) -> pd.Index[Any]:  # noqa: ANN401 a group or a DataFrame
    names: Any = table.index if isinstance(table, pd.DataFrame) else ad.io.read_elem(table[table.attrs["_index"]])
    return pd.Index([str(name) for name in names], dtype=object)


def _all_modalities(entry: Entry, group: Node) -> Node:
    """Return the h5mu file or zarr folder of a modality."""
    return group.file if isinstance(group, h5py.Group) else zarr.open_group(entry.path, mode="r")


def _labels_of_all(entry: Entry, group: Node, own: Sequence[str]) -> list[str]:
    """Return the columns of ``obs`` of all modalities that a modality lacks."""
    if entry.modality is None or "obs" not in (whole := _all_modalities(entry, group)):
        return []
    # muon writes the column n of the modality rna as rna:n, too
    copies = tuple(f"{modality}:" for modality in whole["mod"])
    return [name for name in _columns_of(whole["obs"]) if not name.startswith(copies) and name not in own]


def _column_of_all(entry: Entry, group: Node, name: str, cells: pd.Index[Any]) -> Any:  # noqa: ANN401 an array
    """Return the values of the cells of a modality in a column of all modalities."""
    table = _all_modalities(entry, group)["obs"]
    names = _names_of(table)
    places = np.zeros(0, int) if names.has_duplicates else names.get_indexer(cells)
    if len(places) != len(cells) or (places < 0).any():
        raise Problems(
            f"{entry}: obs of all modalities must have each cell of the modality once. Run update() on the MuData and "
            "write it again, or choose other columns with --obs"
        )
    return pd.Series(_column(entry, table, name)).array[places]


def _strings_of(table: Any) -> dict[str, Any]:  # noqa: ANN401 a group or a DataFrame
    """Return the columns of a table that are strings, or categories that are strings."""
    columns = dict[str, Any]()
    for name in _columns_of(table):
        if isinstance(table, pd.DataFrame):
            column = table[name].array
        elif str(table[name].attrs.get("encoding-type")) in _STRINGS:
            column = ad.io.read_elem(table[name])
        else:
            continue
        kind = pd.Series(column)
        if pd.api.types.infer_dtype(getattr(column, "categories", kind), skipna=True) in {"string", "empty"}:
            columns[name] = kind.astype(object).to_numpy()
    return columns


def _column(entry: Entry, table: Any, name: str) -> Any:  # noqa: ANN401 a group or a DataFrame
    try:
        if isinstance(table, pd.DataFrame):
            return table[name].array
        return ad.io.read_elem(table[name])
    except Exception as error:  # anndata raises many types for unknown encodings
        raise Problems(
            f"{entry}: the column {name} of obs can't be read: {error}. Choose columns with --obs"
        ) from error


def _all(names: Sequence[str]) -> str:
    return few([*names], 10) or "nothing"
