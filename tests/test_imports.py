"""Imports between rooms, and modules that importing the package loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import annbatch_distributed

PACKAGE = Path(annbatch_distributed.__file__).parent

#: Rooms from the highest to the lowest: a room imports from itself and from lower rooms.
ROOMS = [
    *("cli", "integrations", "loader", "sampler", "checks", "cursor", "picture", "report", "epochs"),
    *("stream", "config", "plan", "wrapped", "sets", "state", "ranks", "lanes", "sharding", "masks", "rows"),
]
#: Rooms that know neither samplers nor frameworks.
PURE = ["lanes", "masks", "ranks", "rows", "sharding"]
ARITHMETIC = ["annbatch_distributed", *(f"annbatch_distributed.{room}" for room in PURE)]


def names_imported_by(path: Path) -> set[str]:
    """Names of this package that a module imports at its top level, where order matters."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    return {name for name in names if name.startswith("annbatch_distributed.")}


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Modules in a new process after each of some imports."""
    statements = {
        "command line": "import annbatch_distributed.cli",
        "rooms": "package = annbatch_distributed; package.sharding.__name__, package.ranks.__name__",
        "arithmetic": f"import {', '.join(ARITHMETIC)}",
        "annbatch": "import annbatch",
        "public names": "from annbatch_distributed import DistributedSampler, StatefulLoader",
    }
    code = "import json, sys\n" + "\n".join(
        f"{one}\nprint(json.dumps(list(sys.modules)))" for one in statements.values()
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(statements, map(set, map(json.loads, run.stdout.splitlines())), strict=True))


def roots(modules: set[str]) -> set[str]:
    """The packages of modules."""
    return {name.partition(".")[0] for name in modules}


def test_rooms_import_from_rooms_below() -> None:
    """A module imports at its top level only from its own room and from lower rooms."""
    homes = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    homes = {path: room for path, room in homes.items() if not room.startswith("_")}
    assert set(homes.values()) == set(ROOMS)
    for path, room in homes.items():
        names = {name.split(".")[1] for name in names_imported_by(path)}
        # a public name belongs to the room of its definition
        below = {annbatch_distributed._HOMES.get(name, name).partition(".")[0] for name in names}
        assert not below & set(ROOMS[: ROOMS.index(room)]), path


def test_command_line_loads_nothing_before_a_command(loaded: dict[str, set[str]]) -> None:
    assert roots(loaded["command line"]).isdisjoint({"annbatch", "numpy"})


def test_room_is_an_attribute_before_its_import(loaded: dict[str, set[str]]) -> None:
    rooms = {"annbatch_distributed.ranks", "annbatch_distributed.sharding"}
    assert rooms.isdisjoint(loaded["command line"])
    assert rooms <= loaded["rooms"]


def test_arithmetic_loads_neither_annbatch_nor_a_framework(loaded: dict[str, set[str]]) -> None:
    assert set(ARITHMETIC) <= loaded["arithmetic"]
    others = {"annbatch", "anndata", "dask", "jax", "pandas", "scipy", "torch", "zarr"}
    assert roots(loaded["arithmetic"]).isdisjoint(others)


def test_public_name_loads_no_more_than_annbatch(loaded: dict[str, set[str]]) -> None:
    assert roots(loaded["public names"] - loaded["annbatch"]) <= {"annbatch_distributed"}
    assert "annbatch" in loaded["annbatch"]
    assert "annbatch_distributed.loader" in loaded["public names"]


def test_public_names_are_complete() -> None:
    """The package exports exactly these names, each equal to its object's name."""
    classes = [
        "AlignedLoader",
        "DistributedSampler",
        "EpochPlan",
        "MixedLoader",
        "Rank",
        "Rows",
        "Sets",
        "Shuffled",
        "StatefulLoader",
    ]
    assert sorted(annbatch_distributed.__all__) == [*classes, "deferred", "mesh_ranks", "suggest_sizes"]
    assert set(annbatch_distributed.__all__) <= set(dir(annbatch_distributed))
    for name in annbatch_distributed.__all__:
        assert getattr(annbatch_distributed, name).__name__ == name


def test_unknown_name_raises_attribute_error() -> None:
    """A name that isn't public raises `AttributeError`."""
    with pytest.raises(AttributeError, match="has no attribute 'Distributed'"):
        getattr(annbatch_distributed, "Distributed")  # noqa: B009 mypy would find the attribute missing
