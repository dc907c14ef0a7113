"""Which module may import which, and what importing the package brings along."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import annbatch_distributed

PACKAGE = Path(annbatch_distributed.__file__).parent
PURE = [
    "dealing.py",
    "requests.py",
    "randomness.py",
    *(str(path.relative_to(PACKAGE)) for path in (PACKAGE / "sharding").glob("*.py")),
]


def imported(path: Path) -> set[str]:
    """Modules that a file imports at run time, at the top or in a function."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("file", PURE)
def test_the_arithmetic_needs_the_standard_library_and_numpy_only(file: str) -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy"}
    others = {name for name in imported(PACKAGE / file) if name.split(".")[0] not in allowed}
    pure = ("annbatch_distributed.dealing", "annbatch_distributed.sharding")
    assert all(name.startswith(pure) for name in others)


def test_the_search_for_imports_finds_them() -> None:
    assert "annbatch.abc" in imported(PACKAGE / "sampler.py")
    assert "torch.distributed" in imported(PACKAGE / "ranks" / "torch.py")
    assert "collections.abc" not in imported(PACKAGE / "rest.py")


def test_importing_the_package_brings_nothing_that_annbatch_does_not() -> None:
    code = "import sys, {}; print(*(name.split('.')[0] for name in sys.modules))"
    loaded = [
        set(
            subprocess.run(
                [sys.executable, "-c", code.format(package)], capture_output=True, text=True, check=True, timeout=100
            ).stdout.split()
        )
        for package in ("annbatch", "annbatch_distributed")
    ]
    assert loaded[1] - loaded[0] <= {"annbatch_distributed"}
    assert "annbatch" in loaded[0]


def test_the_public_names_are_these() -> None:
    classes = [
        "Contiguous",
        "DistributedSampler",
        "EpochPlan",
        "Independent",
        "Rank",
        "Shuffled",
        "StatefulLoader",
        "Tally",
    ]
    assert sorted(annbatch_distributed.__all__) == [*classes, "deferred", "mesh_ranks"]
