"""The command ``collect``: one annbatch collection of h5ad files, old or new, with cells or genes in another layout.

1. All files are looked at, and what is wrong with any of them is said, before one is read as a whole.
2. The files are read one after the other, so that the cells of one file are in memory. Each is written to a folder.
3. What all files come to is said: genes, columns of obs, and what is left out.
4. annbatch shuffles and writes the cells, in a folder that gets its name when it is complete.
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
from annbatch_distributed.rows import plural

#: A column of texts with more values names each cell, or is about something else than kinds of cells.
_MOST_VALUES = 20
#: Log-normalized values are below it: log1p of a share of 10,000 counts is at most 9.2.
_MOST_LOG = 15


class _Look(NamedTuple):
    """What a file says of itself without its values."""

    file: Path
    layers: list[str]
    """Names of its layers, and raw if it has that."""
    columns: pd.Index[Any]
    """Columns of its obs."""
    cells: pd.Index[Any]
    genes: pd.Index[Any]
    others: list[str]
    """What the collection can't take: layers, obsm and the like."""


class _Part(NamedTuple):
    """What the collection takes of a file, which is written to a folder of its own."""

    path: Path
    look: _Look
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
    if "://" in options.out:
        raise CommandError(f"--out {options.out}: must be a folder of this machine; copy it to a store afterwards")
    out = Path(options.out)
    with warnings.catch_warnings(action="ignore"), _claimed(out):  # of anndata and zarr: what matters here is said
        try:
            return _collect(options, out)
        except OSError as error:  # a full disk, for one
            raise CommandError(f"{error}; nothing was written to {out}") from error


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Take the name of the collection by an empty folder, so that no other command can, until it is there."""
    try:
        out.mkdir()
    except FileExistsError:
        is_empty = out.is_dir() and not any(out.iterdir())
        hint = ", an empty folder: another collect is writing it, or was killed" if is_empty else ""
        hint = ", a link to nothing" if not out.exists() else hint
        raise CommandError(f"--out {out}: is there already{hint}") from None
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}") from error
    try:
        yield
    finally:
        if not any(out.iterdir()):
            out.rmdir()


@contextmanager
def _parts_folder(out: Path) -> Iterator[Path]:
    """Make a folder for parts, and remove it with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.absolute().parent))
    try:
        yield folder
    finally:
        # after an error, threads of zarr may be writing still
        for _ in range(100):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def _collect(options: Namespace, out: Path) -> int:
    files = list(map(Path, options.files))
    looks = _look_at(files, options)
    names = _short_names(files)
    # next to the result, on the same disk: the finished collection is moved, not copied
    with _parts_folder(out) as folder:
        # one file after the other, so that the cells of a single file are in memory
        parts = [
            _part(look, name, folder / f"{number}.zarr", options)
            for number, (look, name) in enumerate(zip(looks, names, strict=True))
        ]
        _check_counts(parts)
        genes = _genes(parts, options.genes)
        left_out = Counter(chain.from_iterable(look.others for look in looks))
        if left_out:
            what = (f"{name} ({plural(n_files, 'file')})" for name, n_files in sorted(left_out.items()))
            print(f"left out: {', '.join(what)}")
        obs = _united([part.obs for part in parts])
        for value in sorted({*options.missing}.difference(*(part.no_labels for part in parts))):
            print(f"--missing: no cell has {value!r}")
        _check_groups(options.group_by, obs)

        unfinished = folder / "cells.zarr"
        collection = DatasetCollection(unfinished)
        try:
            collection.add_adatas(
                [part.path for part in parts],
                load_adata=_loading({str(part.path): own for part, own in zip(parts, obs, strict=True)}),
                groupby=options.group_by,
                var_subset=sorted(genes) if options.genes == "intersection" else None,
                dataset_size=options.memory,
                rng=np.random.default_rng(options.seed or 0),
            )
        except ValueError as error:
            raise CommandError(f"annbatch can't write the cells (--memory {options.memory}): {error}") from error
        _tell_files(collection, parts)
        unfinished.rename(out)  # which is empty
    n_cells = sum(map(len, obs))
    print(f"{out}: {plural(n_cells, 'cell')} of {plural(len(files), 'file')}, {plural(len(genes), 'gene')}")
    print(f"how two ranks share them: annbatch-distributed plan {out} --ranks 2 --remainder exact --by src_path")
    return 0


# Looking at files


def _look_at(files: list[Path], options: Namespace) -> list[_Look]:
    """Look at all files, and raise what is wrong with any of them."""
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
        problems.append(f"given more than once: {', '.join(files_twice)}")
    if options.layer and looks and not any(options.layer in look.layers for look in looks):
        problems.append(f"no file has a layer {options.layer!r}; {looks[0].file} has {_named(looks[0].layers)}")
    if looks and not sum(len(look.cells) for look in looks):
        problems.append("no file has any cell")
    names = pd.Index([]).append([look.cells for look in looks])
    if not options.make_unique and (n_repeated := int(names.duplicated().sum())):
        problems.append(f"{plural(n_repeated, 'cell name')} repeated, within files or across them: --make-unique")
    if problems:
        raise CommandError(*problems)
    return looks


def _open(file: Path, backed: Literal["r"] | None = None) -> Any:  # noqa: ANN401 what anndata's stubs say is of no use
    if not file.exists():
        raise CommandError(f"{file}: no such file")
    try:
        return ad.read_h5ad(file, backed=backed)
    except Exception as error:  # anndata and h5py raise all kinds for what is missing or damaged
        hint = ""
        if h5py.is_hdf5(file):
            with h5py.File(file) as given:
                hint = ". It is a file of 10x, which scanpy.read_10x_h5 reads" if "matrix" in given else ""
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
    """Yield what is wrong with a file."""
    columns = look.columns if options.obs is None else options.obs
    if missing := [name for name in columns if name not in look.columns]:
        yield f"{look.file}: no columns {', '.join(missing)} in obs, which has {', '.join(look.columns)}"
    if "src_path" in columns:
        yield (
            f"{look.file}: obs has a column src_path, in which a collection has each cell's file. Rename it, or "
            "choose columns with --obs"
        )
    repeated = look.genes[look.genes.duplicated()].unique().tolist()
    if repeated and not options.make_unique:
        names = ", ".join(repeated[:3]) + ", ..." * (len(repeated) > 3)
        yield f"{look.file}: {plural(len(repeated), 'gene name')} repeated ({names}): --make-unique"


def _named(layers: list[str]) -> str:
    return f"layers {', '.join(layers)}" if layers else "no layers"


def _short_names(files: list[Path]) -> list[str]:
    """Return a name of each file: its stem, or the parts of the path that differ where stems are the same.

    >>> _short_names([Path("s1/adata.h5ad"), Path("s2/adata.h5ad")])
    ['s1', 's2']
    """
    stems = [file.stem for file in files]
    if len({*stems}) == len(stems):
        return stems
    parts = [file.absolute().with_suffix("").parts for file in files]
    everywhere = set.intersection(*map(set, parts))
    return ["-".join(part for part in own if part not in everywhere) or own[-1] for own in parts]


# Reading a file


def _part(look: _Look, name: str, path: Path, options: Namespace) -> _Part:
    """Write what the collection takes of a file, which others call by its name."""
    cells = _open(look.file)
    # a file without the layer has its counts in X
    place, values = "X", cells.X
    if options.layer is not None and options.layer in cells.layers:
        place, values = f"layer {options.layer}", cells.layers[options.layer]
    elif options.layer == "raw" and cells.raw is not None:
        cells = cells.raw.to_adata()
        place, values = "raw", cells.X
    if values is None:
        raise CommandError(f"{look.file}: no values in X; --layer names where they are")
    if values.dtype == np.float16:  # scipy has no sparse matrices of them
        values = values.astype(np.float32)
    try:
        values = sp.csr_matrix(values)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{look.file}: {place} has values of {values.dtype}, which can't be collected") from error
    obs = (cells.obs if options.obs is None else cells.obs[list(dict.fromkeys(options.obs))]).copy()
    obs.index.name = None  # which may be that of a column
    taken: Any = ad.AnnData(values, obs=obs[[]], var=cells.var[[]])
    if options.make_unique:
        taken.obs_names = [f"{name}-{cell}" for cell in taken.obs_names]
        taken.obs_names_make_unique()
        taken.var_names_make_unique()
        obs.index = taken.obs_names
    no_labels = _labelled(obs, options.missing)
    taken.write_zarr(path)
    data = taken.X.data
    where = f", of {place}" if options.layer else ""
    shape = f"{plural(taken.n_obs, 'cell')}, {plural(taken.n_vars, 'gene')}"
    print(f"{look.file}: {shape}, {data.dtype}{where}{_unlike_counts(data)}", flush=True)
    are_counts = bool((data % 1 == 0).all()) if data.any() else None
    return _Part(path, look, place, obs, taken.var_names, are_counts, no_labels)


def _unlike_counts(data: np.ndarray[Any, Any]) -> str:
    """Return what values look like if they are no counts."""
    said = []
    if n_nan := int(np.isnan(data).sum()):
        said.append(f"{n_nan:,} values are NaN")
    if n_negative := int((data < 0).sum()):
        said.append(f"{n_negative:,} are negative, as scaled values are")
    elif not (data % 1 == 0).all():
        looks = "; they look log-normalized" if np.nanmax(data) < _MOST_LOG else ""
        said.append(f"not all are whole numbers{looks}")
    return "".join(f"; {text}" for text in said)


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


def _check_counts(parts: list[_Part]) -> None:
    """Raise if some files have counts and others don't: log-normalized values would train as if they were counts."""
    if {part.are_counts for part in parts} >= {True, False}:
        part = next(part for part in parts if part.are_counts is False)
        raise CommandError(
            f"{part.look.file}: {part.place} has numbers that aren't whole, and other files have counts. It has "
            f"{_named(part.look.layers)}; --layer names where counts are, in files that have it"
        )


# What all files come to


def _genes(parts: list[_Part], choice: str | None) -> set[str]:
    """Return the genes that the collection has, and say how many files have them."""
    own = [set(part.genes) for part in parts]
    everywhere, anywhere = set.intersection(*own), set.union(*own)
    if not everywhere and choice != "union":
        # a file of which the first one has no gene, or else the fewest
        other = min(range(len(own)), key=lambda number: len(own[0] & own[number]))
        first, second = (f"{parts[at].look.file} has {', '.join([*parts[at].genes[:3]])}" for at in (0, other))
        raise CommandError(
            f"no gene is in all files: {first}, and {second}. Give all of them names of one kind; or --genes union "
            "takes all of any file, each of them 0 where a file doesn't have it"
        )
    choice = choice or "union"
    # annbatch fills in 0 for genes that a file lacks, if it isn't told to leave them out
    zeros = "; those that a file doesn't have are 0 there" if choice == "union" and everywhere < anywhere else ""
    print(f"genes: {len(everywhere):,} in all files, {len(anywhere):,} in any; their {choice} is taken{zeros}")
    smallest = min(range(len(own)), key=lambda number: len(own[number]))
    if len(everywhere) < len(own[smallest]) / 2:
        print(
            f"WARNING: only {len(everywhere):,} of the {plural(len(own[smallest]), 'gene')} of "
            f"{parts[smallest].look.file} are in all files. Are the names of one kind?"
        )
    return anywhere if choice == "union" else everywhere


def _text(value: object) -> str:
    """Return the label that a value is: numbers that are equal are one.

    >>> [_text(value) for value in (3, 3.0, "3.0", "3.10", True, "B")]
    ['3', '3', '3', '3.10', 'True', 'B']
    """
    return re.sub(r"^(-?(?:0|[1-9]\d*))\.0+$", r"\1", str(value))


def _united(tables: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """Return the columns of all files for each of them, of one type everywhere, and say what they are.

    Labels are strings with the same categories in all files. A column that a file lacks is missing in its cells.
    """
    united = [pd.DataFrame(index=table.index) for table in tables]
    for name in dict.fromkeys(chain(*tables)):
        parts = [table.get(name) for table in tables]
        given = [part for part in parts if part is not None]
        n_missing = sum(
            len(table) if part is None else int(part.isna().sum()) for table, part in zip(tables, parts, strict=True)
        )
        values: pd.Index[Any] | None = None
        if _are_numbers(given):
            dtype = np.result_type(*(getattr(part.dtype, "numpy_dtype", part.dtype) for part in given))
            dtype = np.dtype(np.float64) if n_missing and dtype.kind != "f" else dtype  # for NaN
            own: list[Any] = [None if part is None else part.astype(dtype).to_numpy() for part in parts]
        elif not n_missing and all(pd.api.types.is_bool_dtype(part.dtype) for part in given):
            own = [part.to_numpy(bool) for part in given]
        else:
            labels = {value: _text(value) for part in given for value in part.dropna().unique()}
            values = pd.Index(sorted({*labels.values()}), dtype=object)
            texts = [None if part is None else part.astype(object).map(labels) for part in parts]
            own = [None if part is None else pd.Categorical(part, categories=values) for part in texts]
        for table, column in zip(united, own, strict=True):
            if column is not None:
                table[name] = column
            else:  # the file lacks it
                table[name] = np.nan if values is None else pd.Categorical([None] * len(table), categories=values)
        _report(name, given, values, n_missing, len(tables))
    return united


def _are_numbers(parts: list[pd.Series[Any]]) -> bool:
    return all(pd.api.types.is_numeric_dtype(part) and not pd.api.types.is_bool_dtype(part.dtype) for part in parts)


def _report(name: str, given: list[pd.Series[Any]], values: pd.Index[Any] | None, n_missing: int, n_files: int) -> None:
    """Say what a column is."""
    what = "numbers" if _are_numbers(given) else "booleans" if values is None else plural(len(values), "value")
    if values is not None and 0 < len(values) <= _MOST_VALUES:
        what += f" ({', '.join(values)})"
    where = "" if len(given) == n_files else f", in {len(given):,} of {plural(n_files, 'file')} only"
    print(f"{name}: {what}{where}, {plural(n_missing, 'cell') if n_missing else 'no cell'} without one")
    by_case: dict[str, list[str]] = {}
    for value in () if values is None else values:
        by_case.setdefault(value.casefold(), []).append(value)
    if alike := [spellings for spellings in by_case.values() if len(spellings) > 1]:
        shown = "; ".join(" and ".join(spellings) for spellings in alike[:3]) + "; ..." * (len(alike) > 3)
        print(f"WARNING: values of {name} differ in case only: {shown}")


def _check_groups(columns: list[str] | None, obs: list[pd.DataFrame]) -> None:
    """Raise unless cells can be grouped by some columns."""
    for name in columns or ():
        if name not in obs[0]:
            raise CommandError(f"--group-by {name}: no such column in obs, which has {', '.join(obs[0])}")
        if not isinstance(obs[0][name].dtype, pd.CategoricalDtype):
            raise CommandError(f"--group-by {name}: must be a column of labels, and has numbers or booleans")


def _loading(obs: dict[str, pd.DataFrame]) -> Callable[[Any], ad.AnnData]:
    """Return what opens a part for annbatch: its values stay on disk, and its columns are those of all files."""

    def load(path: Any) -> ad.AnnData:  # noqa: ANN401 a path
        lazy = ad.experimental.read_lazy(path)
        return ad.AnnData(lazy.X, obs=obs[str(path)], var=lazy.var.to_memory()[[]])

    return load


def _tell_files(collection: DatasetCollection, parts: list[_Part]) -> None:
    """Write which file each cell is of, and which genes each file has.

    ``src_path``, in which annbatch keeps the path of what it has read, becomes that of the file that was given.
    ``varm["measured"]`` has a line for each gene and a column for each file.
    """
    files = [str(part.look.file) for part in parts]
    for group in collection:
        var: Any = ad.io.read_elem(cast("Any", group["var"]))
        varm: Any = group.require_group("varm")
        ad.io.write_elem(varm, "measured", np.stack([var.index.isin(part.genes) for part in parts], axis=1))
        varm["measured"].attrs["files"] = files
        # annbatch has the path of the temporary folder, .../cells.zarr.x1y2/3.zarr; that of file 3 is /data/pbmc.h5ad
        column: Any = group["obs/src_path"]
        read: Any = ad.io.read_elem(column["categories"])
        given = [files[int(Path(path).stem)] for path in read]
        ad.io.write_elem(column, "categories", np.array(given, dtype=object))
        zarr.consolidate_metadata(group.store, path=group.path)
