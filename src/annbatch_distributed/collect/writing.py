"""Writing: the steps from files to a collection of shuffled cells with the file of each cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import zarr
from dask.utils import parse_bytes
from tqdm.auto import tqdm

from annbatch_distributed.collect.contents import Contents, Options, check_kinds, inspect
from annbatch_distributed.collect.datasets import (
    PEAK,
    SLICE,
    Dataset,
    Piece,
    order_of,
    selection_of,
    slices_of,
    write_dataset,
)
from annbatch_distributed.collect.entries import AnyPath, entries_of
from annbatch_distributed.collect.files import File
from annbatch_distributed.collect.folders import check_new, folder_of_parts, remove
from annbatch_distributed.collect.jobs import executor_of, run_each
from annbatch_distributed.collect.parts import Part, Statistics, jobs_for, parts_of, smallest, summary, write_parts
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.storage import Storage
from annbatch_distributed.collect.values import Kind
from annbatch_distributed.core.values import Int64Array, few, plural

#: Largest integer up to which float32 holds each one.
_MOST_FLOAT32 = 2**24
#: The same for float64.
_MOST_FLOAT64 = 2**53


def write_collection(
    files: Sequence[AnyPath],
    out: Path,
    *,
    options: Options,
    layer: Sequence[str],
    memory: str,
    jobs: int | None,
    scheduler: str | None,
    dtype: str | None,
    compression: str,
    seed: int,
    restart: bool,
    tell: Callable[[str], object],
) -> None:
    """Write one shuffled collection of files; ``tell`` gets each line about files, genes and columns.

    It takes the arguments of :func:`.collect`. Raises Problems if the files or arguments can't be collected, and an
    OSError if a file can't be written, as on a full disk. Nothing was written to ``out`` then.
    """
    from annbatch.io import V1_ENCODING  # not above, since processes that read files import this module

    check_new(out)
    entries = entries_of(files, layer)
    if scheduler is not None and jobs is not None:
        raise Problems("--jobs: can't be combined with --scheduler, whose workers are the processes. Leave it out")
    contents = inspect(entries, options)
    jobs = 1 if scheduler is not None else jobs or jobs_for(entries)
    n_bytes = _n_bytes(memory) // jobs
    with folder_of_parts(out, restart=restart) as folder, executor_of(jobs, scheduler) as executor:
        parts = [parts_of(file, number, folder, n_bytes) for number, file in enumerate(contents.files)]
        statistics = _write_parts(contents.files, parts, executor, tell, are_chosen=[*layer] != ["X"])
        check_kinds(contents.files, [_largest(own) for own in statistics])
        every = [*chain.from_iterable(statistics)]
        stored, file_dtype = _dtypes([file.dtype for file in contents.files], statistics, dtype)
        storage = Storage(stored, file_dtype, compression, _is_dense(contents.files, every, stored))
        for line in contents.lines:
            tell(line)
        unfinished = folder / "cells"
        remove(unfinished)
        # without consolidated metadata, with which annbatch could not add files to it
        zarr.open_group(unfinished, mode="w", attributes={**V1_ENCODING})
        n_values, group_by = sum(part.n_values for part in every), options.group_by
        datasets = [*_datasets(unfinished, contents, parts, n_values, storage, group_by, n_bytes=n_bytes, seed=seed)]
        for _ in _bar(run_each(write_dataset, datasets, executor), "datasets", len(datasets)):
            pass
        unfinished.rename(out)
    tell(_result(out, contents, storage))


def _bar[Item](items: Iterator[Item], name: str, n_items: int) -> Iterator[Item]:
    """Show a bar on a terminal; in a log, it would be mixed with the lines."""
    return iter(tqdm(items, name, n_items, disable=None))


def _n_bytes(memory: str) -> int:
    try:
        n_bytes = parse_bytes(memory)
    except ValueError:
        n_bytes = 0
    if n_bytes < 1:
        raise Problems(f"--memory {memory}: must be a size above 0, such as 4GB")
    return n_bytes


def _result(out: Path, contents: Contents, storage: Storage) -> str:
    """Return a line about the collection."""
    n_cells, n_files = sum(map(len, contents.obs)), len(contents.files)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    shape = f"{plural(n_cells, 'cell')} of {plural(n_files, 'file')}, {plural(len(contents.var), 'gene')}"
    stored = f"stored as {'dense ' if storage.is_dense else ''}{storage.dtype}"
    if storage.dtype != storage.file_dtype:
        stored += (
            f", which loaders of this package yield as {storage.file_dtype}, and annbatch's Loader as stored (--dtype "
            f"{storage.file_dtype} stores that)"
        )
    return f"{out}: {shape}, {size / 1e6:,.1f} MB; {stored}"


def _write_parts(
    files: Sequence[File],
    parts: Sequence[Sequence[Part]],
    executor: Executor | None,
    tell: Callable[[str], object],
    *,
    are_chosen: bool,
) -> list[list[Statistics]]:
    """Write all parts, and return the statistics of the parts of each file; raises Problems if one can't be written."""
    statistics, problems = dict[Part, Statistics](), list[str]()
    number_of = {part: number for number, own in enumerate(parts) for part in own}
    n_left = [len(own) for own in parts]
    for number, file in enumerate(files):
        if not n_left[number]:  # a file without cells
            tell(summary(file, [], is_chosen=are_chosen or file.place != "X"))
    for part, result in _bar(write_parts([*number_of], executor), "files", len(number_of)):
        if isinstance(result, Problems):
            problems += result.args
            continue
        statistics[part], number = result, number_of[part]
        n_left[number] -= 1
        if not n_left[number]:
            own, file = [statistics[one] for one in parts[number]], files[number]
            tell(summary(file, own, is_chosen=are_chosen or file.place != "X"))
    if problems:
        raise Problems(*problems)
    return [[statistics[part] for part in own] for own in parts]


def _largest(statistics: Sequence[Statistics]) -> Kind | None:
    """Return the kind of the values of a file; None if all are 0."""
    return max((part.kind for part in statistics if part.kind is not None), default=None)


def _dtypes(
    dtypes: Sequence[np.dtype[Any]], statistics: Sequence[Sequence[Statistics]], dtype: str | None
) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the dtype to store, the smallest for counts unless ``dtype`` is another, and the dtype of the files.

    ``dtypes`` and ``statistics`` have an item for each file.
    """
    every = [*chain.from_iterable(statistics)]
    are_counts, most = _largest(every) in (None, Kind.COUNTS), max(part.most for part in every)
    # a file whose values are all 0 says nothing
    of_values = {own for own, parts in zip(dtypes, statistics, strict=True) if _largest(parts) is not None}
    different = of_values or {*dtypes}
    if len(different) == 1:
        (file_dtype,) = different
    elif are_counts:
        file_dtype = np.dtype(np.float32 if most <= _MOST_FLOAT32 else np.float64)
    else:
        file_dtype = np.result_type(*different)
    if dtype is None:
        integers = [
            part.most for own, parts in zip(dtypes, statistics, strict=True) if own.kind in "iu" for part in parts
        ]
        if file_dtype.kind == "f" and max(integers, default=0) > _MOST_FLOAT64:
            raise Problems(
                f"integers must be below 2**53 in files of different dtypes, got {int(max(integers)):,} and "
                f"{few(sorted(map(str, different)), 10)}. Leave files out"
            )
        return smallest(most, file_dtype) if are_counts else file_dtype, file_dtype
    chosen = np.dtype(dtype)
    exact = {"float32": _MOST_FLOAT32, "float64": _MOST_FLOAT64}
    largest = exact[dtype] if dtype in exact else np.iinfo(chosen).max
    if (are_counts and most > largest) or not (are_counts or chosen.kind == "f"):
        what = f"counts up to {int(most):,}" if are_counts else "values that are not counts"
        raise Problems(f"--dtype {dtype}: must hold the values of all files, got {what}. Choose a different one")
    return chosen, chosen


def _is_dense(files: Sequence[File], statistics: Sequence[Statistics], dtype: np.dtype[Any]) -> bool:
    """Return True if all files have dense values, and these take less space than a sparse matrix."""
    n_genes = max(len(file.genes) for file in files)
    density = sum(part.n_values for part in statistics) / max(1, sum(len(file.obs) * len(file.genes) for file in files))
    # a sparse matrix also has an index for each value
    return all(file.is_dense for file in files) and dtype.itemsize <= density * (
        dtype.itemsize + np.min_scalar_type(n_genes).itemsize
    )


def _datasets(
    path: Path,
    contents: Contents,
    parts: Sequence[Sequence[Part]],
    n_values: int,
    storage: Storage,
    group_by: Sequence[str] | None,
    *,
    n_bytes: int,
    seed: int,
) -> Iterator[Dataset]:
    """Yield the datasets of a collection, for processes that may use ``n_bytes`` each."""
    files, n_cells = [str(file.entry) for file in contents.files], sum(map(len, contents.obs))
    # indices of a CSR matrix in memory have 4 bytes
    row_bytes = 8 + n_values / n_cells * (storage.dtype.itemsize + 4)
    if storage.is_dense:
        row_bytes = len(contents.var) * storage.dtype.itemsize
    n_rows = max(SLICE, int(n_bytes / (PEAK * row_bytes)))

    var = contents.var
    # files with the same genes share the matrix that selects them
    numbers: dict[tuple[str, ...], int] = {}
    genes_of = [numbers.setdefault(tuple(genes), len(numbers)) for genes in contents.genes]
    selections = [selection_of(var.index.get_indexer(pd.Index(genes, dtype=object)), len(var)) for genes in numbers]
    measured = np.stack([var.index.isin(genes) for genes in contents.genes], axis=1)
    obs = pd.concat(contents.obs)
    obs["src_path"] = pd.Categorical.from_codes(np.repeat(np.arange(len(files)), [*map(len, contents.obs)]), files)

    pieces = [
        Piece(part.path, 0, part.stop - part.start, genes_of[number])
        for number, own in enumerate(parts)
        for part in own
    ]
    firsts: Int64Array = np.append(0, np.cumsum([piece.stop for piece in pieces]))
    rng = np.random.default_rng(seed)
    for number, slices in enumerate(slices_of(n_cells, n_rows, rng)):
        rows = np.concatenate([np.arange(*bounds) for bounds in slices])
        order = order_of(obs.iloc[rows], rng, group_by)
        own = [*chain.from_iterable(_cut(pieces, firsts, *bounds) for bounds in slices)]
        yield Dataset(path, number, own, order, selections, obs.iloc[rows[order]], var, measured, files, storage)


def _cut(pieces: Sequence[Piece], firsts: Int64Array, start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces of the cells ``[start, stop)``; ``firsts`` are the first cells of all pieces.

    >>> pieces = [Piece(Path(name), 0, 100, 0) for name in "abc"]
    >>> [piece[:3] for piece in _cut(pieces, np.array([0, 100, 200, 300]), 90, 110)]
    [(PosixPath('a'), 90, 100), (PosixPath('b'), 0, 10)]
    """
    low, high = np.searchsorted(firsts, (start, stop - 1), side="right") - 1
    for at in range(int(low), int(high) + 1):
        first, end = int(firsts[at]), int(firsts[at + 1])
        yield pieces[at]._replace(start=max(start, first) - first, stop=min(stop, end) - first)
