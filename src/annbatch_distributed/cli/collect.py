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
from pathlib import Path
from typing import Any

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


def run(options: Namespace) -> int:
    """Write the collection, and say what is in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of anndata and zarr: what matters here is said by name
        return _collect(options)


def _collect(options: Namespace) -> int:
    out = Path(options.out)
    if out.exists():
        raise CommandError(f"--out {out}: is there already")
    files = [Path(file) for file in options.files]
    # annbatch keeps the path of each cell's file, which is a temporary one here: stems lead back to the given files
    if len({file.stem for file in files}) < len(files):
        raise CommandError("two files have the same name, by which a cell's file is told: rename one of them")
    layers = {file: _layers(file) for file in files}
    if options.layer and not any(options.layer in names for names in layers.values()):
        raise CommandError(f"no file has a layer {options.layer!r}; {files[0]} has {_named(layers[files[0]])}")
    # next to the result, on the same disk: the finished collection is moved, not copied
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.absolute().parent) as folder:
        parts = {file: Path(folder) / f"{file.stem}.h5ad" for file in files}
        obs, genes, places, are_counts, found = {}, {}, {}, {}, set[str]()
        for file, part in parts.items():
            cells: Any
            cells, places[file] = _read(file, options)
            found |= _labelled(cells.obs, options.missing)
            cells.write_h5ad(part)
            obs[file], genes[file] = cells.obs, cells.var_names
            if cells.X.data.any():
                are_counts[file] = bool((cells.X.data % 1 == 0).all())
            where = f", of {places[file]}" if options.layer else ""
            shape = f"{plural(cells.n_obs, 'cell')}, {plural(cells.n_vars, 'gene')}"
            print(f"{file}: {shape}, {cells.X.dtype}{where}", flush=True)
        # log-normalized values next to counts would train as if they were counts
        if len(set(are_counts.values())) > 1:
            file = next(file for file in files if not are_counts.get(file, True))
            raise CommandError(
                f"{file}: {places[file]} has numbers that aren't whole, and other files have counts. It has "
                f"{_named(layers[file])}; --layer names where counts are, in files that have it"
            )
        _check_names(obs)
        columns = _columns(obs)
        everywhere = set.intersection(*map(set, genes.values()))
        anywhere = set.union(*map(set, genes.values()))
        kept = {"union": anywhere, "intersection": everywhere}[options.genes]
        if not kept:
            raise CommandError("no gene is in all files: are the names of one kind? --genes union takes all of any")
        _report(obs, columns, everywhere, anywhere, options.genes)
        for value in sorted({*options.missing} - found):
            print(f"--missing: no cell has {value!r}")

        unfinished = Path(folder) / "cells.zarr"
        collection = DatasetCollection(unfinished)
        collection.add_adatas(
            list(parts.values()),
            load_adata=_loading(columns),
            var_subset=sorted(everywhere) if options.genes == "intersection" else None,
            dataset_size=options.memory,
            rng=np.random.default_rng(options.seed or 0),
        )
        _name_files(collection, files)
        shutil.move(unfinished, out)
    n_cells = sum(map(len, obs.values()))
    print(f"{out}: {plural(n_cells, 'cell')} of {plural(len(files), 'file')}, {plural(len(kept), 'gene')}")
    print(f"how two ranks share them: annbatch-distributed plan {out} --ranks 2 --remainder exact --by src_path")
    return 0


def _open(file: Path, *, whole: bool = True) -> Any:  # noqa: ANN401 what anndata's stubs say of it is of no use here
    if not file.exists():
        raise CommandError(f"{file}: no such file")
    try:
        return ad.read_h5ad(file, backed=None if whole else "r")
    except Exception as error:  # anndata and h5py raise all kinds for what is missing or damaged
        raise CommandError(f"{file}: can't be read: {type(error).__name__}: {error}") from error


def _read(file: Path, options: Namespace) -> tuple[ad.AnnData, str]:
    """Return what the collection takes of a file, and where its values are."""
    cells = _open(file)
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
    taken = ad.AnnData(sp.csr_matrix(values), obs=obs.copy(), var=cells.var[[]])
    if options.make_unique:
        taken.obs_names = [f"{file.stem}-{name}" for name in taken.obs_names]
        taken.obs_names_make_unique()
        taken.var_names_make_unique()
    elif repeated := taken.var_names[taken.var_names.duplicated()].unique().tolist():
        names = ", ".join(repeated[:3]) + ", ..." * (len(repeated) > 3)
        raise CommandError(f"{file}: {plural(len(repeated), 'gene name')} repeated ({names}): --make-unique")
    return taken, place


def _layers(file: Path) -> list[str]:
    cells = _open(file, whole=False)
    names = [name for name in cells.layers if name is not None] + ["raw"] * (cells.raw is not None)
    cells.file.close()
    return names


def _named(layers: list[str]) -> str:
    return f"layers {', '.join(layers)}" if layers else "no layers"


def _labelled(obs: pd.DataFrame, missing: list[str]) -> set[str]:
    """Take labels away that are none, in place, and return those that there were."""
    found = set[str]()
    for name in obs:
        texts = obs[name].astype(object)
        if (are_none := texts.isin(missing)).any():
            found |= {*texts[are_none]}
            obs[name] = pd.Categorical(texts.where(texts.isna(), texts.astype(str)).mask(are_none))
    return found


def _check_names(obs: dict[Path, pd.DataFrame]) -> None:
    names = pd.Index(np.concatenate([table.index.to_numpy(dtype=object) for table in obs.values()]))
    if n_repeated := int(names.duplicated().sum()):
        raise CommandError(f"{plural(n_repeated, 'cell name')} repeated, within files or across them: --make-unique")


def _columns(obs: dict[Path, pd.DataFrame]) -> dict[str, pd.Index | None]:
    """Return each column of any file, with the values that it has, united; None for numbers."""
    columns: dict[str, pd.Index | None] = {}
    for name in dict.fromkeys(name for table in obs.values() for name in table):
        parts = [table[name] for table in obs.values() if name in table]
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
        for name, values in columns.items():
            own = given[name] if name in given else pd.Series(np.nan, index=given.index)
            texts = None if values is None else own.astype(object).where(own.isna(), own.astype(str))
            obs[name] = own if values is None else pd.Categorical(texts, categories=values)
        return ad.AnnData(lazy.X, obs=pd.DataFrame(obs, index=given.index), var=lazy.var.to_memory()[[]])

    return load


def _report(
    obs: dict[Path, pd.DataFrame],
    columns: dict[str, pd.Index | None],
    everywhere: set[str],
    anywhere: set[str],
    genes: str,
) -> None:
    zeros = (
        "; those that a file doesn't have are 0 there" if len(everywhere) < len(anywhere) and genes == "union" else ""
    )
    print(f"genes: {len(everywhere):,} in all files, {len(anywhere):,} in any; their {genes} is taken{zeros}")
    for name, values in columns.items():
        there = [table[name] for table in obs.values() if name in table]
        n_missing = sum(len(table) if name not in table else int(table[name].isna().sum()) for table in obs.values())
        what = "numbers" if values is None else plural(len(values), "value")
        if values is not None and 0 < len(values) <= _MOST_VALUES:
            what += f" ({', '.join(values)})"
        where = "" if len(there) == len(obs) else f", in {len(there):,} of {plural(len(obs), 'file')} only"
        print(f"{name}: {what}{where}, {plural(n_missing, 'cell') if n_missing else 'no cell'} without one")


def _name_files(collection: DatasetCollection, files: list[Path]) -> None:
    """Have ``src_path``, in which annbatch keeps the path of what it has read, name the files that were given."""
    by_stem = {file.stem: str(file) for file in files}
    for group in collection:
        column: Any = group["obs/src_path"]
        read: Any = ad.io.read_elem(column["categories"])
        ad.io.write_elem(column, "categories", np.array([by_stem[Path(path).stem] for path in read], dtype=object))
        zarr.consolidate_metadata(group.store, path=group.path)
