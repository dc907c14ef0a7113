"""Ranks from the variables of mpirun, and from MPI itself; test_torchrun.py tests torchrun."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np

from tests.processes import configurations
from tests.processes.job_environment import N_OBS
from tests.processes.launch import MPIRUN, OPEN_MPI, python, run
from tests.processes.results import read_results
from tests.processes.rows import read
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

# variables of launchers, which have the rank of a process
OF_LAUNCHERS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(TORCHELASTIC|OMPI|PMIX?|PRTE|SLURM)_.*")


def check(folder: Path) -> None:
    """Check that two processes have different ranks, and that together they read every row once."""
    first, second = read_results(folder)
    assert first["world_size"] == second["world_size"] == 2
    assert sorted(first["rows"] + second["rows"]) == list(range(N_OBS))
    assert first["rows"]
    assert second["rows"]


def test_mpirun_processes_have_different_ranks(
    collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under mpirun, each process has its own rank, and the example sums every count once."""
    for name in filter(OF_LAUNCHERS.fullmatch, [*os.environ]):
        monkeypatch.delenv(name)

    def start(mpirun: str, *script: object) -> str:
        command = python("-m", "tests.processes.job_environment", tmp_path, *script)
        (done,) = run([mpirun, "-n", "2", *command], environments=[OPEN_MPI])
        check(tmp_path)
        return done.stdout

    # mpirun of this machine, if one is installed, and of the tests' dependency
    if (own := shutil.which("mpirun") or MPIRUN) != MPIRUN:
        start(own)
    printed = start(MPIRUN, "examples/custom_ranks.py", "--ranks", "mpi", collection, tmp_path)
    n_obs = configurations.N_OBS
    assert f"2 ranks have read {n_obs} rows in 12 batches, as planned" in printed
    assert sorted(flat(read(tmp_path, "train-0"))) == list(range(n_obs))
    sums = [np.load(tmp_path / f"rank{rank}.npy") for rank in range(2)]
    cells = ad.read_h5ad(collection.with_suffix(".h5ad")).X
    assert np.array_equal(sum(sums), cells.toarray().sum(axis=0, dtype=float))
