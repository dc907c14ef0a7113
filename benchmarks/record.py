"""The command line of benchmarks, and the JSON files of what they measure.

A file has the commit that was measured, the versions of packages and the number of cores, and next to it, the figures
that are drawn from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "_static"
PACKAGES = "annbatch", "annbatch-distributed", "anndata", "numpy", "pandas", "scipy", "torch", "zarr", "zarrs"

#: Draws the figures of what a file has, the first one at a path.
type Draw = Callable[[dict[str, Any], Path], None]


def arguments(doc: str | None, name: str, draw: Draw | None = None, **options: dict[str, Any]) -> argparse.Namespace:
    """Return what the command line has: --small, --out and further options, which change what is measured.

    Parameters
    ----------
    doc
        Docstring of the script.
    name
        Name of the file of the documentation. Only a run without options writes it.
    draw
        Function for --draw, which draws the figures of an earlier run and ends the process.
    options
        Keywords for ``add_argument``, by the name of an option.
    """
    commit()  # before anything is measured
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="run at a size for tests")
    for option, keywords in options.items():
        parser.add_argument(f"--{option}", **keywords)
    parser.add_argument("--out", type=Path, help="path of the JSON file; figures have the same name")
    if draw:
        parser.add_argument("--draw", action="store_true", help="draw the figures of the file, without measuring")
    found = parser.parse_args()
    if not found.out and (
        changed := [one for one in ("small", *options) if getattr(found, one) != parser.get_default(one)]
    ):
        parser.error(f"pass --out with --{changed[0]}, so that the file of the documentation is kept")
    found.out = (found.out or FOLDER / name).with_suffix(".json")
    if draw and found.draw:
        draw(json.loads(found.out.read_text()), found.out.with_suffix(".svg"))
        sys.exit()
    return found


def write(out: Path, versions: Mapping[str, Any] | None = None, draw: Draw | None = None, **content: object) -> None:
    """Write a file and its figures; the default versions are of this environment."""
    versions = versions or {package: metadata.version(package) for package in PACKAGES}
    about = {"commit": commit(), "python": platform.python_version(), "versions": versions, "cores": os.cpu_count()}
    text = json.dumps(about | content, indent=1) + "\n"
    out.write_text(text)
    if draw:
        draw(json.loads(text), out.with_suffix(".svg"))


def show(*lines: dict[str, Any]) -> list[dict[str, Any]]:
    """Print lines of a file while it is measured, and return them."""
    for line in lines:
        values = (f"{value:.4g}" if isinstance(value, float) else value for value in line.values())
        print(*(f"{name}: {value}" for name, value in zip(line, values, strict=True)), sep="  ", flush=True)
    return list(lines)


@cache
def commit() -> str | None:
    """Return the commit of this repository, with "+changes" if code has changed since; None without git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+changes" * bool(
            git("status", "--porcelain", "src", "benchmarks")
        )
    except (OSError, subprocess.CalledProcessError):
        return None
