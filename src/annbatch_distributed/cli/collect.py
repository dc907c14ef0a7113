"""The command ``collect``: writes one annbatch collection of h5ad files with different layouts, genes and columns.

1. It inspects all files and reports all problems, before it reads a whole file.
2. It reads the files one by one, with one file in memory, and writes each to a temporary folder.
3. It reports the genes and columns of obs of all files, and the parts that are not collected.
4. annbatch shuffles and writes the cells to a folder, which is renamed when it is complete.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection

from annbatch_distributed.cli import CommandError
from annbatch_distributed.core.values import plural

#: Largest number of labels of a column that are printed.
_MOST_VALUES = 20
#: Upper limit of log-normalized values: log1p of a share of 10,000 counts is at most 9.2.
_MOST_LOG = 15
#: Strings that often stand for missing labels, in lower case.
_LIKE_MISSING = {"", "n/a", "na", "nan", "none", "null", "unassigned", "unknown"}


class _Look(NamedTuple):
    """Contents of a file except its values."""

    file: Path
    layers: list[str]
    """Names of its layers, and raw if it has ``.raw``."""
    columns: pd.Index[Any]
    """Columns of its ``obs``."""
    cells: pd.Index[Any]
    genes: pd.Index[Any]
    others: list[str]
    """Parts that are not collected, such as layers and ``obsm``."""


class _Part(NamedTuple):
    """Part of a file that is collected, in its own temporary folder."""

    path: Path
    look: _Look
    place: str
    """Place of its values in the file: X, raw or a layer."""
    obs: pd.DataFrame
    genes: pd.Index[Any]
    are_counts: bool | None
    """True if its values are integers; None if all values are 0."""
    no_labels: set[str]
    """Strings of ``obs`` that were replaced by missing values."""


def run(options: Namespace) -> int:
    """Write the collection, and print its contents."""
    if "://" in options.out:
        raise CommandError(f"--out {options.out}: must be a local folder. Copy the collection to the store afterwards")
    out = Path(options.out)
    with (
        warnings.catch_warnings(action="ignore"),
        _claimed(out),
    ):  # warnings of anndata and zarr; the command prints its own
        try:
            return _collect(options, out)
        except OSError as error:  # a full disk, for one
            raise CommandError(f"{error}; nothing was written to {out}") from error


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Reserve the name of the collection by an empty folder, so that no other command uses it."""
    try:
        out.mkdir()
    except FileExistsError:
        is_empty = out.is_dir() and not any(out.iterdir())
        hint = ", an empty folder: another collect is writing it, or was killed" if is_empty else ""
        hint = ", a broken link" if not out.exists() else hint
        raise CommandError(f"--out {out}: already exists{hint}. Pass a new path, or remove it") from None
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}") from error
    try:
        yield
    finally:
        if not any(out.iterdir()):
            out.rmdir()


@contextmanager
def _parts_folder(out: Path) -> Iterator[Path]:
    """Make a folder for the parts of files, and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.absolute().parent))
    try:
        yield folder
    finally:
        # after an error, threads of zarr may still be writing
        for _ in range(100):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def _collect(options: Namespace, out: Path) -> int:
    files = list(map(Path, options.files))
    looks = _look_at(files, options)
    names = _short_names(files)
    # on the same disk as the result, so that the complete collection is renamed, not copied
    with _parts_folder(out) as folder:
        # one by one, so that a single file is in memory
        parts = [
            _part(look, name, folder / f"{number}.zarr", options)
            for number, (look, name) in enumerate(zip(looks, names, strict=True))
        ]
        _check_counts(parts)
        genes = _genes(parts, options.genes)
        others = Counter(chain.from_iterable(look.others for look in looks))
        if others:
            what = (f"{name} ({plural(n_files, 'file')})" for name, n_files in sorted(others.items()))
            print(f"not collected: {', '.join(what)}")
        obs = _united([part.obs for part in parts])
        for value in sorted({*options.missing}.difference(*(part.no_labels for part in parts))):
            print(f"--missing: no cell has {value!r}")
        _check_groups(options.group_by, obs)

        unfinished = folder / "cells.zarr"
        collection = DatasetCollection(unfinished)
        try:
            collection.add_adatas(
                [part.path for part in parts],
                load_adata=_loading({str(part.path): table for part, table in zip(parts, obs, strict=True)}),
                groupby=options.group_by,
                var_subset=sorted(genes) if options.genes == "intersection" else None,
                dataset_size=options.memory,
                rng=np.random.default_rng(options.seed or 0),
            )
        except ValueError as error:
            raise CommandError(f"annbatch can't write the cells under --memory {options.memory}: {error}") from error
        _tell_files(collection, parts)
        unfinished.rename(out)  # replaces the empty folder
    n_cells = sum(map(len, obs))
    print(f"{out}: {plural(n_cells, 'cell')} of {plural(len(files), 'file')}, {plural(len(genes), 'gene')}")
    print(f"preview two ranks: annbatch-distributed plan {out} --ranks 2 --remainder exact --by src_path")
    return 0


# Inspecting files


def _look_at(files: list[Path], options: Namespace) -> list[_Look]:
    """Inspect all files, and raise a CommandError with all problems."""
    looks, problems = list[_Look](), list[str]()
    for file in files:
        try:
            look = _look(file, options.layer)
        except CommandError as error:
            problems += error.args
            continue
        looks.append(look)
        problems += _problems(look, options)
    if files_twice := [str(file) for file, n_times in Counter(files).items() if n_times > 1]:
        problems.append(f"files must be different, got {', '.join(files_twice)} more than once")
    elif not options.make_unique:
        names = pd.Index([]).append([look.cells for look in looks])
        if repeated := names[names.duplicated()].unique().tolist():
            first = ", ".join(str(look.file) for look in looks if repeated[0] in look.cells)
            problems.append(
                f"{plural(len(repeated), 'cell name')} repeated, such as {repeated[0]} in {first}. If these are "
                "different cells, pass --make-unique; otherwise remove the duplicates"
            )
    if options.layer and looks and not any(options.layer in look.layers for look in looks):
        problems.append(
            f"--layer: no file has a layer {options.layer!r}; {looks[0].file} has {_named(looks[0].layers)}"
        )
    if options.obs and (not_kept := [name for name in options.group_by or () if name not in options.obs]):
        problems.append(f"--group-by: columns must be kept, got {', '.join(not_kept)}. Add them to --obs")
    if looks and not sum(len(look.cells) for look in looks):
        problems.append("the files have no cells")
    if problems:
        raise CommandError(*problems)
    return looks


def _open(file: Path, backed: Literal["r"] | None = None) -> Any:  # noqa: ANN401 the type is no help
    if not file.exists():
        raise CommandError(f"{file}: no such file")
    try:
        return ad.read_h5ad(file, backed=backed)
    except Exception as error:  # anndata and h5py raise many types for missing or damaged data
        hint = ""
        if h5py.is_hdf5(file):
            with h5py.File(file) as contents:
                hint = ". It is a 10x file: read it with scanpy.read_10x_h5" if "matrix" in contents else ""
        raise CommandError(f"{file}: can't be read as h5ad: {type(error).__name__}: {error}{hint}") from error


def _look(file: Path, layer: str | None) -> _Look:
    cells = _open(file, "r")
    try:
        layers = [name for name in cells.layers if name is not None] + ["raw"] * (cells.raw is not None)
        has_raw_genes = layer == "raw" and "raw" not in cells.layers and cells.raw is not None
        genes = cells.raw.var_names if has_raw_genes else cells.var_names
        others = [f"layer {name}" for name in cells.layers if name not in (None, layer)]
        others += ["raw"] * (cells.raw is not None and not has_raw_genes) + [f"obsm {name}" for name in cells.obsm]
        return _Look(file, layers, cells.obs.columns, cells.obs_names, genes, others)
    finally:
        cells.file.close()


def _problems(look: _Look, options: Namespace) -> Iterator[str]:
    """Yield the problems of a file."""
    columns = look.columns if options.obs is None else options.obs
    if missing := [name for name in columns if name not in look.columns]:
        yield f"{look.file}: obs has no columns {', '.join(missing)}. It has {', '.join(look.columns)}"
    if "src_path" in columns:
        yield (
            f"{look.file}: obs must not have a column src_path, which a collection uses for the file of each cell. "
            "Rename it, or choose columns with --obs"
        )
    repeated = look.genes[look.genes.duplicated()].unique().tolist()
    if repeated and not options.make_unique:
        names = ", ".join(repeated[:3]) + ", ..." * (len(repeated) > 3)
        yield f"{look.file}: {plural(len(repeated), 'gene name')} repeated ({names}). Pass --make-unique"


def _named(layers: list[str]) -> str:
    return f"layers {', '.join(layers)}" if layers else "no layers"


def _short_names(files: list[Path]) -> list[str]:
    """Return a name for each file: its stem, or the parts of its path that differ from other paths.

    >>> _short_names([Path("s1/adata.h5ad"), Path("s2/adata.h5ad")])
    ['s1', 's2']
    """
    stems = [file.stem for file in files]
    if len({*stems}) == len(stems):
        return stems
    parts = [file.absolute().with_suffix("").parts for file in files]
    common = set.intersection(*map(set, parts))
    return ["-".join(part for part in path if part not in common) or path[-1] for path in parts]


# Reading a file


def _part(look: _Look, name: str, path: Path, options: Namespace) -> _Part:
    """Write the collected part of a file to a folder; ``name`` is the short name of the file."""
    cells = _open(look.file)
    # files without the layer have their counts in X
    place, values = "X", cells.X
    if options.layer is not None and options.layer in cells.layers:
        place, values = f"layer {options.layer}", cells.layers[options.layer]
    elif options.layer == "raw" and cells.raw is not None:
        cells = cells.raw.to_adata()
        place, values = "raw", cells.X
    if values is None:
        raise CommandError(f"{look.file}: X has no values. Pass --layer to use a layer")
    if values.dtype == np.float16:  # SciPy has no sparse matrices of float16
        values = values.astype(np.float32)
    try:
        values = sp.csr_matrix(values)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{look.file}: {place} must have numbers, got values of {values.dtype}") from error
    obs = (cells.obs if options.obs is None else cells.obs[list(dict.fromkeys(options.obs))]).copy()
    obs.index.name = None  # it may be the name of a column
    part: Any = ad.AnnData(values, obs=obs[[]], var=cells.var[[]])
    if options.make_unique:
        part.obs_names = [f"{name}-{cell}" for cell in part.obs_names]
        part.obs_names_make_unique()
        part.var_names_make_unique()
        obs.index = part.obs_names
    no_labels = _replace_missing(obs, options.missing)
    part.write_zarr(path)
    data = part.X.data
    where = f", from {place}" if options.layer else ""
    shape = f"{plural(part.n_obs, 'cell')}, {plural(part.n_vars, 'gene')}"
    print(f"{look.file}: {shape}, {data.dtype}{where}{_unlike_counts(data)}", flush=True)
    are_counts = bool((data % 1 == 0).all()) if data.any() else None
    return _Part(path, look, place, obs, part.var_names, are_counts, no_labels)


def _unlike_counts(data: np.ndarray[Any, Any]) -> str:
    """Return a remark on values that are not counts; an empty string for counts."""
    remarks = []
    if n_nan := int(np.isnan(data).sum()):
        remarks.append(f"{n_nan:,} values are NaN")
    if n_negative := int((data < 0).sum()):
        remarks.append(f"{n_negative:,} values are negative, as after scaling")
    elif not (data % 1 == 0).all():
        looks = "; they look log-normalized" if np.nanmax(data) < _MOST_LOG else ""
        remarks.append(f"not all values are integers{looks}")
    return "".join(f"; {remark}" for remark in remarks)


def _replace_missing(obs: pd.DataFrame, missing: list[str]) -> set[str]:
    """Replace some strings by missing values, in place, and return the strings that ``obs`` had."""
    strings = set[str]()
    for name in obs:
        # a new categorical, without the categories that were replaced
        labels = obs[name].astype(object)
        if (are_missing := labels.isin(missing)).any():
            strings |= {*labels[are_missing]}
            obs[name] = pd.Categorical(labels.where(labels.isna(), labels.astype(str)).mask(are_missing))
    return strings


def _check_counts(parts: list[_Part]) -> None:
    """Raise if only some files have counts: a model would train on log-normalized values as counts."""
    if {part.are_counts for part in parts} >= {True, False}:
        part = next(part for part in parts if part.are_counts is False)
        raise CommandError(
            f"{part.look.file}: {part.place} must have counts, as in other files, got values that are not integers. "
            f"It has {_named(part.look.layers)}. Pass --layer NAME if a layer has the counts, or --layer raw for .raw; "
            "otherwise leave the file out"
        )


# Combining files


def _genes(parts: list[_Part], choice: str | None) -> set[str]:
    """Return the genes of the collection, and print how many genes all files share."""
    genes = [set(part.genes) for part in parts]
    common, union = set.intersection(*genes), set.union(*genes)
    if not common and choice != "union":
        # a file that shares the fewest genes with the first file
        other = min(range(len(genes)), key=lambda number: len(genes[0] & genes[number]))
        first, second = (f"{parts[at].look.file} has {', '.join([*parts[at].genes[:3]])}" for at in (0, other))
        raise CommandError(
            f"no gene is in all files: {first}, and {second}. Use the same kind of gene names in all files; or pass "
            "--genes union to keep all genes, with 0 for genes that a file lacks"
        )
    choice = choice or "union"
    # annbatch fills in 0 for genes that a file lacks, unless it gets a var_subset
    zeros = "; genes that a file lacks are 0 in its cells" if choice == "union" and common < union else ""
    print(f"genes: {len(common):,} in all files, {len(union):,} in any file; using their {choice}{zeros}")
    smallest = min(range(len(genes)), key=lambda number: len(genes[number]))
    if len(common) < len(genes[smallest]) / 2:
        print(
            f"WARNING: only {len(common):,} of the {plural(len(genes[smallest]), 'gene')} of "
            f"{parts[smallest].look.file} are in all files. Check that all files use the same kind of gene names."
        )
    return union if choice == "union" else common


def _label(value: object) -> str:
    """Return a value as a label; equal numbers have the same label.

    >>> [_label(value) for value in (3, 3.0, "3.0", "3.10", True, "B")]
    ['3', '3', '3', '3.10', 'True', 'B']
    """
    return re.sub(r"^(-?(?:0|[1-9]\d*))\.0+$", r"\1", str(value))


def _united(tables: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """Return ``obs`` of each file with the columns of all files in common dtypes, and print the columns.

    Labels are strings with the same categories in all files. A column that a file lacks has missing values in its
    cells.
    """
    united = [pd.DataFrame(index=table.index) for table in tables]
    for name in dict.fromkeys(chain(*tables)):
        parts = [table.get(name) for table in tables]
        columns = [part for part in parts if part is not None]
        n_missing = sum(
            len(table) if part is None else int(part.isna().sum()) for table, part in zip(tables, parts, strict=True)
        )
        values: pd.Index[Any] | None = None
        if _are_numbers(columns):
            dtype = np.result_type(*(getattr(part.dtype, "numpy_dtype", part.dtype) for part in columns))
            dtype = np.dtype(np.float64) if n_missing and dtype.kind != "f" else dtype  # for NaN
            converted: list[Any] = [None if part is None else part.astype(dtype).to_numpy() for part in parts]
        elif not n_missing and all(pd.api.types.is_bool_dtype(part.dtype) for part in columns):
            converted = [part.to_numpy(bool) for part in columns]
        else:
            labels = {value: _label(value) for part in columns for value in part.dropna().unique()}
            values = pd.Index(sorted({*labels.values()}), dtype=object)
            strings = [None if part is None else part.astype(object).map(labels) for part in parts]
            converted = [None if part is None else pd.Categorical(part, categories=values) for part in strings]
        for table, column in zip(united, converted, strict=True):
            if column is not None:
                table[name] = column
            else:  # the file lacks it
                table[name] = np.nan if values is None else pd.Categorical([None] * len(table), categories=values)
        _report(name, columns, values, n_missing, len(tables))
    return united


def _are_numbers(parts: list[pd.Series[Any]]) -> bool:
    return all(pd.api.types.is_numeric_dtype(part) and not pd.api.types.is_bool_dtype(part.dtype) for part in parts)


def _report(
    name: str, columns: list[pd.Series[Any]], values: pd.Index[Any] | None, n_missing: int, n_files: int
) -> None:
    """Print a summary of a column."""
    what = "numbers" if _are_numbers(columns) else "booleans" if values is None else plural(len(values), "value")
    if values is not None and 0 < len(values) <= _MOST_VALUES:
        what += f" ({', '.join(values)})"
    where = "" if len(columns) == n_files else f", in only {len(columns):,} of {plural(n_files, 'file')}"
    print(f"{name}: {what}{where}, {f'missing in {plural(n_missing, "cell")}' if n_missing else 'none missing'}")
    labels = [] if values is None else values.tolist()
    if like_missing := [label for label in labels if label.casefold() in _LIKE_MISSING]:
        quoted = " ".join(f'"{label}"' for label in like_missing)
        print(f"WARNING: {name} has the labels {quoted}. If they stand for missing labels, pass --missing {quoted}")
    by_case: dict[str, list[str]] = {}
    for label in labels:
        by_case.setdefault(label.casefold(), []).append(label)
    if alike := [spellings for spellings in by_case.values() if len(spellings) > 1]:
        shown = "; ".join(" and ".join(spellings) for spellings in alike[:3]) + "; ..." * (len(alike) > 3)
        print(f"WARNING: values of {name} differ only in case: {shown}")


def _check_groups(columns: list[str] | None, obs: list[pd.DataFrame]) -> None:
    """Raise if cells can't be sorted by some columns."""
    for name in columns or ():
        if name not in obs[0]:
            raise CommandError(f"--group-by {name}: obs has no such column. It has {', '.join(obs[0])}")
        if not isinstance(obs[0][name].dtype, pd.CategoricalDtype):
            raise CommandError(f"--group-by {name}: must be a column of labels, got numbers or booleans")


def _loading(obs: dict[str, pd.DataFrame]) -> Callable[[Any], ad.AnnData]:
    """Return annbatch's ``load_adata`` for parts: values stay on disk, and ``obs`` is the table by path."""

    def load(path: Any) -> ad.AnnData:  # noqa: ANN401 a path
        lazy = ad.experimental.read_lazy(path)
        return ad.AnnData(lazy.X, obs=obs[str(path)], var=lazy.var.to_memory()[[]])

    return load


def _tell_files(collection: DatasetCollection, parts: list[_Part]) -> None:
    """Write the file of each cell, and the genes of each file.

    ``obs["src_path"]``, where annbatch writes the path of a part, gets the path of the h5ad file. ``varm["measured"]``
    has shape ``(n_genes, n_files)``.
    """
    files = [str(part.look.file) for part in parts]
    for group in collection:
        var: Any = ad.io.read_elem(cast("Any", group["var"]))
        varm: Any = group.require_group("varm")
        ad.io.write_elem(varm, "measured", np.stack([var.index.isin(part.genes) for part in parts], axis=1))
        varm["measured"].attrs["files"] = files
        # annbatch has written the path of the part, .../cells.zarr.x1y2/3.zarr; file 3 is /data/pbmc.h5ad, say
        column: Any = group["obs/src_path"]
        part_paths: Any = ad.io.read_elem(column["categories"])
        file_paths = [files[int(Path(path).stem)] for path in part_paths]
        ad.io.write_elem(column, "categories", np.array(file_paths, dtype=object))
        zarr.consolidate_metadata(group.store, path=group.path)
