"""One rank under torchrun: ``python -m torch.distributed.run ... -m tests.processes.job_torch COLLECTION RESULTS``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.processes.rank import ask_too_early, read_all


def keep_step(step: int) -> None:
    """Add up the step of all ranks."""
    total = torch.tensor(step)
    dist.all_reduce(total)
    assert total == step * dist.get_world_size()


if __name__ == "__main__":
    collection, results = map(Path, sys.argv[1:])
    uninitialised = ask_too_early("torch")
    dist.init_process_group("gloo")
    read_all(collection, "torch", uninitialised=uninitialised, keep_step=keep_step).write(results)
    dist.destroy_process_group()
