"""Steps: from files to a collection of shuffled cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import zarr
from tqdm.auto import tqdm

from annbatch_distributed.collect.harmonize.base import Base, base_of
from annbatch_distributed.collect.harmonize.contents import Contents, check_kinds, harmonized
from annbatch_distributed.collect.harmonize.entries import Entry
from annbatch_distributed.collect.matrices import Cells, Matrix
from annbatch_distributed.collect.options import Options
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.write.datasets import datasets_of, write_dataset
from annbatch_distributed.collect.write.dtypes import kind_in, storage_of
from annbatch_distributed.collect.write.folders import (
    add_datasets,
    check_new,
    folder_of_datasets,
    folder_of_parts,
    take_back,
)
from annbatch_distributed.collect.write.jobs import executor_of, run_each
from annbatch_distributed.collect.write.parts import Part, Statistics, jobs_for, parts_of, summary, write_parts
from annbatch_distributed.collect.write.storage import Storage, Stored, stored_in
from annbatch_distributed.core.values import digest, plural

#: Function that gets each line about files, genes and columns.
type Tell = Callable[[str], object]


def write_collection(entries: Sequence[Entry], out: Path, options: Options, tell: Tell, *, adds: bool) -> None:
    """Write one shuffled collection of files, or add them to the one at ``out``.

    Raises Problems if the files or options can't be collected, and an OSError if a file can't be written, as on a full
    disk. Nothing was written to ``out`` then.
    """
    if not adds:
        check_new(out)
    with folder_of_parts(out, restart=options.restart) as folder:
        base = before = None
        if adds:
            base = base_of(out)
            take_back(folder, out)
            before = stored_in(out)
        contents = harmonized(entries, options, base)
        written, storage = _write(contents, entries, options, tell, folder, base, before)
        if adds:
            add_datasets(written, out)
        else:
            written.rename(out)
    tell(_result(out, contents.cells, storage, adds=adds))
    if adds:
        tell("the new cells are after the others: pass sharding='shuffled' to loaders, so that each rank reads of both")


def _write(
    contents: Contents,
    entries: Sequence[Entry],
    options: Options,
    tell: Tell,
    folder: Path,
    base: Base | None,
    before: Stored | None,
) -> tuple[Path, Storage]:
    """Write parts and datasets to a folder; return the folder of the datasets, and the form of their cells."""
    from annbatch.io import V1_ENCODING  # not above, since processes that read files import this module

    cells = contents.cells
    jobs = 1 if options.scheduler is not None else options.jobs or jobs_for(cells.matrices)
    n_bytes = options.memory // jobs
    with executor_of(jobs, options.scheduler) as executor:
        parts = [parts_of(matrix, number, folder, n_bytes) for number, matrix in enumerate(cells.matrices)]
        statistics = _write_parts(cells.matrices, parts, executor, tell, are_chosen=[*options.layer] != ["X"])
        kinds = [kind_in(own) for own in statistics]
        check_kinds(contents.files, kinds if base is None else [base.file.kind, *kinds])
        storage = storage_of(cells, statistics, options, before)
        for line in contents.lines:
            tell(line)
        unfinished = folder_of_datasets(folder, _key(entries, parts, options, n_bytes, base))
        # without consolidated metadata, with which annbatch could not add files to it
        zarr.open_group(unfinished, mode="a", attributes={**V1_ENCODING})
        n_values, start = sum(part.n_values for part in chain(*statistics)), 0 if before is None else before.n_datasets
        datasets = datasets_of(cells, parts, storage, options, unfinished, n_values, n_bytes, start)
        missing = [dataset for dataset in datasets if not dataset.path.exists()]
        for _ in _bar(run_each(write_dataset, missing, executor), "datasets", len(missing)):
            pass
    return unfinished, storage


def _key(
    entries: Sequence[Entry], parts: Sequence[Sequence[Part]], options: Options, n_bytes: int, base: Base | None
) -> str:
    """Return a digest of all that decides what datasets have, so that a later run can tell that they are its own."""
    chosen = replace(options, memory=n_bytes, jobs=None, scheduler=None, restart=False)
    before = None if base is None else (base.files, len(base.file.obs))
    return digest(repr((version("annbatch-distributed"), entries, parts, chosen, before)))


def _bar[Item](items: Iterator[Item], name: str, n_items: int) -> Iterator[Item]:
    """Show a bar on a terminal; in a log, it would be mixed with the lines."""
    return iter(tqdm(items, name, n_items, disable=None))


def _write_parts(
    matrices: Sequence[Matrix],
    parts: Sequence[Sequence[Part]],
    executor: Executor | None,
    tell: Tell,
    *,
    are_chosen: bool,
) -> list[list[Statistics]]:
    """Write all parts, and return the statistics of the parts of each file; raises Problems if one can't be written."""
    statistics, problems = dict[Part, Statistics](), list[str]()
    number_of = {part: number for number, own in enumerate(parts) for part in own}
    n_left = [len(own) for own in parts]
    for number, matrix in enumerate(matrices):
        if not n_left[number]:  # a file without cells
            tell(summary(matrix, [], is_chosen=are_chosen or matrix.place != "X"))
    for result in _bar(write_parts([*number_of], executor), "files", len(number_of)):
        if isinstance(result, Problems):
            problems += result.args
            continue
        part, statistics[part] = result
        number = number_of[part]
        n_left[number] -= 1
        if not n_left[number]:
            own, matrix = [statistics[one] for one in parts[number]], matrices[number]
            tell(summary(matrix, own, is_chosen=are_chosen or matrix.place != "X"))
    if problems:
        raise Problems(*problems)
    return [[statistics[part] for part in own] for own in parts]


def _result(out: Path, cells: Cells, storage: Storage, *, adds: bool) -> str:
    """Return a line about the cells that were written, and the size of the collection."""
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    n_cells, n_files, n_genes = len(cells.obs), len(cells.matrices), len(cells.var)
    shape = f"{plural(n_cells, 'cell')} of {plural(n_files, 'file')}, {plural(n_genes, 'gene')}"
    stored = f"stored as {'dense ' if storage.is_dense else ''}{storage.dtype}"
    if storage.dtype != storage.file_dtype:
        stored += (
            f", which loaders of this package yield as {storage.file_dtype}, and annbatch's Loader as stored "
            f"(dtype={str(storage.file_dtype)!r} stores that)"
        )
    return f"{out}: {'added ' if adds else ''}{shape}, {size / 1e6:,.1f} MB; {stored}"
