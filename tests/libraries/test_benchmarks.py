"""The benchmarks run at a small size; their timings are not tested."""

from __future__ import annotations

import json
import math
import re
import shutil
from itertools import batched, pairwise
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import end_to_end, first_rows, gaps, growth, labels, reading, record, representativeness, sizes
from tests.processes.launch import forked, run

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


def lines_of(script: str, *arguments: str | Path) -> list[str]:
    """Return the lines that a benchmark prints."""
    (done,) = run(forked(f"benchmarks/{script}", *arguments))
    return done.stdout.splitlines()


def small(script: str, folder: Path) -> dict[str, Any]:
    """Return the content of the file that a benchmark writes at a small size."""
    out = folder / f"{script}.json"
    shown = lines_of(f"{script}.py", "--small", "--out", out)
    content: dict[str, Any] = json.loads(out.read_text())
    assert {"commit", "python", "versions", "cores", "lines"} <= content.keys()
    assert len(shown) >= len(content["lines"])
    assert all(math.isfinite(value) for line in content["lines"] for value in line.values() if type(value) is float)
    return content


@pytest.mark.parametrize("script", [end_to_end, first_rows, reading, representativeness])
def test_figures_agree_with_their_file(script: ModuleType, tmp_path: Path) -> None:
    """The figures of the documentation are those that --draw draws from the file of the documentation."""
    name = script.__name__.rsplit(".", 1)[-1]
    shutil.copy(record.FOLDER / f"{name}.json", tmp_path)
    lines_of(f"{name}.py", "--draw", "--out", tmp_path / f"{name}.json")
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert f"{name}.svg" in drawn
    for figure, drawing in drawn.items():
        # also after a new version of matplotlib, which draws differently: python -m benchmarks.NAME --draw
        assert drawing == (record.FOLDER / figure).read_text()


@pytest.mark.parametrize("path", sorted(record.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_file_says_what_was_measured(path: Path) -> None:
    content = json.loads(path.read_text())
    assert re.fullmatch("[0-9a-f]{7,}", content["commit"])
    assert content["versions"]
    assert content["lines"]


def test_options_need_out_to_keep_the_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a run without options writes the file of the documentation."""
    monkeypatch.setattr("sys.argv", ["script", "--only", "x"])
    with pytest.raises(SystemExit):
        record.arguments(None, "none", only={})
    assert "pass --out with --only" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["script"])
    assert record.arguments(None, "none", only={}).out == record.FOLDER / "none.json"


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


def test_latency_benchmark_measures_each_prefetch(tmp_path: Path) -> None:
    """The benchmark of latency measures each value of prefetch."""
    content = small("latency", tmp_path)
    ways = ["annbatch", *(f"prefetch={n_ahead}" for n_ahead in (0, 1, 2, 4, 8))]
    assert [(line["collection"], line["way"]) for line in content["lines"]] == [
        (kind, way) for kind in ("sparse", "dense") for way in ways
    ]
    assert all(line["of annbatch's"] > 0 and line["of the ideal"] > 0 for line in content["lines"])


def test_gpu_benchmark_runs_without_gpu(tmp_path: Path) -> None:
    """The benchmark of GPUs measures every method, also without a GPU."""
    lines = small("gpu", tmp_path)["lines"]
    ways = ["annbatch, preload_to_gpu=False", "ours, preload_to_gpu=False", "ours, prefetch=1"]
    assert [line["way"] for line in lines] == ways
    assert all(line["of annbatch's"] > 0 and line["of the ideal"] > 0 for line in lines)


def test_gaps_benchmark_compares_all_methods(tmp_path: Path) -> None:
    """The benchmark of gaps compares every method of reading selected rows."""
    lines = small("gaps", tmp_path)["lines"]
    ways = [(1, "all")] + [
        (part, way) for part in gaps.PARTS for way in ("index arrays", "no gaps", "gaps", "a collection")
    ]
    assert [(line["collection"], line["selected"], line["way"]) for line in lines] == [
        (kind, *way) for kind in ("sparse", "dense") for way in ways
    ]
    assert all(line["of all"] > 0 for line in lines)


def test_sets_benchmark_compares_chunks_in_both_collections(tmp_path: Path) -> None:
    lines = small("sets", tmp_path)["lines"]
    assert [(line["collection"], line["way"]) for line in lines] == [
        (collection, way)
        for collection in ("grouped", "shuffled")
        for way in ("cells", "chunk_size=4", "chunk_size=16", "chunk_size=64")
    ]
    assert all(line["of cells"] > 0 for line in lines)


def test_weights_benchmark_measures_planning_and_reading(tmp_path: Path) -> None:
    content = small("weights", tmp_path)
    assert content["planning"]["seconds"] > 0
    assert [(line["run"], line["draws for each cell"]) for line in content["lines"]] == [
        (run, part) for run in (64, 512) for part in (1, 0.25)
    ]
    assert all(line["of cells"] > 0 for line in content["lines"])


def test_virtual_ranks_have_equal_losses(tmp_path: Path) -> None:
    content = small("virtual_ranks", tmp_path)
    assert len(content["lines"]) == 8
    assert all(line["of plain"] > 0 for line in content["lines"])
    plain, virtual = content["differences of losses"].values()
    assert plain > 0.1
    assert virtual < 1e-9


def test_reading_benchmark_measures_and_draws(tmp_path: Path) -> None:
    """The benchmark of reading measures every method, and draws a figure."""
    written = small("reading", tmp_path)
    methods = [(line["collection"], line["epoch"], line["step"], line["way"]) for line in written["lines"]]
    steps = [(0, 0), (1, 0), (1, 1), (1, "model")]
    assert methods == [("dense", *step, way) for step in steps for way in reading.WAYS]
    assert all(line["rows/s"] > 0 and line["longest wait"] >= line["99 % of waits"] for line in written["lines"])
    assert ET.parse(tmp_path / "reading.svg").getroot().tag.endswith("svg")


def test_the_workers_benchmark_measures_every_configuration() -> None:
    title, names, *lines = lines_of("workers.py", "--small")
    assert title.startswith("4e+04 cells read by 2 workers")
    assert names.split()[0] == "chunk/preload/batch"
    assert [line.split()[0] for line in lines] == ["512/32/4096", "64/32/256"]
    assert all(float(line.split()[3]) > 0 for line in lines)


def test_growth_benchmark_shows_exponents(tmp_path: Path) -> None:
    """The benchmark of growth measures each task at two sizes, and shows the exponent of its seconds."""
    measured = small("growth", tmp_path)["lines"]
    assert [line["task"] for line in measured] == [name for name in growth.TASKS for _ in range(2)]
    for first, second in batched(measured, 2):
        assert second["size"] == 10 * first["size"]
        assert first["exponent"] is None
        assert second["exponent"] == pytest.approx(math.log10(second["seconds"] / first["seconds"]))


def test_labels_benchmark_measures_each_kind(tmp_path: Path) -> None:
    lines = small("labels", tmp_path)["lines"]
    assert [line["kind"] for line in lines] == [*labels.KINDS]
    assert all(line[name] > 0 for line in lines for name in ("first batch, s", "us a cell"))


def test_sizes_benchmark_measures_each_batch_size(tmp_path: Path) -> None:
    lines = small("sizes", tmp_path)["lines"]
    assert [tuple(line["sizes"]) for line in lines] == [*sizes.SIZES]
    assert all(line["least"] > 0 for line in lines)


def test_representativeness_benchmark_orders_shardings(tmp_path: Path) -> None:
    """Smaller blocks represent sorted rows better."""
    content = small("representativeness", tmp_path)
    tables: dict[str, dict[str, list[float]]] = {part: {} for part in representativeness.PARTS}
    for line in content["lines"]:
        for part, table in tables.items():
            table.setdefault(line["setting"], []).append(line[part])
    steps, batches, epochs = tables.values()
    from_worst_to_best = [
        "contiguous, preload 32",
        "blocks of 4096, preload 32",
        "blocks of 512, preload 32",
        "blocks of 64, preload 32",
        "ideal random sample",
    ]
    assert sorted({line["ranks"] for line in content["lines"]}) == [2, 4]
    for column in range(2):
        assert all(epochs[worse][column] > epochs[better][column] for worse, better in pairwise(from_worst_to_best))
        # differences between ranks cancel out within a step
        assert all(steps[name][column] < batches[name][column] for name in from_worst_to_best)
    assert ET.parse(tmp_path / "representativeness.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
