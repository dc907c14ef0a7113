"""Run a script as ``python`` does, without zarrs: ``python -m tests.processes.without_zarrs SCRIPT [ARGUMENT...]``."""

from __future__ import annotations

import runpy
import sys

import zarr.registry

if __name__ == "__main__":
    # what Python takes for a module that can't be imported, even where a process has imported it before
    sys.modules["zarrs"] = None  # type: ignore[assignment]  # a module, or this
    zarr.registry._pipeline_registry.lazy_load_list.clear()  # where zarr has noted it, as installed
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
