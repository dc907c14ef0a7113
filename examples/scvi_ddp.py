"""Train scvi-tools' SCVI on several ranks, and write the latent representation of every cell.

Run it, stop it, and run it again with the last checkpoint, with as many devices as there are then::

    torchrun --standalone --nproc-per-node=2 examples/scvi_ddp.py --collection cells.zarr
    torchrun --standalone --nproc-per-node=2 examples/scvi_ddp.py --collection cells.zarr --resume CHECKPOINT
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import scvi
import torch
from annbatch import DatasetCollection, Loader
from lightning.pytorch.callbacks import Callback, EarlyStopping
from scvi.dataloaders import AnnbatchDataModule

from annbatch_distributed.integrations.scvi import distribute, embed

if TYPE_CHECKING:
    from lightning import LightningModule, Trainer

BATCH_SIZE, CHUNK_SIZE, PRELOAD_NCHUNKS = 128, 64, 16


class Checkpoints(Callback):
    """Save a checkpoint at regular steps, which no callback of scvi-tools does."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,  # noqa: ARG002 Lightning passes it
        *batch: object,  # noqa: ARG002 Lightning passes it too
    ) -> None:
        """Save a checkpoint if it is due."""
        if trainer.global_step % self.every == 0:
            trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}.ckpt")


def main(
    collection: Path,
    batch: str,
    epochs: int,
    checkpoints: Path,
    every: int,
    resume: Path | None,
) -> None:
    """Run one rank."""
    scvi.settings.seed = 0  # the same network on every rank
    loader = Loader(
        batch_size=BATCH_SIZE,
        chunk_size=CHUNK_SIZE,
        preload_nchunks=PRELOAD_NCHUNKS,
        preload_to_gpu=False,
    )
    loader.use_collection(DatasetCollection(collection, mode="r"))
    cells = AnnbatchDataModule(
        loader, batch_key=batch, chunk_size=CHUNK_SIZE, preload_nchunks=PRELOAD_NCHUNKS
    )
    cells = distribute(cells)  # the one line

    model = scvi.model.SCVI(registry=cells.registry)
    model.train(
        datamodule=cells,
        train_size=0.9,
        max_epochs=epochs,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp_find_unused_parameters_true",
        check_val_every_n_epoch=1,
        # scvi-tools ignores its own early stopping under DDP
        callbacks=[
            EarlyStopping("elbo_validation", patience=5),
            Checkpoints(checkpoints, every),
        ],
        ckpt_path=resume,
        log_save_dir=str(checkpoints),
    )
    latent = embed(model, cells, checkpoints / "latent.zarr")
    if model.trainer.is_global_zero:
        print(
            f"{model.trainer.current_epoch} epochs; "
            f"{latent.shape[1]} latent dimensions for each of {latent.shape[0]} cells"
        )


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
    parser.add_argument(
        "--collection",
        type=existing,
        required=True,
        help="annbatch collection of counts",
    )
    parser.add_argument(
        "--batch", default="donor", help="column of obs with the batch of each cell"
    )
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        help="folder for checkpoints and results",
    )
    parser.add_argument(
        "--every",
        type=positive,
        default=10,
        help="number of steps between checkpoints",
    )
    parser.add_argument("--resume", type=existing, help="checkpoint to resume from")
    arguments = parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error(
            "start this with a launcher: "
            "torchrun --standalone --nproc-per-node=2 examples/scvi_ddp.py ..."
        )
    main(**vars(arguments))
