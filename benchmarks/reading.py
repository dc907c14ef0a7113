"""Effect of reading on training: rows per second of synchronized ranks, and the time that steps wait.

Simulated cells, sparse and dense, are written by annbatch and read from the page cache. Two processes are the ranks of
a job: each takes a batch, synchronizes with the other rank, and works on the batch. annbatch's Loader with its own
sampler is compared with this package's StatefulLoader, with ``prefetch=0`` and ``1``.

Machines with GPUs have many cores, so a step never waits for one. On two cores, "apart" simulates that: one core reads
for both ranks, and the other runs the steps (on Linux). Under "shared", reading uses all cores, so a step may wait a
few milliseconds for one.

1. Without steps, epochs 0 and 1: rows per second relative to annbatch in the same epoch.
2. With steps that take half, once or twice the time of reading a batch, mostly sleeping, and with steps that train a
   small model under DDP: rows per second relative to annbatch, and relative to the limit, the slower of reading alone
   and steps without reading. Limits are measured again in each round, because the speed of the machine changes.
3. In the same epochs, the time that a step waits for its batch: 99th percentile and maximum.

Every round measures each method once; medians over the rounds are reported. Measurements go to a JSON file, with the
versions, and to a figure.

    python -m benchmarks.reading                                    # some minutes; the figure of the documentation
    python -m benchmarks.reading --draw                             # draws it from the JSON file
    python -m benchmarks.reading --small --out small.json           # the same at a size for tests
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import figures, libraries, record
from benchmarks.end_to_end import WORLD_SIZE, together
from benchmarks.libraries.cells import make

#: Of an epoch: rows per second, and of the waits after the first one, the longest and the 99th percentile.
type Epoch = dict[str, float]

#: chunk_size, preload_nchunks, batch_size: load requests of 2,048 rows, of which a rank has 25 in an epoch.
CONFIGURATIONS = [(64, 32, 256), (512, 4, 1024)]
#: Configurations, and what cores there are: one for all that reads, and one for all steps; or both for either.
JOBS = [*((configuration, "apart") for configuration in CONFIGURATIONS), (CONFIGURATIONS[0], "shared")]
#: How long a step takes, as a part of the time in which annbatch reads a batch; or what it does.
STEPS = 0.5, 1, 2, "model"
REFERENCE, OURS, AHEAD = "annbatch", "annbatch-distributed", "annbatch-distributed, prefetch=1"
WAYS = REFERENCE, OURS, AHEAD


def measure(
    folder: Path, configuration: tuple[int, ...], cores: str, steps: tuple[float | str, ...], repeats: int
) -> list[dict[str, Any]]:
    """Return what the ranks measure of each way and step, round by round, and how long the ideal takes for a batch."""
    measured: list[dict[str, Any]] = []
    with libraries.Ranks("annbatch", "serve", folder, cores, *configuration, world_size=WORLD_SIZE) as job:
        job.answers()

        def found(epoch: int, step: float | str, **of: str) -> Epoch:
            return together(job.ask(epoch=epoch, step=step, **of))

        def read(epoch: int, step: float | str) -> dict[str, Epoch]:
            return {way: found(epoch, step, way=way) for way in WAYS}

        def pace(of: Epoch) -> float:
            """Return how long a batch takes."""
            return WORLD_SIZE * configuration[2] / of["rows/s"]

        read(0, 0)  # fills the page cache
        for number in range(repeats):
            for epoch in (0, 1):
                alone = read(epoch, 0)
                ideal = pace(alone[REFERENCE])
                measured.append({"round": number, "epoch": epoch, "step": 0, "ideal": ideal, "ways": alone})
            for step in steps:
                # in each round: a minute later, the machine is faster or slower
                reading = pace(found(1, 0, way=REFERENCE))
                late = max(0.0, pace(found(1, reading)) - reading)  # what meeting takes, and waking up
                asked = step if step == "model" else max(0.0, float(step) * reading - late)
                ways, ideal = read(1, asked), max(reading, pace(found(1, asked)))
                measured.append({"round": number, "epoch": 1, "step": step, "ideal": ideal, "ways": ways})
    return measured


def summary(
    kind: str, configuration: tuple[int, ...], cores: str, measured: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a line for each epoch, step and way: medians over the rounds."""
    lines = []
    for epoch, step in dict.fromkeys((one["epoch"], one["step"]) for one in measured):
        rounds = [one for one in measured if (one["epoch"], one["step"]) == (epoch, step)]
        for way in WAYS:
            of_way = [one["ways"][way] for one in rounds]
            of_annbatch = [one["ways"][way]["rows/s"] / one["ways"][REFERENCE]["rows/s"] for one in rounds]
            ideals = [WORLD_SIZE * configuration[2] / one["ideal"] for one in rounds]
            of_ideal = [one["rows/s"] / ideal for one, ideal in zip(of_way, ideals, strict=True)]
            lines.append(
                {
                    "collection": kind,
                    "configuration": configuration,
                    "cores": cores,
                    "epoch": epoch,
                    "step": step,
                    "way": way,
                    "rows/s": statistics.median(one["rows/s"] for one in of_way),
                    "of annbatch's": statistics.median(of_annbatch),
                    "of the ideal": statistics.median(of_ideal),
                    "longest wait": statistics.median(one["longest wait"] for one in of_way),
                    "99 % of waits": statistics.median(one["99 % of waits"] for one in of_way),
                }
            )
    return lines


def draw(content: dict[str, Any], out: Path) -> None:
    """Write the figure: throughput relative to the limit, by the duration of a step, where reading has its own core."""
    shown = [
        line for line in content["lines"] if (tuple(line["configuration"]), line["cores"]) == JOBS[0] and line["epoch"]
    ]
    kinds = list(dict.fromkeys(line["collection"] for line in shown))
    with figures.figure(out, 5.6, 3.0) as figure:
        panels = figure.subplots(ncols=len(kinds), sharey=True, squeeze=False)[0]
        for panel, kind in zip(panels, kinds, strict=True):
            for way, color in zip(WAYS, (figures.GRAY, figures.ORANGE, figures.BLUE), strict=True):
                own = [line for line in shown if (line["collection"], line["way"]) == (kind, way) and line["step"]]
                places = np.arange(len(own)) + 0.27 * WAYS.index(way)
                panel.bar(places, [line["of the ideal"] for line in own], 0.25, color=color, label=way)
                names = [
                    "small\nmodel" if line["step"] == "model" else f"{line['step']}\N{MULTIPLICATION SIGN}"
                    for line in own
                ]
                panel.set_xticks(np.arange(len(own)) + 0.27, names)
            panel.axhline(1, color=figures.INK, linewidth=0.8)
            panel.set_title(f"{kind} cells", fontsize="medium", loc="left")
        figure.supxlabel("duration of a step, relative to the time in which annbatch reads a batch", fontsize="medium")
        panels[0].set_ylabel("rows per second, relative to the\nslower of reading and steps alone")
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)


def main() -> None:
    """Measure both collections, and write what was measured and the figure."""
    arguments = record.arguments(__doc__, "reading", draw)
    n_obs, repeats, jobs = (6_000, 1, JOBS[:1]) if arguments.small else (103_011, 3, JOBS)
    steps = (1, "model") if arguments.small else STEPS
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("dense",) if arguments.small else ("sparse", "dense"):
            source, cells = Path(folder) / f"{kind}.npz", Path(folder) / kind
            make(kind, n_obs, source)
            versions = libraries.run("annbatch", "write", source, cells)["versions"]
            for configuration, cores in jobs:
                measured = measure(cells, configuration, cores, steps, repeats)
                lines += record.show(*summary(kind, configuration, cores, measured))
    record.write(arguments.out, versions, draw, cells=n_obs, rounds=repeats, lines=lines)


if __name__ == "__main__":
    main()
