"""One rank that passes frameworks' objects as dist_info, and writes the results: ``job_dist_info RESULTS``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from annbatch.samplers import RandomSampler
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh

from annbatch_distributed import DistributedSampler, StatefulLoader
from tests.processes.results import write_result


def sampler(dist_info: Any) -> DistributedSampler:
    """Make a sampler for the rank of a framework's object."""
    return DistributedSampler(RandomSampler(4, 2, 4), dist_info=dist_info, seed=0)


def placement(dist_info: Any) -> list[int] | str:
    """Return the rank and the world size, or the error."""
    try:
        placed = sampler(dist_info)
        return [placed.rank, placed.world_size]
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


class Reader(LightningModule):
    """A model that records the rows of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.rows += batch["index"].tolist()
        loss: torch.Tensor = self.weight * batch["X"].sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


if __name__ == "__main__":
    result: dict[str, Any] = {}
    options: Any = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "strategy": "ddp"}
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "barebones": False}
    trainer = Trainer(**options, **quiet, max_epochs=1)
    early = sampler(trainer)
    loader = StatefulLoader(batch_sampler=early, return_index=True, to="torch", preload_to_gpu=False)
    loader.add_adata(ad.AnnData(np.zeros((64, 1), dtype="float32")))
    result["Trainer, before"] = placement(trainer)
    reader = Reader()
    trainer.fit(reader, loader)
    result["Trainer"] = [early.rank, early.world_size]
    result["rows"] = reader.rows
    loader.check_ranks_agree()
    result["read"] = loader.check_epoch_read()

    fabric = Fabric(**options)
    fabric.launch()
    result["Fabric"] = placement(fabric)
    result["a callable"] = placement(lambda: fabric)
    split = ModelParallelStrategy(lambda model, _: model, data_parallel_size=1, tensor_parallel_size=2)
    sharded = Fabric(**options | {"strategy": split})
    sharded.launch()
    result["Fabric that splits a model"] = placement(sharded)
    # a single-device Trainer in a process of a job
    result["Trainer of one device"] = placement(
        Trainer(accelerator="cpu", devices=1, num_nodes=1, strategy="auto", **quiet)
    )
    # without cpu=True and without GPUs, it assumes a single process
    result["Accelerate without cpu=True"] = placement(PartialState())
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    result["Accelerator"] = placement(accelerator)
    result["PartialState"] = placement(PartialState())
    result["AcceleratorState"] = placement(accelerator.state)
    # like ParallelismConfig, which needs GPUs
    for name, shape in {"dp_replicate": (2, 1), "tp": (1, 2), "dp_shard and tp": (2, 1)}.items():
        names = {"tp": ("cp", "tp"), "dp_shard and tp": ("dp_shard", "tp")}.get(name, (name, "tp"))
        accelerator.state.device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        result[f"Accelerator with a mesh of {name}"] = placement(accelerator)
    torch.distributed.barrier()  # a rank that ends may close connections that other ranks need
    write_result(Path(sys.argv[1]), trainer.global_rank, result)
