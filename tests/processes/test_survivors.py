"""Ranks die and join in mid-epoch, and the other ranks continue without a restart."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

from tests.processes.configurations import N_OBS
from tests.processes.job_survivors import DIES_AT, EPOCHS, JOINS_AT
from tests.processes.launch import forked, run
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path


def test_survivors_and_new_process_read_each_cell_once(collection: Path, tmp_path: Path) -> None:
    """One of four processes is killed, a fifth process joins later, and each cell is read once per epoch."""
    commands = [forked("-m", "tests.processes.job_survivors", name, collection, tmp_path) for name in "abcde"]
    done = run(*commands, expect=[0, 0, -signal.SIGKILL, 0, 0])

    logs = {name: [json.loads(line) for line in (tmp_path / f"{name}.steps").open()] for name in "abcde"}
    # each process logged the same steps while it was running
    assert logs["a"] == logs["b"] == logs["d"]
    assert logs["c"] == logs["a"][: len(logs["c"])]
    assert logs["e"] == logs["a"][-len(logs["e"]) :]
    sizes = []
    for epoch in range(EPOCHS):
        steps = [rows for number, rows in logs["a"] if number == epoch]
        assert sorted(flat(flat(rows) for rows in steps)) == list(range(N_OBS))
        sizes.append([len(rows) for rows in steps])
    n_before, n_joined = DIES_AT[1], JOINS_AT[1]
    assert sizes[0] == [4] * len(sizes[0])
    assert sizes[1] == [4] * n_before + [3] * (len(sizes[1]) - n_before)
    assert sizes[2] == [3] * n_joined + [4] * (len(sizes[2]) - n_joined)
    assert min(len(sizes[1]) - n_before, len(sizes[2]) - n_joined) > 2

    verdicts = {one.stdout.splitlines()[-1] for number, one in enumerate(done) if number != 2}
    (line,) = verdicts
    assert line.endswith(f"Including earlier batches, each of the {N_OBS} rows was read once")
