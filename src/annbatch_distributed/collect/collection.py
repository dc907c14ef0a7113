"""The public function ``collect``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pandas as pd

from annbatch_distributed.collect.harmonize.entries import AnyPath, entries_of, read_table
from annbatch_distributed.collect.options import Options
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.steps import write_collection
from annbatch_distributed.collect.write.storage import COMPRESSORS, DTYPES
from annbatch_distributed.core.values import as_bytes, integer

if TYPE_CHECKING:
    from annbatch import DatasetCollection


def collect(
    files: AnyPath | Sequence[AnyPath],
    out: AnyPath | None = None,
    *,
    add_to: AnyPath | None = None,
    layer: str | Sequence[str] = ("X",),
    join: Literal["outer", "inner"] | None = None,
    feature_types: Sequence[str] | None = None,
    obs: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    labels: AnyPath | pd.DataFrame | None = None,
    na_values: Sequence[str] = (),
    make_unique: bool = False,
    group_by: Sequence[str] | None = None,
    memory: int | str = "4GB",
    jobs: int | None = None,
    scheduler: str | None = None,
    dtype: str | None = None,
    compression: Literal["lz4", "zstd", "none"] = "lz4",
    seed: int = 0,
    restart: bool = False,
    tell: Callable[[str], object] = print,
) -> DatasetCollection:
    r"""Write one shuffled collection of h5ad files.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import anndata as ad
    >>> import numpy as np
    >>> from annbatch_distributed.collect import collect
    >>> folder = Path(tempfile.mkdtemp())
    >>> for donor in ("d1", "d2"):
    ...     cells = ad.AnnData(np.ones((3, 2)))
    ...     cells.obs_names = [f"{donor}-{number}" for number in range(3)]
    ...     cells.write_h5ad(folder / f"{donor}.h5ad")
    >>> _ = (folder / "samples.csv").write_text(
    ...     "path,donor\nd1.h5ad,D1\nd2.h5ad,D2\n"
    ... )
    >>> collection = collect(
    ...     folder / "samples.csv", folder / "cells.zarr", tell=lambda line: None
    ... )
    >>> collection.obs(["donor"])["donor"].value_counts().to_dict()
    {'D1': 3, 'D2': 3}

    Parameters
    ----------
    files
        Paths of h5ad files or of zarr folders that anndata has written; counts may be dense, CSR or CSC.
        ``"file.h5mu#rna"`` is the modality ``rna`` of an h5mu file. Or the path of a sample sheet: a ``.csv`` or
        ``.tsv`` file with a line for each file, and a column ``path``, relative to the sheet. A column ``counts`` has
        the place of the file's counts, as in ``layer``. Any other columns become columns of ``obs`` for all cells of
        the file; an empty field keeps the file's own column.
    out
        Local path of the new collection, which must not exist.
    add_to
        Local path of a collection that ``collect`` has written, in place of ``out``: the cells are added to it, in new
        datasets. They get its genes and its columns of ``obs``, which may get more categories. With ``join="inner"``,
        genes that it lacks are left out; otherwise they are an error. Its cells stay as they are, and readers see all
        new cells or none.
    layer
        Places of the counts, of which the first that a file has is read: ``"X"``, ``"raw"`` or the names of layers
        (default: ``"X"``).
    join
        ``"outer"`` keeps the genes of any file, with 0 for genes that a file lacks; ``"inner"`` keeps the shared genes.
        None is ``"outer"``, but raises if no gene is in all files (default).
    feature_types
        Types of features to keep, by the column ``feature_types`` of ``var``, such as ``"Gene Expression"``. None keeps
        all, as genes (default). Files without this column keep all features, if another file has it.
    obs
        Columns of ``obs`` to keep. None keeps all (default). Columns of a sample sheet are always kept. A column that a
        file lacks is missing in its cells.
    rename
        New names of columns, by the names in the files.
    labels
        Labels to replace: the path of a ``.csv`` file with the columns ``column``, ``from`` and ``to``, or a
        table with these.
    na_values
        Strings in ``obs`` to replace by missing values, such as ``"Unknown"``.
    make_unique
        True renames cells to ``FILE-NAME``, so that names which repeat are different (default False).
    group_by
        Columns of labels by which to sort the cells of each dataset, for samplers of classes and sets.
    memory
        Memory limit of all processes together, in bytes, or such as ``"20GB"`` (default ``"4GB"``); of each worker with
        ``scheduler``. It comes on top of what Python and its libraries need, about 1 GB for each process, and of the
        names and labels of all cells.
    jobs
        Number of processes. None takes one for each core that this process may use, or one in all if the files are
        smaller than 2 GB (default). In a script, call ``collect`` under ``if __name__ == "__main__":``, as these
        processes import it.
    scheduler
        Address of a running ``dask.distributed`` scheduler, whose workers replace processes of this machine. They must
        see the same folders, under the same paths. It needs the extra ``cluster``.
    dtype
        Dtype of the stored values, such as ``"float32"``. None stores counts in the smallest of uint8, int16 and int32
        that holds all of them, and other values in the dtype of the files (default); loaders of this package then
        yield values in the dtype of the files. annbatch's own ``Loader`` yields what is stored.
    compression
        ``"lz4"`` (default), ``"zstd"``, which needs less disk space and more time, or ``"none"``.
    seed
        Seed of the order of the cells (default 0).
    restart
        True removes the parts that an interrupted run has left; False uses them (default).
    tell
        Function that gets each line about files, genes and columns (default: ``print``).

    Returns
    -------
    annbatch.DatasetCollection
        The collection, opened for reading.

    Raises
    ------
    ~annbatch_distributed.collect.Problems
        If files or arguments can't be collected: a ``ValueError`` with a message for each problem of each file.
    TypeError, ValueError
        If ``memory``, ``jobs`` or ``seed`` is invalid.
    OSError
        If a file can't be written, as on a full disk, or the scheduler can't be reached.
    """
    from annbatch import DatasetCollection  # not above, since processes that read files import this module

    for name, value, known in (
        ("join", join, (None, "outer", "inner")),
        ("dtype", dtype, (None, *DTYPES)),
        ("compression", compression, (*COMPRESSORS,)),
    ):
        if value not in known:
            raise Problems(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    if (out is None) == (add_to is None):
        given = "both" if out is not None else "neither"
        raise Problems(f"out: either this or add_to must be the path of a collection, got {given}")
    if add_to is not None and obs is not None:
        raise Problems("obs: can't be combined with add_to, which keeps the columns of the collection. Leave it out")
    name, path = ("out", fspath(out)) if out is not None else ("add_to", fspath(add_to or ""))
    if "://" in path:
        raise Problems(f"{name}={path!r}: must be a local folder. Copy the collection to the store afterwards")
    if scheduler is not None and jobs is not None:
        raise Problems("jobs: can't be combined with scheduler, whose workers are the processes. Leave it out")
    options = Options(
        layer=_listed(layer) or ["X"],
        join=join,
        feature_types=_listed(feature_types),
        obs=_listed(obs),
        rename=rename or {},
        labels=_spellings(labels),
        na_values=_listed(na_values) or [],
        make_unique=make_unique,
        group_by=_listed(group_by),
        memory=as_bytes(memory),
        jobs=None if jobs is None else integer("jobs", jobs, least=1),
        scheduler=scheduler,
        dtype=dtype,
        compression=compression,
        seed=integer("seed", seed, least=0),
        restart=restart,
    )
    entries = entries_of([files] if isinstance(files, str | PathLike) else [*files], options.layer)
    write_collection(entries, Path(path), options, tell, adds=add_to is not None)
    return DatasetCollection(Path(path), mode="r")


def _listed(names: str | Sequence[str] | None) -> list[str] | None:
    """Return names, or a single one, as a list without repeats."""
    return None if names is None else [*dict.fromkeys([names] if isinstance(names, str) else names)]


def _spellings(labels: AnyPath | pd.DataFrame | None) -> dict[str, dict[str, str | None]]:
    """Return the labels of each column that are replaced, and by which; an empty one stands for a missing value."""
    if labels is None:
        return {}
    table = labels if isinstance(labels, pd.DataFrame) else read_table(Path(labels), "a file of labels", strip=False)
    if missing := [name for name in ("column", "from", "to") if name not in table]:
        raise Problems(f"labels: must have the columns column, from and to, got no {' and '.join(missing)}")
    pairs = [
        (str(column), str(old), None if pd.isna(new) else str(new) or None)
        for column, old, new in zip(table["column"], table["from"], table["to"], strict=True)
    ]
    spellings: dict[str, dict[str, str | None]] = {}
    for column, old, new in pairs:
        if spellings.setdefault(column, {}).setdefault(old, new) != new:
            raise Problems(f"labels: {old!r} of {column} must become one label, got several")
    return spellings
