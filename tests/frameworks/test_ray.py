"""Ray Train with two workers, one of which fails."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.processes.configurations import LABELED
from tests.processes.launch import ROOT, none_left, python, run
from tests.processes.rows import BATCH_SIZE, read_batches
from tests.samplers import flat

if TYPE_CHECKING:
    from collections.abc import Iterator

N_BATCHES = -(-len(LABELED) // (2 * BATCH_SIZE))  # of an epoch, on each of two ranks


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Folder in the command lines of Ray's processes, any of which is an error if it remains at the end."""
    # not tmp_path, whose name is too long for a socket
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, none_left(folder, seconds=60):
        yield Path(folder)


def test_restarted_workers_resume_at_checkpoint(collection: Path, tmp_path: Path, ray_folder: Path) -> None:
    """Restarted workers resume where the checkpoint was saved."""
    environment = {
        "PYTHONPATH": str(ROOT),  # for workers, which run in folders of Ray
        # the node's address is then 127.0.0.1, on Linux too
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_TMPDIR": str(ray_folder),
        # otherwise it writes one to the home folder
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        # otherwise it installs an environment for its workers, if uv runs the tests
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # starts one process less
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }
    job = "--collection", collection, "--label", "label", "--epochs", 2, "--checkpoints", tmp_path
    # fails one batch after a checkpoint
    script = "examples/ray_train.py", *job, "--every", 2, "--fail-at", 3
    run(python("-m", "tests.frameworks.job_ray", tmp_path, *script), environments=[environment])

    order = []
    for epoch in range(2):
        ranks = read_batches(tmp_path, f"train-{epoch}")
        if epoch == 0:  # both attempts
            assert [len(batches) for batches in ranks] == [3 + N_BATCHES - 2] * 2
            for batches in ranks:
                assert batches.pop(3) == batches[2]
        assert sorted(flat(flat(ranks))) == LABELED
        order.append(ranks)
    assert order[0] != order[1]
