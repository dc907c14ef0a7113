"""Do one task of a library: ``python -m benchmarks.libraries LIBRARY TASK ARGUMENT...``; benchmarks call it.

Answers are JSON on what was standard output; what libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import warnings
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.libraries import remote

if TYPE_CHECKING:
    from collections.abc import Callable

#: No process may have more memory, in bytes: a machine that swaps measures nothing.
MEMORY = 16 << 30


def measured(begin: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that a call takes, and how many megabytes of memory it has at most beyond what was there."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory of the process: see proc(5)
    before, began = status("VmRSS"), time.perf_counter()
    begin()
    return {"seconds": time.perf_counter() - began, "MB": status("VmHWM") - before}


def status(name: str) -> float:
    """Return what Linux says of this process's memory, in megabytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1e3


def main() -> None:
    """Do what the command line says."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # of anndata, zarr and others
    name, task, *arguments = sys.argv[1:]
    library = import_module(f"benchmarks.libraries.{name}")
    if task == "serve":
        from benchmarks.libraries.lockstep import serve  # torch, which not every library has

        serve(library, out, *arguments)
        return
    if task == "remote":
        remote.serve(library, out, *arguments)
        return
    answer: dict[str, Any] = {"versions": {package: metadata.version(package) for package in library.PACKAGES}}
    if task == "write":
        library.write(*map(Path, arguments))
    else:
        numbers = list(map(int, arguments))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        try:
            answer |= measured(library.plan(*numbers) if task == "plan" else library.resume(*numbers))
        except MemoryError as error:
            answer["error"] = repr(error)
        except RuntimeError as error:  # torch says it so
            if "memory" not in str(error) and "alloc" not in str(error):
                raise
            answer["error"] = repr(error)
    print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
