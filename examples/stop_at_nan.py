"""Stop at the first step whose loss isn't finite, and resume without the cells that caused it.

Start it with torchrun. To resume, run it again without the epoch, and with the rows to skip. A real job also saves its
model, see from_h5ad/train.py::

    torchrun --standalone --nproc-per-node 2 examples/stop_at_nan.py cells.zarr --epoch 3
    torchrun --standalone --nproc-per-node 2 examples/stop_at_nan.py cells.zarr --skip 11977
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import StatefulLoader


def main(collection: str, epoch: int | None, state: Path, skip: list[int]) -> None:
    """Run one epoch of a job on one rank, or the rest of it."""
    loader = StatefulLoader.from_collection(
        collection, dist_info="torch", to="torch", return_index=True, memory=400_000
    )

    def save(batches_done: int) -> None:  # with the model's checkpoint
        if dist.get_rank() == 0:
            state.write_text(json.dumps(loader.state_dict(batches_done=batches_done)))

    if epoch is None:
        loader.load_state_dict(json.loads(state.read_text()))
        epoch = loader.next_epoch
    model = DistributedDataParallel(torch.nn.Linear(loader.n_var, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    loader.set_epoch(epoch)
    save(loader.batches_done)
    for step, batch in enumerate(loader, start=loader.batches_done):
        keep = ~np.isin(batch["index"], skip)
        loss = model(batch["X"].to_dense()[keep]).square().mean()
        # each rank has its own loss; the sum isn't finite if one of them isn't
        total = loss.detach().clone()
        dist.all_reduce(total)
        if not torch.isfinite(total):
            raise FloatingPointError(
                f"the loss of step {step} of epoch {epoch} is {total.item()}"
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            save(step + 1)
    read = loader.check_epoch_read()
    if dist.get_rank() == 0:
        print(read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("collection")
    parser.add_argument("--epoch", type=int, help="epoch to begin, without a state")
    parser.add_argument("--state", type=Path, default=Path("state.json"))
    parser.add_argument("--skip", type=int, nargs="+", default=[], help="rows to skip")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start this with a launcher: "
            "torchrun --standalone --nproc-per-node 2 examples/stop_at_nan.py ..."
        )
    elif arguments.state.exists() == (arguments.epoch is not None):
        parser.error(
            f"pass --epoch to begin an epoch, or leave it out to resume from "
            f"{arguments.state}; remove this file to begin"
        )
    else:
        dist.init_process_group("gloo")
        main(**vars(arguments))
        dist.destroy_process_group()
