"""A machine dies in mid-epoch, torchrun restarts the job, and each row is trained on once."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.processes.configurations import DONORS
from tests.processes.job_faults import DIES_IN, EPOCHS, EVERY, HELD_OUT, WORLD_SIZE, Step
from tests.processes.launch import free_port, none_left, python, run
from tests.processes.results import read_results
from tests.samplers import flat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


EPOCH, DIED_AT = DIES_IN
# otherwise restarted ranks find the addresses of earlier ranks, which Gloo keeps in the store of the agents
# (https://github.com/pytorch/pytorch/issues/135712)
STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Folder of a job; at the end, no process has it in its command line."""
    with none_left(str(tmp_path), seconds=0):
        yield tmp_path


def steps_of(folder: Path) -> list[Step]:
    """Return the steps of all ranks in the epoch in which the machine dies, also after the last checkpoint."""
    lines = [line for path in folder.glob("*.steps") for line in path.read_text().splitlines()]
    return [step for step in (Step(**json.loads(line)) for line in lines) if step.epoch == EPOCH]


def test_remaining_machine_resumes_from_checkpoint(collection: Path, folder: Path) -> None:
    """One of two torchrun agents dies, and the ranks of the other agent resume from the checkpoint."""
    # in seconds; the defaults are 30 and 5
    times = "last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=5"
    agent = ["--nnodes=1:2", "--max-restarts=1", "--local-addr=127.0.0.1", "--rdzv-backend=c10d"]
    meeting = [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    job = "-m", "tests.processes.job_faults", collection, folder
    surviving, dying = (
        python(
            "-m", "torch.distributed.run", *agent, *meeting, f"--nproc-per-node={ranks}", f"--rdzv-conf={conf}", *job
        )
        for ranks, conf in ((2, f"is_host=true,{times}"), (1, f"is_host=false,{times}"))
    )
    run(surviving, dying, environments=[STORE, STORE], expect=[0, -signal.SIGKILL])

    steps = steps_of(folder)
    before = [step for step in steps if step.world_size == WORLD_SIZE]
    after = [step for step in steps if step not in before]
    assert {step.world_size for step in after} == {2}
    assert {step.rank for step in before} == set(range(WORLD_SIZE))
    assert {step.rank for step in after} == {0, 1}
    assert {step.step for step in before} == set(range(1, DIED_AT))

    model, same = read_results(folder)
    assert model == same
    trained_on = np.flatnonzero(DONORS != HELD_OUT).tolist()
    assert [sorted(rows) for rows in model] == [trained_on] * EPOCHS
    # the logs of all ranks, without the steps after the last checkpoint
    kept = [step for step in before if step.step <= EVERY]
    assert sorted(flat(step.rows for step in kept + after)) == trained_on
