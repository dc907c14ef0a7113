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
from annbatch_distributed.collect.datasets import PEAK, SLICE, Dataset, Piece, order_of, slices_of, write_dataset
from annbatch_distributed.collect.entries import AnyPath, entries_of
from annbatch_distributed.collect.files import File
from annbatch_distributed.collect.folders import check_new, folder_of_parts, remove
from annbatch_distributed.collect.jobs import executor_of, run_each
from annbatch_distributed.collect.parts import Part, Statistics, jobs_for, parts_of, summary, write_parts
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.values import Kind
from annbatch_distributed.core.values import Int64Array, plural

#: Largest integer up to which float32 holds each one.
_MOST_FLOAT32 = 2**24


def write_collection(
    files: Sequence[AnyPath],
    out: Path,
    *,
    options: Options,
    layer: Sequence[str],
    memory: str,
    jobs: int | None,
    scheduler: str | None,
    seed: int,
    restart: bool,
    tell: Callable[[str], object],
) -> None:
    """Write one shuffled collection of files; ``tell`` gets each line about files, genes and columns.

    Arguments are those of :func:`.collect`. Raises Problems if the files or arguments can't be collected, and an
    OSError if a file can't be written, as on a full disk. Nothing was written to ``out`` then.
    """
    from annbatch.io import V1_ENCODING  # not above, since processes that read files import this module

    check_new(out)
    entries = entries_of(files, layer)
    if scheduler is not None and jobs is not None:
        raise Problems("--jobs: can't be combined with --scheduler, whose workers are the processes. Leave it out")
    contents = inspect(entries, options)
    jobs = 1 if scheduler is not None else jobs or jobs_for(entries)
    n_bytes = parse_bytes(memory) // jobs
    with folder_of_parts(out, restart=restart) as folder, executor_of(jobs, scheduler) as executor:
        parts = [parts_of(file, number, folder, n_bytes) for number, file in enumerate(contents.files)]
        statistics = _write_parts(contents.files, parts, executor, tell, are_chosen=[*layer] != ["X"])
        check_kinds(contents.files, [_largest(own) for own in statistics])
        for line in contents.lines:
            tell(line)
        unfinished = folder / "cells"
        remove(unfinished)
        collection = zarr.open_group(unfinished, mode="w", attributes={**V1_ENCODING})
        datasets = [*_datasets(unfinished, contents, parts, statistics, options.group_by, n_bytes=n_bytes, seed=seed)]
        for _ in tqdm(run_each(write_dataset, datasets, executor), "datasets", len(datasets)):
            pass
        zarr.consolidate_metadata(collection.store)
        unfinished.rename(out)
    n_cells = sum(map(len, contents.obs))
    n_files, n_genes = len(contents.files), len(contents.kept_genes)
    tell(f"{out}: {plural(n_cells, 'cell')} of {plural(n_files, 'file')}, {plural(n_genes, 'gene')}")


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
    for part, result in tqdm(write_parts([*number_of], executor), "files", len(number_of)):
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


def _dtype(files: Sequence[File], statistics: Sequence[Statistics]) -> np.dtype[Any]:
    """Return the dtype of the files' values; float32 if they have counts of different dtypes."""
    dtypes = {file.dtype for file in files}
    if len(dtypes) == 1:
        return dtypes.pop()
    if _largest(statistics) in (None, Kind.COUNTS):
        return np.dtype(np.float32 if max(part.most for part in statistics) <= _MOST_FLOAT32 else np.float64)
    return np.result_type(*dtypes)


def _datasets(
    path: Path,
    contents: Contents,
    parts: Sequence[Sequence[Part]],
    statistics: Sequence[Sequence[Statistics]],
    group_by: Sequence[str] | None,
    *,
    n_bytes: int,
    seed: int,
) -> Iterator[Dataset]:
    """Yield the datasets of a collection, for processes that may use ``n_bytes`` each."""
    files, every = [str(file.entry) for file in contents.files], [*chain.from_iterable(statistics)]
    n_cells, dtype = sum(map(len, contents.obs)), _dtype(contents.files, every)
    # of the arrays of a CSR matrix, whose indices have 4 bytes
    row_bytes = 8 + sum(part.n_values for part in every) / n_cells * (dtype.itemsize + 4)
    n_rows = max(SLICE, int(n_bytes / (PEAK * row_bytes)))

    var = pd.DataFrame(index=pd.Index(contents.kept_genes, dtype=object))
    # files with the same genes share their places
    numbers: dict[tuple[str, ...], int] = {}
    genes_of = [numbers.setdefault(tuple(genes), len(numbers)) for genes in contents.genes]
    places = [var.index.get_indexer(pd.Index(genes, dtype=object)).astype(np.int32) for genes in numbers]
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
        # rows in the order 2 0 1 have the places 1 2 0
        table = obs.iloc[rows[order]]
        yield Dataset(path, number, own, np.argsort(order), places, table, var, measured, files, dtype)


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
