"""Connect a rank that `forked_ranks` has started to the other ranks, with PyTorch or JAX."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import jax
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

type Framework = Literal["torch", "jax"]


@contextmanager
def in_job(framework: Framework) -> Iterator[int]:
    """Join the job of a framework, and yield the rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if framework == "torch":
        dist.init_process_group("gloo")
        yield rank
        dist.destroy_process_group()
    else:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, world_size, rank, coordinator_bind_address=address)
        yield rank
        jax.distributed.shutdown()
