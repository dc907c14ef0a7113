"""Parts: the part of each file that is collected, in its own temporary folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from annbatch_distributed.collect.files import File, open_h5ad
from annbatch_distributed.collect.labels import replace_missing
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import plural

#: Upper limit of log-normalized values: log1p of a share of 10,000 counts is at most 9.2.
_MOST_LOG = 15


class Part(NamedTuple):
    """Part of a file that is collected."""

    path: Path
    """Folder with its values and names."""
    file: File
    obs: pd.DataFrame
    genes: pd.Index[Any]
    are_counts: bool | None
    """True if its values are integers; None if all values are 0."""
    no_labels: set[str]
    """Strings of ``obs`` that were replaced by missing values."""
    summary: str
    """Line about its size and values."""


def write_part(
    path: Path,
    file: File,
    *,
    layer: str | None,
    columns: Sequence[str] | None,
    na_values: Sequence[str],
    make_unique: bool,
) -> Part:
    """Write the collected part of a file to the folder ``path``."""
    cells = open_h5ad(file.path)
    if file.place == "raw":
        cells = cells.raw.to_adata()
    values = cells.layers[layer] if file.place == f"layer {layer}" else cells.X
    if values is None:
        raise Problems(f"{file.path}: X has no values. Pass --layer to use a layer")
    if values.dtype == np.float16:  # SciPy has no sparse matrices of float16
        values = values.astype(np.float32)
    try:
        values = sp.csr_matrix(values)
    except (TypeError, ValueError) as error:
        raise Problems(f"{file.path}: {file.place} must have numbers, got values of {values.dtype}") from error
    obs = (cells.obs if columns is None else cells.obs[list(dict.fromkeys(columns))]).copy()
    obs.index.name = None  # it may be the name of a column
    part: Any = ad.AnnData(values, obs=obs[[]], var=cells.var[[]])
    if make_unique:
        part.obs_names = [f"{file.name}-{cell}" for cell in part.obs_names]
        part.obs_names_make_unique()
        part.var_names_make_unique()
        obs.index = part.obs_names
    no_labels = replace_missing(obs, na_values)
    part.write_zarr(path)
    data = part.X.data
    where = f", from {file.place}" if layer else ""
    shape = f"{plural(part.n_obs, 'cell')}, {plural(part.n_vars, 'gene')}"
    return Part(
        path=path,
        file=file,
        obs=obs,
        genes=part.var_names,
        are_counts=bool((data % 1 == 0).all()) if data.any() else None,
        no_labels=no_labels,
        summary=f"{file.path}: {shape}, {data.dtype}{where}{_unlike_counts(data)}",
    )


def check_counts(parts: Sequence[Part]) -> None:
    """Raise if only some files have counts: a model would train on log-normalized values as counts."""
    if {part.are_counts for part in parts} >= {True, False}:
        file = next(part.file for part in parts if part.are_counts is False)
        raise Problems(
            f"{file.path}: {file.place} must have counts, as in other files, got values that are not integers. "
            f"It has {file.named_layers}. Pass --layer NAME if a layer has the counts, or --layer raw for .raw; "
            "otherwise leave the file out"
        )


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
