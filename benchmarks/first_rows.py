"""Time to first batch: time and memory until a rank knows its first rows, at the beginning or the middle of an epoch.

For 10^6 to 10^9 rows on 8 ranks, shuffled by each library's own method: wall seconds and peak additional memory of one
rank until it knows the rows of its first load request or batch. In the middle of an epoch, a state saved at half of
the epoch is loaded, on 8 ranks and on 6.

- annbatch, and this package with ``sharding="shuffled"``: chunk_size/preload_nchunks/batch_size 512/32/4096, and
  64/512/4096, which has many chunks.
- PyTorch's DistributedSampler; torchdata's StatefulDataLoader with its own version of it, which skips the rows that
  were read. On a different number of ranks, it reads some rows again and misses others.
- mosaicml-streaming computes an epoch on the first rank of each node, for all ranks; that rank is measured. On 6
  ranks, batches are larger, as it requires.
- litdata assigns chunks, of which there are fewer than rows, and shuffles rows only within a chunk. Grain computes
  each row independently: its state is a number, and resuming costs as much as starting.

Every run is a separate process; medians are reported. A process may use 16 GiB; more is None. Measurements go
to a JSON file, with the versions, and to a figure.

    python -m benchmarks.first_rows                                # some minutes; the figure of the documentation
    python -m benchmarks.first_rows --draw                         # draws it from the JSON file
    python -m benchmarks.first_rows --small --out small.json       # the same at a size for tests
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import figures, libraries, record

if TYPE_CHECKING:
    from pathlib import Path

UNITS = "seconds", "MB"
RANK, WORLD_SIZE, OTHER_WORLD_SIZE = 3, 8, 6
FEW_CHUNKS, MANY_CHUNKS = (512, 32, 4096), (64, 512, 4096)
#: What is measured: a name, a library, a configuration.
BEGINNINGS = [
    ("annbatch-distributed, 512/32/4096", "annbatch_distributed", FEW_CHUNKS),
    ("annbatch-distributed, 64/512/4096", "annbatch_distributed", MANY_CHUNKS),
    ("annbatch, 512/32/4096", "annbatch", FEW_CHUNKS),
    ("annbatch, 64/512/4096", "annbatch", MANY_CHUNKS),
    ("Grain", "grain", FEW_CHUNKS),
    ("litdata", "litdata", FEW_CHUNKS),
    ("mosaicml-streaming", "mosaicml_streaming", FEW_CHUNKS),
    ("torch", "torch", FEW_CHUNKS),
]
#: The same, and on how many ranks it resumes.
MIDDLES = [
    ("annbatch-distributed, 512/32/4096", "annbatch_distributed", FEW_CHUNKS, WORLD_SIZE),
    ("annbatch-distributed, 64/512/4096", "annbatch_distributed", MANY_CHUNKS, WORLD_SIZE),
    ("mosaicml-streaming", "mosaicml_streaming", FEW_CHUNKS, WORLD_SIZE),
    ("torchdata", "torch", FEW_CHUNKS, WORLD_SIZE),
    ("annbatch-distributed, 512/32/4096", "annbatch_distributed", FEW_CHUNKS, OTHER_WORLD_SIZE),
    ("annbatch-distributed, 64/512/4096", "annbatch_distributed", MANY_CHUNKS, OTHER_WORLD_SIZE),
    ("mosaicml-streaming", "mosaicml_streaming", FEW_CHUNKS, OTHER_WORLD_SIZE),
]


def measure(task: str, library: str, numbers: list[int], repeats: int) -> dict[str, Any]:
    """Return the medians of some runs, or None for each if they took more memory than a process may have."""
    runs: list[dict[str, Any]] = []
    while len(runs) < repeats:
        runs.append(libraries.run(library, task, *numbers))
        if "error" in runs[-1]:
            return runs[-1] | dict.fromkeys(UNITS)
        if runs[-1]["seconds"] > 10:  # noise is negligible there
            break
    return runs[0] | {name: statistics.median(run[name] for run in runs) for name in UNITS}


def draw(content: dict[str, Any], out: Path) -> None:
    """Write the figure: seconds and memory by the number of rows, where an epoch begins."""
    lines = content["lines"]
    kind = lines[0]["when"]
    names = list(dict.fromkeys(line["name"] for line in lines if line["when"] == kind))
    with figures.figure(out, 5.6, 6.4) as figure:
        panels = figure.subplots(nrows=2, sharex=True)
        # very small values are drawn at the bottom
        for panel, unit, least in zip(panels, UNITS, (1e-3, 0.1), strict=True):
            ends = []
            for name in names:
                own = [
                    line for line in lines if (line["when"], line["name"]) == (kind, name) and line[unit] is not None
                ]
                rows, heights = [line["rows"] for line in own], [max(line[unit], least) for line in own]
                color = {"annbatch-distributed": figures.BLUE, "annbatch": figures.ORANGE}.get(
                    name.split(", ")[0], figures.INK
                )
                panel.loglog(rows, heights, marker="o", markersize=3, color=color)
                ends.append((rows[-1], heights[-1], name, color))
            panel.set_ylim(top=3 * panel.get_ylim()[1])
            figures.label_lines(panel, ends)
            panel.set_xlim(right=10 ** (np.log10(panel.get_xlim()[1]) + 1.9))  # room for the names
            panel.set_xticks(sorted({line["rows"] for line in lines if line["when"] == kind}))
            panel.minorticks_off()
            panel.set_ylabel("seconds" if unit == "seconds" else "memory (MB)")
        panels[-1].set_xlabel("rows")


def main() -> None:
    """Measure everything, and write what was measured and the figure."""
    arguments = record.arguments(__doc__, "first_rows", draw)
    sizes, middles, repeats = (
        ([10**5], [10**5], 1) if arguments.small else ([10**6, 10**7, 10**8, 10**9], [10**7, 10**8], 3)
    )
    versions: dict[str, Any] = {}
    lines = []
    for name, library, configuration in BEGINNINGS:
        for n_obs in sizes:
            found = measure("plan", library, [n_obs, *configuration, RANK, WORLD_SIZE], repeats)
            versions[library] = found["versions"]
            lines += record.show(
                {"name": name, "rows": n_obs, "when": "an epoch begins", **{unit: found[unit] for unit in UNITS}}
            )
    for name, library, configuration, after in MIDDLES:
        for n_obs in middles:
            found = measure("resume", library, [n_obs, *configuration, RANK, WORLD_SIZE, after], repeats)
            when = f"in its middle, {WORLD_SIZE} to {after} ranks"
            lines += record.show({"name": name, "rows": n_obs, "when": when, **{unit: found[unit] for unit in UNITS}})
    about = {"rank": RANK, "world size": WORLD_SIZE, "runs": repeats}
    record.write(arguments.out, versions, draw, **about, lines=lines)


if __name__ == "__main__":
    main()
