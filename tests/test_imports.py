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
    *("cli", "integrations", "loader", "sampler", "checks", "picture", "report", "planner"),
    *("stream", "config", "plan", "wrapped", "state", "ranks", "lanes", "sharding", "masks", "rows"),
]
#: What knows neither samplers nor what frameworks make of batches.
PURE = ["lanes", "masks", "ranks", "rows", "sharding"]
ARITHMETIC = ["annbatch_distributed", *(f"annbatch_distributed.{room}" for room in PURE)]


def imported(path: Path) -> set[str]:
    """Names in this package that a module imports at the top, where order matters."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    return {name for name in names if name.startswith("annbatch_distributed.")}


def loaded(*statements: str) -> list[set[str]]:
    """Modules that there are in a fresh process after each of some statements."""
    code = "import json, sys\n" + "\n".join(f"{one}\nprint(json.dumps(list(sys.modules)))" for one in statements)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in run.stdout.splitlines()]


def test_rooms_import_from_rooms_below() -> None:
    """A module imports at the top from its own room and from rooms further down only."""
    homes = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    homes = {path: room for path, room in homes.items() if not room.startswith("_")}
    assert set(homes.values()) == set(ROOMS)
    for path, room in homes.items():
        names = {name.split(".")[1] for name in imported(path)}
        # a public name is in the room that it is imported from
        below = {annbatch_distributed._HOMES.get(name, name).partition(".")[0] for name in names}
        assert not below & set(ROOMS[: ROOMS.index(room)]), path


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
        "DistributedSampler",
        "EpochPlan",
        "MixedLoader",
        "Rank",
        "Rows",
        "Shuffled",
        "StatefulLoader",
    ]
    assert sorted(annbatch_distributed.__all__) == [*classes, "deferred", "mesh_ranks", "suggest_sizes"]
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
