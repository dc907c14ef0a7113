"""One rank of a training by Hugging Face's Trainer: ``-m tests.frameworks.job_transformers FOLDER [CHECKPOINT]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import torch
from accelerate import PartialState
from annbatch.samplers import RandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from annbatch_distributed import DistributedSampler, StatefulLoader


class Mean(torch.nn.Module):
    """Notes the rows of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows: list[list[int]] = []

    def forward(self, cells: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        self.rows.append(rows.tolist())
        return {"loss": (self.weight * cells).mean()}


class CellsTrainer(Trainer):
    """A Trainer of a loader that is shared out already."""

    batches: Any = None

    def get_train_dataloader(self) -> Any:
        return self.batches


class SaveLoader(TrainerCallback):
    """Saves the state of the loader in each checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
            path.write_text(json.dumps(others["train_dataloader"].state_dict()))


def inputs(batch: Any) -> dict[str, torch.Tensor]:
    """What the model takes of a batch."""
    return {"cells": batch["X"], "rows": torch.as_tensor(batch["index"])}


def main(folder: Path, checkpoint: Path | None) -> None:
    """Train one rank for three epochs, or what is left of them."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=3,
        save_steps=3,
        use_cpu=True,
        ddp_backend="gloo",
        ignore_data_skip=True,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        gradient_accumulation_steps=2,
    )
    sampler = DistributedSampler(RandomSampler(8, 2, 8), dist_info=PartialState(), seed=0, sharding="shuffled")
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, to="torch", preload_to_gpu=False)
    loader.add_adata(ad.AnnData(np.arange(160, dtype="float32").reshape(-1, 1))).check_ranks_agree()
    model = Mean()
    trainer = CellsTrainer(model, arguments, callbacks=[SaveLoader()])
    trainer.batches = loader.to_dataloader(collate_fn=inputs)
    if checkpoint is not None:
        trainer.batches.load_state_dict(json.loads((checkpoint / "loader.json").read_text()))
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    name = f"{'whole' if checkpoint is None else checkpoint.name}-rank{loader.sampler.rank}.json"
    (folder / name).write_text(json.dumps(model.rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
