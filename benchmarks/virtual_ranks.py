"""Cost and benefit of virtual ranks.

1. CPU time of one iteration without reading, of a rank with virtual ranks relative to a rank with the same number of
   rows and no virtual ranks. The two alternate; ratios are of neighboring runs, and their median is reported.
2. Loss of a linear model trained on 1, 2, 4 and 8 ranks, with gradients averaged over ranks as in DDP, with and without
   virtual ranks. All ranks run in this process, one after another.

Measurements go to a JSON file, with the versions.

    python -m benchmarks.virtual_ranks                             # some minutes; the file of the documentation
    python -m benchmarks.virtual_ranks --small --out small.json    # the same at a size for tests
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank
from benchmarks import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    type Floats = npt.NDArray[np.float64]
    type Rows = npt.NDArray[np.int64]

#: chunk_size, preload_nchunks, batch_size: annbatch's FAQ, and its tutorial.
CONFIGURATIONS = [(512, 32, 4096), (64, 32, 256)]
VIRTUAL_RANKS = 8
#: Of the losses: how many rows a step has over all ranks.
GLOBAL_BATCH = 256
WORLD_SIZES = 1, 2, 4, 8


def exhaust(sampler: DistributedSampler, n_obs: int) -> float:
    """Return the CPU time of a pass."""
    sampler.set_epoch(0)
    gc.collect()  # what the run before has left is not for this one to pay
    began = time.process_time()
    for _ in sampler.sample(n_obs):
        pass
    return time.process_time() - began


def compare(configuration: tuple[int, int, int], sharding: str, n_own: int, n_obs: int, repeats: int) -> list[float]:
    """Return the ratios of a rank with ``n_own`` virtual ones to one with as many rows."""
    rank = Rank(0, VIRTUAL_RANKS // n_own)
    virtual = DistributedSampler(
        RandomSampler(*configuration),
        dist_info=rank,
        seed=0,
        sharding=sharding,
        virtual_ranks=VIRTUAL_RANKS,
    )
    plain = DistributedSampler(
        RandomSampler(*configuration),
        dist_info=rank,
        seed=0,
        sharding=sharding,
    )
    ratios = []
    for repeat in range(repeats + 1):
        times = {}
        for one in (virtual, plain) if repeat % 2 else (plain, virtual):
            times[one is virtual] = exhaust(one, n_obs)
        ratios.append(times[True] / times[False])
    return ratios[1:]  # the first passes plan


def steps(world_size: int, epoch: int, virtual_ranks: int | None, n_obs: int) -> Iterator[list[Rows]]:
    """Yield, for each step, the rows of every rank's batch."""
    size = GLOBAL_BATCH // (virtual_ranks or world_size)
    passes = []
    for rank in range(world_size):
        sampler = DistributedSampler(
            RandomSampler(size, 8, size),
            dist_info=Rank(rank, world_size),
            seed=0,
            sharding="shuffled",
            virtual_ranks=virtual_ranks,
        )
        sampler.set_epoch(epoch)
        passes.append(batches(sampler, n_obs))
    yield from map(list, zip(*passes, strict=True))


def batches(sampler: DistributedSampler, n_obs: int) -> Iterator[Rows]:
    """Yield the rows of every batch of a rank."""
    for request in sampler.sample(n_obs):
        rows = np.concatenate([np.arange(part.start, part.stop) for part in request["requests"]])
        yield from (rows[split] for split in request["splits"])


def losses(world_size: int, virtual_ranks: int | None, cells: Floats, targets: Floats, epochs: int) -> Floats:
    """Return the mean loss of every step over all ranks, while a linear model learns the targets."""
    weights, found = np.zeros(cells.shape[1]), []
    for epoch in range(epochs):
        for ranks in steps(world_size, epoch, virtual_ranks, len(cells)):
            errors = [cells[rows] @ weights - targets[rows] for rows in ranks]
            found.append(np.mean([np.square(error).mean() for error in errors]))
            gradients = [cells[rows].T @ error / len(rows) for rows, error in zip(ranks, errors, strict=True)]
            weights -= 0.02 * np.mean(gradients, axis=0)
    return np.array(found)


def main() -> None:
    """Measure, and write the ratios and the differences."""
    arguments = record.arguments(__doc__, "virtual_ranks")
    n_obs, repeats = (100_000, 1) if arguments.small else (10_000_000, 9)
    lines = []
    for configuration in CONFIGURATIONS:
        for sharding in ("contiguous", "shuffled"):
            for n_own in (2, VIRTUAL_RANKS):
                ratios = compare(configuration, sharding, n_own, n_obs, repeats)
                about = {"sizes": configuration, "sharding": sharding, "virtual ranks of a rank": n_own}
                spread = {"of plain": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
                lines += record.show(about | spread)
    rng = np.random.default_rng(0)
    n_cells, epochs = (4_096, 1) if arguments.small else (8_192, 2)
    groups = np.repeat(np.arange(8), n_cells // 8)  # in ranges, as in files that follow each other
    cells = rng.normal(size=(n_cells, 16)) + rng.normal(size=(8, 16))[groups]
    targets = cells @ rng.normal(size=16) + rng.normal(size=n_cells)
    curves = {
        name: {size: losses(size, virtual, cells, targets, epochs) for size in WORLD_SIZES}
        for name, virtual in (("plain ranks", None), (f"{VIRTUAL_RANKS} virtual ranks", VIRTUAL_RANKS))
    }
    differences = {
        name: max(float(np.abs(found - of_ranks[1]).max()) for found in of_ranks.values())
        for name, of_ranks in curves.items()
    }
    record.show(differences)
    jobs = {"rows": n_obs, "virtual ranks": VIRTUAL_RANKS, "ranks": WORLD_SIZES, "differences of losses": differences}
    record.write(arguments.out, **jobs, rounds=repeats, lines=lines)


if __name__ == "__main__":
    main()
