"""Rows per second from disk to the end of a step on a GPU, relative to annbatch's Loader.

A simulated sparse collection, with 1,000 of 20,000 genes expressed, is written by annbatch and read from the page
cache by one process, through zarrs. Each batch is copied to the GPU, made dense there, and used to train a model of
three layers: a narrow model, whose step takes about as long as reading a batch, and a wide model, whose step takes
longer. annbatch's Loader and a StatefulLoader are compared, each with and without ``preload_to_gpu``, and with
``prefetch=1``.

Every round reads one epoch with each method, in turn; the first round isn't counted. Medians are reported, in rows per
second, relative to the better method of annbatch, and relative to the ideal: the same number of steps on one batch.
They go to a JSON file, with the versions.

    python -m benchmarks.gpu                            # on a GPU with CuPy, two minutes; the file of the documentation
    python -m benchmarks.gpu --small --out small.json   # at a size for tests, on the CPU if there is no GPU
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import torch
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from benchmarks import record
from benchmarks.libraries.cells import make, matrix

SIZES = 64, 32, 256
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Training:
    """A model of three layers, and its steps."""

    def __init__(self, n_var: int, width: int) -> None:
        layers = torch.nn.Linear(n_var, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 10)
        self._model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]).to(DEVICE)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)

    def step(self, cells: torch.Tensor) -> None:
        """Move a batch to the GPU, if it isn't there, and train on it."""
        self._optimizer.zero_grad()
        self._model(cells.to(DEVICE, non_blocking=True).to_dense()).square().mean().backward()
        self._optimizer.step()

    def rate(self, batches: Any) -> float:  # noqa: ANN401 what has tensors of cells as its batches' "X"
        """Return rows per second until the last step is done."""
        n_rows, began = 0, time.perf_counter()
        for batch in batches:
            self.step(batch["X"])
            n_rows += batch["X"].shape[0]
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return n_rows / (time.perf_counter() - began)


def loaders(cells: DatasetCollection) -> dict[str, Loader]:
    """Return the ways to read, by name: those that move load requests to the GPU where there is cupy."""
    made: dict[str, Loader] = {}
    for preload in (False, True) if DEVICE.type == "cuda" and find_spec("cupy") else (False,):
        options: dict[str, Any] = {"preload_to_gpu": preload, "to": "torch"}
        made[f"annbatch, preload_to_gpu={preload}"] = Loader(batch_sampler=RandomSampler(*SIZES), **options)
        for prefetch in (0,) if preload else (0, 1):
            sampler = DistributedSampler(RandomSampler(*SIZES), dist_info=Rank(0, 1), seed=0)
            name = f"ours, {f'prefetch={prefetch}' if prefetch else f'preload_to_gpu={preload}'}"
            made[name] = StatefulLoader(batch_sampler=sampler, prefetch=prefetch, **options)
    return {name: loader.use_collection(cells) for name, loader in made.items()}


def measure(cells: DatasetCollection, width: int, repeats: int) -> list[dict[str, Any]]:
    """Return a line for each way."""
    ways = loaders(cells)
    training = Training(next(iter(ways.values())).n_var, width)
    ours = ways["ours, preload_to_gpu=False"]
    batch = next(iter(ours))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    ideals = []
    for number in range(1 + repeats):
        ideal = training.rate([batch] * len(ours))
        found = {name: training.rate(loader) for name, loader in ways.items()}
        if number:
            ideals.append(ideal)
            for name, rate in found.items():
                rates[name].append(rate)
    medians = {name: statistics.median(own) for name, own in rates.items()}
    ideal = statistics.median(ideals)
    theirs = max(rate for name, rate in medians.items() if name.startswith("annbatch"))
    about = {"width": width, "step, ms": 1e3 * SIZES[-1] / ideal}
    return record.show(
        *(
            about | {"way": name, "rows/s": rate, "of annbatch's": rate / theirs, "of the ideal": rate / ideal}
            for name, rate in medians.items()
        )
    )


def main() -> None:
    """Measure a narrow and a wide model, and write what was measured."""
    arguments = record.arguments(__doc__, "gpu")
    if not arguments.small and DEVICE.type == "cpu":
        print("torch finds no GPU, so that nothing is measured")
        return
    n_obs, repeats, widths = (1_500, 1, [8]) if arguments.small else (60_000, 3, [512, 8_192])
    warnings.simplefilter("ignore")  # harmless warnings of anndata and zarr
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    with tempfile.TemporaryDirectory() as folder:
        source, file, path = (Path(folder) / name for name in ("cells.npz", "cells.h5ad", "cells.zarr"))
        make("sparse", n_obs, source)
        ad.AnnData(matrix(source)).write_h5ad(file)
        DatasetCollection(path).add_adatas([file])
        lines = [line for width in widths for line in measure(DatasetCollection(path, mode="r"), width, repeats)]
    record.write(arguments.out, device=name, cells=n_obs, sizes=SIZES, rounds=repeats, lines=lines)


if __name__ == "__main__":
    main()
