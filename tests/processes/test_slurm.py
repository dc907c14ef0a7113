"""The script for Slurm: a signal stops jobs of torchrun and srun, which resume with the next batch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import zarr
from annbatch.samplers import RandomSampler

from tests.processes.launch import ROOT, forked, free_port, run, torchrun
from tests.processes.rows import read_batches
from tests.samplers import batches, job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


FOLDER = ROOT / "examples" / "slurm"
SCRIPT = "examples/slurm/train.py"
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
N_OBS = 20_000  # of the fixture


def test_signal_stops_ranks_after_same_step(cells: Path, tmp_path: Path) -> None:
    """A signal stops all ranks after the same step, and the job resumes with the next step."""
    shutil.copytree(cells, collection := tmp_path / "cells.zarr")
    is_labeled = np.random.default_rng(0).random(N_OBS) < 0.9
    codes = zarr.open_array(collection / "dataset_0/obs/cell_type/codes")
    codes[:] = np.where(is_labeled, codes[:], -1)
    logging = "-m", "tests.processes.logging_rows", tmp_path
    command = [*logging, SCRIPT, collection, tmp_path / "checkpoint.pt", "--epochs", 1000]

    def send(number: signal.Signals) -> Callable[[list[int]], None]:
        """Return a function that sends a signal to the last process after more steps than an epoch has."""
        enough = n_steps(tmp_path) + 60
        to_send = [number]

        def when_due(pids: list[int]) -> None:
            if to_send and n_steps(tmp_path) >= enough:
                os.kill(pids[-1], to_send.pop())

        return when_due

    # torchrun receives the signal, forwards it to its ranks, and always exits with 1
    (stopped,) = run(torchrun(SIGNALS, *command, ranks=2), expect=1, meanwhile=send(signal.SIGUSR1))
    assert "stopped in epoch " in stopped.stdout
    after_torchrun = n_steps(tmp_path)

    # one rank receives the signal; each rank has the variables of srun
    slurm = [{"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)} for rank in range(2)]
    torchs = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [variables | torchs for variables in slurm]
    first, _ = run(*[forked(*command)] * 2, environments=environments, meanwhile=send(signal.SIGTERM))
    assert "stopped in epoch " in first.stdout
    assert n_steps(tmp_path) > after_torchrun

    # both ranks have read the same steps of the plan, and a restart continues with the next step
    n_read = n_steps(tmp_path)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["loader"]
    samplers = job(RandomSampler(64, 32, 256), world_size=2, seed=0, mask=is_labeled)
    for rank, sampler in enumerate(samplers):
        planned: list[list[int]] = []
        for epoch in range(saved["epoch"] + 1):
            sampler.set_epoch(epoch)
            planned += batches(sampler.sample(N_OBS))
        epochs = range(len(logged(tmp_path)))
        read = [rows for epoch in epochs for rows in read_batches(tmp_path, f"train-{epoch}")[rank]]
        assert read == planned[:n_read]
        sampler.load_state_dict(saved)
        # after the last batch of an epoch, a new iteration is next
        assert sampler.n_batches(N_OBS) == (len(planned) - n_read or sampler.plan(N_OBS).n_batches(rank))


def n_steps(folder: Path) -> int:
    """Return the number of steps of rank 0."""
    return sum(path.read_text().count("\n") for path in logged(folder))


def logged(folder: Path) -> list[Path]:
    """Return the log of rank 0 for each epoch."""
    return list(folder.glob("train-*-rank0.txt"))


@pytest.mark.parametrize("script", ["srun.sbatch", "torchrun.sbatch"])
def test_slurm_scripts_request_started_ranks(script: str) -> None:
    """The batch scripts are valid bash, and request the ranks that they start."""
    subprocess.run(["bash", "-n", FOLDER / script], check=True)
    text = (FOLDER / script).read_text()
    assert SCRIPT in text
    assert "--signal=B:USR1@120" in text
    assert ("torchrun" in text) == (SIGNALS in text)
