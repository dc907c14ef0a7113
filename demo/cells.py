"""Input of the demo: scanpy's cells, a file, a collection, or simulated cells."""

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

# harmless warnings of libraries
for message in (
    "Consolidated metadata is currently not part in the Zarr format 3",
    "Only `X`, `obs`, and `var` are kept for now",
    "Observation names are not unique",
    "Variable names are not unique",
):
    warnings.filterwarnings("ignore", message=message)

# scanpy's cells; the number is fixed, because anndata takes seconds to import
PBMC_LABEL = "bulk_labels"
PBMC_CELLS = 700

SYNTHETIC_LABELS = 10
SYNTHETIC_GENES = 2_000
SYNTHETIC_GENES_PER_CELL = 100


class UnusableCellsError(Exception):
    """Error for cells that can't be trained on; its message is one line."""


def pbmc() -> Path:
    """Return the path of scanpy's file, without importing scanpy."""
    return Path(str(distribution("scanpy").locate_file("scanpy/datasets/10x_pbmc68k_reduced.h5ad")))


def check_h5ad(path: Path, label: str) -> int:
    """Check that a file can be used for training.

    Parameters
    ----------
    path
        Path of an h5ad file.
    label
        Column of ``obs`` to learn.

    Returns
    -------
    int
        Number of cells.

    Raises
    ------
    UnusableCellsError
        If the file can't be used.
    """
    if not path.is_file():
        msg = f"{path}: no such file"
        raise UnusableCellsError(msg)

    import anndata as ad

    try:
        cells = ad.read_h5ad(path, backed="r")
        matrix = cells.X
    except Exception as error:
        msg = f"{path}: must be an h5ad file with a matrix X"
        raise UnusableCellsError(msg) from error
    with closing(cells.file):
        if matrix is None or getattr(matrix, "format", "dense") not in {"dense", "csr"}:
            msg = f"{path}: X must be a dense or a CSR matrix"
            raise UnusableCellsError(msg)
        _check_shape(path, cells.n_obs, cells.n_vars)
        _check_labels(path, cells.obs, label)
        return int(cells.n_obs)


def check_collection(path: Path, label: str) -> int:
    """Check that a collection can be used for training, as `check_h5ad` does."""
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
        msg = f"{path}: must be an annbatch collection, but is not even a zarr group"
        raise UnusableCellsError(msg) from error
    except Exception as error:
        # zarr, anndata and annbatch raise many kinds of errors for damaged files
        msg = f"{path}: the annbatch collection can't be read: {_in_one_line(error)}"
        raise UnusableCellsError(msg) from error
    if loader is None or obs is None:
        msg = f"{path}: a zarr group, but not an annbatch collection; write one with annbatch-distributed collect"
        raise UnusableCellsError(msg)
    _check_shape(path, len(obs), loader.n_var)
    _check_labels(path, obs, label)
    return len(obs)


def write_collection(job: Job) -> None:
    """Write the cells of a job to its collection: shuffled, only with X and the labels."""
    import numpy as np
    from annbatch import DatasetCollection

    def load(_: str) -> ad.AnnData:
        return _simulate(job.n_obs, job.label) if job.h5ad is None else _open(job.h5ad, job.label)

    # the default size of datasets is in bytes, and simulated cells have no file to estimate it from
    DatasetCollection(job.collection).add_adatas(
        [job.h5ad or "simulated"], load_adata=load, dataset_size=200_000, rng=np.random.default_rng(0)
    )


def _open(path: str, label: str) -> ad.AnnData:
    import anndata as ad

    lazy = ad.experimental.read_lazy(path)
    return ad.AnnData(X=lazy.X, obs=lazy.obs.to_memory()[[label]], var=lazy.var.to_memory()[[]])


def _simulate(n_obs: int, label: str) -> ad.AnnData:
    """Simulate sparse counts: a tenth of the genes of a cell are markers of its label."""
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
        msg = f"{path}: {n_obs:,} cells and {n_var:,} genes; both must be at least 1"
        raise UnusableCellsError(msg)


def _check_labels(path: Path, obs: pd.DataFrame, label: str) -> None:
    import pandas as pd

    if label not in obs:
        msg = f"{path}: obs has no column {label!r}; pass --label with one of {', '.join(map(str, obs.columns))}"
        raise UnusableCellsError(msg)
    if pd.api.types.is_float_dtype(obs[label]):
        msg = f"{path}: column {label!r} must hold labels, not floats"
        raise UnusableCellsError(msg)
    if obs[label].isna().any():
        msg = f"{path}: column {label!r} lacks values for {obs[label].isna().sum():,} cells"
        raise UnusableCellsError(msg)
    if obs[label].nunique() < 2:
        msg = f"{path}: column {label!r} must have at least two values"
        raise UnusableCellsError(msg)
