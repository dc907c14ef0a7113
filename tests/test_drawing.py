"""The drawing of the glossary is the one that its script draws."""

from __future__ import annotations

import runpy

from tests.processes.launch import ROOT


def test_the_drawing_of_the_glossary_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "terms.py"))["drawing"]()
    assert (ROOT / "docs" / "_static" / "terms.svg").read_text() == drawn
