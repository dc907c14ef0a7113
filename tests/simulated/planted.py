"""Faults that are planted into the package, each of which simulated jobs must find within a minute.

``python -m tests.simulated.planted [NAME...]`` plants all or the named ones, each in a copy of the package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: Within how many seconds a fault must be found.
LIMIT = 60


class Fault(NamedTuple):
    """A part of a file, and what replaces it."""

    file: str
    right: str
    wrong: str


#: By name: what goes wrong.
FAULTS = {
    name: Fault(**fault) for name, fault in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}


def found(name: str) -> str | None:
    """Plant a fault, and return what the first failing job says; None if all jobs of a minute pass.

    A TimeoutExpired if a job doesn't end, and an AssertionError if no job could run.
    """
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        for copied in ("src", "tests"):
            shutil.copytree(ROOT / copied, Path(folder) / copied, ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder) / "src/annbatch_distributed" / fault.file
        text = file.read_text()
        assert text.count(fault.right) == 1, f"{fault.file} must have once: {fault.right}"
        file.write_text(text.replace(fault.right, fault.wrong))
        run = [sys.executable, "-m", "tests.simulated", "0", "--jobs=1000000", f"--seconds={LIMIT}", "--no-shrinking"]
        ended = subprocess.run(
            run,
            env=os.environ | {"PYTHONPATH": f"{folder}/src"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=5 * LIMIT,
            check=False,
        )
    # an error of the fault itself, such as one of syntax, would end all jobs before the first
    assert " jobs, " in ended.stdout, ended.stderr
    return ended.stdout if ended.returncode else None


def main() -> None:
    """Plant all faults, or the named ones."""
    missed = []
    for name in sys.argv[1:] or FAULTS:
        began = time.monotonic()
        said = found(name)
        print(f"{'found' if said else 'MISSED'} in {time.monotonic() - began:.0f} s: {name}", flush=True)
        if said is None:
            missed.append(name)
        else:
            print("   ", next((line for line in said.splitlines() if "Error" in line), said[-200:])[:160], flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
