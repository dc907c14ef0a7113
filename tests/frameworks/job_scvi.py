"""One of two ranks that train models of scvi-tools, and write the rows of their batches.

``-m tests.frameworks.job_scvi COLLECTION RESULTS``
"""

from __future__ import annotations

import os
import sys
import time
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scvi
import torch
import zarr
from annbatch import DatasetCollection, Loader
from lightning.pytorch.callbacks import Callback
from scvi.dataloaders import AnnbatchDataModule

from annbatch_distributed import Rank
from annbatch_distributed.integrations.scvi import distribute, embed
from tests.processes.results import write_result

SIZES = {"chunk_size": 8, "preload_nchunks": 4}
BATCH_SIZE, EPOCHS = 8, 3
RANK = int(os.environ["RANK"])
TRAINER: Any = {
    "accelerator": "cpu",
    "devices": 2,
    "strategy": "ddp_find_unused_parameters_true",
    "train_size": 0.8,
    "check_val_every_n_epoch": 1,
    "enable_progress_bar": False,
}


def cells(collection: Path, **options: Any) -> AnnbatchDataModule:
    """Open the collection as a data module."""
    loader = Loader(batch_size=BATCH_SIZE, **SIZES, preload_to_gpu=False)
    loader.use_collection(DatasetCollection(collection, mode="r"))
    keys = {"batch_key": "donor", "label_key": "cell_type"}
    return AnnbatchDataModule(loader, **keys, **SIZES, **options)


class Rows(Callback):
    """Records the rows of each batch, from the first gene, and saves a checkpoint after a step."""

    def __init__(self, checkpoint: Path | None = None, after: int = 0) -> None:
        self.train: dict[int, list[list[int]]] = {}
        self.validation: dict[int, list[list[int]]] = {}
        self.checkpoint, self.after = checkpoint, after

    @staticmethod
    def rows(batch: dict[str, torch.Tensor]) -> list[int]:
        return [int(value) - 1 for value in batch["X"][:, 0]]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.train.setdefault(trainer.current_epoch, []).append(self.rows(batch))
        torch.manual_seed(trainer.global_step)  # for random numbers of the model, which no checkpoint has

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validation.setdefault(trainer.current_epoch, []).append(self.rows(batch))

    def on_train_batch_end(self, trainer: Any, *batch: object) -> None:
        if self.checkpoint is not None and trainer.global_step == self.after:
            trainer.save_checkpoint(self.checkpoint)


def train(model: Any, datamodule: Any, *, epochs: int = EPOCHS, **options: Any) -> dict[str, Any]:
    """Train a model, and return the rows of its batches and a digest of its weights."""
    rows = Rows(options.pop("checkpoint", None), options.pop("after", 0))
    model.train(datamodule=datamodule, max_epochs=epochs, callbacks=[rows], **TRAINER | options)
    weights = b"".join(weight.numpy().tobytes() for weight in model.module.state_dict().values())
    return {"train": rows.train, "validation": rows.validation, "weights": sha256(weights).hexdigest()}


def new(kind: Any, cells: Any, **options: Any) -> Any:
    """Make a model, the same on every rank and in every job."""
    scvi.settings.seed = 0
    return kind(registry=cells.registry, n_hidden=8, n_latent=3, **options)


def trained(datamodule: Any) -> Any:
    """Make a model that is marked as trained."""
    model = new(scvi.model.SCVI, datamodule)
    model.is_trained_ = True
    model.module.eval()  # as after training
    return model


def failing(own: AnnbatchDataModule, results: Path) -> list[str]:
    """Fail in each way in which a rank can fail or differ, and return the errors."""
    errors = []
    wider = SimpleNamespace(module=torch.nn.Linear(2, 2 + RANK))
    wider.get_latent_representation = lambda dataloader: dataloader[0]["X"].numpy()
    weights = wider.module.weight.detach().clone()
    # in each of these calls, one rank fails, or the ranks differ
    for model, data, options in (
        (lambda batch: batch["X"].numpy() + RANK, own, {}),
        (lambda batch: batch["X"].numpy() if RANK else 1 / 0, own, {}),
        (lambda batch: batch["X"].numpy(), own if RANK == 0 else 3, {}),
        (lambda batch: batch["X"].numpy(), own, {"batch_size": 1 - RANK}),
        (wider, own, {}),
    ):
        with pytest.raises((ValueError, ZeroDivisionError, TypeError)) as raised:
            embed(model, data, results / "wrong.zarr", progress=False, **options)
        errors.append(str(raised.value))
    assert torch.equal(weights, wider.module.weight)
    assert not (results / "wrong.zarr").exists()
    calls: list[int] = []

    def late(batch: Any) -> Any:
        calls.append(1)
        return batch["X"].numpy() if RANK == 0 or len(calls) < 4 else 1 / 0

    with pytest.raises(ValueError, match="process 1 has failed: ZeroDivisionError"):
        embed(late, own, results / "late.zarr", progress=False)
    return errors


def main(collection: Path, results: Path) -> dict[str, Any]:
    """Train, resume in the middle of an epoch, and embed."""
    result: dict[str, Any] = {}
    checkpoint = results / "middle.ckpt"
    for name, options in {
        "SCVI": {"checkpoint": checkpoint, "after": 22},
        "resumed": {"ckpt_path": checkpoint},
    }.items():
        own = distribute(cells(collection))
        result[name] = train(new(scvi.model.SCVI, own), own, **options)
    labeled = distribute(cells(collection, model_name="SCANVI"), remainder="exact", prefetch=1)
    result["SCANVI"] = train(new(scvi.model.SCANVI, labeled, datamodule=labeled), labeled, epochs=1)
    sampled = distribute(cells(collection, class_sampler_key="cell_type"))
    result["classes"] = train(new(scvi.model.SCVI, sampled), sampled, epochs=1)
    result["sharding"] = str(sampled.train_dataloader().sampler.plan(347).sharding)

    # without a validation, each rank under DDP has the running means of its own last batch
    model = new(scvi.model.SCVI, own)
    result["weights"] = train(model, own, epochs=1, check_val_every_n_epoch=None)["weights"]
    embed(model, own, results / "trained.zarr", progress=False)
    if RANK == 0:
        embed(model, own, results / "alone.zarr", dist_info=Rank(0, 1), progress=False)

    def slow(batch: Any) -> Any:
        time.sleep(0.05 * RANK)
        return batch["X"].numpy() + 0.5

    array = embed(slow, own, results / "slow.zarr", progress=False)
    result["complete"] = bool(np.isfinite(np.asarray(array[:])).all())
    # the remaining chunks are divided again, whichever rank they belonged to
    if RANK == 0:
        embed(lambda batch: batch["X"].numpy(), own, results / "uneven.zarr", dist_info=Rank(0, 1), progress=False)
        for number in (1, 3, 5, 7):
            (results / "uneven.zarr" / "c" / str(number) / "0").unlink()
    torch.distributed.barrier()
    computed: list[int] = []

    def counted(batch: Any) -> Any:
        computed.append(len(batch["X"]))
        return batch["X"].numpy()

    again = embed(counted, own, results / "uneven.zarr", progress=False)
    assert np.isfinite(np.asarray(again[:])).all()
    result["computed"] = len(computed)

    result["errors"] = failing(own, results)
    other = distribute(cells(collection), seed=RANK)
    with pytest.raises(ValueError, match="don't agree") as raised:
        train(new(scvi.model.SCVI, other), other)
    result["errors"].append(str(raised.value))
    if RANK == 0:  # the other rank does not make the call
        with pytest.raises(TimeoutError, match="process 1 did not make this call within 1 seconds"):
            embed(trained(own), own, results / "nobody.zarr", progress=False, timeout=1)
    return result


if __name__ == "__main__":
    collection, results = map(Path, sys.argv[1:])
    torch.use_deterministic_algorithms(mode=True)
    TRAINER["log_save_dir"] = str(results)
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    write_result(results, RANK, main(collection, results))
