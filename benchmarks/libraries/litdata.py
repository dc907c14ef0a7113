"""litdata: chunks that are dealt to ranks, and rows that are shuffled within a chunk.

Its StreamingDataset asks for this when an epoch begins; it is asked directly, so that no cells need be there.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from litdata.streaming.cache import Cache
from litdata.streaming.shuffle import FullShuffle
from litdata.utilities.env import _DistributedEnv

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = "litdata", "numpy", "torch"
#: Cells in a chunk: its default of 64 MB, at 100 values of 8 bytes.
CHUNK = 80_000


def plan(n_obs: int, *numbers: int) -> Callable[[], object]:
    """Deal the chunks, and shuffle the first one."""
    *_, batch_size, rank, world_size = numbers
    folder = Path(tempfile.mkdtemp())
    chunks = [
        {
            "chunk_bytes": 64_000_000,
            "chunk_size": min(CHUNK, n_obs - begin),
            "dim": None,
            "filename": f"chunk-0-{begin}.bin",
        }
        for begin in range(0, n_obs, CHUNK)
    ]
    config = {
        "chunk_bytes": 64_000_000,
        "chunk_size": None,
        "compression": None,
        "data_format": ["int"],
        "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))

    def begin() -> object:
        cache = Cache(input_dir=str(folder), chunk_bytes=64_000_000)
        shuffle = FullShuffle(cache, seed=0, drop_last=True)
        environment = _DistributedEnv(world_size, rank, 1)
        chunks, intervals = shuffle.get_chunks_and_intervals_per_workers(environment, 1, batch_size, 0)
        first = intervals[rank][0]
        return shuffle(np.arange(first[1], first[2]), len(chunks[rank]), 0, 0)

    return begin
