"""collect in other processes: its memory, and the workers of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import psutil
import pytest
import scipy.sparse as sp
from annbatch import DatasetCollection
from dask.distributed import LocalCluster

from annbatch_distributed.collect import Problems, collect
from annbatch_distributed.collect.write import datasets
from tests.collect.test_files import GENES, cells_of, collected, counts, quiet
from tests.processes.job_add import SLICE
from tests.processes.launch import forked, run

if TYPE_CHECKING:
    from pathlib import Path

PEAK = """
import re, sys, warnings
warnings.simplefilter("ignore")
from annbatch_distributed.collect import collect
peaks = []
for path in sys.argv[1:]:
    collect(path, path + ".zarr", memory="200MB", jobs=1, tell=str)
    peaks.append(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(*peaks)
"""


def test_memory_is_limited_for_files_of_any_form(tmp_path: Path) -> None:
    """A large file needs at most the memory limit in addition to the peak of a small file."""
    rng = np.random.default_rng(0)
    large = sp.random(60_000, 2_000, 0.25, "csr", np.float32, rng, lambda n: rng.integers(1, 9, n))
    (tmp_path / "peak.py").write_text(PEAK)
    commands = []
    for form, values in {"csr": large, "csc": large.tocsc(), "dense": large.toarray()}.items():
        files = [tmp_path / f"{form}-{size}.h5ad" for size in ("small", "large")]
        for file, own in zip(files, (values[:100], values), strict=True):
            ad.AnnData(own).write_h5ad(file)
        commands.append(forked(tmp_path / "peak.py", *files))
    for done in run(*commands):
        of_small, of_large = map(int, done.stdout.split())
        assert (of_large - of_small) * 1024 < 200e6  # the values alone take 240 MB


def test_workers_of_a_cluster_write_the_same_collection(tmp_path: Path) -> None:
    """Two workers of a dask cluster write the collection that this process writes."""
    files = [tmp_path / f"{name}.h5ad" for name in "abc"]
    for seed, path in enumerate(files):
        cells_of(path.stem, counts(700, 12, seed), GENES, type=[*"xyz"] * 233 + ["x"]).write_h5ad(path)
    expected, _ = collected(collect(files, tmp_path / "one.zarr", tell=quiet))
    with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster:
        done = collect(files, tmp_path / "two.zarr", scheduler=cluster.scheduler_address, tell=quiet)
    read, _ = collected(done)
    pd.testing.assert_frame_equal(read, expected)
    with pytest.raises(Problems, match="jobs: can't be combined with scheduler"):
        collect(files, tmp_path / "three.zarr", scheduler="tcp://127.0.0.1:1", jobs=2, tell=quiet)


ORPHANS = """
import os, time
from annbatch_distributed.collect.write.jobs import executor_of
if __name__ == "__main__":
    with executor_of(2, None) as executor:
        pids = [executor.submit(os.getpid) for _ in range(2)]
        print(*{pid.result() for pid in pids}, flush=True)
        time.sleep(600)
"""


def test_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    """No process stays if the one that runs collect is killed."""
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [*map(int, parent.stdout.readline().split())]
    assert pids
    parent.kill()
    parent.wait(timeout=60)
    for pid in pids:
        for _ in range(300):
            if not psutil.pid_exists(pid):
                break
            time.sleep(0.1)
        assert not psutil.pid_exists(pid)


def test_killed_addition_leaves_the_old_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a run is killed that adds files, readers find the cells of before, and the next run adds all."""
    for seed, name in enumerate(("old", "new")):
        cells_of(name, counts(40, 12, seed), GENES, type=[*"wxyz"] * 10).write_h5ad(tmp_path / f"{name}.h5ad")
    new, out = tmp_path / "new.h5ad", tmp_path / "cells.zarr"
    monkeypatch.setattr(datasets, "_SLICE", SLICE)
    for path in (tmp_path / "twin.zarr", out):
        collect(tmp_path / "old.h5ad", path, tell=quiet)
    expected = collect(new, add_to=tmp_path / "twin.zarr", memory="5kB", jobs=1, tell=quiet)
    n_new = len([*expected]) - 1
    assert n_new > 1
    metadata, folder, written = (out / "zarr.json").read_text(), out.with_name("cells.zarr.parts"), list[int]()
    # the metadata is replaced, each dataset is moved, and the metadata is replaced again
    for moment in range(n_new + 2):
        run(forked("-m", "tests.processes.job_add", new, out, moment), expect=9)
        (of_first,) = {*folder.glob("cells-*/dataset_1/zarr.json"), *out.glob("dataset_1/zarr.json")}
        written.append(of_first.stat().st_mtime_ns)
        found = DatasetCollection(out, mode="r").obs()
        assert sorted(found.index) == sorted(f"old-{number}" for number in range(40))
    run(forked("-m", "tests.processes.job_add", new, out, n_new + 2))
    assert not folder.exists()
    assert {*written} == {(out / "dataset_1" / "zarr.json").stat().st_mtime_ns}  # datasets are not written again
    assert json.loads((out / "zarr.json").read_text()) == json.loads(metadata)
    pd.testing.assert_frame_equal(DatasetCollection(out, mode="r").obs(), expected.obs())
