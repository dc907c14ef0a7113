"""What one rank reads that asks its launcher's variables which one it is; or what is wrong with them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler
from tests.samplers import batches, flat

N_OBS = 21


@dataclass(frozen=True)
class Asked:
    """What a process has learned that asked."""

    rank: int
    world_size: int
    rows: list[int]


def ask() -> Asked:
    """Ask, and read."""
    sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info="env", remainder="keep")
    return Asked(sampler.rank, sampler.world_size, flat(batches(list(sampler.sample(N_OBS)))))


if __name__ == "__main__":
    (Path(sys.argv[1]) / f"process{os.getpid()}.json").write_text(json.dumps(asdict(ask())))
