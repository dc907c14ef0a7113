"""Which room may import which, and what importing the package brings along."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import annbatch_distributed

PACKAGE = Path(annbatch_distributed.__file__).parent

#: Highest first: a room imports from itself and from those below it.
ROOMS = [
    *(
        "cli",
        "integrations",
        "loader",
        "sampler",
        "job",
        "checks",
        "planner",
        "arguments",
        "counts",
        "passes",
        "stream",
    ),
    *("replay", "requests", "fingerprint", "known", "copies", "callers", "randomness", "plan", "report"),
    *("progress", "state", "ranks", "lanes", "sharding", "masks", "rows", "names", "integers"),
]
#: What knows neither samplers nor what frameworks make of batches.
PURE = ["checks", "plan", "ranks", "sharding"]
ARITHMETIC = ["annbatch_distributed", *(f"annbatch_distributed.{room}" for room in PURE)]


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
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def loaded(*statements: str) -> list[set[str]]:
    """Modules that there are in a fresh process after each of some statements."""
    code = "import json, sys\n" + "\n".join(f"{one}\nprint(json.dumps(list(sys.modules)))" for one in statements)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in run.stdout.splitlines()]


def test_every_module_is_in_a_room() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py") and not path.stem.startswith("__")}
    assert entries == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_itself_and_from_those_below(room: str) -> None:
    files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").exists() else [*(PACKAGE / room).rglob("*.py")]
    assert files
    above = ROOMS[: ROOMS.index(room)]
    for file in files:
        names = [name.split(".")[1] for name in imported(file) if name.startswith("annbatch_distributed.")]
        # a public name is in the room that it is imported from
        own = {annbatch_distributed._HOMES.get(name, name).partition(".")[0] for name in names}
        assert not own & set(above), f"{file} imports from above"


def test_the_search_for_imports_finds_them() -> None:
    assert "annbatch.abc.Sampler" in imported(PACKAGE / "sampler.py")
    assert "torch.distributed" in imported(PACKAGE / "ranks" / "torch.py")
    assert not any("collections.abc" in name for name in imported(PACKAGE / "sampler.py"))


def test_arithmetic_loads_neither_annbatch_nor_a_framework() -> None:
    (modules,) = loaded(f"import {', '.join(ARITHMETIC)}")
    assert set(ARITHMETIC) <= modules
    roots = {name.partition(".")[0] for name in modules}
    assert roots.isdisjoint({"annbatch", "anndata", "dask", "jax", "pandas", "scipy", "torch", "zarr"})


def test_the_command_line_loads_nothing_before_a_command_is_run() -> None:
    (modules,) = loaded("import annbatch_distributed.cli")
    assert {name.partition(".")[0] for name in modules}.isdisjoint({"annbatch", "numpy"})


def test_a_public_name_loads_nothing_that_annbatch_does_not() -> None:
    alone, with_ours = loaded("import annbatch", "from annbatch_distributed import DistributedSampler, StatefulLoader")
    assert {name.partition(".")[0] for name in with_ours - alone} <= {"annbatch_distributed"}
    assert "annbatch" in alone
    assert "annbatch_distributed.loader" in with_ours


def test_the_public_names_are_these() -> None:
    classes = [
        "Contiguous",
        "DistributedSampler",
        "EpochPlan",
        "Independent",
        "MixedLoader",
        "Rank",
        "Rows",
        "Shuffled",
        "StatefulLoader",
        "Tally",
    ]
    assert sorted(annbatch_distributed.__all__) == [*classes, "deferred", "mesh_ranks", "sizes"]
    assert set(annbatch_distributed.__all__) <= set(dir(annbatch_distributed))
    for name in annbatch_distributed.__all__:
        assert getattr(annbatch_distributed, name).__name__ == name


def test_a_room_is_an_attribute_of_the_package_before_anybody_has_imported_it() -> None:
    rooms = ", ".join(f"package.{name}.__name__" for name in ("sharding", "ranks"))
    (modules,) = loaded(f"import annbatch_distributed as package; assert all([{rooms}])")
    assert "annbatch_distributed.ranks" in modules


def test_a_name_that_is_not_public_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'annbatch_distributed' has no attribute 'Distributed'"):
        getattr(annbatch_distributed, "Distributed")  # noqa: B009 mypy would find the attribute missing
