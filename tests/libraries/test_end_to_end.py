"""The comparison of libraries from disk to training step, each in its own environment of uv."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from benchmarks import end_to_end, libraries
from tests.processes.launch import python, run

if TYPE_CHECKING:
    from pathlib import Path


def test_every_library_reads_the_same_cells(tmp_path: Path) -> None:
    out = tmp_path / "small.json"
    run(python("-m", "benchmarks.end_to_end", "--small", "--out", out))
    written = json.loads(out.read_text())
    assert set(written["versions"]) == set(end_to_end.LIBRARIES)
    ways = {line["way"] for line in written["lines"]}
    assert len(ways) == 22
    assert all(any(way.lower().replace("-", "_").startswith(name) for way in ways) for name in end_to_end.LIBRARIES)
    assert all(line["rows/s"] > 0 for line in written["lines"])
    assert {line["epoch"] for line in written["lines"]} == {0, 1}
    assert all(0.9 * 16_400 <= line["rows"] <= 16_400 for line in written["lines"])
    for name in ("small", "small_libraries", "small_speed"):
        assert ET.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]], id="a cell on both ranks"),
        pytest.param([[0, 1, 2, 3, 4], []], id="a rank without cells"),
        pytest.param([[0, 1, 2, 3, 4], [5, 6, 7, 8, 10]], id="a cell that does not exist"),
        pytest.param([[9, 1, 2, 3, 4], [5, 6, 7, 8, 0]], id="the order of the other epoch"),
    ],
)
def test_end_to_end_refuses_incomplete_reads(wrong: list[list[int]]) -> None:
    """A method that does not read each cell once is not compared."""
    other = [[9, 1, 2, 3, 4], [5, 6, 7, 8, 0]]
    end_to_end.check("this", [other, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]], 10, other_orders=True)
    with pytest.raises(RuntimeError, match="this"):
        end_to_end.check("this", [other, wrong], 10, other_orders=True)


def test_slow_methods_have_few_rounds() -> None:
    """Methods that are much slower are measured in a few rounds."""
    rates = {"annbatch": (9, 10, 90), "much slower": (5, 5, 5), "slower": (70, 7, 1), "faster": (11, 30, 2)}
    measured = [{"way": way, "rows/s": rate} for way, own in rates.items() for rate in own]
    assert end_to_end.slow(measured) == {"much slower"}


def test_failing_library_raises_without_waiting() -> None:
    """A library that fails raises, and no rank is left waiting."""
    with pytest.raises(RuntimeError, match="A rank of torch has failed"):
        libraries.run("torch", "resume", 1_000, 64, 1, 64, 0, 2, 3)


@pytest.mark.timeout(300)  # the other rank would time out after libraries.SECONDS, with the same error
def test_dead_rank_raises_without_waiting(tmp_path: Path) -> None:
    """A dead rank raises, and no other rank is left waiting."""
    with libraries.Ranks("annbatch", "serve", tmp_path, "shared", 64, 16, 256, world_size=2) as job:
        job._processes[1].kill()
        with pytest.raises(RuntimeError, match="A rank of annbatch has failed"):
            job.answers()
