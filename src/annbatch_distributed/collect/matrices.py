"""Matrices: the values of files, where they are and what kind of values they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import h5py
import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.sparse as sp
import zarr

from annbatch_distributed.collect.formats import hint_of_keys, hint_of_path
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import few

#: A group of h5py or zarr; or values, which are an array of these, or anndata's sparse matrix on disk.
type Node = Any

#: Number of values that tell the kind of a file before all are read, at its beginning, in its middle and at its end.
_N_SAMPLED = 100_000


class Source(NamedTuple):
    """A file, or a modality of it."""

    path: Path
    """Path of the file, or of a zarr folder."""
    modality: str | None
    """Modality of an h5mu file; None for files without modalities."""

    def __str__(self) -> str:
        return str(self.path) if self.modality is None else f"{self.path}#{self.modality}"


class Kind(IntEnum):
    """Kind of values; a larger one says more."""

    COUNTS = 1
    """Integers from 0."""
    NONNEGATIVE = 2
    """Numbers from 0, such as normalized counts, or NaN."""
    NEGATIVE = 3
    """Numbers of which some are negative, as after scaling."""

    @property
    def described(self) -> str:
        """Words for a message."""
        return {1: "counts", 2: "values that are not integers", 3: "negative values"}[int(self)]


class Matrix(NamedTuple):
    """Values of a file that are collected."""

    source: Source
    place: str
    """Place in the file: ``X``, ``raw``, or ``layer NAME``."""
    shape: tuple[int, int]
    """Numbers of cells and genes."""
    dtype: np.dtype[Any]
    """Dtype in which values are read."""
    is_dense: bool
    """True for a dense matrix, False for a sparse one."""
    genes: sp.csr_matrix
    """Matrix by which its rows are multiplied to have the genes of the collection; files may share it."""


class Cells(NamedTuple):
    """Cells of all files, as they will be in the collection."""

    matrices: list[Matrix]
    obs: pd.DataFrame
    """Names and labels of all cells, in the order of the matrices."""
    var: pd.DataFrame
    """Names and labels of the genes."""
    measured: pd.DataFrame
    """True for genes that a file has; its columns are the files."""


@contextmanager
def opened(source: Source) -> Iterator[Node]:
    """Open a file, or a modality of it, as a group; raises Problems if it can't be read."""
    path = source.path
    if not path.exists():
        raise Problems(f"{source}: no such file")
    try:
        whole: Node = zarr.open_group(path, mode="r") if path.is_dir() else h5py.File(path, "r")
    except Exception as error:  # zarr and h5py raise many types for damaged data
        hint = hint_of_path(path) or f"{type(error).__name__}: {error}"
        raise Problems(f"{source}: can't be read as h5ad: {hint}") from error
    try:
        yield _modality(source, whole)
    finally:
        if isinstance(whole, h5py.File):
            whole.close()


def _modality(source: Source, whole: Node) -> Node:
    if "mod" in whole:
        names = [*whole["mod"]]
        if source.modality not in names:
            raise Problems(
                f"{source}: must name a modality of the file, as in {source.path}#{names[0]}, got {listed(names)}"
            )
        return whole["mod"][source.modality]
    if "obs" not in whole or "var" not in whole:
        keys = listed([*whole])
        raise Problems(f"{source}: can't be read as h5ad: it has no obs and var, but {keys}. {hint_of_keys(whole)}")
    return whole


def values_at(group: Node, place: str) -> Node:
    """Return the values at a place of a file: an array, or a sparse matrix on disk."""
    if place == "raw":
        values = group["raw/X"] if "raw" in group else group["raw.X"]
    else:
        values = group[f"layers/{place.removeprefix('layer ')}" if place.startswith("layer ") else "X"]
    if is_dense(values):
        return values
    if not {"data", "indices", "indptr"} <= {*values}:
        raise ValueError(f"{place} must have data, indices and indptr, got {listed([*values])}")
    return ad.io.sparse_dataset(values, should_cache_indptr=False)


def is_dense(values: Node) -> bool:
    """Return True for an array, False for a sparse matrix."""
    return isinstance(values, h5py.Dataset | zarr.Array)


def dtype_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values are read, for those that SciPy or PyTorch has no sparse matrices of.

    >>> dtype_of(np.dtype("float16")), dtype_of(np.dtype(">i4"))
    (dtype('float32'), dtype('int32'))
    """
    native = dtype.newbyteorder("=")
    return np.dtype({"float16": np.float32, "bool": np.uint8}.get(str(native), native))


def kind_of(values: npt.NDArray[Any]) -> Kind | None:
    """Return the kind of some values; None if all are 0, which says nothing.

    >>> kind_of(np.array([0.0, 2.0])).name, kind_of(np.array([-0.5, 2.0])).name
    ('COUNTS', 'NEGATIVE')
    """
    if not values.any():
        return None
    if (values < 0).any():
        return Kind.NEGATIVE
    # NaN isn't equal to itself, and infinity is its own integer
    is_whole = values.dtype.kind in "iub" or bool((values == np.rint(values)).all() and np.isfinite(values.max()))
    return Kind.COUNTS if is_whole else Kind.NONNEGATIVE


def sampled(values: Node) -> npt.NDArray[Any]:
    """Return some values of a matrix: at its beginning, in its middle and at its end."""
    stored = values if is_dense(values) else values.group["data"]
    n_rows = stored.shape[0]
    n_each = min(n_rows, max(1, _N_SAMPLED // max(1, int(np.prod(stored.shape[1:])))))
    starts = sorted({0, (n_rows - n_each) // 2, n_rows - n_each})
    return np.concatenate([np.asarray(stored[start : start + n_each]).ravel() for start in starts])


def listed(names: list[str]) -> str:
    """Return the first of some names, for a message."""
    return few(names, 10) or "nothing"
