"""The page about Hugging Face's Trainer, on two ranks: a job that is resumed, and one that ran through."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.processes.launch import ROOT, forked_ranks, run
from tests.processes.rows import check_goes_on, read_batches
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path


N_BATCHES = 39  # of each rank in an epoch: 20 steps of two, or of one that is left over


def test_a_job_goes_on_from_a_checkpoint_as_if_it_had_not_been_interrupted(cells: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/frameworks/transformers.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    for folder, checkpoint in ((whole, []), (rest, [whole / "checkpoint-25"])):
        folder.mkdir()
        job = "-m", "tests.frameworks.job_transformers", tmp_path / "train.py", cells, folder
        run(*forked_ranks(*job, *checkpoint, ranks=2))

    for epoch in range(3):
        one, other = (flat(batches) for batches in read_batches(whole, f"train-{epoch}"))
        assert len({*one, *other}) == len(one) + len(other) == 2 * N_BATCHES * 256
    # five steps of the second epoch were done
    check_goes_on(whole, rest, epoch=1, n_batches=N_BATCHES - 5 * 2)
    check_goes_on(whole, rest, epoch=2, n_batches=N_BATCHES)
    assert not list(rest.glob("train-0-*"))
