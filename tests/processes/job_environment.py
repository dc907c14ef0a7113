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
    """What a process was told that asked."""

    rank: int
    world_size: int
    rows: list[int]


def main(folder: Path) -> None:
    """Ask, and write down the answer in a file of this process."""
    sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info="env", remainder="keep")
    asked = Asked(sampler.rank, sampler.world_size, flat(batches(list(sampler.sample(N_OBS)))))
    (folder / f"process{os.getpid()}.json").write_text(json.dumps(asdict(asked)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
