"""Figures of benchmarks: what pages say of them is what their files have."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.processes.launch import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

type Lines = list[dict[str, Any]]
#: A page, and a sentence or the line of a table that it has, with figures.
type Citation = tuple[str, str]
#: Yields what pages cite of the lines of a file.
type Cited = Callable[[Lines], Iterator[Citation]]

FILES = ROOT / "docs" / "_static"
KINDS = "sparse", "dense"
BENCHMARKS, PERFORMANCE = "docs/benchmarks.md", "docs/performance.md"
OURS = "annbatch-distributed"


def value(lines: Lines, name: str, /, **about: object) -> Any:
    """Return a value of the only line that is about something."""
    (found,) = (line[name] for line in lines if about.items() <= line.items())
    return found


def ranged(*values: float, digits: int = 2) -> str:
    """Return the smallest and the largest value, or one if they are the same."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}–{high}"


def end_to_end(lines: Lines) -> Iterator[Citation]:
    def ratio(kind: str, way: str) -> float:
        return float(value(lines, "of annbatch's", collection=kind, way=way, ranks=2, epoch=1))

    def both(kind: str, way: str, of: str = "of annbatch's per core") -> str:
        return ranged(*(value(lines, of, collection=kind, way=way, ranks=1, epoch=epoch) for epoch in (0, 1)))

    best = f"{OURS}, prefetch=1, collect, uncompressed"
    gains = ratio("sparse", best), ratio("sparse", best) / ratio("sparse", "annbatch, uncompressed")
    yield "docs/index.md", f"two ranks read {gains[0]:.1f} times as fast as with annbatch's defaults"
    yield "docs/index.md", f"and {gains[1]:.1f} times as fast as annbatch from its own store, uncompressed"
    control = [line for line in lines if line["way"] == "annbatch, again" and line["ranks"] == 2]
    medians = ranged(*(line["of annbatch's"] for line in control)).replace("–", " to ")
    rounds = ranged(*(line[end] for line in control for end in ("least", "most"))).replace("–", " to ")
    yield BENCHMARKS, f"annbatch compared with itself, were {medians}, but its single rounds ranged from {rounds}."
    fast, collected = ratio("dense", "scDataset"), ratio("dense", "annbatch, collect")
    yield BENCHMARKS, f"scDataset reads dense cells {fast:.2f} times as fast as annbatch reads its compressed store"
    yield BENCHMARKS, f"the compressed store of `collect` ({collected:.2f})"
    workers = [f"{ratio('sparse', f'{package}, DataLoader'):.2f}" for package in ("annbatch", OURS)]
    yield BENCHMARKS, f"ours were as slow as annbatch's ({workers[0]} for sparse cells)"
    assert workers[0] == workers[1]
    stores = {
        "": "annbatch's (float32, lz4)",
        ", uncompressed": "annbatch's, uncompressed",
        ", collect": "`collect` (uint8, lz4)",
        ", collect, uncompressed": "`collect --compression none` (uint8)",
    }
    for suffix, store in stores.items():
        own = "1 | 1" if not suffix else " | ".join(both(kind, f"annbatch{suffix}") for kind in KINDS)
        yield BENCHMARKS, f"| {store} | annbatch | {own} |"
        if suffix != ", uncompressed":
            own = " | ".join(both(kind, f"{OURS}{suffix}") for kind in KINDS)
            yield BENCHMARKS, f"| | {OURS} | {own} |"
    own = " | ".join(both(kind, best) for kind in KINDS)
    yield BENCHMARKS, f"| | {OURS}, `prefetch=1` | {own} |"
    seconds = (both("sparse", f"{package}, collect", "of annbatch's") for package in ("annbatch", OURS))
    yield BENCHMARKS, "faster ({} against {})".format(*seconds)
    gain, compressed = (
        both("sparse", f"{OURS}, collect{suffix}").replace("–", " to ") for suffix in (", uncompressed", "")
    )
    yield PERFORMANCE, f"reads {gain} times as many rows per second as annbatch's `Loader` from its own store"
    yield PERFORMANCE, f"and {compressed} times as many from compressed counts of `collect`"
    # the README says that about half of the gain comes from the store
    assert 0.4 < (ratio("sparse", "annbatch, collect, uncompressed") - 1) / (gains[0] - 1) < 0.6
    # the page says that prefetching is slower without training
    for kind in KINDS:
        assert ratio(kind, best) < ratio(kind, f"{OURS}, collect, uncompressed")


def labels(lines: Lines) -> Iterator[Citation]:
    def of(name: str, kind: str) -> float:
        return float(value(lines, name, kind=kind, cells=10_000_000))

    read, named = "read", "read, with names"
    yield BENCHMARKS, f"needs {of('MB', read):.0f} MB, and yields its first batch after"
    yield BENCHMARKS, f"first batch after {of('first batch, s', read):.1f} s; with names, {of('MB', named):.0f} MB"
    memory = of("MB", "annbatch"), of("first batch, s", "annbatch")
    yield BENCHMARKS, "annbatch needs {:,.0f} MB, and {:.1f} s".format(*memory)
    # beyond what reading takes without labels
    read_in, named_in, gathered_in = (
        of("us a cell", kind) - of("us a cell", "none") for kind in (read, named, "in memory")
    )
    yield BENCHMARKS, f"takes {read_in:.1f} µs of a core for each cell, and {named_in:.1f} µs with names"
    yield BENCHMARKS, f"gathering them from memory takes {gathered_in:.1f} µs"
    yield PERFORMANCE, f"[{of('MB', named):.0f} MB instead of {of('MB', 'in memory'):,.0f} MB]"


def sizes(lines: Lines) -> Iterator[Citation]:
    gains = ranged(*(line["of annbatch's"] for line in lines)).replace("–", " to ")
    yield BENCHMARKS, f"{OURS} reads {gains} times as many rows per core second"
    few, many = (max(line["values"] for line in lines) if most else 30 for most in (False, True))
    batches = sorted({line["sizes"][2] for line in lines})
    yield BENCHMARKS, f"with {few} to {many:,} values, in batches of {batches[0]} to {batches[-1]:,}"


def remote(lines: Lines) -> Iterator[Citation]:
    names = {"no cache": f"{OURS}, no cache", "cache": f"{OURS}, `cache`", "local disk": f"{OURS}, local disk"}
    for line in lines:
        if (line["way"], line["epoch"]) == ("local disk", 0):  # left out on the page
            continue
        way = line["way"]
        name = names.get(way, way) if line["epoch"] == 0 or way == "local disk" else ""
        rate = f"{round(line['rows/s'], -2):,.0f}"
        about = f"{line['epoch']} | {rate} | {line['first batch, s']:.2f} | {line['MB']:.0f} |"
        yield BENCHMARKS, f"| {name} | {about}".replace("|  |", "| |")
    gain = value(lines, "rows/s", way="cache", epoch=0) / value(lines, "rows/s", way="no cache", epoch=0)
    yield BENCHMARKS, f"The first epoch with a cache is {gain:.1f} times as fast as without one."
    yield PERFORMANCE, f"the first epoch was {gain:.1f} times as fast as without a cache"


def growth(lines: Lines) -> Iterator[Citation]:
    largest = {line["task"]: line for line in sorted(lines, key=lambda line: line["size"])}

    def of(task: str) -> str:
        return f"{largest[task]['seconds']:.2g} s and {float(f'{largest[task]["MB"]:.2g}'):.0f} MB"

    yield BENCHMARKS, f"take {of('first request, chunks of 512')} until the first load request"
    yield BENCHMARKS, f"blocks of 64 takes {of('shuffled, blocks of 64')} to begin"
    exponent = max(line["exponent"] for line in largest.values())
    yield BENCHMARKS, f"ten times the rows take at most {math.ceil(10**exponent)} times as long"


def gpu(lines: Lines) -> Iterator[Citation]:
    for way in dict.fromkeys(line["way"] for line in lines if line["way"] != "annbatch, preload_to_gpu=False"):
        ratios = (f"{line["of annbatch's"]:.2f}" for line in lines if line["way"] == way)
        name = way.replace("ours", OURS).replace(", preload_to_gpu=False", "").replace("=True", "=True`")
        name = name.replace("preload", "`preload").replace("prefetch=1", "`prefetch=1`")
        yield BENCHMARKS, f"| {name} | {' | '.join(ratios)} |"


def reading(lines: Lines) -> Iterator[Citation]:
    def gains(configuration: list[int], cores: str, step: object) -> str:
        about = {"configuration": configuration, "cores": cores, "step": step, "epoch": 1}
        way = f"{OURS}, prefetch=1"
        return ranged(*(value(lines, "of annbatch's", collection=kind, way=way, **about) for kind in KINDS))

    small, large = [64, 32, 256], [512, 4, 1024]
    steps = {0.5: "half of the time to read", 1: "equal to the time to read", 2: "twice the time to read"}
    for step, name in (steps | {"model": "a small model, DDP"}).items():
        columns = gains(small, "apart", step), gains(large, "apart", step), gains(small, "shared", step)
        yield BENCHMARKS, f"| {name} | {' | '.join(columns)} |"
    ends = re.findall(r"[\d.]+", gains(small, "apart", 1) + " " + gains(large, "apart", 1))
    yield PERFORMANCE, f"ranks read {float(min(ends)):.1f} to {float(max(ends)):.1f} times as many rows per second"


def gaps(lines: Lines) -> Iterator[Citation]:
    def of(kind: str, part: float, way: str) -> str:
        return f"{value(lines, 'of all', collection=kind, selected=part, way=way):.2f}"

    for kind, part in (("sparse", 0.9), ("sparse", 0.5), ("dense", 0.5), ("sparse", 0.2), ("dense", 0.2)):
        ratios = [of(kind, part, way) for way in ("no gaps", "gaps", "a collection")]
        yield BENCHMARKS, "| {:.0%}, {} | {} | **{}** | {} |".format(part, kind, *ratios)
    yield (
        PERFORMANCE,
        f"read at [{of('sparse', 0.5, 'gaps')}× of the speed of the whole](benchmarks.md#few-selected-rows)",
    )
    yield PERFORMANCE, f"instead of {of('sparse', 0.5, 'no gaps')}× without over-reading"


def first_rows(lines: Lines) -> Iterator[Citation]:
    def of(name: str, rows: int, when: str) -> str:
        seconds, memory = (value(lines, one, name=name, rows=rows, when=when) for one in ("seconds", "MB"))
        return f"{seconds:.{1 if seconds >= 1 else 2}f} s and {memory:.0f} MB"

    begins = "an epoch begins"
    ours, theirs = (
        [of(f"{name}, {size}", 10**9, begins) for size in ("512/32/4096", "64/512/4096")] for name in (OURS, "annbatch")
    )
    yield BENCHMARKS, f"{OURS} takes {ours[0]} with chunks of 512 rows, and {ours[1]} with chunks of 64"
    yield BENCHMARKS, f"annbatch takes {theirs[0]}, and {theirs[1]}"
    yield BENCHMARKS, f"Grain takes {of('Grain', 10**9, begins)}, and litdata {of('litdata', 10**9, begins)}"


def latency(lines: Lines) -> Iterator[Citation]:
    for seconds in (0.03, 0.1):
        about = {"latency": seconds, "way": "prefetch=4"}
        gains = ranged(*(value(lines, "of annbatch's", collection=kind, **about) for kind in KINDS), digits=1)
        yield BENCHMARKS, f"{gains.replace('–', ' to ')} times as many rows per second at {seconds * 1000:.0f} ms"


def sets(lines: Lines) -> Iterator[Citation]:
    for kind in ("grouped", "shuffled"):
        ratios = (value(lines, "of cells", collection=kind, way=f"chunk_size={size}") for size in (4, 16, 64))
        yield "docs/sets.md", f"| {kind} collection | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"


def weights(lines: Lines) -> Iterator[Citation]:
    def of(part: float) -> str:
        (ratio,) = (x["of cells"] for x in lines if (x.get("run"), x.get("draws for each cell")) == (512, part))
        return f"{ratio:.2f}"

    yield "docs/sampling.md", f"drawing each cell once on average is {of(1)}× as fast as reading each cell once"
    yield "docs/sampling.md", f"with a quarter of the draws, {of(0.25)}× as many cells per second"


CITED: dict[str, Cited] = {
    one.__name__: one
    for one in (end_to_end, first_rows, gaps, gpu, growth, labels, latency, reading, remote, sets, sizes, weights)
}


@pytest.mark.parametrize("name", CITED)
def test_pages_cite_figures_of_files(name: str) -> None:
    lines = json.loads((FILES / f"{name}.json").read_text())["lines"]
    lacking = []
    for page, sentence in CITED[name](lines):
        if sentence not in " ".join((ROOT / page).read_text().split()):
            lacking.append((page, sentence))
    assert lacking == []


def test_losses_of_virtual_ranks_are_cited() -> None:
    differences = json.loads((FILES / "virtual_ranks.json").read_text())["differences of losses"]
    cited = f"differed by at most {differences['8 virtual ranks']:.0e} ([values](_static/virtual_ranks.json))"
    assert cited in " ".join((ROOT / "docs/checkpoints.md").read_text().split())


def test_each_file_is_linked() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    files = list(FILES.glob("*.json"))
    assert {path.stem for path in files} == {*CITED, "virtual_ranks", "representativeness"}
    assert [path.name for path in files if f"(_static/{path.name})" not in pages] == []
