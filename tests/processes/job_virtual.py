"""One rank of a training on virtual ranks: ``-m tests.processes.job_virtual COLLECTION FOLDER STOP_AT``.

It trains a linear model with DDP, and rank 0 logs the mean loss of each step over all ranks. The last rank is killed
after ``STOP_AT`` steps of the last epoch, between two checkpoints; 0 trains to the end. If there is a checkpoint, the
training resumes, on any number of ranks.
"""

from __future__ import annotations

import json
import os
import signal
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
#: Number of steps between checkpoints in each epoch.
EVERY = 4


def train(collection: Path, folder: Path, stop_at: int) -> None:
    """Train to the end, or until a rank is killed."""
    sampler = DistributedSampler(
        RandomSampler(**CHUNKS), dist_info="torch", seed=0, sharding="shuffled", virtual_ranks=VIRTUAL_RANKS
    )
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, to="torch", preload_to_gpu=False)
    loader.use_collection(DatasetCollection(collection, mode="r"))
    loader.check_ranks_agree()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(loader.n_var, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    checkpoint, losses = folder / "checkpoint.pt", []
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        losses = saved["losses"]
    for epoch in range(sampler.next_epoch, EPOCHS):
        loader.set_epoch(epoch)
        done = sampler.batches_done
        for step, batch in enumerate(loader, start=done + 1):
            cells = batch["X"].to_dense() / 100
            loss = nn.functional.mse_loss(model(cells), torch.sin(cells[:, :1] * 20))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach()
            dist.all_reduce(mean)
            rows: list[list[int]] = [[]] * dist.get_world_size()
            dist.all_gather_object(rows, batch["index"].tolist())
            losses.append((epoch, step, float(mean) / dist.get_world_size(), sorted(flat(rows))))
            if dist.get_rank() == 0 and step % EVERY == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
                torch.save(state | {"loader": loader.state_dict()}, checkpoint.with_suffix(".unfinished"))
                checkpoint.with_suffix(".unfinished").replace(checkpoint)
            if (epoch, step) == (EPOCHS - 1, stop_at):
                dist.barrier()
                if dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    dist.destroy_process_group()
