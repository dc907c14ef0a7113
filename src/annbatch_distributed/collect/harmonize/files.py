"""Files: what h5ad files, zarr folders and h5mu files hold, read element by element.

What isn't collected isn't read, so that it may have any encoding. A file is a group of h5py or zarr with the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import zarr

from annbatch_distributed.collect.harmonize.entries import Entry, why_no_column
from annbatch_distributed.collect.matrices import (
    Kind,
    Node,
    Source,
    dtype_of,
    is_dense,
    kind_of,
    listed,
    opened,
    sampled,
    values_at,
)
from annbatch_distributed.collect.problems import Problems

#: Encodings of anndata that strings may have.
_STRINGS = {"string-array", "nullable-string-array", "categorical"}


class File(NamedTuple):
    """Contents of a file, except its values."""

    source: Source
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


def inspected(entry: Entry, *, columns: Sequence[str] | None, rename: Mapping[str, str]) -> File:
    """Return the contents of a file; raises Problems with all that it has."""
    with opened(entry.source) as group:
        try:
            return _inspected(entry, group, columns, rename)
        except Problems:
            raise
        except Exception as error:  # h5py, zarr and anndata raise many types for damaged or unknown elements
            raise Problems(f"{entry}: can't be read: {type(error).__name__}: {error}") from error


def _inspected(entry: Entry, group: Node, columns: Sequence[str] | None, rename: Mapping[str, str]) -> File:
    places = _places_in(group)
    place = next((places[name] for name in entry.places if name in places), None)
    tables = _tables(entry.source, group)
    # the table that has each column, by its name in the file
    table_of = dict.fromkeys(_columns_of(tables["obs"]), tables["obs"]) | _labels_of_all(entry, group, tables["obs"])
    renamed = [rename.get(name, name) for name in table_of]
    kept = [name for name in dict.fromkeys([*renamed, *entry.labels]) if columns is None or name in columns]
    problems = [*_problems_of_columns(entry, renamed, kept)]
    if place is None:
        found = listed([*places.values()])
        hint = f"Name one of these, as in layer={[*places][:1] or ['X']}, or in the column counts of the sample sheet"
        problems.insert(0, f"{entry}: has no {' or '.join(entry.places)}, but {found}. {hint}")
    if place is None or problems:
        raise Problems(*problems)
    obs = pd.DataFrame(index=_names_of(tables["obs"]))
    for name in kept:
        if name in entry.labels:
            obs[name] = pd.Categorical([entry.labels[name]] * len(obs))
        else:
            own = [*table_of][renamed.index(name)]
            obs[name] = _column(entry, own, table_of[own], tables["obs"], obs.index)
    of_genes = tables["raw" if place == "raw" else "var"]
    var = pd.DataFrame(_strings_of(of_genes), index=_names_of(of_genes), dtype=object)
    others = [*(places[name] for name in places if name != "X"), *(f"obsm {key}" for key in group.get("obsm", ()))]
    values = values_at(group, place)
    some = _sampled(entry, place, values, (len(obs), len(var)))
    return File(
        source=entry.source,
        place=place,
        obs=obs,
        var=var,
        dtype=dtype_of(some.dtype),
        is_dense=is_dense(values),
        kind=kind_of(some),
        columns=[*dict.fromkeys([*renamed, *entry.labels])],
        renamed=[name for name in table_of if name in rename],
        replaced=[name for name in entry.labels if name in renamed and name in kept],
        others=[part for part in others if part != place],
    )


def _places_in(group: Node) -> dict[str, str]:
    """Return the places of values in a file, by the names that a user gives them."""
    return {
        **{name: f"layer {name}" for name in group.get("layers", ())},
        # after the layers, one of which may have the same name
        **({"X": "X"} if _has(group, "X") else {}),
        **({"raw": "raw"} if _has(group, "raw") or "raw.X" in group else {}),
    }


def _problems_of_columns(entry: Entry, renamed: Sequence[str], kept: Sequence[str]) -> Iterator[str]:
    for name in kept:
        if renamed.count(name) > 1:
            yield f"{entry}: obs has two columns {name} after they were renamed. Leave one out"
        if why := why_no_column(name):
            yield (
                f"{entry}: obs must not have a column {name}, {why}. Rename it, as in rename={ {name: 'NEW'} }, or "
                "choose columns with obs=['NAME']"
            )


def _sampled(entry: Entry, place: str, values: Node, shape: tuple[int, int]) -> Any:  # noqa: ANN401 an array
    """Return some values of a matrix; raises Problems if these aren't numbers, or the matrix has another shape."""
    if tuple(values.shape) != shape:
        raise Problems(
            f"{entry}: {place} must have {shape[0]:,} cells and {shape[1]:,} genes, as its obs and var, got "
            f"{tuple(map(int, values.shape))}"
        )
    some = sampled(values)
    if some.dtype.kind not in "iufb":
        raise Problems(f"{entry}: {place} must have numbers, got values of {some.dtype}")
    return some


def _has(group: Node, key: str) -> bool:
    """Return True if a group has an element that isn't None."""
    return key in group and group[key].attrs.get("encoding-type") != "null"


def _tables(source: Source, group: Node) -> dict[str, Any]:
    """Return ``obs`` and ``var``, and ``raw`` for the one of ``.raw``: as groups, or as tables of old files."""
    if isinstance(group["obs"], h5py.Dataset):  # of anndata before 0.7
        cells: Any = ad.read_h5ad(source.path, backed="r")
        tables = {"obs": cells.obs, "var": cells.var, **({} if cells.raw is None else {"raw": cells.raw.var})}
        cells.file.close()
        return tables
    raw = {"raw": _table(group["raw/var"])} if _has(group, "raw") else {}
    return {"obs": _table(group["obs"]), "var": _table(group["var"]), **raw}


def _table(table: Node) -> Any:  # noqa: ANN401 a group or a DataFrame
    """Return a table of a file; read as a whole if anndata 0.7 wrote it, as its categories aren't with its columns."""
    return ad.io.read_elem(table) if table.attrs.get("encoding-version") == "0.1.0" else table


def _columns_of(table: Any) -> list[str]:  # noqa: ANN401 a group or a DataFrame
    return list(map(str, table.columns if isinstance(table, pd.DataFrame) else table.attrs["column-order"]))


def _names_of(table: Any) -> pd.Index[Any]:  # noqa: ANN401 a group or a DataFrame
    names: Any = table.index if isinstance(table, pd.DataFrame) else ad.io.read_elem(table[table.attrs["_index"]])
    return pd.Index([str(name) for name in names], dtype=object)


def _labels_of_all(entry: Entry, group: Node, own: Any) -> dict[str, Any]:  # noqa: ANN401 a group or a DataFrame
    """Return the columns of ``obs`` of all modalities that the one of a modality lacks, each with that table."""
    if entry.source.modality is None:
        return {}
    whole: Node = group.file if isinstance(group, h5py.Group) else zarr.open_group(entry.source.path, mode="r")
    if "obs" not in whole:
        return {}
    # muon writes the column n of the modality rna as rna:n, too
    known = tuple(f"{modality}:" for modality in whole["mod"])
    table = _table(whole["obs"])
    names = (name for name in _columns_of(table) if not name.startswith(known))
    return dict.fromkeys([name for name in names if name not in _columns_of(own)], table)


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


def _column(entry: Entry, name: str, table: Any, own: Any, cells: pd.Index[Any]) -> Any:  # noqa: ANN401 a group or a DataFrame
    """Return a column of some cells; ``table`` is their ``own`` one, or the one of all modalities."""
    try:
        column = table[name].array if isinstance(table, pd.DataFrame) else ad.io.read_elem(table[name])
    except Exception as error:  # anndata raises many types for unknown encodings
        raise Problems(
            f"{entry}: the column {name} of obs can't be read: {error}. Choose columns with obs=['NAME']"
        ) from error
    if table is own:
        return column
    names = _names_of(table)
    places = np.zeros(0, int) if names.has_duplicates else names.get_indexer(cells)
    if len(places) != len(cells) or (places < 0).any():
        raise Problems(
            f"{entry}: obs of all modalities must have each cell of the modality once. Run update() on the MuData and "
            "write it again, or choose other columns with obs=['NAME']"
        )
    return pd.Series(column).array[places]
