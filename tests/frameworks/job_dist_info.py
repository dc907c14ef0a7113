"""One rank that asks frameworks' objects for its rank, and tells what they say: ``job_dist_info RESULTS``."""

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
from tests.processes.told import tell


def sampler(dist_info: Any) -> DistributedSampler:
    """Share out rows by what a framework's object says."""
    return DistributedSampler(RandomSampler(4, 2, 4), dist_info=dist_info, seed=0)


def said(dist_info: Any) -> list[int] | str:
    """Return rank and world size, or the error in their place."""
    try:
        made = sampler(dist_info)
        return [made.rank, made.world_size]
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


class Reader(LightningModule):
    """Notes the rows that it is given."""

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
    told: dict[str, Any] = {}
    options: Any = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "strategy": "ddp"}
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "barebones": False}
    trainer = Trainer(**options, **quiet, max_epochs=1)
    early = sampler(trainer)
    loader = StatefulLoader(batch_sampler=early, return_index=True, to="torch", preload_to_gpu=False)
    loader.add_adata(ad.AnnData(np.zeros((64, 1), dtype="float32")))
    told["Trainer, before"] = said(trainer)
    reader = Reader()
    trainer.fit(reader, loader)
    told["Trainer"] = [early.rank, early.world_size]
    told["rows"] = reader.rows
    loader.check_ranks_agree()
    told["read"] = loader.check_epoch_read()

    fabric = Fabric(**options)
    fabric.launch()
    told["Fabric"] = said(fabric)
    told["a callable"] = said(lambda: fabric)
    split = ModelParallelStrategy(lambda model, _: model, data_parallel_size=1, tensor_parallel_size=2)
    sharded = Fabric(**options | {"strategy": split})
    sharded.launch()
    told["Fabric that splits up a model"] = said(sharded)
    # on its own, in a process of a job
    told["Trainer of one device"] = said(Trainer(accelerator="cpu", devices=1, num_nodes=1, strategy="auto", **quiet))
    # without cpu=True, and without GPUs, it takes its process for the only one
    told["accelerate on its own"] = said(PartialState())
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    told["Accelerator"] = said(accelerator)
    told["PartialState"] = said(PartialState())
    told["AcceleratorState"] = said(accelerator.state)
    # as ParallelismConfig sets it, which needs GPUs
    for name, shape in {"dp_replicate": (2, 1), "tp": (1, 2), "dp_shard and tp": (2, 1)}.items():
        names = {"tp": ("cp", "tp"), "dp_shard and tp": ("dp_shard", "tp")}.get(name, (name, "tp"))
        accelerator.state.device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        told[f"Accelerator with a mesh of {name}"] = said(accelerator)
    torch.distributed.barrier()  # whoever ends takes along what others may still connect to
    tell(Path(sys.argv[1]), trainer.global_rank, told)
