"""Train with Lightning, and resume in the middle of an epoch after a stop.

Run it, stop it, and run it again with the last checkpoint, with as many devices as there are then::

    python examples/lightning_ddp.py --collection cells.zarr --hold-out d09 d10
    python examples/lightning_ddp.py --collection cells.zarr --hold-out d09 d10 --resume checkpoints/last.ckpt --devices 1
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from annbatch import DatasetCollection
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from annbatch_distributed import StatefulLoader

type Batch = dict[str, Any]


class Cells(LightningDataModule):
    """Labeled cells: held-out donors to validate on, all other donors to train on."""

    def __init__(
        self, collection: Path, label: str, donor: str, hold_out: list[str]
    ) -> None:
        super().__init__()
        self.collection = DatasetCollection(collection, mode="r")
        obs = self.collection.obs([label, donor])
        donors = obs[donor].astype(str)
        if unknown := {*hold_out} - {*donors}:
            msg = (
                f"--hold-out: no cell's {donor} is {', '.join(sorted(unknown))}; "
                f"choose from {', '.join(sorted({*donors}))}"
            )
            raise ValueError(msg)
        self.label, self.classes = label, pd.Categorical(obs[label]).categories
        # a cell without a donor may be of one that is held out
        self.is_known, self.is_held_out = obs.notna().all(axis=1), donors.isin(hold_out)

    def setup(self, stage: str) -> None:  # noqa: ARG002 Lightning's
        """Open the collection on this rank."""
        self.train = self.load(self.is_known & ~self.is_held_out, shuffle=True)
        self.validation = self.load(self.is_known & self.is_held_out, shuffle=False)
        # if the seed, mask or collection of a rank differs, every rank raises
        self.train.check_ranks_agree()
        self.validation.check_ranks_agree()

    def load(self, mask: pd.Series, *, shuffle: bool) -> StatefulLoader:
        """Return a loader that reads each selected cell once in an epoch."""
        return StatefulLoader.from_collection(
            self.collection,
            batch_size=32,
            dist_info=self.trainer,
            mask=mask,
            shuffle=shuffle,
            seed=0,
            to="torch",
        )

    def train_dataloader(self) -> StatefulLoader:
        """Return the loader itself, without a DataLoader."""
        return self.train

    def val_dataloader(self) -> StatefulLoader:
        """Return the loader of the held-out cells."""
        return self.validation

    # Lightning saves the state of a loader too, but loads it after it has read its length,
    # which depends on the number of devices. Without these two methods, a job on more
    # devices would skip the end of the epoch.
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch."""
        return self.train.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the position."""
        self.train.load_state_dict(state_dict)


class Classifier(LightningModule):
    """A small classifier of cell types."""

    def __init__(self, cells: Cells) -> None:
        super().__init__()
        self.cells = cells
        self.accuracy = MeanMetric()  # sums over ranks

    def configure_model(self) -> None:
        """Create the network, once the collection is open."""
        if hasattr(
            self, "network"
        ):  # Lightning also calls this before trainer.validate
            return
        n_var, n_classes = self.cells.train.n_var, len(self.cells.classes)
        self.network = nn.Sequential(
            nn.Linear(n_var, 64), nn.ReLU(), nn.Linear(64, n_classes)
        )

    def training_step(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch."""
        return cross_entropy(*self.scores_and_targets(batch))

    def validation_step(self, batch: Batch) -> None:
        """Count the cells that are predicted correctly."""
        scores, targets = self.scores_and_targets(batch)
        self.accuracy.update(scores.argmax(dim=1) == targets)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def scores_and_targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the network."""
        labels = batch["obs"][self.cells.label]
        targets = torch.tensor(
            self.cells.classes.get_indexer(labels), device=self.device
        )
        return self.network(torch.log1p(batch["X"].to_dense())), targets

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(
    collection: Path,
    label: str,
    donor: str,
    hold_out: list[str],
    epochs: int,
    devices: int,
    checkpoints: Path,
    every: int,
    resume: Path | None,
) -> None:
    """Train, with one process for each device."""
    torch.manual_seed(0)
    cells = Cells(collection, label, donor, hold_out)
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=devices,
        strategy="ddp",
        max_epochs=epochs,
        callbacks=[
            ModelCheckpoint(
                checkpoints, every_n_train_steps=every, save_top_k=-1, save_last=True
            )
        ],
        # the rest of an epoch that began on a different number of devices has a different
        # length, which Lightning would otherwise use for all epochs
        reload_dataloaders_every_n_epochs=1,
        logger=False,
    )
    trainer.fit(Classifier(cells), cells, ckpt_path=resume)


def positive(text: str) -> int:
    """Parse a positive integer."""
    if (number := int(text)) < 1:
        msg = f"must be 1 or more, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


def existing(text: str) -> Path:
    """Parse a path that exists."""
    if not (path := Path(text)).exists():
        msg = f"{text!r} doesn't exist"
        raise argparse.ArgumentTypeError(msg)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collection", type=existing, required=True)
    parser.add_argument("--label", default="cell_type", help="column of obs to learn")
    parser.add_argument(
        "--donor", default="donor", help="column of obs with the donors"
    )
    parser.add_argument(
        "--hold-out",
        nargs="+",
        required=True,
        metavar="DONOR",
        help="donors to validate on",
    )
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument(
        "--devices",
        type=positive,
        default=2,
        help="number of GPUs, or of processes without GPUs",
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        help="folder for checkpoints",
    )
    parser.add_argument(
        "--every", type=positive, default=10, help="number of steps between checkpoints"
    )
    parser.add_argument("--resume", type=existing, help="checkpoint to resume from")
    arguments = parser.parse_args()
    main(**vars(arguments))
