"""Labels: memory, time and speed of a rank whose cells have names and four columns of labels, by their number.

A collection of ``collect`` is opened in the middle of a job's life: its files are in the page cache. Cells have few
values, as this is about their labels: two columns of 50 and 200 categories, one of numbers, one of missing values, and
names of 24 letters.

- "annbatch": annbatch's Loader, which holds all labels in memory
- "in memory": this package's loader, with ``load_adata``
- "read": labels are read with the rows
- "read, with names": names, too
- "none": cells without labels

Memory is the peak beyond what a process had after its imports, from opening the collection until 50 batches are read,
by the number of cells; the seconds are those until the first batch, and CPU seconds of the batches after it. Every run
is a separate process; medians are reported. Measurements go to a JSON file, with the versions.

    python -m benchmarks.labels                                # half an hour; the file of the documentation
    python -m benchmarks.labels --small --out small.json       # the same at a size for tests
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.collect import collect
from benchmarks import record
from benchmarks.libraries.__main__ import measured

KINDS = "annbatch", "in memory", "read", "read, with names", "none"
#: Number of cells of a file, and of batches to read after the first one.
N_EACH, N_BATCHES = 1_000_000, 50


def write(folder: Path, n_cells: int, n_each: int) -> None:
    """Collect cells of 8 values each."""
    rng, files = np.random.default_rng(0), []
    for first in range(0, n_cells, n_each):
        columns = {
            "donor": pd.Categorical.from_codes(rng.integers(0, 50, n_each), [f"donor {code}" for code in range(50)]),
            "type": pd.Categorical.from_codes(rng.integers(0, 200, n_each), [f"type {code}" for code in range(200)]),
            "depth": rng.random(n_each, dtype=np.float32),
            "stage": pd.Categorical.from_codes(rng.integers(-1, 5, n_each), list("abcde")),
        }
        names = [f"AAACCTGAGAAACCAT-{cell:07d}" for cell in range(first, first + n_each)]
        indices = (np.arange(8) * 100 + rng.integers(0, 100, (n_each, 1))).astype(np.int32)
        values = sp.csr_matrix((np.ones(indices.size, np.float32), indices.ravel(), np.arange(n_each + 1) * 8))
        values.resize((n_each, 1_000))
        files.append(folder / f"{first}.h5ad")
        ad.AnnData(values, obs=pd.DataFrame(columns, index=names)).write_h5ad(files[-1])
    collect(files, folder / "cells.zarr", memory="2GB", jobs=2, tell=lambda _: None)
    for file in files:
        file.unlink()


def run(kind: str, path: str) -> None:
    """Open a collection and read batches, and print what it took as JSON."""
    warnings.simplefilter("ignore")
    group = zarr.open_group(path, mode="r")
    sampler = DistributedSampler(RandomSampler(64, 32, 256), dist_info=Rank(0, 8), seed=0)
    batches: list[Any] = []

    def load(group: zarr.Group) -> ad.AnnData:
        cells: Any = group["X"]
        return ad.AnnData(ad.io.sparse_dataset(cells), obs=ad.io.read_elem(group["obs"]))

    def begin() -> None:
        if kind == "annbatch":
            loader: Any = Loader(batch_sampler=sampler, preload_to_gpu=False)
        else:
            loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        if kind == "none":
            for dataset in DatasetCollection(group):
                loader.add_dataset(ad.io.sparse_dataset(dataset["X"]))
        else:
            options: dict[str, Any] = {"load_adata": load} if kind == "in memory" else {}
            options |= {"names": "names" in kind} if kind.startswith("read") else {}
            loader.use_collection(DatasetCollection(group), **options)
        iterator = iter(loader)
        next(iterator)
        first = time.perf_counter() - began
        began_cpu = time.process_time()
        n_batches = sum(1 for _ in islice(iterator, N_BATCHES))
        batches.extend([first, (time.process_time() - began_cpu) / (256 * n_batches)])

    began = time.perf_counter()
    found = measured(begin)
    print(json.dumps({"MB": found["MB"], "first batch, s": batches[0], "us a cell": batches[1] * 1e6}))


def main() -> None:
    """Measure everything, and write what was measured."""
    arguments = record.arguments(__doc__, "labels", run={"nargs": 2, "help": argparse.SUPPRESS})
    if arguments.run:
        run(*arguments.run)
        return
    sizes, n_each, repeats = ([20_000], 20_000, 1) if arguments.small else ([N_EACH, 10 * N_EACH], N_EACH, 3)
    lines = []
    for n_cells in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), n_cells, n_each)
            command = [sys.executable, "-m", "benchmarks.labels", "--out", os.devnull, "--run"]
            runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            for _ in range(repeats):
                for kind in KINDS:
                    done = subprocess.run(
                        [*command, kind, f"{folder}/cells.zarr"],
                        check=True,
                        capture_output=True,
                        text=True,
                        cwd=record.ROOT,
                    )
                    runs[kind].append(json.loads(done.stdout))
            for kind, found in runs.items():
                medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
                lines += record.show({"kind": kind, "cells": n_cells, **medians})
    record.write(arguments.out, runs=repeats, lines=lines)


if __name__ == "__main__":
    main()
