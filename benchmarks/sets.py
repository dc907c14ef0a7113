"""Rows per second of sets with matched controls, relative to a loader of cells on the same collection.

A simulated collection of cell lines and drugs is written with the cells of each line and drug together (grouped), and
again shuffled, annbatch's default. Each is read by a loader of cells, in chunks of 64 rows, and by loaders of sets of
64 cells with 64 controls of the same line, in chunks of 4, 16 and 64 cells. Every round reads each once; the medians
of the ratios within a round are reported, without the first round. Measurements go to a JSON file, with the versions.

    python -m benchmarks.sets                             # 60,000 cells, some minutes; the file of the documentation
    python -m benchmarks.sets --small --out small.json    # the same at a size for tests
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
import zarrs  # noqa: F401 registers the codecs that annbatch recommends
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler

from annbatch_distributed import CellSets, DistributedSampler, Rank, StatefulLoader
from benchmarks import record

N_LINES, N_DRUGS, SIZE = 10, 20, 64
CHUNKS = 4, 16, 64


def write(folder: Path, n_cells: int, n_genes: int) -> dict[str, DatasetCollection]:
    """Write the collections, grouped and shuffled."""
    rng = np.random.default_rng(0)
    lines, drugs = rng.integers(N_LINES, size=n_cells), rng.integers(N_DRUGS, size=n_cells)
    obs = pd.DataFrame({"line": lines.astype(str), "drug": drugs.astype(str)}).astype("category")
    obs.index = pd.Index([f"cell {cell}" for cell in range(n_cells)])
    cells = sp.random_array((n_cells, n_genes), density=0.1, format="csr", dtype=np.float32, rng=rng)
    ad.AnnData(cells, obs=obs).write_h5ad(folder / "cells.h5ad")
    collections = {}
    for name, options in (("grouped", {"groupby": ["line", "drug"]}), ("shuffled", {"shuffle": True})):
        collection = DatasetCollection(folder / f"{name}.zarr")
        collections[name] = collection.add_adatas([folder / "cells.h5ad"], rng=rng, **options)
    return collections


def loaders(collection: DatasetCollection) -> dict[str, StatefulLoader]:
    """Return a loader of cells, and loaders of sets by the cells of a chunk."""

    def loader(sampler: RandomSampler, sets: CellSets | None = None) -> StatefulLoader:
        distributed = DistributedSampler(sampler, dist_info=Rank(0, 1), sets=sets, seed=0, remainder="exact")
        return StatefulLoader(batch_sampler=distributed, preload_to_gpu=False).use_collection(collection)

    obs = collection.obs(["line", "drug"])
    made = {"cells": loader(RandomSampler(64, 128, 1_024))}
    for chunk in CHUNKS:
        sets = CellSets.from_obs(
            obs, by=["line", "drug"], set_size=SIZE, controls={"drug": "0"}, match=["line"], chunk_size=chunk, seed=0
        )
        # as many rows in a load request and in a batch as above
        made[f"chunk_size={chunk}"] = loader(RandomSampler(1, 64, 8), sets)
    return made


def seconds_for_a_row(loader: StatefulLoader) -> float:
    """Read an epoch."""
    n_rows, start = 0, time.perf_counter()
    for batch in loader:
        n_rows += batch["X"].shape[0]
    return (time.perf_counter() - start) / n_rows


def main() -> None:
    """Measure both collections, and write what was measured."""
    arguments = record.arguments(__doc__, "sets")
    n_cells, n_genes, n_rounds = (15_000, 1_000, 1) if arguments.small else (60_000, 10_000, 9)
    warnings.simplefilter("ignore")  # harmless warnings of anndata and zarr
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, collection in write(Path(folder), n_cells, n_genes).items():
            ways = loaders(collection)
            ratios: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(1 + n_rounds):
                times = {way: seconds_for_a_row(loader) for way, loader in ways.items()}
                for way, seconds in times.items():
                    ratios[way].append(times["cells"] / seconds)
            medians = {way: statistics.median(values[1:]) for way, values in ratios.items()}
            lines += record.show(
                *(
                    {"collection": name, "way": way, "of cells": median, "least": min(ratios[way][1:])}
                    for way, median in medians.items()
                )
            )
    about = {"cells": n_cells, "genes": n_genes, "set size": SIZE, "groups": N_LINES * N_DRUGS}
    record.write(arguments.out, **about, rounds=n_rounds, lines=lines)


if __name__ == "__main__":
    main()
