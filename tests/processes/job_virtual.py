"""One rank of a training on virtual ranks: ``-m tests.processes.job_virtual COLLECTION LOSSES``.

It trains a linear model with DDP, and rank 0 writes the mean loss of each step over all ranks, and their rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import DistributedSampler, StatefulLoader
from tests.processes.configurations import CHUNKS
from tests.samplers import flat

EPOCHS = 2
VIRTUAL_RANKS = 4


def train(collection: Path, written: Path) -> None:
    """Train to the end."""
    sampler = DistributedSampler(
        RandomSampler(**CHUNKS), dist_info="torch", seed=0, sharding="shuffled", virtual_ranks=VIRTUAL_RANKS
    )
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, to="torch", preload_to_gpu=False)
    loader.use_collection(DatasetCollection(collection, mode="r"))
    loader.check_ranks_agree()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(loader.n_var, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            cells = batch["X"].to_dense() / 100
            loss = nn.functional.mse_loss(model(cells), torch.sin(cells[:, :1] * 20))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach()
            dist.all_reduce(mean)
            rows: list[list[int]] = [[]] * dist.get_world_size()
            dist.all_gather_object(rows, batch["index"].tolist())
            losses.append((float(mean) / dist.get_world_size(), sorted(flat(rows))))
    if dist.get_rank() == 0:
        written.write_text(json.dumps(losses))


if __name__ == "__main__":
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
