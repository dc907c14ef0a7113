"""Epochs from object storage: with a cache on the node and without, and by other libraries with theirs.

A server in a process of its own delays each answer, and counts requests and bytes. Each library writes the same
simulated sparse cells in its own format, and reads them in one process, in batches. In every round and for each method,
a new process reads two epochs, with an empty cache; it includes opening in epoch 0. Then it reads a third epoch, in
which it must read nearly all cells, each once. Medians over the rounds are reported, and written to a JSON file with
the versions.

    python -m benchmarks.remote                           # some minutes
    python -m benchmarks.remote --small --out small.json  # the same at a size for tests
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import libraries, record
from benchmarks.libraries.cells import make
from benchmarks.libraries.server import BUCKET, Server, serving

BATCH_SIZE = 256
OURS = "annbatch_distributed"
#: Methods, and their library.
WAYS = {
    "no cache": OURS,
    "cache": OURS,
    "local disk": OURS,
    "mosaicml-streaming": "mosaicml_streaming",
    "litdata": "litdata",
}
#: The part of the cells that is read at least: the others would make no whole batch.
LEAST = 0.9


def measure(way: str, folder: Path, cache: Path, server: Server, n_obs: int) -> list[dict[str, Any]]:
    """Return what a new process measures in two epochs."""
    library = WAYS[way]
    place = folder / library if way == "local disk" else f"s3://{BUCKET}/{library}"
    shutil.rmtree(cache, ignore_errors=True)
    os.sync()  # what other methods have written isn't on its way to the disk then
    measured = []
    with libraries.Ranks(library, "remote", place, "" if way == "no cache" else cache, BATCH_SIZE, world_size=1) as job:
        job.answers()
        server.counts()
        for epoch in range(2):
            (found,) = job.ask(epoch=epoch, note=False)
            n_requests, n_bytes = server.counts()
            measured.append(
                {
                    "way": way,
                    "epoch": epoch,
                    "rows/s": found["rows"] / found["seconds"],
                    "rows/core s": found["rows"] / found["core seconds"],
                    "first batch, s": found["first"],
                    "requests": n_requests,
                    "MB": n_bytes / 1e6,
                }
            )
        (found,) = job.ask(epoch=2, note=True)
        numbers = np.array(found["numbers"])
        if len(np.unique(numbers)) < max(LEAST * n_obs, len(numbers)) or not set(numbers) <= set(range(n_obs)):
            raise RuntimeError(f"{way} has read {len(numbers):,} of {n_obs:,} cells, or some of them twice.")
    return measured


def main() -> None:
    """Measure all methods, and write what was measured."""
    arguments = record.arguments(
        __doc__,
        "remote",
        only={"nargs": "+", "default": [*WAYS], "choices": [*WAYS], "help": "methods to compare"},
        latency={"type": float, "default": 0.03, "help": "seconds before each answer (0.03)"},
    )
    n_obs, repeats = (6_000, 1) if arguments.small else (100_011, 3)
    versions: dict[str, Any] = {}
    measured = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary, "bucket"), Path(temporary, "cache")
        folder.mkdir()
        make("sparse", n_obs, folder / "cells.npz")
        for library in dict.fromkeys(WAYS[way] for way in arguments.only):
            versions[library] = libraries.run(library, "write", folder / "cells.npz", folder / library)["versions"]
        with serving(folder, arguments.latency) as server:
            os.environ |= server.environment
            for number in range(repeats):
                for way in np.random.default_rng(number).permutation(arguments.only):
                    measured += measure(str(way), folder, cache, server, n_obs)
    names = [name for name in measured[0] if name not in ("way", "epoch")]
    lines = [
        {"way": way, "epoch": epoch}
        | {
            name: statistics.median(one[name] for one in measured if (one["way"], one["epoch"]) == (way, epoch))
            for name in names
        }
        for way in arguments.only
        for epoch in range(2)
    ]
    record.show(*lines)
    record.write(arguments.out, versions, cells=n_obs, latency=arguments.latency, rounds=repeats, lines=lines)


if __name__ == "__main__":
    main()
