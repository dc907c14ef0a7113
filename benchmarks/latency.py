"""Reading from a store with latency, such as object storage, by the number of prefetched load requests.

A simulated collection is written by annbatch, and each request to the local store is delayed. It is read by annbatch's
Loader, and by a StatefulLoader with several values of ``prefetch``; all with zarr's own codecs.

1. Without steps: rows per second, also relative to annbatch.
2. With steps that sleep for the time that reading a batch takes with ``prefetch=8``: rows per second relative to
   steps without reading, the ideal.

Every round measures each method once, in a second epoch; medians over the rounds are reported, and written to a
JSON file with the versions.

    python -m benchmarks.latency                             # some minutes; the file of the documentation
    python -m benchmarks.latency --small --out small.json    # the same at a size for tests
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler
from zarr.storage import LocalStore
from zarr.testing.store import LatencyStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from benchmarks import record

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = 512, 4, 512
AHEAD = 0, 1, 2, 4, 8


def opened(path: Path, latency: float) -> DatasetCollection:
    """Open a collection whose store answers late."""
    store = LatencyStore(LocalStore(path, read_only=True), get_latency=latency)
    return DatasetCollection(zarr.open_group(store, mode="r"))


def rate(loader: Loader, step: float = 0.0) -> float:
    """Return rows per second in an epoch, each batch of which is followed by a step."""
    n_rows, began = 0, time.perf_counter()
    for batch in loader:
        n_rows += batch["X"].shape[0]
        time.sleep(step)
    return n_rows / (time.perf_counter() - began)


def measure(path: Path, latency: float, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a line for annbatch, and one for each number of load requests that are read at once."""
    theirs = Loader(batch_sampler=RandomSampler(*SIZES), preload_to_gpu=False)
    loaders: dict[str, Loader] = {"annbatch": theirs.use_collection(opened(path, latency))}
    for n_ahead in AHEAD:
        sampler = DistributedSampler(RandomSampler(*SIZES), dist_info=Rank(0, 1), seed=0)
        ours = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, prefetch=n_ahead)
        loaders[f"prefetch={n_ahead}"] = ours.use_collection(opened(path, latency))
    last = f"prefetch={AHEAD[-1]}"
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    parts: dict[str, list[float]] = {name: [] for name in loaders}
    for loader in loaders.values():
        rate(loader)  # a first epoch, with which annbatch reads where sparse rows begin
    for _ in range(repeats):
        for name, loader in loaders.items():
            rates[name].append(rate(loader))
        step = SIZES[-1] / rates[last][-1]
        for name, loader in loaders.items():
            parts[name].append(rate(loader, step) * step / SIZES[-1])
    for name in loaders:
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates[name], rates["annbatch"], strict=True))
        speed, part = statistics.median(rates[name]), statistics.median(parts[name])
        yield {"way": name, "rows/s": speed, "of annbatch's": ratio, "of the ideal": part}


def main() -> None:
    """Measure both kinds of cells at each latency, and write what was measured."""
    concurrency = {"type": int, "default": 10, "help": "zarr's async.concurrency (10, its default)"}
    arguments = record.arguments(__doc__, "latency", concurrency=concurrency)
    n_rows, repeats, latencies = (9_000, 1, [0.005]) if arguments.small else (40_000, 3, [0.03, 0.1])
    warnings.simplefilter("ignore")  # harmless warnings of anndata and zarr
    zarr.config.set({"async.concurrency": arguments.concurrency})
    rng = np.random.default_rng(0)
    kinds = {
        "sparse": sp.random(n_rows, 2_000, density=0.05, format="csr", dtype="float32", rng=rng),
        "dense": rng.random((n_rows, 200), dtype="float32"),
    }
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, cells in kinds.items():
            file, path = Path(folder) / f"{kind}.h5ad", Path(folder) / f"{kind}.zarr"
            ad.AnnData(cells).write_h5ad(file)
            DatasetCollection(path).add_adatas([file])
            for latency in latencies:
                about = {"collection": kind, "latency": latency}
                lines += record.show(*(about | line for line in measure(path, latency, repeats)))
    about = {"cells": n_rows, "sizes": SIZES, "concurrency": arguments.concurrency}
    record.write(arguments.out, **about, rounds=repeats, lines=lines)


if __name__ == "__main__":
    main()
