"""One rank under torchrun: ``python -m torch.distributed.run ... -m tests.processes.job_agreement_torch RESULTS``."""

import sys
from pathlib import Path

import torch.distributed as dist

from annbatch_distributed import Rank
from tests.processes.disagreements import check_all


def gather(text: str) -> list[str]:
    """Return the texts of all ranks, as mpi4py's ``comm.allgather`` does."""
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


if __name__ == "__main__":
    results = Path(sys.argv[1])
    dist.init_process_group("gloo")
    who = dist.get_rank(), dist.get_world_size()
    check_all("torch", *who).write(results / "torch")
    check_all(Rank(*who), *who, gather).write(results / "gather")
    dist.destroy_process_group()
