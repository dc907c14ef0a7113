"""The benchmark of caches, each library in its own environment of uv."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks import remote
from tests.processes.launch import python, run

if TYPE_CHECKING:
    from pathlib import Path


def test_remote_benchmark_counts_what_caches_fetch(tmp_path: Path) -> None:
    """Every method with a cache fetches all of its bytes in the first epoch, and none in the second one."""
    out = tmp_path / "small.json"
    run(python("-m", "benchmarks.remote", "--small", "--out", out))
    lines = {(line["way"], line["epoch"]): line for line in json.loads(out.read_text())["lines"]}
    assert [*lines] == [(way, epoch) for way in remote.WAYS for epoch in (0, 1)]
    fetched = {way: [lines[way, epoch]["MB"] for epoch in (0, 1)] for way in remote.WAYS}
    assert all(fetched[way][0] > 0 for way in remote.WAYS if way != "local disk")
    assert [way for way in remote.WAYS if fetched[way][1]] == ["no cache"]
    assert fetched["local disk"] == [0, 0]
    assert all(line["rows/s"] > 0 for line in lines.values())
