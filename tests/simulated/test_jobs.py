"""Simulated jobs keep all laws, and planted faults are where they were."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings

from tests.simulated.planted import FAULTS, ROOT
from tests.simulated.run import outcomes

#: Jobs that one test runs.
N_EACH = 25
#: 500 jobs by default.
N_JOBS = N_EACH * settings().max_examples


@pytest.mark.parametrize("first", range(0, N_JOBS, N_EACH))
def test_jobs_keep_all_laws(first: int) -> None:
    """Each epoch has the batches of an uninterrupted one, whatever happens to the job; its checks say what is true."""
    ended = outcomes(range(first, first + N_EACH))
    assert ended["ran"] > 0.6 * N_EACH


def test_command_shows_a_job_step_by_step() -> None:
    command = [sys.executable, "-m", "tests.simulated", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.startswith("job 3: ")
    assert "ranks start" in done.stdout


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_in_one_place(name: str) -> None:
    """Code that has moved would make a planted fault pass unnoticed."""
    fault = FAULTS[name]
    assert (ROOT / "src/annbatch_distributed" / fault.file).read_text().count(fault.right) == 1
    assert fault.wrong != fault.right
