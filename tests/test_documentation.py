"""The pages, their pictures and the files of a release: what no page runs."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest
import yaml

from docs.palette import FILLS, LINES, PAGES, STYLE, TEXT, contrast, themed
from docs.pictures import DEMO
from tests.processes.launch import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES_OF_DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
DRAWINGS = [path for path in sorted((ROOT / "docs/_static").glob("*.svg")) if path.name != "logo.svg"]


def test_text_and_lines_have_contrast_with_the_page() -> None:
    """On white and on dark pages; the text in boxes with their fills."""
    for light, dark in LINES.values():
        assert contrast(light, PAGES["light"]) >= 4.5
        assert contrast(dark, PAGES["dark"]) >= 4.5
    assert min(contrast(fill, TEXT) for fill in FILLS.values()) >= 4.5
    # the definition's extremes, and the limit's own example of a gray
    assert contrast("#000000", "#ffffff") == 21
    assert contrast("#777777", "#ffffff") < 4.5 < contrast("#767676", "#ffffff")


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_drawing_has_only_colors_of_the_palette(path: Path) -> None:
    """Each color is literal, as renderers without CSS need it, and one that the style can replace."""
    drawing = path.read_text()
    assert drawing.count(STYLE) == 1
    drawn = drawing.replace(STYLE, "")
    assert "var(--" not in drawn
    used = {color.lower() for color in re.findall(r"#[0-9a-fA-F]{6}\b", drawn)}
    assert used <= {*(light for light, _ in LINES.values()), *FILLS.values(), TEXT}


def test_themed_adds_style_after_opening_tag_and_title() -> None:
    drawing = '<?xml version="1.0"?>\n<svg viewBox="0 0 1 1">\n<title>A line</title>\n<g/></svg>'
    tag, rest = drawing[: drawing.index("\n<g/>")], "\n<g/></svg>"
    assert themed(drawing) == f"{tag}\n{STYLE}{rest}"
    assert themed("<svg><g/></svg>") == f"<svg>\n{STYLE}<g/></svg>"
    for wrong in (themed(drawing), "<p>no drawing</p>"):
        with pytest.raises(ValueError, match="must be an SVG without STYLE, got "):
            themed(wrong)


def test_style_replaces_each_color_as_attribute_and_in_style() -> None:
    for light, dark in LINES.values():
        for part in ("fill", "stroke"):
            assert f'[{part}="{light}"] {{ {part}: {dark} }}' in STYLE
            assert f'[style*="{part}: {light}"] {{ {part}: {dark} !important }}' in STYLE
    # boxes, and the text in them, are the same on both pages
    assert not any(color in STYLE for color in (*FILLS.values(), TEXT))


def test_terminal_shows_checks_of_the_demo() -> None:
    """The picture of the demo has its words, with numbers in place of names."""
    source = (ROOT / "demo/report.py").read_text()
    checks = [line[2:] for line in DEMO.splitlines() if line.startswith("✓ ")]
    assert len(checks) == 6
    for check in checks:
        assert re.search(re.sub(r"\d+", r"\\{[^}]+\\}", check), source)


def test_code_on_pages_fits_their_width() -> None:
    """A page has room for 85 columns; output may be longer, as it wraps."""
    lines = []
    for page in PAGES_OF_DOCS:
        for block in re.findall(
            r"^```(?:\{code-.*|python|bash|console)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            own = block.splitlines()
            prompted = [line for line in own if line.startswith((">>>", "...", "$ "))]
            lines += prompted or own
    assert len(lines) > 400
    assert [line for line in lines if len(line) > 85] == []


def test_versions_on_the_page_are_those_of_the_project() -> None:
    """The table of versions that go together has the limits of pyproject.toml."""
    page = (ROOT / "docs/installation.md").read_text()
    table = page[page.index("## Versions") :]
    shown = dict(re.findall(r"^\| ([\w-]+) \| ([<>=].*?) \|$", table, re.MULTILINE))
    extras = [limit for name, extra in PROJECT["project"]["optional-dependencies"].items() for limit in extra]
    limits = [*PROJECT["project"]["dependencies"], *extras, *PROJECT["dependency-groups"]["frameworks"]]
    known = {re.split(r"[\[<>=]", limit)[0]: re.sub(r"^[\w-]+(\[.*\])?", "", limit) for limit in limits}
    assert len(shown) >= 10
    assert {name: known[name.lower()] for name in shown} == shown
    assert f"| Python | {PROJECT['project']['requires-python'].removeprefix('>=')} or newer |" in table


def test_address_is_in_one_place() -> None:
    """Nothing but pyproject.toml names the site and the repository, except for the entry that scverse asks for."""
    urls = PROJECT["project"]["urls"]
    entry = yaml.safe_load((ROOT / ".github/meta.yaml").read_text())
    assert entry["project_home"] == urls["Source"]
    assert entry["documentation_home"] == urls["Documentation"]
    assert entry["license"] == PROJECT["project"]["license"]
    words = [urls[name].removeprefix("https://") for name in ("Source", "Documentation")]
    patterns = [argument for word in words for argument in ("-e", word)]
    listed = subprocess.run(
        ["git", "grep", "--untracked", "--files-with-matches", "--fixed-strings", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(listed.stdout.split()) == {"pyproject.toml", ".github/meta.yaml"}
