"""Imports between rooms, and modules that importing the package loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import annbatch_distributed

PACKAGE = Path(annbatch_distributed.__file__).parent

#: Rooms from the highest to the lowest: a room imports from itself and from lower rooms.
ROOMS = [
    *("__main__", "cli", "collect", "integrations", "mixtures", "loader", "sampler", "checks", "cursor", "reports"),
    *("sets", "weights", "ranks", "core"),
]
#: Modules that know neither samplers nor frameworks.
PURE = ["core.lanes", "core.masks", "core.rank", "core.rows", "core.sharding", "core.values", "core.worker", "ranks"]
ARITHMETIC = ["annbatch_distributed", *(f"annbatch_distributed.{name}" for name in PURE)]


def modules_imported_by(path: Path) -> set[str]:
    """Modules of this package that a module imports, also in functions and for types."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or str(node.module).partition(".")[0] != "annbatch_distributed":
            continue
        module = str(node.module).partition(".")[2]
        for alias in node.names:
            # a public name belongs to the module of its definition; a module may be imported from its package
            name = alias.name if module else annbatch_distributed._HOMES.get(alias.name, alias.name)
            name = f"{module}.{name}".removeprefix(".")
            modules.add(name if name in MODULES else module)
    return modules - {""}


def module_of(path: Path) -> str:
    """The name of a module within the package; of a package, the name of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py") if path.name != "_version.py"}
IMPORTS = {name: modules_imported_by(path) for name, path in MODULES.items() if name}


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Modules in a new process after each of some imports."""
    statements = {
        "command line": "import annbatch_distributed.cli",
        "rooms": "package = annbatch_distributed; package.core.__name__, package.ranks.__name__",
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
    """A module imports, also in functions, only from its own room and from lower rooms."""
    assert {name.partition(".")[0] for name in IMPORTS} == {*ROOMS}
    assert IMPORTS["core.epochs"] >= {"core.plan", "core.state"}
    for name, imported in IMPORTS.items():
        room = name.partition(".")[0]
        assert not {other.partition(".")[0] for other in imported} & {*ROOMS[: ROOMS.index(room)]}, name


def test_collect_imports_only_two_modules_of_core() -> None:
    """The room ``collect`` uses two modules of ``core``, and only the command line uses ``collect``."""
    importing = {name: imported for name, imported in IMPORTS.items() if name.partition(".")[0] == "collect"}
    outside = {name for name in set().union(*importing.values()) if name not in importing}
    assert outside == {"core.processes", "core.values"}
    users = {name for name, imported in IMPORTS.items() if imported & {*importing}}
    assert users - {*importing} == {"cli.collect", "cli.data"}


def test_rooms_of_collect_do_not_know_each_other() -> None:
    """``collect.harmonize`` and ``collect.write`` meet only in ``collect.steps``, as cells with matrices."""
    between = {"core.processes", "core.values", *(f"collect.{name}" for name in ("matrices", "options", "problems"))}
    for room in ("collect.harmonize", "collect.write"):
        own = {name for name in IMPORTS if name.startswith(room)}
        assert len(own) > 5
        assert set().union(*(IMPORTS[name] for name in own)) - own <= between


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """No module imports itself through other modules, also not in functions."""
    order = [*TopologicalSorter({name: imported - {name} for name, imported in IMPORTS.items()}).static_order()]
    assert order.index("core.values") < order.index("core.epochs") < order.index("sampler")


def test_command_line_loads_nothing_before_a_command(loaded: dict[str, set[str]]) -> None:
    assert roots(loaded["command line"]).isdisjoint({"annbatch", "numpy"})


def test_room_is_an_attribute_before_its_import(loaded: dict[str, set[str]]) -> None:
    rooms = {"annbatch_distributed.ranks", "annbatch_distributed.core"}
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
        "CellSets",
        "DistributedSampler",
        "EpochPlan",
        "MixedLoader",
        "Rank",
        "Rows",
        "Shuffled",
        "StatefulLoader",
    ]
    assert sorted(annbatch_distributed.__all__) == [*classes, "deferred", "suggest_sizes"]
    assert set(annbatch_distributed.__all__) <= set(dir(annbatch_distributed))
    for name in annbatch_distributed.__all__:
        assert getattr(annbatch_distributed, name).__name__ == name


def test_unknown_name_raises_attribute_error() -> None:
    """A name that isn't public raises `AttributeError`."""
    with pytest.raises(AttributeError, match="has no attribute 'Distributed'"):
        getattr(annbatch_distributed, "Distributed")  # noqa: B009 mypy would find the attribute missing
