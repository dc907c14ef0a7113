"""Train in a Slurm job that can be stopped at any time: on SIGUSR1 or SIGTERM, all ranks save after the same step.

Started again, it resumes with the next batch. ``torchrun.sbatch`` and ``srun.sbatch`` start it; without Slurm::

    torchrun --standalone --nproc-per-node 2 examples/slurm/train.py cells.zarr checkpoint.pt
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from annbatch_distributed import DistributedSampler, StatefulLoader

CHUNK_SIZE, PRELOAD_NCHUNKS, BATCH_SIZE = 64, 32, 256


class StopRequest:
    """A request to stop this job, by a signal to any of its ranks."""

    def __init__(self) -> None:
        self.came_here = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:  # noqa: ARG002 Python's
        # nothing else: a signal can arrive in the middle of a collective
        self.came_here = True

    def came_anywhere(self) -> bool:
        """Return True on all ranks, after the same step, if any rank got a signal."""
        # on the CPU, with Gloo, so that no rank waits for its GPU
        came = torch.tensor(int(self.came_here))
        dist.all_reduce(came, op=dist.ReduceOp.MAX)
        return bool(came)


def main(
    device: torch.device,
    collection: Path,
    checkpoint: Path,
    label: str,
    epochs: int,
) -> None:
    """Run one rank."""
    stop = StopRequest()  # early: until here, a signal kills the process
    cells = DatasetCollection(collection, mode="r")
    labels = cells.obs([label])[label]
    classes = pd.Categorical(labels).categories
    sampler = DistributedSampler(
        RandomSampler(CHUNK_SIZE, PRELOAD_NCHUNKS, BATCH_SIZE),
        dist_info="torch",
        seed=0,
        mask=labels.notna(),
    )
    loader = StatefulLoader(
        batch_sampler=sampler, to="torch", preload_to_gpu=False, prefetch=1
    )
    loader.use_collection(cells)

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(loader.n_var, 64), nn.ReLU(), nn.Linear(64, len(classes))
    )
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    loader.check_ranks_agree()

    def save() -> None:
        if dist.get_rank() == 0:  # the loader's state is the same on every rank
            state = {"model": model.module, "optimizer": optimizer, "loader": loader}
            unfinished = checkpoint.with_suffix(".unfinished")
            torch.save(
                {name: of.state_dict() for name, of in state.items()}, unfinished
            )
            unfinished.replace(checkpoint)  # replaces the file atomically
        dist.barrier()  # no rank ends the job before the file is written

    for epoch in range(loader.next_epoch, epochs):
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
            if stop.came_anywhere():
                save()
                if dist.get_rank() == 0:
                    print(
                        f"stopped in epoch {epoch}, and saved to {checkpoint}",
                        flush=True,
                    )
                return
        save()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("collection", type=Path, help="annbatch collection")
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="file to save to, and to resume from if it exists",
    )
    parser.add_argument("--label", default="cell_type", help="column of obs to learn")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    if "RANK" not in os.environ:  # started by srun, without torchrun
        for name, of_slurm in (
            ("RANK", "PROCID"),
            ("WORLD_SIZE", "NTASKS"),
            ("LOCAL_RANK", "LOCALID"),
        ):
            os.environ[name] = os.environ[f"SLURM_{of_slurm}"]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # a rank sees all GPUs of its node, or only its own
        device = torch.device(
            "cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        )
        # first of all: otherwise, every rank uses GPU 0
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    main(device, **vars(arguments))
    dist.destroy_process_group()
