"""Train a cell-type classifier with Hugging Face's Trainer, on any number of ranks.

Run it, and resume it from a checkpoint::

    torchrun --standalone --nproc-per-node 2 transformers_trainer.py cells.zarr
    torchrun --standalone --nproc-per-node 2 transformers_trainer.py cells.zarr trained/checkpoint-20
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from accelerate import PartialState
from annbatch import DatasetCollection
from torch.nn.functional import cross_entropy
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from annbatch_distributed import StatefulLoader

if TYPE_CHECKING:
    from annbatch_distributed.loader.workers import WorkerDataLoader


class Classifier(torch.nn.Module):
    """A linear classifier that returns its loss, as the Trainer expects."""

    def __init__(self, n_genes: int, n_types: int) -> None:
        super().__init__()
        self.network = torch.nn.Linear(n_genes, n_types)

    def forward(
        self, cells: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the loss of a batch."""
        return {"loss": cross_entropy(self.network(cells), labels)}


class CellsTrainer(Trainer):
    """A Trainer of the batches of a loader."""

    batches: WorkerDataLoader

    def get_train_dataloader(self) -> WorkerDataLoader:
        """Return the loader, which is sharded already."""
        return self.batches


class SaveLoader(TrainerCallback):
    """Saves the state of the loader with each checkpoint."""

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 the Trainer passes it
        **objects: Any,  # noqa: ANN401 of the Trainer, such as its loader
    ) -> None:
        """Write the state, which is the same on every rank."""
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
            text = json.dumps(objects["train_dataloader"].state_dict())
            (folder / "loader.json").write_text(text)


def train(
    collection: DatasetCollection,
    types: pd.Series,
    checkpoint: str | None = None,
    **options: Any,  # noqa: ANN401 of TrainingArguments
) -> Trainer:
    """Train, from a checkpoint if there is one."""
    arguments = TrainingArguments(
        ignore_data_skip=True, remove_unused_columns=False, report_to=[], **options
    )
    loader = StatefulLoader.from_collection(
        collection,
        dist_info=PartialState(),  # set up by TrainingArguments
        mask=types.notna(),
        remainder="drop",
        to="torch",
    )
    loader.check_ranks_agree()
    classes = pd.Categorical(types).categories

    def inputs(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        labels = torch.tensor(classes.get_indexer(batch["obs"][types.name]))
        return {"cells": batch["X"].to_dense().float(), "labels": labels}

    model = Classifier(loader.n_var, len(classes))
    trainer = CellsTrainer(model, arguments, callbacks=[SaveLoader()])
    trainer.batches = loader.to_dataloader(collate_fn=inputs)
    if checkpoint is not None:
        state = json.loads(Path(checkpoint, "loader.json").read_text())
        trainer.batches.load_state_dict(state)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


class EvaluatingTrainer(CellsTrainer):
    """A Trainer that counts each held-out cell once, whatever the sizes of batches."""

    held_out: WorkerDataLoader

    def evaluate(
        self,
        *_: Any,  # noqa: ANN401 a dataset, which this trainer has already
        metric_key_prefix: str = "eval",
        **__: Any,  # noqa: ANN401 options of other metrics
    ) -> dict[str, float]:
        """Return the mean loss of all held-out cells."""
        model: Any = self.model
        model.eval()
        total = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of cells
        for batch in self.held_out:
            inputs = self._prepare_inputs(batch)
            n_cells = len(inputs["labels"])
            with torch.no_grad():
                loss = model(**inputs)["loss"].item()
            total += torch.tensor([loss * n_cells, n_cells])
        total = self.accelerator.reduce(total.to(self.args.device))
        metrics = {f"{metric_key_prefix}_loss": (total[0] / total[1]).item()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a classifier of cells.")
    parser.add_argument("collection")
    parser.add_argument("checkpoint", nargs="?", help="folder to resume from")
    parser.add_argument("--label", default="cell_type", help="column of obs to learn")
    options = parser.parse_args()
    cells = DatasetCollection(options.collection, mode="r")
    train(
        cells,
        cells.obs([options.label])[options.label],
        options.checkpoint,
        output_dir="trained",
        num_train_epochs=1,
        save_steps=20,
    )
