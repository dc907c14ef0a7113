"""Real jobs of virtual ranks: the losses are the same on two ranks and on one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.processes.launch import forked_ranks, run

if TYPE_CHECKING:
    from pathlib import Path


def test_virtual_ranks_have_losses_of_fewer_ranks(collection: Path, tmp_path: Path) -> None:
    """DDP averages the gradients of two ranks to the gradients of one rank that runs all virtual ranks."""
    job = "-m", "tests.processes.job_virtual", collection
    ranks = [rank for n in (1, 2) for rank in forked_ranks(*job, tmp_path / f"{n}.json", ranks=n)]
    run(*ranks)
    alone, on_two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))

    # mean loss and rows of all ranks
    assert [rows for _, rows in on_two] == [rows for _, rows in alone]
    losses = [loss for loss, _ in alone]
    assert len({*losses}) == len(losses) > 15
    # gradients are summed in a different order
    assert [loss for loss, _ in on_two] == pytest.approx(losses, rel=1e-4, abs=1e-6)
