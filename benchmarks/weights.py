"""Cost of weights: planning, and rows per second relative to reading each cell once.

1. Planning: seconds and memory, in addition to the weights themselves, to make a sampler of 10^8 lognormal weights and
   to begin an epoch, and seconds to begin each further epoch.
2. Reading: a simulated collection, shuffled, with a lognormal number of genes for each cell and with lognormal weights,
   read by one process through zarrs. Draws per second relative to the cells per second of a loader without weights of
   the same sizes, by the number of consecutive draws that are read together, and by the number of draws. Every round
   reads each once; medians over the rounds are reported, without the first round.

Measurements go to a JSON file, with the versions.

    python -m benchmarks.weights                             # some minutes; the file of the documentation
    python -m benchmarks.weights --small --out small.json    # the same at a size for tests
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import zarr
import zarrs  # noqa: F401 registers the codecs that annbatch recommends
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.collect import collect
from benchmarks import record
from benchmarks.libraries.__main__ import status
from benchmarks.libraries.cells import anndata_of, make

RUNS = 64, 512
BATCH_SIZE, PRELOADED = 256, 4_096


def plan(n_cells: int) -> dict[str, float]:
    """Return what planning takes."""
    values = np.random.default_rng(0).lognormal(0, 1, n_cells).astype(np.float32)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory of the process: see proc(5)
    before, times = status("VmRSS"), [time.perf_counter()]
    sampler = DistributedSampler(RandomSampler(512, 32, 4_096), dist_info=Rank(3, 8), weights=values, seed=0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        next(sampler.sample(n_cells))
        times.append(time.perf_counter())
    first, *others = np.diff(times)
    return {"cells": n_cells, "seconds": first, "MB": status("VmHWM") - before, "seconds of an epoch": max(others)}


def loader(collection: DatasetCollection, run: int, part: float | None) -> StatefulLoader:
    """Return a loader that draws a part of the number of cells, or reads each cell once."""
    n_cells = len(collection.obs(["donor"]))
    options: dict[str, Any] = {}
    if part is not None:
        values = np.random.default_rng(0).lognormal(0, 1, n_cells)
        options = {"weights": values, "num_samples": int(part * n_cells)}
    wrapped = RandomSampler(run, PRELOADED // run, BATCH_SIZE)
    sampler = DistributedSampler(wrapped, dist_info=Rank(0, 1), seed=0, **options)
    return StatefulLoader(batch_sampler=sampler, preload_to_gpu=False).use_collection(collection)


def rate(loader: StatefulLoader, epoch: int) -> float:
    """Return draws per second of an epoch."""
    n_rows, began = 0, time.perf_counter()
    loader.set_epoch(epoch)
    for batch in loader:
        n_rows += batch["X"].shape[0]
    return n_rows / (time.perf_counter() - began)


def main() -> None:
    """Measure planning and reading, and write what was measured."""
    arguments = record.arguments(__doc__, "weights")
    n_planned, n_cells, n_rounds = (10**6, 6_000, 1) if arguments.small else (10**8, 120_000, 7)
    warnings.simplefilter("ignore")  # harmless warnings of anndata and zarr
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    (planning,) = record.show(plan(n_planned))
    with tempfile.TemporaryDirectory() as folder:
        source, file = Path(folder) / "cells.npz", Path(folder) / "cells.h5ad"
        make("sparse", n_cells, source)
        anndata_of(source).write_h5ad(file)
        collection = collect(file, Path(folder) / "cells.zarr", tell=lambda line: None)  # noqa: ARG005 it is not shown
        ways = {(run, part): loader(collection, run, part) for run in RUNS for part in (None, 1, 0.25)}
        ratios: dict[tuple[int, float], list[float]] = {}
        for number in range(1 + n_rounds):
            rates = {way: rate(one, number) for way, one in ways.items()}
            for (run, part), own in rates.items():
                if number and part is not None:
                    ratios.setdefault((run, part), []).append(own / rates[run, None])
    lines = []
    for (run, part), values in ratios.items():
        medians = {"of cells": statistics.median(values), "least": min(values)}
        lines += record.show({"run": run, "draws for each cell": part, **medians})
    record.write(arguments.out, cells=n_cells, rounds=n_rounds, planning=planning, lines=lines)


if __name__ == "__main__":
    main()
