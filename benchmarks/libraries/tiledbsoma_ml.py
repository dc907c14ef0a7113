"""tiledbsoma-ml over a SOMA experiment."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
import tiledbsoma
import tiledbsoma.io
from tiledbsoma_ml import ExperimentDataset, experiment_dataloader

from benchmarks.libraries.cells import matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    type Configuration = tuple[int, int, int]
    type Way = Callable[[int], Iterator[Any]]

#: Number of rows that are read together, as in scDataset.
FEWER = 4_096
PACKAGES = "tiledbsoma-ml", "tiledbsoma", "numpy", "torch"


def write(source: Path, folder: Path) -> None:
    """Write an experiment; it reads sparse ones only, so that dense cells are written as such."""
    cells = matrix(source)
    if isinstance(cells, np.ndarray):
        (folder.parent / f"{folder.name}-dense").touch()  # to be made dense where they are read
    tiledbsoma.io.from_anndata(str(folder), ad.AnnData(sp.csr_matrix(cells)), measurement_name="RNA")


def loaders(folder: Path, configuration: Configuration, rank: int, world_size: int) -> dict[str, Way]:  # noqa: ARG001 it finds its rank itself
    """Return its loader, which reads up to 65,536 rows together, and one that reads fewer and prefetches."""
    experiment = tiledbsoma.Experiment.open(str(folder))
    options: dict[str, Any] = {"layer_name": "data", "batch_size": configuration[2], "seed": 0}
    options["return_sparse_X"] = not (folder.parent / f"{folder.name}-dense").exists()
    ways: dict[str, Way] = {}
    for name, more in {"tiledbsoma-ml": {}, f"tiledbsoma-ml, {FEWER} rows": {"io_batch_size": FEWER}}.items():
        query = experiment.axis_query(measurement_name="RNA")
        ways[name] = partial(epoch_of, ExperimentDataset(query, **options, **more))
    return ways


def epoch_of(dataset: ExperimentDataset, epoch: int) -> Iterator[Any]:
    """Read an epoch."""
    dataset.set_epoch(epoch)
    for batch, _ in experiment_dataloader(dataset):
        yield batch
