"""Base: the collection to which files are added, as the first of the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd

from annbatch_distributed.collect.harmonize.files import File
from annbatch_distributed.collect.matrices import Source, is_dense, kind_of, sampled, values_at
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import few, plural


class Base(NamedTuple):
    """Collection to which files are added."""

    file: File
    """Its cells and genes, like the contents of a file; ``obs`` has no columns."""
    labels: pd.DataFrame
    """Some rows with the dtypes of its ``obs``, and with each category."""
    var: pd.DataFrame
    files: list[str]
    """Files of which it was made."""


def base_of(path: Path) -> Base:
    """Return a collection; raises Problems if ``collect`` has not written it."""
    from annbatch import DatasetCollection  # not above, since processes that read files import this module

    try:
        groups: list[Any] = [*DatasetCollection(path, mode="r")]
        obs: Any = groups[-1]["obs"]
        var: Any = ad.io.read_elem(groups[0]["var"])
        # the last dataset has all categories
        columns: dict[str, Any] = {name: ad.io.read_elem(obs[name]) for name in obs.attrs["column-order"]}
        names: list[Any] = [ad.io.read_elem(group["obs"][group["obs"].attrs["_index"]]) for group in groups]
        values = values_at(groups[0], "X")
        some = sampled(values)
        # all of its datasets, since annbatch may have added others
        _ = [group["varm/measured"].attrs["files"] for group in groups]
    except Exception as error:  # zarr and annbatch raise many types for what isn't a collection
        what = f"{type(error).__name__}: {error}"
        raise Problems(f"add_to={str(path)!r}: must be a collection that collect has written, got {what}") from error
    labels = _rows_of_each_category(columns)
    file = File(
        source=Source(path, None),
        place="X",
        obs=pd.DataFrame(index=pd.Index(np.concatenate(names), dtype=object)),
        var=var.astype(object),
        dtype=some.dtype,
        is_dense=is_dense(values),
        kind=kind_of(some),
        columns=[name for name in columns if name != "src_path"],
        renamed=[],
        replaced=[],
        others=[],
    )
    files = labels.pop("src_path").cat.categories.tolist()
    return Base(file, labels, var, files)


def _rows_of_each_category(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return a table with the dtypes of some columns, with each category of labels."""
    n_rows = max((len(own.categories) for own in columns.values() if isinstance(own, pd.Categorical)), default=1)
    table = pd.DataFrame(index=range(max(1, n_rows)))
    for name, own in columns.items():
        if isinstance(own, pd.Categorical):
            codes = np.arange(len(table)) % len(own.categories) if len(own.categories) else [-1] * len(table)
            table[name] = pd.Categorical.from_codes(codes, dtype=own.dtype)
        else:
            table[name] = pd.Series(0, table.index).astype(own.dtype)
    return table


def check_genes(base: Base, files: Sequence[File], genes_of: Sequence[pd.Index[Any]], join: str | None) -> str:
    """Return a line about genes; raises Problems if files have genes that the collection lacks, unless ``"inner"``."""
    own, problems, n_shared = {*base.var.index}, list[str](), list[int]()
    for file, genes in zip(files, genes_of, strict=True):
        every = genes.dropna()
        others = [gene for gene in every if gene not in own]
        n_shared.append(len(every) - len(others))
        if not n_shared[-1]:
            problems.append(f"{file.source}: has no gene of {base.file.source}, but {few([*every], 3) or 'none'}")
        elif others and join != "inner":
            problems.append(
                f"{file.source}: has {plural(len(others), 'gene')} that {base.file.source} lacks, such as "
                f"{few(others, 3)}. Pass join='inner' to leave them out, or collect all files again"
            )
    if problems:
        raise Problems(*problems)
    return f"genes: the {len(own):,} of the collection, of which each file has at least {min(n_shared):,}"


def in_dtypes_of(base: Base, tables: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Return tables of labels with the columns and dtypes of the collection, which may get more categories.

    ``tables`` are united with the labels of the collection. Raises Problems for each column that can't be.
    """
    problems = [
        f"{name}: {base.file.source} has no such column. Leave it out, or collect all files again"
        for name in tables[0]
        if name not in base.labels
    ]
    of_base = [table[[name for name in base.labels if name in table]].copy() for table in tables]
    for name, own in base.labels.items():
        dtype: Any = tables[0][name].dtype
        # flags of missing values may all be False
        if dtype in {own.dtype, getattr(own.dtype, "numpy_dtype", own.dtype)}:
            for table in of_base:
                table[name] = table[name].astype(own.dtype)
        elif not _begins(dtype, own.dtype):
            problems.append(
                f"{name}: has {_described(own.dtype)} in {base.file.source}, and would have {_described(dtype)} with "
                "these files. Change these, or collect all files again"
            )
    if problems:
        raise Problems(*problems)
    return of_base


def _begins(dtype: Any, own: Any) -> bool:  # noqa: ANN401 dtypes
    """Return True if the categories of ``own`` are the first ones of another dtype, so that codes stay the same."""
    if not all(isinstance(one, pd.CategoricalDtype) for one in (dtype, own)) or dtype.ordered != own.ordered:
        return False
    return bool(dtype.categories[: len(own.categories)].equals(own.categories))


def _described(dtype: Any) -> str:  # noqa: ANN401 a dtype
    if not isinstance(dtype, pd.CategoricalDtype):
        return f"values of {dtype}"
    return f"labels ({few([*map(str, dtype.categories)], 10, ' < ' if dtype.ordered else ', ')})"
