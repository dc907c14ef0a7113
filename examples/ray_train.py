"""Train with Ray Train, and resume in the middle of an epoch after a failure.

Run it on this machine::

    python examples/ray_train.py --collection cells.zarr --checkpoints checkpoints/ --workers 2

Run again with the same folder, it resumes from the last checkpoint there, with as many workers as there are then.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import ray
import ray.train
import torch
from annbatch import DatasetCollection
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy

from annbatch_distributed import StatefulLoader


def train(config: dict[str, Any]) -> None:
    """Run one worker."""
    context = ray.train.get_context()
    rank, device = context.get_world_rank(), get_device()
    cells, label = DatasetCollection(config["collection"], mode="r"), config["label"]
    labels = cells.obs([label])[label]
    classes = pd.Categorical(labels).categories
    loader = StatefulLoader.from_collection(
        cells,
        batch_size=32,
        dist_info=context,
        mask=labels.notna(),
        seed=0,
        to="torch",
    )

    torch.manual_seed(0)
    # only the model: the loader is sharded already
    model = prepare_model(
        nn.Sequential(
            nn.Linear(loader.n_var, 64), nn.ReLU(), nn.Linear(64, len(classes))
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(
                Path(folder) / "state.pt", weights_only=True, map_location=device
            )
        # on a different number of workers, the model may be wrapped differently
        getattr(model, "module", model).load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    # if the seed, state or collection of a worker differs, every worker raises
    loader.check_ranks_agree()

    step = 0
    for epoch in range(loader.next_epoch, config["epochs"]):
        loader.set_epoch(epoch)  # an epoch that was just loaded stays where it is
        for batch in loader:
            targets = torch.tensor(
                classes.get_indexer(batch["obs"][label]), device=device
            )
            loss = cross_entropy(
                model(batch["X"].to(device).to_dense().float()), targets
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % config["every"] == 0:
                report(
                    rank,
                    {"epoch": epoch, "loss": loss.item()},
                    model,
                    optimizer,
                    loader,
                )
            if config["fail_at"] == step and checkpoint is None:
                msg = f"worker {rank} fails on purpose after {step} batches"
                raise RuntimeError(msg)


def report(
    rank: int,
    metrics: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: StatefulLoader,
) -> None:
    """Report metrics to Ray, and the checkpoint of rank 0, which every worker loads."""
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = {
            "model": getattr(model, "module", model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
        }
        torch.save(saved, Path(folder) / "state.pt")
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


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
    return path.resolve()  # workers run in a different folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collection", type=existing, required=True)
    parser.add_argument("--label", default="cell_type", help="column of obs to learn")
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        help="folder for checkpoints",
    )
    parser.add_argument(
        "--every",
        type=positive,
        default=10,
        help="number of batches between checkpoints",
    )
    parser.add_argument(
        "--fail-at",
        type=positive,
        help="number of batches after which the first attempt fails, to see it resume",
    )
    arguments = parser.parse_args()

    # on this machine; rows don't pass through the object store, so it can be small
    ray.init(
        num_cpus=arguments.workers,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
    )
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(arguments),
        scaling_config=ScalingConfig(
            num_workers=arguments.workers, use_gpu=torch.cuda.is_available()
        ),
        run_config=RunConfig(
            name="cells",
            storage_path=str(arguments.checkpoints.resolve()),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    trainer.fit()
    ray.shutdown()
