"""Real jobs of virtual ranks: after a rank was killed, the losses are the same on 4, 2 and 1 ranks."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.processes.launch import forked_ranks, run

if TYPE_CHECKING:
    from pathlib import Path


#: The step after which a rank is killed.
STOP_AT = 6


def test_virtual_ranks_resume_with_same_losses(collection: Path, tmp_path: Path) -> None:
    """After a kill, a different number of ranks resumes with the same losses."""

    def train(name: str, ranks: int, stop_at: int = 0, expect: int | list[int] = 0) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        job = "-m", "tests.processes.job_virtual", collection, tmp_path / name, stop_at
        run(*forked_ranks(*job, ranks=ranks), expect=expect)
        return tmp_path / name / "losses.json"

    uninterrupted = json.loads(train("whole", 4).read_text())
    assert not train("stopped", 2, STOP_AT, expect=[1, -signal.SIGKILL]).exists()
    resumed = json.loads(train("stopped", 1).read_text())

    # epoch, step, mean loss and rows of all ranks
    assert [(epoch, step, rows) for epoch, step, _, rows in resumed] == [
        (epoch, step, rows) for epoch, step, _, rows in uninterrupted
    ]
    losses = [loss for _, _, loss, _ in uninterrupted]
    assert len({*losses}) == len(losses) > 15
    # gradients are summed in a different order
    assert [loss for _, _, loss, _ in resumed] == pytest.approx(losses, rel=1e-4, abs=1e-6)
