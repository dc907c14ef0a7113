"""Benefit of shuffled sharding: how well ranks and batches represent a collection that is sorted by class.

The measure is the total variation distance of labels from the collection: the fraction of rows that would need a
different label, 0 for a perfect match. It is computed for the batches of all ranks in each step, for the batches of
each rank, for the epoch of each rank, and for ideal random samples of the same sizes.

    python -m benchmarks.representativeness                            # a minute; the figure of the documentation
    python -m benchmarks.representativeness --draw                     # draws it from the JSON file
    python -m benchmarks.representativeness --small --out small.json   # the same at a size for tests
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, Shuffled
from benchmarks import figures, record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy.typing as npt

    type Labels = npt.NDArray[np.uint8]
    type Counts = npt.NDArray[np.int64]
    type Distances = npt.NDArray[np.float64]

N_CLASSES = 50
#: annbatch's FAQ
CHUNK_SIZE, BATCH_SIZE = 512, 4096
IDEAL = "ideal random sample"
#: What a distance is taken of.
PARTS = ("each step's batches of all ranks", "each rank's batches", "each rank's epoch")


class Setting(NamedTuple):
    """A setting to compare, and the look of its line."""

    sharding: str | Shuffled
    preload_nchunks: int
    color: str
    line: str = "-"

    def __str__(self) -> str:
        sharding = self.sharding
        name = f"blocks of {sharding.block_size}" if isinstance(sharding, Shuffled) else "contiguous"
        return f"{name}, preload {self.preload_nchunks}"


# a color for each sharding, and a line for each number of chunks to preload
SETTINGS = [
    Setting("contiguous", 32, figures.ORANGE),
    Setting(Shuffled(4096), 32, figures.GRAY),
    Setting(Shuffled(512), 8, figures.BLUE, ":"),
    Setting(Shuffled(512), 32, figures.BLUE),
    Setting(Shuffled(512), 128, figures.BLUE, "--"),
    Setting(Shuffled(64), 32, figures.GREEN),
]


def sorted_labels(n_obs: int) -> Labels:
    """Return the class of every row: classes of very different sizes, one after the other."""
    shares = np.random.default_rng(0).lognormal(size=N_CLASSES)
    stops = np.rint(np.cumsum(shares) / shares.sum() * n_obs).astype(np.int64)
    return np.repeat(np.arange(N_CLASSES, dtype=np.uint8), np.diff(stops, prepend=0))


def measure(setting: Setting, world_size: int, labels: Labels) -> Distances:
    """Return the distance of each part, from an epoch of every rank."""
    sampler = RandomSampler(CHUNK_SIZE, setting.preload_nchunks, BATCH_SIZE)
    job = [
        DistributedSampler(sampler, dist_info=Rank(rank, world_size), sharding=setting.sharding, seed=0)
        for rank in range(world_size)
    ]
    counts = np.array([count_labels(rank, labels) for rank in job])  # by rank, step and class
    return distances((counts.sum(axis=0), counts, counts.sum(axis=1)), labels)


def count_labels(sampler: DistributedSampler, labels: Labels) -> list[Counts]:
    """Return, for each batch of a pass, how many rows of each class are in it."""
    counts = []
    for request in sampler.sample(len(labels)):
        read = np.concatenate([labels[rows] for rows in request["requests"]])
        counts += [np.bincount(read[split], minlength=N_CLASSES) for split in request["splits"]]
    return counts


def measure_ideal(world_size: int, labels: Labels) -> Distances:
    """Return the distance of each part for a random sample of all rows."""
    rng = np.random.default_rng(0)
    n_rows = world_size * BATCH_SIZE, BATCH_SIZE, len(labels) // world_size
    classes = np.bincount(labels)
    return distances((rng.multivariate_hypergeometric(classes, n, 200, method="marginals") for n in n_rows), labels)


def distances(parts: Iterable[Counts], labels: Labels) -> Distances:
    """Return, for each part, the mean over all axes but the last, which are the classes."""
    expected = np.bincount(labels) / len(labels)
    return np.array([abs(part / part.sum(-1, keepdims=True) - expected).sum(-1).mean() / 2 for part in parts])


def draw(content: dict[str, Any], out: Path) -> None:
    """Write the figure: a panel for each part, and in it a line for each setting, by the number of ranks."""
    looks = {str(setting): (setting.color, setting.line) for setting in SETTINGS} | {IDEAL: (figures.INK, "-.")}
    world_sizes = sorted({line["ranks"] for line in content["lines"]})
    with figures.figure(out, 5.6, 6.4) as figure:
        panels = figure.subplots(nrows=2, sharex=True)
        # each rank's batches depend little on the setting, and its epoch does not depend on the chunks to preload
        for part, panel in zip((PARTS[0], PARTS[2]), panels, strict=True):
            names = [name for name in looks if part == PARTS[0] or "preload" not in name or "preload 32" in name]
            ends = []
            for name in names:
                color, style = looks[name]
                found = [line[part] for line in content["lines"] if line["setting"] == name]
                panel.plot(world_sizes, found, style, color=color)
                label = name if part == PARTS[0] else name.removesuffix(", preload 32")
                ends.append((world_sizes[-1], found[-1], label, color))
            panel.set_title(part, fontsize="medium", loc="left")
            panel.set_xscale("log", base=2)
            panel.set_xlim(right=world_sizes[-1] ** 1.8)  # room for the names
            panel.set_xticks(world_sizes, [str(world_size) for world_size in world_sizes])
            panel.set_yscale("log")
            ticks = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]
            panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
            figures.label_lines(panel, ends)
        panels[-1].set_xlabel("ranks")
        figure.supylabel("total variation distance of labels", fontsize="medium")


def main() -> None:
    """Measure, and write the distances and the figure."""
    arguments = record.arguments(__doc__, "representativeness", draw)
    n_obs, world_sizes = (500_000, [2, 4]) if arguments.small else (20_000_000, [2, 4, 8, 16, 32, 64])
    labels = sorted_labels(n_obs)
    lines = []
    for setting in [*SETTINGS, None]:
        for world_size in world_sizes:
            found = measure(setting, world_size, labels) if setting else measure_ideal(world_size, labels)
            name = str(setting or IDEAL)
            distances = dict(zip(PARTS, map(float, found), strict=True))
            lines += record.show({"setting": name, "ranks": world_size, **distances})
    record.write(arguments.out, draw=draw, rows=n_obs, classes=N_CLASSES, lines=lines)


if __name__ == "__main__":
    main()
