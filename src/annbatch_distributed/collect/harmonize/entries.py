"""Entries: the files to collect, as a user names them, one by one or in a sample sheet."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd
from anndata.utils import make_index_unique

from annbatch_distributed.collect.matrices import Source
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import few

#: Path of a file or folder.
type AnyPath = str | PathLike[str]

_SHEETS = ".csv", ".tsv"
#: Names of columns that a collection can't have, and why.
_RESERVED = {
    "_index": "which anndata uses for obs_names",
    "src_path": "which a collection uses for the file of each cell",
}
#: Names that zarr can't store.
_NO_KEYS = "", ".", "..", "zarr.json"


@dataclass(frozen=True)
class Entry:
    """A file to collect."""

    source: Source
    places: tuple[str, ...]
    """Where its counts may be: ``X``, ``raw``, or the name of a layer; the first of these that it has is read."""
    labels: dict[str, str] = field(default_factory=dict, hash=False)
    """Columns of ``obs`` with one label for all its cells."""

    def __str__(self) -> str:
        return str(self.source)


def entries_of(files: Sequence[AnyPath], places: Sequence[str]) -> list[Entry]:
    """Return the entries of paths, or of the lines of a single sample sheet; raises Problems if some can't be."""
    paths = list(map(str, files))
    if not paths:
        raise Problems("files must have at least one file, got none")
    sheets = [path for path in paths if path.endswith(_SHEETS)]
    if sheets and len(paths) > 1:
        raise Problems(f"{sheets[0]}: a sample sheet must be the only file, got {len(paths)} files")
    entries = _of_sheet(Path(sheets[0]), places) if sheets else [_entry(path, places) for path in paths]
    if twice := [str(one) for one, n_times in Counter(map(str, entries)).items() if n_times > 1]:
        raise Problems(f"files must be different, got {', '.join(twice)} more than once")
    return entries


def why_no_column(name: str) -> str:
    """Return why a collection can't have a column of ``obs`` with this name; an empty string if it can."""
    return _RESERVED.get(name, "which zarr can't store" if "/" in name or name in _NO_KEYS else "")


def short_names(sources: Sequence[Source]) -> list[str]:
    """Return a name for each file: its stem, or the parts of its path that differ from other paths.

    >>> short_names([Source(Path(f"s{n}/adata.h5ad"), None) for n in (1, 2)])
    ['s1', 's2']
    """
    stems = [Path(str(source)).stem for source in sources]
    if len({*stems}) == len(stems):
        return stems
    parts = [Path(str(source)).absolute().with_suffix("").parts for source in sources]
    common = set.intersection(*map(set, parts))
    return ["-".join(part for part in path if part not in common) or path[-1] for path in parts]


def unique(names: pd.Index[Any]) -> pd.Index[Any]:
    """Return names, of which repeated ones are numbered, as anndata does.

    >>> unique(pd.Index(["a", "b", "a"])).tolist()
    ['a', 'b', 'a-1']
    """
    with warnings.catch_warnings(action="ignore"):  # of names that end in a number
        return make_index_unique(names) if names.has_duplicates else names


def _entry(text: str, places: Sequence[str], labels: dict[str, str] | None = None) -> Entry:
    # file.h5mu#rna; a # may be part of the name of other files
    path, mark, modality = text.rpartition("#")
    is_named = bool(mark) and path.endswith((".h5mu", ".zarr"))
    source = Source(Path(path), modality) if is_named else Source(Path(text), None)
    return Entry(source, tuple(places), labels or {})


def read_table(path: Path, noun: str, *, strip: bool) -> pd.DataFrame:
    """Read a table of strings, whose first line has the names of the columns; ``strip`` removes blanks around them.

    Raises Problems if it can't be read.
    """
    separator, described = ("\t", "tabs") if path.suffix == ".tsv" else (",", "commas")
    try:
        # the names as a line of their own, since pandas would move the columns if other lines had more fields
        lines = pd.read_csv(
            path,
            sep=separator,
            header=None,
            dtype=str,
            keep_default_na=False,
            skipinitialspace=strip,
            encoding="utf-8-sig",
        ).fillna("")  # of lines with fewer fields
    except (OSError, ValueError) as error:  # ValueError is the base of pandas' errors
        hint = ". Put values with commas in quotes" if isinstance(error, pd.errors.ParserError) else ""
        raise Problems(f"{path}: can't be read as {noun}: {str(error).strip()}{hint}") from error
    lines = lines.apply(lambda column: column.str.strip()) if strip else lines
    names = [name.strip() for name in lines.iloc[0]]
    if len(names) == 1 and any(mark in names[0] for mark in ",;\t"):
        raise Problems(f"{path}: {noun} must be separated by {described}, got {names[0]!r}")
    table = lines[1:].set_axis(names, axis="columns").reset_index(drop=True)
    # spreadsheets write empty columns
    return table.loc[:, [bool(name) or (table.iloc[:, at] != "").any() for at, name in enumerate(names)]]


def _of_sheet(sheet: Path, places: Sequence[str]) -> list[Entry]:
    table = read_table(sheet, "a sample sheet", strip=True)  # "02 " and "02" are the same donor
    if problems := [*_problems_of(sheet, table)]:
        raise Problems(*problems)
    labels = table.drop(columns=["path", "counts"], errors="ignore")
    return [
        _entry(
            str(sheet.parent / line["path"]),
            [line["counts"]] if line.get("counts") else places,
            {name: value for name, value in own.items() if value},  # an empty field leaves the file's own column
        )
        for line, own in zip(table.to_dict("records"), labels.to_dict("records"), strict=True)
    ]


def _problems_of(sheet: Path, table: pd.DataFrame) -> Iterator[str]:
    if "path" not in table:
        yield f"{sheet}: a sample sheet must have a column path, got {few([*table], 10)}"
    elif table.columns.has_duplicates:
        yield f"{sheet}: the columns of a sample sheet must be different, got {few([*table], 10)}"
    elif "" in table:
        yield f"{sheet}: column {[*table].index('') + 1} of a sample sheet must have a name, got none"
    elif refused := [f"{name}, {why}" for name in table if (why := why_no_column(name))]:
        yield from (f"{sheet}: a sample sheet must not have a column {one}. Rename it in the sheet" for one in refused)
    elif not len(table):
        yield f"{sheet}: a sample sheet must have a line for each file, got none"
    elif (table["path"] == "").any():
        yield f"{sheet}: each line must have a path, got none in line {int((table['path'] == '').argmax()) + 2}"
