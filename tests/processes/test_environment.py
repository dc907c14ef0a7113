"""Ranks from the variables of real launchers, torchrun and mpirun."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.processes.job_environment import N_OBS
from tests.processes.launch import MPIRUN, OPEN_MPI, python, run, torchrun
from tests.processes.results import read_results

if TYPE_CHECKING:
    from pathlib import Path

JOB = "-m", "tests.processes.job_environment"

# variables of launchers, which have the rank of a process
OF_LAUNCHERS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(TORCHELASTIC|OMPI|PMIX?|PRTE|SLURM)_.*")
# mpirun of the tests' dependency, and of this machine if it is installed
MPIRUNS = dict.fromkeys([MPIRUN, shutil.which("mpirun") or ""])


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if OF_LAUNCHERS.fullmatch(name):
            monkeypatch.delenv(name)


def check(folder: Path) -> None:
    """Check that two processes have different ranks, and that together they read every row once."""
    first, second = read_results(folder)
    assert first["world_size"] == second["world_size"] == 2
    assert sorted(first["rows"] + second["rows"]) == list(range(N_OBS))
    assert first["rows"]
    assert second["rows"]


IN_A_TASK = {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


def test_torchrun_processes_have_different_ranks(tmp_path: Path) -> None:
    """Under torchrun, each process has its own rank, also within a task of Slurm."""
    run(torchrun(*JOB, tmp_path, ranks=2), environments=[IN_A_TASK])
    check(tmp_path)


@pytest.mark.parametrize("mpirun", [mpirun for mpirun in MPIRUNS if mpirun])
def test_mpirun_processes_have_different_ranks(mpirun: str, tmp_path: Path) -> None:
    run([mpirun, "-n", "2", *python(*JOB, tmp_path)], environments=[OPEN_MPI])
    check(tmp_path)
