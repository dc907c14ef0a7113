"""The example of Hugging Face's Trainer: an uninterrupted job, a resumed job, and the evaluation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.processes.launch import ROOT, forked_ranks, run
from tests.processes.rows import check_continues, read_batches
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path


SCRIPT = ROOT / "examples/transformers_trainer.py"
#: Evaluates 101 cells, whose losses are their numbers, with the documented trainer and with Hugging Face's trainer.
EVALUATION = """
import anndata as ad
import numpy as np
from annbatch.samplers import SequentialSampler
from annbatch_distributed import DistributedSampler


class Numbers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, cells, labels):
        return {"loss": cells.mean() + 0 * self.weight.sum()}


class StockTrainer(CellsTrainer):
    def get_eval_dataloader(self, _=None):
        return self.held_out


def make(trainer_class, remainder):
    options = {"report_to": [], "use_cpu": True, "remove_unused_columns": False, "disable_tqdm": True}
    trainer = trainer_class(Numbers(), TrainingArguments("trained", ddp_backend="gloo", **options))
    sampler = DistributedSampler(SequentialSampler(8, 2, 16), dist_info=PartialState(), remainder=remainder)
    loader = StatefulLoader(batch_sampler=sampler, to="torch", preload_to_gpu=False)
    loader.add_adata(ad.AnnData(np.arange(101, dtype="float32")[:, None]))
    trainer.held_out = loader.to_dataloader(collate_fn=lambda b: {"cells": b["X"], "labels": b["X"][:, 0]})
    return trainer


if __name__ == "__main__":
    losses = {"page": make(EvaluatingTrainer, "exact").evaluate()["eval_loss"]}
    losses["drop"] = make(StockTrainer, "drop").evaluate()["eval_loss"]
    for remainder in ("exact", "pad", "keep"):
        try:
            make(StockTrainer, remainder).evaluate()
        except RuntimeError as error:
            losses[remainder] = str(error)
    print(json.dumps(losses))
"""

N_BATCHES = 39  # of each rank in an epoch: 19 steps of two batches and one step of one


@pytest.fixture(scope="module")
def job(cells: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Folder of a job of two ranks that trains, resumes and evaluates, and output of one rank and of two."""
    folder = tmp_path_factory.mktemp("transformers")
    evaluate = folder / "evaluate.py"
    evaluate.write_text(SCRIPT.read_text().partition("if __name__")[0] + EVALUATION)
    on_two = forked_ranks("-m", "tests.frameworks.job_transformers", SCRIPT, evaluate, cells, folder, ranks=2)
    first, _, alone = run(*on_two, *forked_ranks(evaluate, ranks=1))
    return folder, {"1 rank": alone.stdout, "2 ranks": first.stdout}


def test_trainer_resumes_as_if_uninterrupted(job: tuple[Path, dict[str, str]]) -> None:
    """A job resumes from a checkpoint as if it had not been interrupted."""
    whole, rest = job[0] / "whole", job[0] / "rest"
    for epoch in range(3):
        one, other = (flat(batches) for batches in read_batches(whole, f"train-{epoch}"))
        assert len({*one, *other}) == len(one) + len(other) == 2 * N_BATCHES * 256
    # five steps of the second epoch were done
    check_continues(whole, rest, epoch=1, n_batches=N_BATCHES - 5 * 2)
    check_continues(whole, rest, epoch=2, n_batches=N_BATCHES)
    assert not list(rest.glob("train-0-*"))


@pytest.mark.parametrize("ranks", ["1 rank", "2 ranks"])
def test_evaluation_counts_each_cell_once(ranks: str, job: tuple[Path, dict[str, str]]) -> None:
    """The documented trainer counts each cell once; the stock trainer raises unless all batches are full."""
    losses = json.loads(job[1][ranks].splitlines()[-1])
    assert losses["page"] == pytest.approx(50)
    # of 101 cells in batches of 16, one rank drops 5 and two drop 5: cells 0 to 95
    assert losses["drop"] == pytest.approx(47.5)
    assert all("override evaluate" in losses[remainder] for remainder in ("exact", "pad", "keep"))
