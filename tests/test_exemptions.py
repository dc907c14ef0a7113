"""What a checker, a test run or the coverage is told to pass over has its reason beside it."""

from __future__ import annotations

import re
import tokenize

import pytest

from tests.processes.launch import ROOT

FOLDERS = "src", "tests", "demo", "benchmarks", "examples", "docs", ".ci"
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if "_build" not in path.parts]
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
    assert len(FILES) > 200
    assert found == []
