"""Ranks that ask the variables of their launcher: of real ones where they run here, and as the others set them."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from tests.processes.job_environment import N_OBS, Asked, ask
from tests.processes.launch import MPIRUN, OPEN_MPI, python, run, torchrun

if TYPE_CHECKING:
    from pathlib import Path

JOB = "-m", "tests.processes.job_environment"
SECONDS = 180  # the limit for a launch, which takes about five

# what tells a process that a launcher started it, and which one it is
OF_LAUNCHERS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(TORCHELASTIC|OMPI|PMIX?|PRTE|SLURM)_.*")
# that of the tests' own dependency, and one of this machine if it has another
MPIRUNS = dict.fromkeys([MPIRUN, shutil.which("mpirun") or ""])

# as the launchers set them; Slurm's as srun does within a batch script
SET_BY = {
    "torchrun": [{"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"} for rank in range(2)],
    "open mpi": [{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"} for rank in range(2)],
    "mpich": [{"PMI_RANK": str(rank), "PMI_SIZE": "2"} for rank in range(2)],
    "slurm": [
        {
            "SLURM_JOB_ID": "3",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "2",
        }
        for rank in range(2)
    ],
}


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if OF_LAUNCHERS.fullmatch(name):
            monkeypatch.delenv(name)


def asked(folder: Path) -> list[Asked]:
    """What every process of a job has learned, by rank."""
    told = [Asked(**json.loads(path.read_text())) for path in folder.iterdir()]
    return sorted(told, key=lambda one: one.rank)


def check(told: list[Asked], world_size: int) -> None:
    """Check that every process is another rank, and that together they read every row once."""
    assert [(one.rank, one.world_size) for one in told] == [(rank, world_size) for rank in range(world_size)]
    assert sorted(row for one in told for row in one.rows) == list(range(N_OBS))
    assert all(one.rows for one in told)


def ask_with(variables: dict[str, str]) -> Asked:
    """What a process is told that has the variables of a launcher: this one, since nobody asks twice."""
    with mock.patch.dict(os.environ, variables):
        return ask()


@pytest.mark.parametrize("variables", SET_BY.values(), ids=SET_BY)
def test_by_the_variables_of_a_launcher_every_process_is_another_rank(variables: list[dict[str, str]]) -> None:
    check(list(map(ask_with, variables)), 2)


IN_A_TASK = {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


def test_under_torchrun_every_process_is_another_rank_also_within_a_task_of_slurm(tmp_path: Path) -> None:
    run(torchrun(*JOB, tmp_path, ranks=2), environments=[IN_A_TASK], seconds=SECONDS)
    check(asked(tmp_path), 2)


@pytest.mark.parametrize("mpirun", [mpirun for mpirun in MPIRUNS if mpirun])
def test_under_mpirun_every_process_is_another_rank(mpirun: str, tmp_path: Path) -> None:
    run([mpirun, "-n", "2", *python(*JOB, tmp_path)], environments=[OPEN_MPI], seconds=SECONDS)
    check(asked(tmp_path), 2)


def test_a_batch_script_that_does_not_call_srun_fails() -> None:
    batch_script = {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    with pytest.raises(RuntimeError, match="start the script with srun"):
        ask_with(batch_script)


def test_a_rank_that_a_batch_script_exported_for_all_fails_where_it_is_another() -> None:
    first, second = ({"RANK": "0", "WORLD_SIZE": "2"} | task for task in SET_BY["slurm"])
    assert ask_with(first).rank == 0
    with pytest.raises(ValueError, match=r"RANK=0, WORLD_SIZE=2.*SLURM_PROCID=1, SLURM_NTASKS=2"):
        ask_with(second)
