"""Rows per second from disk to the step, relative to annbatch, for this package and other libraries.

Each library writes the same simulated cells in its own format, sparse and dense, and reads them from the page cache.
Cells have a lognormal number of genes, and two columns of labels. Two processes are the ranks of a job; they
synchronize after every step and do nothing else in it. annbatch and this package are also measured in one process. Each
library is used as its documentation recommends, in its own environment, see benchmarks/libraries. Before anything is
measured, each method is checked: it must read nearly all cells, each once, in two epochs.

Every round measures each method once, in a different order, epochs 0 and 1 in turn. Libraries that count epochs
themselves have later epochs then, and much slower methods run only in the first rounds. annbatch runs twice in every
round, as a control. Medians and ranges over the rounds are reported, in rows per second of the job and per core second,
relative to annbatch in the same round and epoch. Core seconds are those of the ranks, without workers of a
``DataLoader``. Measurements go to a JSON file, with the versions, and to figures.

    python -m benchmarks.end_to_end                                # some minutes; the figures of the documentation
    python -m benchmarks.end_to_end --draw                         # draws them from the JSON file
    python -m benchmarks.end_to_end --small --out small.json       # the same at a size for tests
    python -m benchmarks.end_to_end --only annbatch --rounds 60 --out long.json    # annbatch and this package alone
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import figures, libraries, record
from benchmarks.libraries.cells import make

WORLD_SIZE = 2
#: chunk_size, preload_nchunks, batch_size: load requests of 1,024 rows. Other libraries have the batches only.
CONFIGURATION = 64, 16, 256
LIBRARIES = "annbatch", "mosaicml_streaming", "scdataset", "tiledbsoma_ml"
REFERENCE = "annbatch"
#: The part of the cells that is read at least: the others would make batches that not every rank has.
LEAST = 0.9
#: Libraries that read the cells in the same order in each epoch.
SAME_ORDERS = {"tiledbsoma_ml"}
#: Rounds of every way; ways with less than a part of annbatch's rows per second are so slow that these say enough.
FEW_ROUNDS, SLOW = 2, 0.6

#: Labels of the bars of the figures. Those of the two packages are grouped by the store.
STORES = {
    "annbatch's store": {
        "annbatch": "annbatch",
        "annbatch, again": "annbatch (control)",
        "annbatch-distributed": "annbatch-distributed",
    },
    "the same, uncompressed": {"annbatch, uncompressed": "annbatch"},
    "collect (lz4)": {"annbatch, collect": "annbatch", "annbatch-distributed, collect": "annbatch-distributed"},
    "collect --compression none": {
        "annbatch, collect, uncompressed": "annbatch",
        "annbatch-distributed, collect, uncompressed": "annbatch-distributed",
        "annbatch-distributed, collect, uncompressed, as stored": 'the same, dtype="stored"',
    },
}
#: annbatch, and the fastest way of this package.
REFERENCES = {
    "annbatch": "annbatch",
    "annbatch-distributed, collect, uncompressed, as stored": (
        'annbatch-distributed, collect,\nuncompressed, dtype="stored"'
    ),
}
#: The bars of the README: as `from_collection` reads, which prefetches.
README = {
    "annbatch": "annbatch",
    "annbatch, uncompressed": "annbatch,\nuncompressed store",
    "annbatch-distributed, prefetch=1, collect, uncompressed": "annbatch-distributed,\ncollect --compression none",
}


def together(found: list[dict[str, float]]) -> dict[str, float]:
    """Return what all ranks have measured as a job's: its rows per second and core second, and the longest waits."""
    n_rows = sum(rank["rows"] for rank in found)
    return {
        "rows/s": n_rows / max(rank["seconds"] for rank in found),
        "rows/core s": n_rows / sum(rank["core seconds"] for rank in found),
        **{name: max(rank[name] for rank in found) for name in ("longest wait", "99 % of waits")},
    }


def measure(
    folders: dict[str, Path], configuration: tuple[int, ...], repeats: int, n_obs: int, world_size: int
) -> list[dict[str, Any]]:
    """Return what every way has measured in every round and epoch, after a look at what it reads."""
    measured = []
    with ExitStack() as jobs:
        ranks = {
            library: jobs.enter_context(
                libraries.Ranks(library, "serve", folder, "shared", *configuration, world_size=world_size)
            )
            for library, folder in folders.items()
        }
        ways = [(library, way, job) for library, job in ranks.items() for way in job.answers()[0]]
        rows = {}
        for library, way, job in ways:  # fills the page cache, and starts workers
            read = [[rank["numbers"] for rank in job.ask(way=way, epoch=epoch, step="note")] for epoch in (0, 1)]
            check(way, read, n_obs, other_orders=library not in SAME_ORDERS)
            rows[way] = min(sum(map(len, epoch)) for epoch in read)
        for number in range(repeats):
            if number == FEW_ROUNDS:
                ways = [one for one in ways if one[1] not in slow(measured)]
            for place in np.random.default_rng(number).permutation(len(ways)):
                _, way, job = ways[place]
                for epoch in (0, 1):
                    found = together(job.ask(way=way, epoch=epoch, step=0))
                    about = {"ranks": world_size, "round": number, "way": way, "epoch": epoch, "rows": rows[way]}
                    measured.append(about | found)
    return sorted(measured, key=lambda one: list(rows).index(one["way"]))


def slow(measured: list[dict[str, Any]]) -> set[str]:
    """Return the ways that are much slower than annbatch."""
    rates: dict[str, list[float]] = {}
    for one in measured:
        rates.setdefault(one["way"], []).append(one["rows/s"])
    enough = SLOW * statistics.median(rates[REFERENCE])
    return {way for way, own in rates.items() if statistics.median(own) < enough}


def check(way: str, read: list[list[list[int]]], n_obs: int, *, other_orders: bool) -> None:
    """Raise an error unless the ranks have read nearly all cells, each once, and other ones together in each epoch.

    ``read`` has the numbers of the cells of each rank, in each of two epochs.
    """
    for ranks in read:
        cells = np.concatenate(ranks)
        if len(np.unique(cells)) != len(cells) or not set(cells) <= set(range(n_obs)):
            raise RuntimeError(f"{way} has read cells twice, or cells that are not there.")
        if len(cells) < LEAST * n_obs:
            raise RuntimeError(f"{way} has read {len(cells)} of {n_obs} cells: it can't be compared.")
    if (read[0] == read[1]) is other_orders:
        raise RuntimeError(f"{way} is said to have {'an order for each epoch' if other_orders else 'one order'}.")


def summary(kind: str, configuration: tuple[int, ...], measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each way and epoch: medians over the rounds, and ranges."""
    of_reference = {(one["epoch"], one["round"]): one for one in measured if one["way"] == REFERENCE}
    lines = []
    for way, epoch in dict.fromkeys((one["way"], one["epoch"]) for one in measured):
        own = [one for one in measured if (one["way"], one["epoch"]) == (way, epoch)]
        # in rows per second, and in rows per core second
        parts, core_parts = (
            [one[name] / of_reference[epoch, one["round"]][name] for one in own] for name in ("rows/s", "rows/core s")
        )
        lines.append(
            {
                "collection": kind,
                "configuration": configuration,
                "ranks": own[0]["ranks"],
                "way": way,
                "epoch": epoch,
                "rounds": len(own),
                "rows": own[0]["rows"],
                "rows/s": statistics.median(one["rows/s"] for one in own),
                "of annbatch's": statistics.median(parts),
                "least": min(parts),
                "most": max(parts),
                "of annbatch's per core": statistics.median(core_parts),
            }
        )
    return lines


def draw(content: dict[str, Any], out: Path) -> None:
    """Write the figures: this package and annbatch by the store, all libraries, and three bars for the README."""
    lines = [line for line in content["lines"] if (line["ranks"], line["epoch"]) == (WORLD_SIZE, 1)]
    kinds = list(dict.fromkeys(line["collection"] for line in lines))
    parts = {(line["collection"], line["way"]): line["of annbatch's"] for line in lines}
    others = {way: way.replace("-ml, ", "-ml,\n") for _, way in parts if not way.startswith("annbatch")}
    name = {"end_to_end": "speed"}.get(out.stem, f"{out.stem}_speed")
    draw_bars(parts, kinds, STORES, out)
    draw_bars(parts, kinds, {"": {**REFERENCES, **others}}, out.with_name(f"{out.stem}_libraries.svg"))
    draw_bars(parts, kinds[:1], {"": README}, out.with_name(f"{name}.svg"))


def draw_bars(
    parts: dict[tuple[str, str], float], kinds: list[str], groups: dict[str, dict[str, str]], out: Path
) -> None:
    """Write a figure of rows per second, with a panel for each kind of cells and groups of bars with their labels."""
    titles, ways, labels, places, place = [], [], [], [], 0.0
    for title, bars in groups.items():
        rows: list[tuple[str | None, str]] = [(None, title)] if title else []
        for way, label in [*rows, *bars.items()]:
            height = 1 + 0.7 * label.count("\n")
            titles.append(way is None)
            ways.append(way)
            labels.append(label)
            places.append(place + height / 2)
            place += height
    with figures.figure(out, 5.6, 0.55 + 0.2 * len(kinds) + 0.2 * place) as figure:
        panels = figure.subplots(ncols=len(kinds), sharex=True, sharey=True, squeeze=False)[0]
        for panel, kind in zip(panels, kinds, strict=True):
            for way, at in zip(ways, places, strict=True):
                if (part := parts.get((kind, str(way)))) is not None:
                    color = figures.BLUE if str(way).startswith("annbatch-distributed") else figures.GRAY
                    panel.barh(at, part, 0.75, color=color)
                    # to the right of the line at 1, which would cross out a number
                    panel.annotate(f"{part:.2f}", (max(part, 1), at), (3, 0), textcoords="offset points", va="center")
            panel.axvline(1, color=figures.INK, linewidth=0.8)
            panel.tick_params(axis="y", length=0)
            if kinds[1:]:
                panel.set_title(f"{kind} cells", fontsize="medium", loc="left")
        shown = [part for (kind, way), part in parts.items() if kind in kinds and way in ways]
        panels[0].set_xlim(0, 1.25 * max(shown))
        panels[0].set_xticks(range(int(1.25 * max(shown)) + 1))
        panels[0].set_ylim(place, 0)
        panels[0].set_yticks(places, labels)
        for label, is_title in zip(panels[0].get_yticklabels(), titles, strict=True):
            label.set_fontweight("bold" if is_title else "normal")
        figure.supxlabel("rows per second, relative to annbatch", fontsize="medium")


def main() -> None:
    """Measure both collections, and write what was measured and the figures."""
    arguments = record.arguments(
        __doc__,
        "end_to_end",
        draw,
        only={"nargs": "+", "default": LIBRARIES, "choices": LIBRARIES, "help": "libraries to compare"},
        rounds={"type": int, "choices": range(1, 1_000), "metavar": "N", "help": "rounds of methods that are not slow"},
    )
    if REFERENCE not in arguments.only:
        raise SystemExit(f"--only must include {REFERENCE}, the reference")
    n_obs, repeats = 16_400 if arguments.small else 60_011, arguments.rounds or (1 if arguments.small else 21)
    versions: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for kind in ("sparse",) if arguments.small else ("sparse", "dense"):
            source = Path(temporary) / f"{kind}.npz"
            make(kind, n_obs, source)
            folders = {library: Path(temporary) / f"{kind}-{library}" for library in arguments.only}
            for library, folder in folders.items():
                versions[library] = libraries.run(library, "write", source, folder)["versions"]
            for world_size, compared in {1: {REFERENCE: folders[REFERENCE]}, WORLD_SIZE: folders}.items():
                measured = measure(compared, CONFIGURATION, repeats, n_obs, world_size)
                lines += record.show(*summary(kind, CONFIGURATION, measured))
    record.write(arguments.out, versions, draw, cells=n_obs, rounds=repeats, lines=lines)


if __name__ == "__main__":
    main()
