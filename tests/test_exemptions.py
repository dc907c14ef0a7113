"""What a checker, a test run or the coverage is told to pass over has its reason beside it."""

from __future__ import annotations

import ast
import re
import tokenize

import pytest

from tests.processes.launch import ROOT

FOLDERS = "src", "tests", "demo", "benchmarks", "examples", "docs", ".ci"
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if "_build" not in path.parts]
#: What pytest has to skip a test, or to let it fail.
SKIPS = {"skip", "skipif", "xfail", "importorskip"}
EXEMPTION = re.compile(
    r"#\s*(noqa\b(:\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*)?|(type|pyright):\s*ignore(\[[^\]]*\])?|pragma:\s*no cover)"
)


def without_reason(comment: str) -> bool:
    """Whether a comment exempts from something, and says no more."""
    return bool(EXEMPTION.search(comment)) and not re.search(r"\w", EXEMPTION.sub("", comment))


@pytest.mark.parametrize(
    ("comment", "lacks_one"),
    [
        ("# noqa: ANN401", True),
        ("# type: ignore[misc]  # pyright: ignore[reportX]  # noqa: B018, E501", True),
        ("# pragma: no cover", True),
        ("# noqa: ANN401 a module", False),
        ("# type: ignore[misc]  # that of the data module", False),
        ("# why a line is there", False),
    ],
)
def test_a_comment_that_exempts_and_says_no_more_lacks_a_reason(comment: str, *, lacks_one: bool) -> None:
    assert without_reason(comment) == lacks_one


def test_every_exemption_has_its_reason_beside_it() -> None:
    found = []
    for path in FILES:
        with tokenize.open(path) as file:
            comments = [token for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT]
        found += [f"{path.relative_to(ROOT)}:{token.start[0]}" for token in comments if without_reason(token.string)]
    assert len(FILES) > 150
    assert found == []


def skips_without_reason(code: str) -> list[int]:
    """The lines where a test is skipped, or may fail, and nobody says why."""
    nodes = list(ast.walk(ast.parse(code)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    reasoned = [call.func for call in calls if any(keyword.arg == "reason" for keyword in call.keywords)]
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in SKIPS and node not in reasoned
        if ast.unparse(node).startswith("pytest.")
    ]


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("@pytest.mark.skip\ndef test_it(): ...", [1]),
        ("\n@pytest.mark.xfail(strict=True)\ndef test_it(): ...", [2]),
        ("def test_it():\n    pytest.skip()", [2]),
        ("torch = pytest.importorskip('torch')", [1]),
        ("marks = [pytest.mark.skipif(True, reason='there is no fork')]", []),
        ("rows.skip(2)", []),
    ],
)
def test_a_skip_that_says_no_more_lacks_a_reason(code: str, lines: list[int]) -> None:
    assert skips_without_reason(code) == lines


def test_every_skip_has_its_reason_beside_it() -> None:
    found = {str(path.relative_to(ROOT)): skips_without_reason(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}
