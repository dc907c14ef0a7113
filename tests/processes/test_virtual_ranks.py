"""Real ranks that run virtual ones: after a rank was killed, the losses are the same on 1, 2 and 4 ranks."""

from __future__ import annotations

import json
import shutil
import signal
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.processes.launch import forked_ranks, run
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path

JOB = "-m", "tests.processes.job_virtual"
VIRTUAL_RANKS = 4
STOP_AT = 6
SECONDS = 150
pytestmark = pytest.mark.timeout(4 * SECONDS)


class Step(NamedTuple):
    """What all ranks together did in one step."""

    epoch: int
    step: int
    loss: float
    rows: list[int]


def steps_of(folder: Path) -> list[Step]:
    return [Step(*step) for step in json.loads((folder / "losses.json").read_text())]


@pytest.fixture(scope="module")
def uninterrupted(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """A training on one rank."""
    folder = tmp_path_factory.mktemp("one")
    run(*forked_ranks(*JOB, collection, folder, VIRTUAL_RANKS, 0, 0, ranks=1), seconds=SECONDS)
    return steps_of(folder)


def check_same(steps: list[Step], expected: list[Step]) -> None:
    assert [step[:2] for step in steps] == [step[:2] for step in expected]
    assert [step.rows for step in steps] == [step.rows for step in expected]
    # gradients are summed up in another order
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=1e-4, abs=1e-6)


def test_after_a_rank_was_killed_any_number_of_ranks_goes_on_with_the_same_losses(
    collection: Path, tmp_path: Path, uninterrupted: list[Step]
) -> None:
    """Workers of a DataLoader read, two for each rank."""
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    job = *JOB, collection
    ends = [1, -signal.SIGKILL]
    run(*forked_ranks(*job, stopped, VIRTUAL_RANKS, 2, STOP_AT, ranks=2), seconds=SECONDS, expect=ends)
    assert not (stopped / "losses.json").exists()
    found = {}
    for ranks in (1, 4):
        folder = shutil.copytree(stopped, tmp_path / str(ranks))
        run(*forked_ranks(*job, folder, VIRTUAL_RANKS, 2, 0, ranks=ranks), seconds=SECONDS)
        found[ranks] = steps_of(folder)
    for steps in found.values():
        check_same(steps, found[4])
    assert len({step.loss for step in uninterrupted}) == len(uninterrupted) > 15
    assert [step[:2] for step in found[1]] == [step[:2] for step in uninterrupted]
    # workers of a sampler that shuffles change the order of the batches, and not which there are
    for epoch in (0, 1):
        one, other = ([step.rows for step in steps if step.epoch == epoch] for steps in (found[1], uninterrupted))
        assert sorted(flat(one)) == sorted(flat(other))
