"""Sessions of nox run where they are named, so that each has to be named before a change lands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def sessions() -> set[str]:
    """Return the names of the sessions that nox runs by itself."""
    names = set()
    parsed = ast.parse((ROOT / "noxfile.py").read_text())
    for function in (one for one in parsed.body if isinstance(one, ast.FunctionDef)):
        for decorator in function.decorator_list:
            assert isinstance(decorator, ast.Call)
            options = {one.arg: ast.literal_eval(one.value) for one in decorator.keywords if one.arg != "python"}
            if options.get("default", True):
                names.add(str(options.get("name", function.name)))
    return names


@pytest.mark.parametrize("file", [".ci/run", ".github/workflows/ci.yml"])
def test_every_session_that_is_not_marked_is_named(file: str) -> None:
    named = re.findall(r"--session ([a-z0-9.\- ]+)", (ROOT / file).read_text())
    assert sessions() <= {name.split("-3.")[0] for line in named for name in line.split()}
