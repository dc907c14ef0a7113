"""litdata: chunks that are divided among ranks, and rows that are shuffled within a chunk.

Its StreamingDataset asks for a plan when an epoch begins. Planning is measured by asking for it directly, so that no
cells need be there.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, optimize
from litdata.streaming import downloader
from litdata.streaming.cache import Cache
from litdata.streaming.shuffle import FullShuffle
from litdata.utilities.env import _DistributedEnv

from benchmarks.libraries.cells import N_GENES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def write(source: Path, folder: Path) -> None:
    """Write cells one by one, in chunks of its default size."""
    with np.load(source) as parts:
        np.savez(folder.with_suffix(".npz"), **{name: parts[name] for name in ("indices", "data", "indptr")})
    n_obs = len(np.load(folder.with_suffix(".npz"))["indptr"]) - 1
    bounds = [(begin, min(begin + 10_000, n_obs)) for begin in range(0, n_obs, 10_000)]
    optimize(
        partial(samples_of, folder.with_suffix(".npz")),
        bounds,
        str(folder),
        chunk_bytes="64MB",
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


def samples_of(source: Path, bounds: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the genes and counts of each cell."""
    with np.load(source) as parts:
        genes, counts, indptr = parts["indices"].astype(np.int32), parts["data"].astype(np.float32), parts["indptr"]
    for cell in range(*bounds):
        own = slice(indptr[cell], indptr[cell + 1])
        yield {"genes": genes[own], "counts": counts[own]}


def remote(place: str, cache: str, batch_size: str) -> Callable[[int], Iterator[Any]]:
    """Return a way to read from object storage, through its folder of whole chunks."""
    # a server on this machine has no TLS
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    dataset = StreamingDataset(
        place,
        cache_dir=cache,
        shuffle=True,
        drop_last=True,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    loader = StreamingDataLoader(dataset, batch_size=int(batch_size), num_workers=0, collate_fn=collate)

    def way(epoch: int) -> Iterator[Any]:  # noqa: ARG001 it counts epochs itself
        yield from loader

    return way


def collate(samples: list[dict[str, Any]]) -> torch.Tensor:
    """Make a batch of cells."""
    bounds = np.cumsum([0, *(len(sample["genes"]) for sample in samples)])
    genes, counts = (np.concatenate([sample[name] for sample in samples]) for name in ("genes", "counts"))
    return torch.sparse_csr_tensor(
        torch.from_numpy(bounds), torch.from_numpy(genes), torch.from_numpy(counts), (len(samples), N_GENES)
    )
