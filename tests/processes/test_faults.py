"""A rank dies in the middle of an epoch, and the job comes back: what was trained on in the end, row by row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.processes.configurations import CHUNKS, DONORS
from tests.processes.job_faults import DIES_IN, EPOCHS, EVERY, HELD_OUT, WORLD_SIZE, Model, Step
from tests.processes.launch import forked_ranks, free_port, python, run
from tests.samplers import flat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECONDS = 200  # the limit for a job that comes back, which takes up to a third of that on a busy machine
pytestmark = pytest.mark.timeout(SECONDS + 40)

JOB = "-m", "tests.processes.job_faults"
EPOCH, DIED_AT = DIES_IN
# else the ranks that are started again find the addresses of those before them: gloo puts them where the agents meet
# (https://github.com/pytorch/pytorch/issues/135712)
STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a job writes; in the end, no process that wrote there is alive."""
    yield tmp_path
    alive = [pid for pid in (int(path.stem) for path in tmp_path.glob("*.process")) if _is_alive(pid, tmp_path)]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive, "ranks that outlived their job"


def _is_alive(pid: int, folder: Path) -> bool:
    """Whether a process is a rank of this job: its number may belong to another one by now, and it may be a zombie."""
    command = ["ps", "-ww", "-o", "stat=,args=", "-p", str(pid)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # it fails if there is none
    return str(folder) in shown and not shown.startswith("Z")


def steps_of(folder: Path) -> list[Step]:
    """What all ranks did in the epoch in which one died, also what no checkpoint knew of."""
    lines = [line for path in folder.glob("*.steps") for line in path.read_text().splitlines()]
    return [step for step in (Step(**json.loads(line)) for line in lines) if step.epoch == EPOCH]


def models_of(folder: Path) -> list[Model]:
    """What the training came to, on each rank of the last attempt."""
    return [Model.of_dict(json.loads(path.read_text())) for path in sorted(folder.glob("trained*.json"))]


def check(folder: Path, ranks: int, remainder: str) -> tuple[list[Step], list[Step]]:
    """Count the rows; return the steps that were lost with the rank that died, and those of the ranks that go on."""
    steps = steps_of(folder)
    first = [step for step in steps if step.attempt == 0 and step.world_size == WORLD_SIZE]
    after = [step for step in steps if step not in first]
    kept = [step for step in first if step.step <= EVERY]
    lost = [step for step in first if step.step > EVERY]
    assert {step.rank for step in first} == set(range(WORLD_SIZE))
    assert {step.step for step in lost} == set(range(EVERY + 1, DIED_AT))
    assert {step.world_size for step in after} == {ranks}
    assert {step.rank for step in after} == set(range(ranks))

    models = models_of(folder)
    assert len(models) == ranks
    assert all(model == models[0] for model in models)
    # as every rank wrote it down, and as the model that went through the checkpoint has it
    rows = flat(step.rows for step in kept + after)
    trained_on = np.flatnonzero(DONORS != HELD_OUT).tolist()
    assert len(set(rows)) == len(rows)
    n_lost = len(trained_on) - len(rows)  # under drop, the rest of a batch for each rank, and fewer batches than ranks
    assert 0 < n_lost < (WORLD_SIZE + ranks) * CHUNKS["batch_size"] if remainder == "drop" else not n_lost
    assert HELD_OUT not in DONORS[rows]
    assert Counter(models[0].epochs[EPOCH]) == Counter(rows)
    for epoch in range(EPOCHS):
        read = models[0].epochs[epoch]
        assert epoch == EPOCH or sorted(read + models[0].lost[epoch]) == trained_on
    return lost, after


def test_after_a_rank_was_killed_as_many_ranks_go_on_from_the_checkpoint(collection: Path, folder: Path) -> None:
    job = *JOB, collection, folder, "exact", "rank"
    run(*forked_ranks(*job, ranks=WORLD_SIZE), seconds=SECONDS / 2, expect=[1, -signal.SIGKILL, 1])
    run(*forked_ranks(*job, ranks=WORLD_SIZE, attempt=1), seconds=SECONDS / 2)
    lost, after = check(folder, WORLD_SIZE, "exact")
    # what was lost is done again as it was
    done = {(step.rank, step.step): step.rows for step in after}
    assert lost
    assert all(step.rows == done[step.rank, step.step - EVERY] for step in lost)


def test_after_a_rank_was_killed_a_job_of_fewer_ranks_goes_on_from_the_checkpoint(
    collection: Path, folder: Path
) -> None:
    job = *JOB, collection, folder, "drop", "rank"
    run(*forked_ranks(*job, ranks=WORLD_SIZE), seconds=SECONDS / 2, expect=[1, -signal.SIGKILL, 1])
    run(*forked_ranks(*job, ranks=2), seconds=SECONDS / 2)
    check(folder, 2, "drop")


def test_after_a_machine_is_gone_the_ranks_that_are_left_go_on_from_the_checkpoint(
    collection: Path, folder: Path
) -> None:
    """Two agents, with two ranks and one; torchrun takes the silent one for dead, and starts the others again."""
    times = "last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=5"  # in seconds, 30 and 5 unless said
    agent = ["--nnodes=1:2", "--max-restarts=1", "--local-addr=127.0.0.1", "--rdzv-backend=c10d"]
    meeting = [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    job = *JOB, collection, folder, "exact", "machine"
    staying, going = (
        python(
            "-m", "torch.distributed.run", *agent, *meeting, f"--nproc-per-node={ranks}", f"--rdzv-conf={conf}", *job
        )
        for ranks, conf in ((2, f"is_host=true,{times}"), (1, f"is_host=false,{times}"))
    )
    run(staying, going, seconds=SECONDS, environments=[STORE, STORE], expect=[0, -signal.SIGKILL])
    check(folder, 2, "exact")
