"""mosaicml-streaming: cells one by one in its MDS files, and epochs that are worked out as a whole."""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from benchmarks.libraries.cells import N_GENES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    type Configuration = tuple[int, int, int]
    type Way = Callable[[int], Iterator[Any]]

PACKAGES = "mosaicml-streaming", "numpy", "torch"
WORKERS = 2
#: Cells in a shard: its default of 64 MB, at 100 values of 8 bytes.
SHARD = 80_000
#: Its default for one canonical node, which it works out only where an epoch is read.
SHUFFLED_TOGETHER = 4_000_000


def write(source: Path, folder: Path) -> None:
    """Write cells one by one, as its quick start does."""
    with np.load(source) as parts:
        if "counts" in parts:
            cells = parts["counts"].astype(np.float32)
            columns = {"cell": f"ndarray:float32:{cells.shape[1]}"}
            samples: Any = ({"cell": cell} for cell in cells)
        else:
            columns = {"genes": "ndarray:int32", "counts": "ndarray:float32"}
            genes, counts = parts["indices"].astype(np.int32), parts["data"].astype(np.float32)
            bounds = parts["indptr"]
            samples = ({"genes": genes[begin:end], "counts": counts[begin:end]} for begin, end in pairwise(bounds))
        with MDSWriter(out=str(folder), columns=columns) as out:
            for sample in samples:
                out.write(sample)
        (folder / "n_genes").write_text(str(cells.shape[1] if "counts" in parts else parts["shape"][1]))


def collate(samples: list[dict[str, Any]], n_genes: int) -> torch.Tensor:
    """Make a batch of cells."""
    if "cell" in samples[0]:
        return torch.from_numpy(np.stack([sample["cell"] for sample in samples]))
    bounds = np.cumsum([0, *(len(sample["genes"]) for sample in samples)])
    genes, counts = (np.concatenate([sample[name] for sample in samples]) for name in ("genes", "counts"))
    return torch.sparse_csr_tensor(
        torch.from_numpy(bounds), torch.from_numpy(genes), torch.from_numpy(counts), (len(samples), n_genes)
    )


def loaders(folder: Path, configuration: Configuration, rank: int, world_size: int) -> dict[str, Way]:  # noqa: ARG001 it finds its rank itself
    """Return its loader without workers and with them."""
    batch_size = configuration[2]
    ways: dict[str, Way] = {}
    for workers in (0, WORKERS):
        dataset = StreamingDataset(local=str(folder), batch_size=batch_size, shuffle=True, num_canonical_nodes=1)
        loader = StreamingDataLoader(
            dataset,
            batch_size=batch_size,
            num_workers=workers,
            persistent_workers=bool(workers),
            collate_fn=partial(collate, n_genes=int((folder / "n_genes").read_text())),
            drop_last=True,
        )
        name = "mosaicml-streaming, DataLoader" if workers else "mosaicml-streaming"
        ways[name] = partial(epoch_of, loader)
    return ways


def remote(place: str, cache: str, batch_size: str) -> Way:
    """Return a way to read from object storage, through its folder of whole shards."""
    dataset = StreamingDataset(
        remote=place, local=cache, batch_size=int(batch_size), shuffle=True, num_canonical_nodes=1
    )
    loader = StreamingDataLoader(
        dataset, batch_size=int(batch_size), num_workers=0, collate_fn=partial(collate, n_genes=N_GENES), drop_last=True
    )
    return partial(epoch_of, loader)


def epoch_of(loader: StreamingDataLoader, epoch: int) -> Iterator[Any]:  # noqa: ARG001 it counts epochs itself
    """Read an epoch."""
    yield from loader


def index_of(n_obs: int) -> Path:
    """Write the index of cells that are not there: where their order is worked out, no more is read."""
    folder = Path(tempfile.mkdtemp())
    shard = {
        "column_encodings": ["int"],
        "column_names": ["cell"],
        "column_sizes": [8],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": None,
    }
    shards = [
        shard
        | {
            "raw_data": {"basename": f"shard.{number:05}.mds", "bytes": 64_000_000, "hashes": {}},
            "samples": min(SHARD, n_obs - begin),
        }
        for number, begin in enumerate(range(0, n_obs, SHARD))
    ]
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def first_batch(folder: Path, batch_size: int, rank: int, world_size: int, sample_in_epoch: int) -> object:
    """Work out an epoch as the first rank of a node does, and take the first batch of a rank."""
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}
    dataset = StreamingDataset(
        local=str(folder),
        batch_size=batch_size,
        shuffle=True,
        num_canonical_nodes=1,
        shuffle_block_size=SHUFFLED_TOGETHER,
    )
    world = World(1, world_size, 1, rank)
    return generate_work(dataset.batching_method, dataset, world, 0, sample_in_epoch)[0, rank, 0, 0]


def plan(n_obs: int, *numbers: int) -> Callable[[], object]:
    """Work out an epoch."""
    *_, batch_size, rank, world_size = numbers
    return partial(first_batch, index_of(n_obs), batch_size, rank, world_size, 0)


def resume(n_obs: int, *numbers: int) -> Callable[[], object]:
    """Go on in the middle of an epoch, with a global batch that both numbers of ranks divide, as it asks for."""
    *_, batch_size, rank, old, new = numbers
    both = lcm(old, new)
    together = -(-batch_size * old // both) * both
    done = n_obs // (2 * together) * together
    return partial(first_batch, index_of(n_obs), together // new, rank, new, done)
