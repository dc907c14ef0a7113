"""The comparison of libraries by the time to first batch, each in its own environment of uv."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from benchmarks import first_rows
from tests.processes.launch import python, run

if TYPE_CHECKING:
    from pathlib import Path


def test_every_library_has_its_first_rows(tmp_path: Path) -> None:
    out = tmp_path / "small.json"
    run(python("-m", "benchmarks.first_rows", "--small", "--out", out))
    written = json.loads(out.read_text())
    compared = [name for name, *_ in first_rows.BEGINNINGS + first_rows.MIDDLES]
    assert [line["name"] for line in written["lines"]] == compared
    assert all(line["seconds"] > 0 for line in written["lines"])
    assert ET.parse(out.with_suffix(".svg")).getroot().tag.endswith("svg")
