"""Parts: the values of some rows of a file, each in its own folder, with which a later run can continue.

A part depends only on its file and its rows. It has no names and no ``obs``, so that a later run may choose
different ones. A folder gets its name when it is complete.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import scipy.sparse as sp
import zarr

from annbatch_distributed.collect.matrices import Kind, Matrix, Source, kind_of, opened, values_at
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.write.blocks import blocks_of, in_columns, read_blocks
from annbatch_distributed.collect.write.jobs import run_each
from annbatch_distributed.collect.write.storage import smallest
from annbatch_distributed.core.values import n_cores, plural

#: Peak memory of a process that writes a part, in sizes of its block.
_PEAK = 4
#: Number of rows of a chunk of a part: the rows of a slice of a dataset.
_CHUNK = 1_000
#: Size of files that are read by a single process, which saves starting others, in bytes.
_SMALL = 2_000_000_000
#: Errors of a disk that is full.
_FULL = {EDQUOT, EFBIG, ENOSPC}
#: Upper limit of log-normalized values: log1p of a share of 10,000 counts is at most 9.2.
_MOST_LOG = 15


class Part(NamedTuple):
    """Rows of a file."""

    source: Source
    place: str
    """Place of the values in the file."""
    start: int
    stop: int
    path: Path
    """Folder of the part."""
    stamp: tuple[int, int]
    """Size of the file in bytes, and when it was changed."""
    are_together: bool
    """True if the parts of the file are written by one process, which reads it once."""

    @property
    def key(self) -> dict[str, Any]:
        """The file and its rows, as JSON; a folder with a different key is a different part."""
        return {"file": str(self.source), "place": self.place, "rows": [self.start, self.stop], "stamp": [*self.stamp]}


class Statistics(NamedTuple):
    """Statistics of the values of a part."""

    kind: Kind | None
    most: float
    """Largest absolute value."""
    n_values: int
    """Number of values that aren't 0."""
    n_nan: int
    n_negative: int


def parts_of(matrix: Matrix, number: int, folder: Path, memory: int) -> list[Part]:
    """Return the parts of a file, for processes that may use ``memory`` bytes each; or raise Problems."""
    source, place = matrix.source, matrix.place
    with opened(source) as group:
        values = values_at(group, place)
        are_together = in_columns(values)
        try:
            blocks = blocks_of(values, max(1, memory // _PEAK))
        except Exception as error:  # h5py and zarr raise many types for damaged values
            raise Problems(f"{source}: {place} can't be read: {type(error).__name__}: {error}") from error
    stamp = _stamp(source.path)
    paths = [folder / f"{number}-{start}-{stop}.zarr" for start, stop in blocks]
    return [Part(source, place, *block, path, stamp, are_together) for block, path in zip(blocks, paths, strict=True)]


def _stamp(path: Path) -> tuple[int, int]:
    stats = [one.stat() for one in (path.rglob("*") if path.is_dir() else [path])]
    return sum(one.st_size for one in stats), max(one.st_mtime_ns for one in stats)


def write_parts(parts: Sequence[Part], executor: Executor | None) -> Iterator[tuple[Part, Statistics] | Problems]:
    """Write parts, and yield each with its statistics, or problems; existing parts are kept."""
    tasks: dict[Any, list[Part]] = {}
    for part in parts:
        if (statistics := _statistics_of(part)) is not None:
            yield part, statistics
        else:
            tasks.setdefault(part.source if part.are_together else part, []).append(part)
    own = [*tasks.values()]
    for number, results in run_each(_written, own, executor):
        if isinstance(results, Problems):
            yield results
        else:
            yield from zip(own[number], results, strict=True)


def _statistics_of(part: Part) -> Statistics | None:
    """Return the statistics of a part from an earlier run; None if there is none, or the file has changed since."""
    try:
        attributes = dict(zarr.open_group(part.path, mode="r").attrs)
    except FileNotFoundError:
        return None
    if attributes.get("key") != part.key:
        return None
    kind, *others = attributes["statistics"]  # type: ignore[misc]  # a list of JSON
    return Statistics(None if kind is None else Kind(kind), *others)  # type: ignore[arg-type]  # as above


def _written(parts: Sequence[Part]) -> list[Statistics] | Problems:
    """Write parts of a file; return problems, since raised ones would end the other parts."""
    first, last = parts[0], parts[-1]
    statistics = list[Statistics]()
    try:
        with opened(first.source) as group:
            bounds, scratch = [(part.start, part.stop) for part in parts], first.path.with_suffix(".columns.unfinished")
            blocks = read_blocks(values_at(group, first.place), bounds, scratch)
            for part in parts:
                try:
                    block = next(blocks)
                except Exception as error:  # h5py and zarr raise many types for damaged values
                    if getattr(error, "errno", None) in _FULL:  # the disk with the scratch, not the file
                        raise
                    what = f"cells {first.start:,} to {last.stop - 1:,} of {first.place}"
                    problem = f"{first.source}: {what} can't be read: {type(error).__name__}: {error}"
                    raise Problems(problem) from error
                statistics.append(_write(part, block))
    except Problems as problems:
        return problems
    return statistics


def _write(part: Part, block: sp.csr_matrix) -> Statistics:
    """Write a part, in the smallest dtype for counts, and return its statistics."""
    data = block.data
    # of Python, since numpy's -(-128) is -128 as int8
    most = max(np.nanmax(data, initial=0).item(), -np.nanmin(data, initial=0).item())
    statistics = Statistics(
        kind_of(data),
        min(most, sys.float_info.max),  # JSON has no infinity
        len(data),
        int(np.isnan(data).sum()) if data.dtype.kind == "f" else 0,
        int((data < 0).sum()),
    )
    block.data = data.astype(smallest(statistics.most, data.dtype) if statistics.kind is Kind.COUNTS else data.dtype)
    unfinished = part.path.with_suffix(".unfinished")
    for before in (unfinished, part.path):  # of a process that was killed, or of the file before it was changed
        shutil.rmtree(before, ignore_errors=True)
    group = zarr.open_group(unfinished, mode="w")
    chunks = (max(1, len(data) * _CHUNK // max(1, block.shape[0])),)
    with ad.settings.override(write_csr_csc_indices_with_min_possible_dtype=True):
        ad.io.write_elem(group, "X", block, dataset_kwargs={"chunks": chunks} if len(data) else {})
    group.attrs.update(key=part.key, statistics=[*statistics])
    unfinished.rename(part.path)
    return statistics


def jobs_for(matrices: Sequence[Matrix]) -> int:
    """Return the number of processes by default: one for each core, or one for small files."""
    return 1 if sum(_stamp(matrix.source.path)[0] for matrix in matrices) < _SMALL else n_cores()


def _remark_on(statistics: Sequence[Statistics]) -> str:
    """Return a warning of values of a file that aren't counts; an empty string for counts."""
    remarks = list[str]()
    if n_nan := sum(part.n_nan for part in statistics):
        remarks.append(f"{plural(n_nan, 'value')} {'is' if n_nan == 1 else 'are'} NaN")
    if n_negative := sum(part.n_negative for part in statistics):
        remarks.append(f"{n_negative:,} values are negative, as after scaling")
    elif not n_nan and any(part.kind is Kind.NONNEGATIVE for part in statistics):  # NaN is no integer either
        looks = "; they look log-normalized" if max(part.most for part in statistics) < _MOST_LOG else ""
        remarks.append(f"not all values are integers{looks}")
    return f". WARNING: {'; '.join(remarks)}" if remarks else ""


def summary(matrix: Matrix, statistics: Sequence[Statistics], *, is_chosen: bool) -> str:
    """Return a line about the size and the values of a file."""
    where = f", from {matrix.place}" if is_chosen else ""
    n_cells, n_genes = matrix.shape
    shape = f"{plural(n_cells, 'cell')}, {plural(n_genes, 'gene')}"
    return f"{matrix.source}: {shape}, {matrix.dtype}{where}{_remark_on(statistics)}"
