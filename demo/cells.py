"""Cells: those that come with scanpy, a file, a collection, or made-up ones; checked, and written to a collection."""

from __future__ import annotations

import warnings
from contextlib import closing
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import anndata as ad
    import pandas as pd

    from demo.job import Job

# known, and not about anything that can be changed here
for message in (
    "Consolidated metadata is currently not part in the Zarr format 3",
    "Only `X`, `obs`, and `var` are kept for now",
    "Observation names are not unique",
    "Variable names are not unique",
):
    warnings.filterwarnings("ignore", message=message)

# the cells that come with scanpy: known, because anndata takes seconds to import
PBMC_LABEL = "bulk_labels"
PBMC_CELLS = 700

SYNTHETIC_LABELS = 10
SYNTHETIC_GENES = 2_000
SYNTHETIC_GENES_PER_CELL = 100


class UnusableCellsError(Exception):
    """What was asked for can't be trained on; the message is one line that says why."""


def pbmc() -> Path:
    """Find the file that comes with scanpy, without importing it."""
    return Path(str(distribution("scanpy").locate_file("scanpy/datasets/10x_pbmc68k_reduced.h5ad")))


def check_h5ad(path: Path, label: str) -> int:
    """Check that a file can be trained on.

    Parameters
    ----------
    path
        An h5ad file.
    label
        The column of ``obs`` to learn.

    Returns
    -------
    How many cells it has.

    Raises
    ------
    UnusableCellsError
        If it can't be trained on.
    """
    if not path.is_file():
        msg = f"{path}: no such file"
        raise UnusableCellsError(msg)

    import anndata as ad

    try:
        cells = ad.read_h5ad(path, backed="r")
        matrix = cells.X
    except Exception as error:
        msg = f"{path}: not an h5ad file that anndata can read, with a matrix X"
        raise UnusableCellsError(msg) from error
    with closing(cells.file):
        if matrix is None or getattr(matrix, "format", "dense") not in {"dense", "csr"}:
            msg = f"{path}: X must be a dense or a CSR matrix, for rows to be read from it"
            raise UnusableCellsError(msg)
        _check_shape(path, cells.n_obs, cells.n_vars)
        _check_labels(path, cells.obs, label)
        return int(cells.n_obs)


def check_collection(path: Path, label: str) -> int:
    """Check that a collection can be trained on; as `check_h5ad` does for a file."""
    if not path.is_dir():
        msg = f"{path}: no such folder"
        raise UnusableCellsError(msg)

    import zarr
    from annbatch import DatasetCollection, Loader

    try:
        collection = DatasetCollection(zarr.open_group(path, mode="r"))
        is_empty = collection.is_empty
        loader = None if is_empty else Loader(batch_size=1, preload_to_gpu=False).use_collection(collection)
        obs = None if is_empty else collection.obs()
    except FileNotFoundError as error:
        msg = f"{path}: not an annbatch collection, not even a zarr group"
        raise UnusableCellsError(msg) from error
    except Exception as error:
        # whatever zarr, anndata and annbatch raise about a file that is damaged
        msg = f"{path}: not an annbatch collection that can be read: {_in_one_line(error)}"
        raise UnusableCellsError(msg) from error
    if loader is None or obs is None:
        msg = f"{path}: a zarr group, but not an annbatch collection; DatasetCollection(...).add_adatas writes one"
        raise UnusableCellsError(msg)
    _check_shape(path, len(obs), loader.n_var)
    _check_labels(path, obs, label)
    return len(obs)


def write_collection(job: Job) -> None:
    """Write a job's cells to its collection: shuffled, with nothing but their matrix and their labels."""
    import numpy as np
    from annbatch import DatasetCollection

    def load(_: str) -> ad.AnnData:
        return _make_up(job.n_obs, job.label) if job.h5ad is None else _open(job.h5ad, job.label)

    # the default sizes of data sets are bytes, and made-up cells have no file to estimate them from
    DatasetCollection(job.collection).add_adatas(
        [job.h5ad or "made up"], load_adata=load, dataset_size=200_000, rng=np.random.default_rng(0)
    )


def _open(path: str, label: str) -> ad.AnnData:
    import anndata as ad

    lazy = ad.experimental.read_lazy(path)
    return ad.AnnData(X=lazy.X, obs=lazy.obs.to_memory()[[label]], var=lazy.var.to_memory()[[]])


def _make_up(n_obs: int, label: str) -> ad.AnnData:
    """Make up sparse counts: a tenth of the genes of a cell are markers of its label, the others are any genes."""
    import anndata as ad
    import numpy as np
    import pandas as pd
    import scipy.sparse as sp

    rng = np.random.default_rng(0)
    codes = rng.integers(SYNTHETIC_LABELS, size=n_obs)
    genes = rng.integers(SYNTHETIC_GENES, size=(n_obs, SYNTHETIC_GENES_PER_CELL))
    markers = genes[:, ::10]
    markers -= markers % SYNTHETIC_LABELS
    markers += codes[:, None]
    counts = 1 + rng.poisson(size=genes.size).astype(np.float32)
    starts = np.arange(n_obs + 1) * SYNTHETIC_GENES_PER_CELL
    matrix = sp.csr_matrix((counts, genes.ravel(), starts), shape=(n_obs, SYNTHETIC_GENES))
    matrix.sum_duplicates()
    labels = pd.Categorical.from_codes(codes, [f"type {code}" for code in range(SYNTHETIC_LABELS)])
    return ad.AnnData(X=matrix, obs=pd.DataFrame({label: labels}, index=np.arange(n_obs).astype(str)))


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _check_shape(path: Path, n_obs: int, n_var: int) -> None:
    if n_obs == 0 or n_var == 0:
        msg = f"{path}: {n_obs:,} cells with {n_var:,} genes, so there is nothing to learn from"
        raise UnusableCellsError(msg)


def _check_labels(path: Path, obs: pd.DataFrame, label: str) -> None:
    import pandas as pd

    if label not in obs:
        msg = f"{path}: no column {label!r} in obs; --label takes one of: {', '.join(map(str, obs.columns))}"
        raise UnusableCellsError(msg)
    if pd.api.types.is_float_dtype(obs[label]):
        msg = f"{path}: column {label!r} holds measurements, not labels"
        raise UnusableCellsError(msg)
    if obs[label].isna().any():
        msg = f"{path}: column {label!r} has no value for {obs[label].isna().sum():,} cells"
        raise UnusableCellsError(msg)
    if obs[label].nunique() < 2:
        msg = f"{path}: column {label!r} has one value for all cells, so there is nothing to learn"
        raise UnusableCellsError(msg)
