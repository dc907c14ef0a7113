"""Train under Lightning on every rank's own share of the cells, and go on in the middle of an epoch after a stop.

Run it, stop it, and run it again with the last checkpoint, with as many devices as there are then::

    python examples/lightning_ddp.py --checkpoints checkpoints/
    python examples/lightning_ddp.py --checkpoints checkpoints/ --resume checkpoints/last.ckpt --devices 1
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import torch
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.samplers import RandomSampler, SequentialSampler
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from annbatch_distributed import DistributedSampler, StatefulLoader

BATCH_SIZE = 32

type Batch = dict[str, Any]


class Cells(LightningDataModule):
    """The cells that have a label: of the first four fifths to train on, of the last fifth to validate on."""

    def __init__(self, collection: Path | None, label: str) -> None:
        super().__init__()
        self.collection, self.label = collection, label

    def setup(self, stage: str) -> None:  # noqa: ARG002 Lightning's
        """Open the cells on this rank."""
        chunks = {
            "chunk_size": BATCH_SIZE,
            "preload_nchunks": 8,
            "batch_size": BATCH_SIZE,
        }
        is_labelled = labels_of(self.collection, self.label).notna().to_numpy()
        is_first = np.arange(len(is_labelled)) < len(is_labelled) * 4 // 5
        train = DistributedSampler(
            RandomSampler(**chunks),
            dist_info=self.trainer,
            mask=is_labelled & is_first,
            seed=0,
        )
        # "exact": every row once, and still the same number of batches on every rank
        validation = DistributedSampler(
            SequentialSampler(**chunks),
            dist_info=self.trainer,
            mask=is_labelled & ~is_first,
            remainder="exact",
        )
        # Lightning moves batches
        options = {
            "return_index": True,
            "to": "torch",
            "preload_to_gpu": False,
        }
        self.train = self.load(StatefulLoader(batch_sampler=train, **options))
        self.validation = self.load(Loader(batch_sampler=validation, **options))
        # a rank with another seed, mask or collection is an error on all of them now,
        # instead of a wrong result
        self.train.check_ranks_agree()
        validation.check_ranks_agree(self.validation.n_obs)

    def load[AnyLoader: Loader](self, loader: AnyLoader) -> AnyLoader:
        """Give the cells to a loader."""
        if self.collection is None:
            return loader.add_adata(made_up_cells(self.label))
        return loader.use_collection(DatasetCollection(self.collection, mode="r"))

    def train_dataloader(self) -> StatefulLoader:
        """Return the loader itself: a DataLoader would add nothing."""
        return self.train

    def val_dataloader(self) -> Loader:
        """Return the loader of the cells that are held out."""
        return self.validation

    # Lightning saves a loader's state by itself, but loads it after it has asked how
    # many batches there are, and on another number of devices there are others: without
    # these two, a job that grew would leave out the epoch's end.
    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch is."""
        return self.train.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there."""
        self.train.load_state_dict(state_dict)


class Classifier(LightningModule):
    """A small network that tells cell types apart, and notes what it was shown."""

    def __init__(
        self, n_var: int, classes: pd.Index, label: str, log_folder: Path | None
    ) -> None:
        super().__init__()
        self.classes, self.label, self.log_folder = classes, label, log_folder
        self.network = nn.Sequential(
            nn.Linear(n_var, 64), nn.ReLU(), nn.Linear(64, len(classes))
        )
        self.accuracy = MeanMetric()  # which adds up over ranks
        self.rows: dict[str, list[np.ndarray]] = {"train": [], "validation": []}

    def training_step(self, batch: Batch) -> torch.Tensor:
        """Learn from a batch."""
        scores, targets = self.scores_and_targets(batch)
        self.rows["train"].append(batch["index"])
        return cross_entropy(scores, targets)

    def validation_step(self, batch: Batch) -> None:
        """See how many cells of a batch are told right."""
        scores, targets = self.scores_and_targets(batch)
        self.accuracy.update(scores.argmax(dim=1) == targets)
        self.log("accuracy", self.accuracy, prog_bar=True)
        self.rows["validation"].append(batch["index"])

    def scores_and_targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the network."""
        targets = torch.tensor(
            self.classes.get_indexer(batch["obs"][self.label]), device=self.device
        )
        return self.network(batch["X"].to_dense().float()), targets

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_validation_epoch_end(self) -> None:
        """Write down the rows that were held out."""
        name = (
            "sanity"
            if self.trainer.sanity_checking
            else f"validation-{self.current_epoch}"
        )
        self.log_rows(name, self.rows["validation"])

    def on_train_epoch_end(self) -> None:
        """Write down the rows that were trained on."""
        self.log_rows(f"train-{self.current_epoch}", self.rows["train"])

    def log_rows(self, name: str, rows: list[np.ndarray]) -> None:
        """Write down which rows this rank read, and begin anew."""
        if self.log_folder is not None:
            np.save(
                self.log_folder / f"{name}-rank{self.global_rank}.npy",
                np.concatenate(rows),
            )
        rows.clear()


def main(
    collection: Path | None,
    label: str,
    epochs: int,
    devices: int,
    checkpoints: Path,
    every: int,
    resume: Path | None,
    log: Path | None,
) -> None:
    """Train, on as many processes as there are devices."""
    torch.manual_seed(0)
    cells = Cells(collection, label)
    classes = pd.Categorical(labels_of(collection, label)).categories
    n_var = cells.load(Loader(batch_size=1)).n_var
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
        # the rest of an epoch that began on other devices has a length of its own,
        # which would be taken for all epochs'
        reload_dataloaders_every_n_epochs=1,
        logger=False,
    )
    trainer.fit(Classifier(n_var, classes, label, log), cells, ckpt_path=resume)


def labels_of(collection: Path | None, label: str) -> pd.Series:
    """Give the label of each cell."""
    obs = (
        made_up_cells(label).obs
        if collection is None
        else DatasetCollection(collection, mode="r").obs([label])
    )
    return obs[label]


def made_up_cells(label: str) -> ad.AnnData:
    """Make up 2,001 cells of four types, the same on every rank."""
    rng = np.random.default_rng(0)
    types = rng.integers(4, size=2_001)
    counts = rng.poisson(1 + 2 * (np.arange(50) % 4 == types[:, None])).astype(
        np.float32
    )
    return ad.AnnData(
        X=counts,
        obs=pd.DataFrame(
            {label: types.astype(str)}, index=np.arange(2_001).astype(str)
        ),
    )


def positive(text: str) -> int:
    """Read a number that is 1 or more."""
    if (number := int(text)) < 1:
        msg = f"must be 1 or more, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


def existing(text: str) -> Path:
    """Read a path of something that is there."""
    if not (path := Path(text)).exists():
        msg = f"{text!r} is not there"
        raise argparse.ArgumentTypeError(msg)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--collection",
        type=existing,
        help="an annbatch collection; without one, cells are made up",
    )
    parser.add_argument(
        "--label", default="cell_type", help="the column of obs to learn"
    )
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument(
        "--devices",
        type=positive,
        default=2,
        help="GPUs, or processes where there are none",
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        help="the folder for checkpoints",
    )
    parser.add_argument(
        "--every", type=positive, default=10, help="after how many steps to save one"
    )
    parser.add_argument("--resume", type=existing, help="the checkpoint to go on from")
    parser.add_argument(
        "--rows",
        type=existing,
        dest="log",
        help="a folder to write the rows to that each rank reads",
    )
    arguments = parser.parse_args()
    if find_spec("zarrs"):
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    else:
        print("cells are read faster with zarrs: pip install zarrs")
    main(**vars(arguments))
