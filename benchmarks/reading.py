"""What a training feels of reading: rows per second of two ranks in lock-step, and how long their steps wait.

A made-up collection, sparse and dense, is written as annbatch writes it, and read from the page cache. Two processes
are the ranks of a job: each takes a batch, works on it for as long as a step takes (it sleeps), and waits for the other
one, as a collective does. Compared are annbatch's Loader with its own sampler, and this package's StatefulLoader,
without and with ``read_ahead=1``.

1. Without a step, epochs 0 and 1: rows per second as a part of annbatch's in the same epoch.
2. With a step that takes half as long as reading a batch, as long, and twice as long: rows per second, as a part of
   annbatch's, and of the ideal, which is that of whichever takes longer: reading alone, or steps without reading, which
   wait for the other rank as well.
3. In the same epochs, how long a step waits for its batch: the 99th percentile and the longest.

Every round measures each way once, and reported are medians over the rounds. What is measured goes into a JSON file,
with the versions, and the second and the third of it into a picture.

    python benchmarks/reading.py                                    # some minutes; the figure of the documentation
    python benchmarks/reading.py --small --out small.svg            # the same at a size for tests
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import annbatch.samplers
import anndata as ad
import matplotlib as mpl
import numpy as np
import scipy.sparse as sp
import zarr
import zarrs  # noqa: F401 registers the codecs that annbatch recommends
from annbatch import Loader, write_sharded
from annbatch.samplers import RandomSampler
from matplotlib.figure import Figure

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

    type Made = Loader[Any, Any]
    #: Of an epoch: rows per second, and of the waits after the first one, the longest and the 99th percentile.
    type Epoch = dict[str, float]

FIGURE = Path(__file__).parents[1] / "docs" / "_static" / "reading.svg"
WORLD_SIZE = 2
#: chunk_size, preload_nchunks, batch_size: some 60 load requests on each rank.
CONFIGURATIONS = [(64, 16, 256), (512, 2, 512)]
#: How long a step takes, as a part of the time in which annbatch reads a batch.
STEPS = 0.5, 1.0, 2.0
WAYS = "annbatch", "ours", "ours, read_ahead=1"
PACKAGES = "annbatch", "annbatch-distributed", "anndata", "numpy", "zarr", "zarrs"


def write(folder: Path, kind: str, n_obs: int) -> None:
    """Write a collection as annbatch does, in chunks of 64 rows."""
    rng = np.random.default_rng(0)
    if kind == "dense":
        cells: Any = rng.random((n_obs, 512), dtype=np.float32)
    else:
        cells = sp.random_array((n_obs, 2_000), density=0.05, format="csr", dtype=np.float32, rng=rng)
    write_sharded(zarr.open_group(folder, mode="w"), ad.AnnData(cells))


def made(way: str, configuration: tuple[int, int, int], folder: Path, rank: int) -> Made:
    """Make a rank's loader of a collection."""
    sampler = RandomSampler(*configuration, rng=np.random.default_rng(0))
    if way == "annbatch":
        theirs = annbatch.samplers.DistributedSampler(sampler, dist_info=partial(tuple, (rank, WORLD_SIZE)))
        loader: Made = Loader(batch_sampler=theirs, preload_to_gpu=False)
    else:
        ours = DistributedSampler(sampler, dist_info=Rank(rank, WORLD_SIZE), seed=0)
        loader = StatefulLoader(batch_sampler=ours, preload_to_gpu=False, read_ahead=int("ahead" in way))
    cells: Any = zarr.open_group(folder, mode="r")["X"]
    return loader.add_adata(ad.AnnData(X=cells if isinstance(cells, zarr.Array) else ad.io.sparse_dataset(cells)))


def run(loader: Made, epoch: int, step: float, together: Barrier) -> Epoch:
    """Read an epoch, with a step of so many seconds after each batch, and with all ranks in every step."""
    if isinstance(loader, StatefulLoader):
        loader.set_epoch(epoch)
    together.wait()
    n_rows, waits = 0, []
    began = asked = time.perf_counter()
    for batch in loader:
        waits.append(time.perf_counter() - asked)
        n_rows += batch["X"].shape[0]
        if step:
            time.sleep(step)
        together.wait()
        asked = time.perf_counter()
    took = time.perf_counter() - began
    return {
        "rows/s": n_rows / took,
        "longest wait": max(waits[1:]),
        "99 % of waits": float(np.quantile(waits[1:], 0.99)),
    }


def pace(step: float, n_batches: int, together: Barrier) -> float:
    """Return how many seconds a step takes with all ranks, without reading."""
    together.wait()
    began = time.perf_counter()
    for _ in range(n_batches):
        time.sleep(step)
        together.wait()
    return (time.perf_counter() - began) / n_batches


def run_rank(
    rank: int, folder: Path, repeats: int, steps: tuple[float, ...], together: Barrier, found: Queue[Any]
) -> None:
    """Measure everything of a collection, in lock-step with the other rank."""
    warnings.simplefilter("ignore")  # of anndata and of zarr
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    measured = []
    for configuration in CONFIGURATIONS:
        loaders = {way: made(way, configuration, folder, rank) for way in WAYS}
        for loader in loaders.values():
            run(loader, 0, 0, together)
        for epoch in (0, 1):
            rounds = [{way: run(loader, epoch, 0, together) for way, loader in loaders.items()} for _ in range(repeats)]
            one = {"configuration": configuration, "epoch": epoch, "step": 0.0, "rounds": rounds, "paces": [0.0]}
            measured.append(one)
        # the same step on both ranks: that of the first one, which says it in a file
        shared = folder.with_suffix(f".{configuration[0]}")
        if not rank:
            reading = configuration[2] / statistics.median(one["annbatch"]["rows/s"] for one in rounds)
            shared.write_text(str(reading))
        together.wait()
        for part in steps:
            step = part * float(shared.read_text())
            rounds, paces = [], []
            for _ in range(repeats):
                rounds.append({way: run(loader, 1, step, together) for way, loader in loaders.items()})
                paces.append(pace(step, 100, together))
            one = {"configuration": configuration, "epoch": 1, "step": part, "rounds": rounds, "paces": paces}
            measured.append(one)
    if not rank:
        found.put(measured)


def measure(folder: Path, repeats: int, steps: tuple[float, ...]) -> list[dict[str, Any]]:
    """Run the ranks on a collection, and return what the first one has measured."""
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(WORLD_SIZE, timeout=300), context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, folder, repeats, steps, together, found))
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    try:
        measured: list[dict[str, Any]] = found.get(timeout=3_000)
    finally:
        for rank in ranks:
            rank.join(timeout=60)
            rank.kill()
    return measured


def summary(kind: str, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each configuration, epoch, step and way: medians over the rounds."""
    lines = []
    reading: dict[tuple[int, ...], float] = {}  # seconds for a batch
    for one in measured:
        rounds, configuration, step = one["rounds"], tuple(one["configuration"]), one["step"]
        for way in WAYS:
            rate = statistics.median(epochs[way]["rows/s"] for epochs in rounds)
            if way == "annbatch" and not step:
                reading[configuration] = configuration[2] / rate
            ideal = configuration[2] / max(reading[configuration], statistics.median(one["paces"]))
            lines.append(
                {
                    "collection": kind,
                    "configuration": configuration,
                    "epoch": one["epoch"],
                    "step": step,
                    "way": way,
                    "rows/s": rate,
                    "of annbatch's": statistics.median(
                        epochs[way]["rows/s"] / epochs["annbatch"]["rows/s"] for epochs in rounds
                    ),
                    "of the ideal": rate / ideal,
                    "longest wait": statistics.median(epochs[way]["longest wait"] for epochs in rounds),
                    "99 % of waits": statistics.median(epochs[way]["99 % of waits"] for epochs in rounds),
                }
            )
    return lines


def text_of(line: dict[str, Any]) -> str:
    """Return a line of a table."""
    name = "/".join(map(str, line["configuration"]))
    return (
        f"{line['collection']:>10}  {name:>11}  {line['epoch']:5}  {line['step']:4}  {line['way']:<18}  "
        f"{line['rows/s']:9.0f}  {line["of annbatch's"]:13.2f}  {line['of the ideal']:12.2f}  "
        f"{line['99 % of waits'] * 1e3:13.1f}  {line['longest wait'] * 1e3:12.1f}"
    )


def draw(lines: list[dict[str, Any]], out: Path) -> None:
    """Write the picture: what is reached of the ideal, and how long a step waits, by how long it takes."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "reading", "font.size": 9}):
        kinds = list(dict.fromkeys((line["collection"], line["configuration"]) for line in lines))
        figure = Figure(figsize=(2.4 * len(kinds), 4.4), layout="constrained")
        panels = figure.subplots(nrows=2, ncols=len(kinds), sharey="row", squeeze=False)
        for column, (kind, configuration) in enumerate(kinds):
            for way, color in zip(WAYS, ("#bdbdbd", "#6baed6", "#08519c"), strict=True):
                own = [
                    line
                    for line in lines
                    if (line["collection"], line["configuration"], line["way"]) == (kind, configuration, way)
                    and line["epoch"]
                ]
                places = np.arange(len(own)) + 0.25 * WAYS.index(way)
                panels[0, column].bar(places, [line["of the ideal"] for line in own], 0.25, color=color, label=way)
                panels[1, column].bar(places, [line["99 % of waits"] * 1e3 for line in own], 0.25, color=color)
                for row in (0, 1):
                    panels[row, column].set_xticks(np.arange(len(own)) + 0.25, [f"{line['step']:g}" for line in own])
            panels[0, column].set_title(f"{kind}, {'/'.join(map(str, configuration))}", fontsize="medium")
            panels[1, column].set_xlabel("step / reading a batch")
        panels[0, 0].set_ylabel("rows/s, of the ideal")
        panels[1, 0].set_ylabel("99th percentile of waits, ms")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Measure both collections, print a table, and write it and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="run in seconds, for a look at whether it works")
    parser.add_argument("--out", type=Path, default=FIGURE, help="where the picture goes, and the JSON file beside it")
    arguments = parser.parse_args()
    if arguments.small and arguments.out == FIGURE:
        parser.error("--small needs an --out, or the figure of the documentation would be a small one")
    n_obs, repeats, steps = (6_000, 1, STEPS[:1]) if arguments.small else (120_011, 5, STEPS)
    warnings.simplefilter("ignore")  # of zarr
    versions = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    print(f"{n_obs:.0e} cells, {WORLD_SIZE} ranks, {os.cpu_count()} cores; medians of {repeats}; {versions}")
    names = "collection  chunk/.../b  epoch  step  way                    rows/s  of annbatch's  of the ideal"
    print(f"{names}  99 % wait, ms  longest, ms")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("sparse", "dense"):
            write(Path(folder) / kind, kind, n_obs)
            lines += summary(kind, measure(Path(folder) / kind, repeats, steps))
            for line in lines[-len(WAYS) * len(CONFIGURATIONS) * (2 + len(steps)) :]:
                print(text_of(line), flush=True)
    draw(lines, arguments.out)
    written = {"cells": n_obs, "cores": os.cpu_count(), "rounds": repeats, "versions": versions, "lines": lines}
    arguments.out.with_suffix(".json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
