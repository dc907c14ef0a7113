"""The benchmarks run at a small size; their timings are not tested."""

from __future__ import annotations

import json
import math
import re
from itertools import batched, pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from benchmarks import growth, labels, reading, sizes
from tests.processes.launch import forked, run

if TYPE_CHECKING:
    from pathlib import Path


def lines_of(script: str, *arguments: str | Path) -> list[str]:
    """Return the lines that a benchmark prints."""
    (done,) = run(forked(f"benchmarks/{script}", *arguments))
    return done.stdout.splitlines()


def test_the_sampling_benchmark_compares_every_configuration_and_answers() -> None:
    lines = lines_of("sampling.py", "--small")
    assert sum("of annbatch's time" in line for line in lines) == 6
    for alone in ("RandomSampler", "SequentialSampler"):
        for sharding in (", contiguous,", "Shuffled(block_size=512)"):
            assert sum(sharding in line and f"of the lone {alone}'s time" in line for line in lines) == 3
    assert [line.split(" at ")[0] for line in lines[18:21]] == ["n_batches", "plan", "str(plan)"]
    assert ["plan an epoch of 1e+09 rows" in line for line in lines[21:]] == [True, True]


def test_the_resume_benchmark_measures_every_configuration() -> None:
    title, names, *lines = lines_of("resume.py", "--small")
    assert title.startswith("1e+06 rows, half an epoch done on 8 ranks")
    assert names.split()[0] == "chunk/preload/batch"
    assert [line.split()[0] for line in lines] == ["512/32/4096", "256/32/4096", "64/32/256"]
    assert all(float(line.split()[-1]) > 0 for line in lines)


def test_latency_benchmark_measures_each_prefetch() -> None:
    """The benchmark of latency measures each value of prefetch."""
    lines = lines_of("latency.py", "--small")
    ways = ["annbatch", *(f"prefetch={n_ahead}" for n_ahead in (0, 1, 2, 4, 8))]
    assert [line.split()[0] for line in lines] == ["sparse,", *ways, "dense,", *ways]
    assert all("of annbatch's" in line and "of the ideal" in line for line in lines if line.split()[0] in ways)


def test_gpu_benchmark_runs_without_gpu() -> None:
    """The benchmark of GPUs measures every method, also without a GPU."""
    _, _, *lines = lines_of("gpu.py", "--small")
    ways = ["annbatch, preload_to_gpu=False", "ours, preload_to_gpu=False", "ours, prefetch=1"]
    assert [line.split("  ")[0] for line in lines] == ways
    assert all("of annbatch's" in line and "of the ideal" in line for line in lines)


def test_gaps_benchmark_compares_all_methods() -> None:
    """The benchmark of gaps compares every method of reading selected rows."""
    title, *lines = lines_of("gaps.py", "--small")
    assert title.startswith("6e+03 cells")
    assert [line.split()[0] for line in lines] == [
        name for kind in ("sparse", "dense") for name in (kind, "all", "90%", "50%", "20%", "10%", "2%")
    ]
    assert all(line.count("(") == 4 for line in lines if "selected" in line)


def test_sets_benchmark_compares_chunks_in_both_collections() -> None:
    title, *lines = lines_of("sets.py", "--small")
    assert title.startswith("15,000 cells")
    assert [line.split(":")[0].strip() for line in lines] == ["grouped", "shuffled"]
    for line in lines:
        assert re.findall(r"(\S+) [\d.]+", line) == ["cells", "chunk_size=4", "chunk_size=16", "chunk_size=64"]


def test_weights_benchmark_measures_planning_and_reading() -> None:
    planning, title, *lines = lines_of("weights.py", "--small")
    assert planning.startswith("planning 1e+06 cells: ")
    assert title.startswith("reading 6,000 cells")
    assert [line.split(":")[0] for line in lines] == [
        f"runs of {run:3}, {part:>4} draws for each cell" for run in (64, 512) for part in ("1", "0.25")
    ]


def test_virtual_ranks_have_equal_losses() -> None:
    lines = lines_of("virtual_ranks.py", "--small")
    assert sum(line.split()[0] in ("512/32/4096", "64/32/256") for line in lines) == 8
    plain, virtual = lines[-2:]
    assert float(plain.split("differ by ")[1].split()[0]) > 0.1
    assert float(virtual.split("differ by ")[1].split()[0]) < 1e-9


def test_reading_benchmark_measures_and_draws(tmp_path: Path) -> None:
    """The benchmark of reading measures every method, and draws a figure."""
    title, _, *lines = lines_of("reading.py", "--small", "--out", tmp_path / "small.svg")
    assert title.startswith("6e+03 cells")
    written = json.loads((tmp_path / "small.json").read_text())
    methods = [(line["collection"], line["epoch"], line["step"], line["way"]) for line in written["lines"]]
    steps = [(0, 0), (1, 0), (1, 1), (1, "model")]
    assert methods == [("dense", *step, way) for step in steps for way in reading.WAYS]
    assert len(lines) == len(methods)
    assert all(line["rows/s"] > 0 and line["longest wait"] >= line["99 % of waits"] for line in written["lines"])
    assert ET.parse(tmp_path / "small.svg").getroot().tag.endswith("svg")


def test_the_workers_benchmark_measures_every_configuration() -> None:
    title, names, *lines = lines_of("workers.py", "--small")
    assert title.startswith("4e+04 cells read by 2 workers")
    assert names.split()[0] == "chunk/preload/batch"
    assert [line.split()[0] for line in lines] == ["512/32/4096", "64/32/256"]
    assert all(float(line.split()[3]) > 0 for line in lines)


def test_growth_benchmark_shows_exponents(tmp_path: Path) -> None:
    """The benchmark of growth measures each task at two sizes, and shows the exponent of its seconds."""
    written = tmp_path / "growth.json"
    _, _, *lines = lines_of("growth.py", "--small", "--out", written)
    measured = json.loads(written.read_text())["lines"]
    assert [line["task"] for line in measured] == [name for name in growth.TASKS for _ in range(2)]
    assert len(lines) == len(measured)
    for first, second in batched(measured, 2):
        assert second["size"] == 10 * first["size"]
        assert first["exponent"] is None
        assert second["exponent"] == pytest.approx(math.log10(second["seconds"] / first["seconds"]))


def test_labels_benchmark_measures_each_kind(tmp_path: Path) -> None:
    written = tmp_path / "labels.json"
    lines_of("labels.py", "--small", "--out", written)
    lines = json.loads(written.read_text())["lines"]
    assert [line["kind"] for line in lines] == [*labels.KINDS]
    assert all(line[name] > 0 for line in lines for name in ("first batch, s", "us a cell"))


def test_sizes_benchmark_measures_each_batch_size(tmp_path: Path) -> None:
    written = tmp_path / "sizes.json"
    lines_of("sizes.py", "--small", "--out", written)
    lines = json.loads(written.read_text())["lines"]
    assert [tuple(line["sizes"]) for line in lines] == [*sizes.SIZES]
    assert all(line["least"] > 0 for line in lines)


def test_representativeness_benchmark_orders_shardings(tmp_path: Path) -> None:
    """Smaller blocks represent sorted rows better."""
    figure = tmp_path / "figure.svg"
    tables: list[dict[str, list[float]]] = []
    for line in lines_of("representativeness.py", "--small", "--out", figure):
        name, numbers = line[:36].strip(), line[36:].split()
        if numbers:
            tables[-1][name] = list(map(float, numbers))
        else:
            tables.append({})
    steps, batches, epochs = tables
    from_worst_to_best = [
        "contiguous, preload 32",
        "blocks of 4096, preload 32",
        "blocks of 512, preload 32",
        "blocks of 64, preload 32",
        "ideal random sample",
    ]
    assert steps["ranks"] == [2, 4]
    for column in range(2):
        assert all(epochs[worse][column] > epochs[better][column] for worse, better in pairwise(from_worst_to_best))
        # differences between ranks cancel out within a step
        assert all(steps[name][column] < batches[name][column] for name in from_worst_to_best)
    assert ET.parse(figure).getroot().tag == "{http://www.w3.org/2000/svg}svg"
