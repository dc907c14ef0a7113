"""The command ``collect``: one annbatch collection of h5ad files, old or new, with cells or genes in another layout.

1. Each file is read by itself, and what the collection takes of it is written beside it: so many cells are in memory.
2. What all files come to is said.
3. annbatch shuffles and writes the cells, in a folder that gets its name when it is complete.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection

from annbatch_distributed.cli import CommandError
from annbatch_distributed.rows import plural

#: A column of texts with more values names each cell, or is about something else than kinds of cells.
_MOST_VALUES = 20


class _Part(NamedTuple):
    """What the collection takes of a file, which is written to a file of its own."""

    path: Path
    file: Path
    """The file that was given."""
    place: str
    """Where its values were: X, raw or a layer."""
    obs: pd.DataFrame
    genes: pd.Index[Any]
    are_counts: bool | None
    """True if its values are whole numbers; None if all of them are 0."""
    no_labels: set[str]
    """Strings of ``obs`` that were no labels, and are missing values now."""


def run(options: Namespace) -> int:
    """Write the collection, and say what is in it."""
    with warnings.catch_warnings(action="ignore"):  # of anndata and zarr: what matters here is said by name
        return _collect(options)


def _collect(options: Namespace) -> int:
    out, files = Path(options.out), list(map(Path, options.files))
    if out.exists():
        raise CommandError(f"--out {out}: is there already")
    # annbatch keeps the path of each cell's file, which is a temporary one here: stems lead back to the given files
    if len({file.stem for file in files}) < len(files):
        raise CommandError("two files have the same name, by which a cell's file is told: rename one of them")
    layers = {file: _layers(file) for file in files}
    if options.layer and not any(options.layer in names for names in layers.values()):
        raise CommandError(f"no file has a layer {options.layer!r}; {files[0]} has {_named(layers[files[0]])}")
    # next to the result, on the same disk: the finished collection is moved, not copied
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.absolute().parent) as folder:
        # one file after the other, so that the cells of a single file are in memory
        parts = [_part(file, Path(folder) / f"{file.stem}.h5ad", options) for file in files]
        # log-normalized values next to counts would train as if they were counts
        if {part.are_counts for part in parts} >= {True, False}:
            part = next(part for part in parts if part.are_counts is False)
            raise CommandError(
                f"{part.file}: {part.place} has numbers that aren't whole, and other files have counts. It has "
                f"{_named(layers[part.file])}; --layer names where counts are, in files that have it"
            )
        tables = [part.obs for part in parts]
        names = pd.concat([table[[]] for table in tables]).index
        if n_repeated := int(names.duplicated().sum()):
            raise CommandError(
                f"{plural(n_repeated, 'cell name')} repeated, within files or across them: --make-unique"
            )
        # annbatch fills in 0 for genes that a file lacks, if it isn't told to leave them out
        everywhere = set.intersection(*(set(part.genes) for part in parts))
        anywhere = set.union(*(set(part.genes) for part in parts))
        is_union = options.genes == "union"
        kept = anywhere if is_union else everywhere
        if not kept:
            raise CommandError("no gene is in all files: are the names of one kind? --genes union takes all of any")
        zeros = "; those that a file doesn't have are 0 there" if is_union and everywhere < anywhere else ""
        print(
            f"genes: {len(everywhere):,} in all files, {len(anywhere):,} in any; their {options.genes} is taken{zeros}"
        )
        columns = _columns(tables)
        _report(tables, columns)
        for value in sorted({*options.missing}.difference(*(part.no_labels for part in parts))):
            print(f"--missing: no cell has {value!r}")

        unfinished = Path(folder) / "cells.zarr"
        collection = DatasetCollection(unfinished)
        collection.add_adatas(
            [part.path for part in parts],
            load_adata=_loading(columns),
            var_subset=None if is_union else sorted(everywhere),
            dataset_size=options.memory,
            rng=np.random.default_rng(options.seed or 0),
        )
        _name_files(collection, files)
        shutil.move(unfinished, out)
    print(f"{out}: {plural(len(names), 'cell')} of {plural(len(files), 'file')}, {plural(len(kept), 'gene')}")
    print(f"how two ranks share them: annbatch-distributed plan {out} --ranks 2 --remainder exact --by src_path")
    return 0


def _open(file: Path, backed: Literal["r"] | None = None) -> Any:  # noqa: ANN401 what anndata's stubs say is of no use
    if not file.exists():
        raise CommandError(f"{file}: no such file")
    try:
        return ad.read_h5ad(file, backed=backed)
    except Exception as error:  # anndata and h5py raise all kinds for what is missing or damaged
        raise CommandError(f"{file}: can't be read: {type(error).__name__}: {error}") from error


def _layers(file: Path) -> list[str]:
    cells = _open(file, "r")
    names = [name for name in cells.layers if name is not None] + ["raw"] * (cells.raw is not None)
    cells.file.close()
    return names


def _named(layers: list[str]) -> str:
    return f"layers {', '.join(layers)}" if layers else "no layers"


def _part(file: Path, path: Path, options: Namespace) -> _Part:
    """Write what the collection takes of a file."""
    cells = _open(file)
    # a file without the layer has its counts in X
    place, values = "X", cells.X
    if options.layer is not None and options.layer in cells.layers:
        place, values = f"layer {options.layer}", cells.layers[options.layer]
    elif options.layer == "raw" and cells.raw is not None:
        cells = cells.raw.to_adata()
        place, values = "raw", cells.X
    if values is None:
        raise CommandError(f"{file}: no values in X; --layer names where they are")
    if missing := [name for name in options.obs or () if name not in cells.obs]:
        raise CommandError(f"{file}: no columns {', '.join(missing)} in obs, which has {', '.join(cells.obs)}")
    obs = cells.obs if options.obs is None else cells.obs[options.obs]
    taken: Any = ad.AnnData(sp.csr_matrix(values), obs=obs.copy(), var=cells.var[[]])
    if options.make_unique:
        taken.obs_names = [f"{file.stem}-{name}" for name in taken.obs_names]
        taken.obs_names_make_unique()
        taken.var_names_make_unique()
    elif repeated := taken.var_names[taken.var_names.duplicated()].unique().tolist():
        names = ", ".join(repeated[:3]) + ", ..." * (len(repeated) > 3)
        raise CommandError(f"{file}: {plural(len(repeated), 'gene name')} repeated ({names}): --make-unique")
    no_labels = _labelled(taken.obs, options.missing)
    taken.write_h5ad(path)
    data = taken.X.data
    where = f", of {place}" if options.layer else ""
    shape = f"{plural(taken.n_obs, 'cell')}, {plural(taken.n_vars, 'gene')}"
    print(f"{file}: {shape}, {data.dtype}{where}", flush=True)
    are_counts = bool((data % 1 == 0).all()) if data.any() else None
    return _Part(path, file, place, taken.obs, taken.var_names, are_counts, no_labels)


def _labelled(obs: pd.DataFrame, missing: list[str]) -> set[str]:
    """Take labels away that are none, in place, and return those that there were."""
    found = set[str]()
    for name in obs:
        # a category that was replaced is gone from the column, too
        texts = obs[name].astype(object)
        if (are_none := texts.isin(missing)).any():
            found |= {*texts[are_none]}
            obs[name] = pd.Categorical(texts.where(texts.isna(), texts.astype(str)).mask(are_none))
    return found


def _columns(tables: list[pd.DataFrame]) -> dict[str, pd.Index | None]:
    """Return each column of any file, with the values that it has, united; None for numbers."""
    columns: dict[str, pd.Index | None] = {}
    for name in dict.fromkeys(chain(*tables)):
        parts = [table[name] for table in tables if name in table]
        is_number = all(pd.api.types.is_numeric_dtype(part) for part in parts)
        texts = (part.dropna().astype(str).unique() for part in parts)
        columns[name] = None if is_number else pd.Index(sorted(set().union(*texts)), dtype=object)
    return columns


def _loading(columns: dict[str, pd.Index | None]) -> Callable[[Any], ad.AnnData]:
    """Return what opens a file for annbatch: its values stay on disk, and its columns are those of all files."""

    def load(part: Any) -> ad.AnnData:  # noqa: ANN401 a path
        lazy = ad.experimental.read_lazy(part)
        given, obs = ad.read_h5ad(part, backed="r").obs, {}
        # a column that the file lacks is missing there; labels are the same strings in all files
        # {"donor": ["d1", "d2"], "age": None} of all files; this one has cells of d2 only, and no age
        for name, values in columns.items():
            own = given[name] if name in given else pd.Series(np.nan, index=given.index)
            texts = None if values is None else own.astype(object).where(own.isna(), own.astype(str))
            obs[name] = own if values is None else pd.Categorical(texts, categories=values)
        return ad.AnnData(lazy.X, obs=pd.DataFrame(obs, index=given.index), var=lazy.var.to_memory()[[]])

    return load


def _report(tables: list[pd.DataFrame], columns: dict[str, pd.Index | None]) -> None:
    for name, values in columns.items():
        n_there = sum(name in table for table in tables)
        # a column that a file lacks is missing in all of its cells
        n_missing = sum(int(table[name].isna().sum()) if name in table else len(table) for table in tables)
        what = "numbers" if values is None else plural(len(values), "value")
        if values is not None and 0 < len(values) <= _MOST_VALUES:
            what += f" ({', '.join(values)})"
        where = "" if n_there == len(tables) else f", in {n_there:,} of {plural(len(tables), 'file')} only"
        print(f"{name}: {what}{where}, {plural(n_missing, 'cell') if n_missing else 'no cell'} without one")


def _name_files(collection: DatasetCollection, files: list[Path]) -> None:
    """Have ``src_path``, in which annbatch keeps the path of what it has read, name the files that were given."""
    # annbatch has the path of the temporary file, .../cells.zarr.x1y2/pbmc.h5ad; the given one is /data/pbmc.h5ad
    by_stem = {file.stem: str(file) for file in files}
    for group in collection:
        column: Any = group["obs/src_path"]
        read: Any = ad.io.read_elem(column["categories"])
        ad.io.write_elem(column, "categories", np.array([by_stem[Path(path).stem] for path in read], dtype=object))
        zarr.consolidate_metadata(group.store, path=group.path)
