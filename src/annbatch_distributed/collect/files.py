"""Files: the contents of h5ad files, and the problems that are known before their values are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anndata as ad
import h5py
import pandas as pd

from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import plural


class File(NamedTuple):
    """Contents of a file, except its values."""

    path: Path
    name: str
    """Short name of the file, which begins the names of cells under ``make_unique``."""
    place: str
    """Place of the values that are collected: X, raw or a layer."""
    layers: list[str]
    """Names of its layers, and raw if it has ``.raw``."""
    columns: pd.Index[Any]
    """Columns of its ``obs``."""
    cells: pd.Index[Any]
    genes: pd.Index[Any]
    others: list[str]
    """Parts that are not collected, such as layers and ``obsm``."""

    @property
    def named_layers(self) -> str:
        """Names of its layers, for a message."""
        return f"layers {', '.join(self.layers)}" if self.layers else "no layers"


def inspect_files(
    paths: Sequence[Path],
    *,
    layer: str | None,
    columns: Sequence[str] | None,
    make_unique: bool,
    group_by: Sequence[str] | None,
) -> list[File]:
    """Inspect all files, and raise one error with all problems."""
    files, problems = list[File](), list[str]()
    for path, name in zip(paths, _short_names(paths), strict=True):
        try:
            file = _inspected(path, name, layer)
        except Problems as error:
            problems += error.args
            continue
        files.append(file)
        problems += _problems_of(file, columns, make_unique=make_unique)
    if paths_twice := [str(path) for path, n_times in Counter(paths).items() if n_times > 1]:
        problems.append(f"files must be different, got {', '.join(paths_twice)} more than once")
    elif not make_unique:
        problems += _repeated_cells(files)
    if layer and files and not any(layer in file.layers for file in files):
        problems.append(f"--layer: no file has a layer {layer!r}; {files[0].path} has {files[0].named_layers}")
    if columns and (not_kept := [name for name in group_by or () if name not in columns]):
        problems.append(f"--group-by: columns must be kept, got {', '.join(not_kept)}. Add them to --obs")
    if files and not sum(len(file.cells) for file in files):
        problems.append("the files have no cells")
    if problems:
        raise Problems(*problems)
    return files


def open_h5ad(path: Path, backed: Literal["r"] | None = None) -> Any:  # noqa: ANN401 the type is no help
    """Open a file; raises Problems if it can't be read."""
    if not path.exists():
        raise Problems(f"{path}: no such file")
    try:
        return ad.read_h5ad(path, backed=backed)
    except Exception as error:  # anndata and h5py raise many types for missing or damaged data
        hint = ""
        if h5py.is_hdf5(path):
            with h5py.File(path) as contents:
                hint = ". It is a 10x file: read it with scanpy.read_10x_h5" if "matrix" in contents else ""
        raise Problems(f"{path}: can't be read as h5ad: {type(error).__name__}: {error}{hint}") from error


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: its stem, or the parts of its path that differ from other paths.

    >>> _short_names([Path("s1/adata.h5ad"), Path("s2/adata.h5ad")])
    ['s1', 's2']
    """
    stems = [path.stem for path in paths]
    if len({*stems}) == len(stems):
        return stems
    parts = [path.absolute().with_suffix("").parts for path in paths]
    common = set.intersection(*map(set, parts))
    return ["-".join(part for part in path if part not in common) or path[-1] for path in parts]


def _inspected(path: Path, name: str, layer: str | None) -> File:
    cells = open_h5ad(path, "r")
    try:
        layers = [key for key in cells.layers if key is not None]
        raw = ["raw"] if cells.raw is not None else []
        if layer in layers:
            place = f"layer {layer}"
        elif layer == "raw" and raw:
            place = "raw"
        else:  # files without the layer have their counts in X
            place = "X"
        parts = [*(f"layer {key}" for key in layers), *raw, *(f"obsm {key}" for key in cells.obsm)]
        return File(
            path=path,
            name=name,
            place=place,
            layers=layers + raw,
            columns=cells.obs.columns,
            cells=cells.obs_names,
            genes=cells.raw.var_names if place == "raw" else cells.var_names,
            others=[part for part in parts if part != place],
        )
    finally:
        cells.file.close()


def _problems_of(file: File, columns: Sequence[str] | None, *, make_unique: bool) -> Iterator[str]:
    """Yield the problems of a file."""
    columns = [*file.columns] if columns is None else columns
    if missing := [name for name in columns if name not in file.columns]:
        yield f"{file.path}: obs has no columns {', '.join(missing)}. It has {', '.join(file.columns)}"
    if "src_path" in columns:
        yield (
            f"{file.path}: obs must not have a column src_path, which a collection uses for the file of each cell. "
            "Rename it, or choose columns with --obs"
        )
    repeated = file.genes[file.genes.duplicated()].unique().tolist()
    if repeated and not make_unique:
        names = ", ".join(repeated[:3]) + ", ..." * (len(repeated) > 3)
        yield f"{file.path}: {plural(len(repeated), 'gene name')} repeated ({names}). Pass --make-unique"


def _repeated_cells(files: Sequence[File]) -> Iterator[str]:
    """Yield a problem if names of cells are repeated, in a file or in different files."""
    names = pd.Index([]).append([file.cells for file in files])
    if repeated := names[names.duplicated()].unique().tolist():
        where = ", ".join(str(file.path) for file in files if repeated[0] in file.cells)
        yield (
            f"{plural(len(repeated), 'cell name')} repeated, such as {repeated[0]} in {where}. If these are "
            "different cells, pass --make-unique; otherwise remove the duplicates"
        )
