"""Train on cells in object storage, and resume from the last checkpoint on any number of ranks.

Credentials come from the environment, as for any other program that reads S3 (``AWS_ACCESS_KEY_ID``, a role of the
machine, ...); ``gs://`` and ``az://`` have theirs::

    torchrun --standalone --nproc-per-node 2 examples/object_storage.py s3://atlas/cells.zarr --checkpoint last.pt
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from zarr.storage import FsspecStore, ObjectStore

from annbatch_distributed import DistributedSampler, StatefulLoader

if TYPE_CHECKING:
    from obstore.store import RetryConfig
    from zarr.abc.store import Store


def open_cells(url: str, client: str) -> DatasetCollection:
    """Open a collection by its URL."""
    store: Store
    if client == "obstore":
        from obstore.store import from_url

        # failed requests, and requests of more than 30 seconds, are repeated, and finally raise
        retries: RetryConfig = {
            "max_retries": 5,
            "retry_timeout": timedelta(minutes=2),
        }
        store = ObjectStore(from_url(url, retry_config=retries), read_only=True)
    else:
        store = FsspecStore.from_url(url, read_only=True)
    return DatasetCollection(zarr.open_group(store, mode="r"))


def main(url: str, checkpoint: Path, client: str, epochs: int, every: int) -> None:
    """Run one rank."""
    dist.init_process_group("gloo")
    sampler = DistributedSampler(
        RandomSampler(chunk_size=64, preload_nchunks=16, batch_size=64),
        dist_info="torch",
        seed=0,
        remainder="exact",
    )
    # read four load requests at the same time, which hides the latency
    loader = StatefulLoader(
        batch_sampler=sampler, to="torch", preload_to_gpu=False, prefetch=4
    )
    loader.use_collection(open_cells(url, client)).check_ranks_agree()

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(loader.n_var, 32), nn.ReLU(), nn.Linear(32, loader.n_var)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if checkpoint.exists():
        states = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(states["model"])
        loader.load_state_dict(states["loader"])

    owner, job = (
        checkpoint.with_suffix(".job"),
        uuid4().hex,
    )  # only the newest job writes the checkpoint
    if dist.get_rank() == 0:
        owner.write_text(job)
    for epoch in range(loader.next_epoch, epochs):
        loader.set_epoch(epoch)
        first = loader.batches_done
        if dist.get_rank() == 0:
            print(f"epoch {epoch} from step {first} of {len(loader)}")
        for step, batch in enumerate(loader, start=first):
            counts = batch["X"].to_dense()
            loss = mse_loss(model(counts), counts)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % every == 0 and dist.get_rank() == 0:
                if owner.read_text() != job:
                    msg = f"a newer job writes {checkpoint}: stop this job"
                    raise RuntimeError(msg)
                states = {"model": network.state_dict(), "loader": loader.state_dict()}
                torch.save(states, checkpoint.with_suffix(".unfinished"))
                checkpoint.with_suffix(".unfinished").replace(checkpoint)
        read = (
            loader.check_epoch_read()
        )  # raises unless all ranks read the planned rows
        if dist.get_rank() == 0:
            print(read)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="such as s3://atlas/cells.zarr")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--client", choices=["obstore", "fsspec"], default="obstore")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=10, help="steps to a checkpoint")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start this with a launcher: "
            "torchrun --standalone --nproc-per-node 2 object_storage.py ..."
        )
    main(**vars(arguments))
