"""Cost of sharding, relative to annbatch's DistributedSampler and to the wrapped sampler alone.

Times are CPU seconds of one process. Runs of the two alternate, so that changes in the speed of the machine affect both
equally; the median of the ratios of neighboring runs is reported. Planning is reported in wall seconds and in peak
memory allocated by Python.

    python -m benchmarks.sampling            # 10^8 rows
    python -m benchmarks.sampling --small    # the same at a size for tests
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING

import annbatch.samplers
import numpy as np
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, Rank, Shuffled

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

WORLD_SIZE = 8
#: chunk_size, preload_nchunks, batch_size: annbatch's FAQ, the same with smaller chunks, and its tutorial.
CONFIGURATIONS = [(512, 32, 4096), (256, 32, 4096), (64, 32, 256)]
BLOCK_SIZE = 512


def base(configuration: tuple[int, int, int]) -> RandomSampler:
    """Return the sampler to distribute."""
    return RandomSampler(*configuration, rng=np.random.default_rng(0))


def exhaust(sampler: Sampler, n_obs: int) -> int:
    """Return the number of batches in a pass, having run through it."""
    return sum(len(request["splits"]) for request in sampler.sample(n_obs))


def exhaust_next_epoch(sampler: DistributedSampler, n_obs: int) -> int:
    """Return the number of batches in a pass of the following epoch, having run through it."""
    sampler.set_epoch(sampler.epoch + 1)
    return exhaust(sampler, n_obs)


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time that a call takes."""
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(ours: Callable[[], object], theirs: Callable[[], object], whose: str, repeats: int) -> str:
    """Return the median ratio of the times that two calls take, in words."""
    ratios, seconds = [], []
    for repeat in range(repeats):
        # alternates which one is first
        order = [ours, theirs] if repeat % 2 else [theirs, ours]
        taken = {run: cpu_seconds(run) for run in order}
        ratios.append(taken[ours] / taken[theirs])
        seconds.append(taken[ours])
    return (
        f"{statistics.median(ratios):.3f} of {whose} time "
        f"(median of {repeats}; {min(ratios):.3f} to {max(ratios):.3f}; ours {statistics.median(seconds):.3f} s)"
    )


def compare_exhausting(n_obs: int, rank: int, repeats: int) -> None:
    """Print, for each configuration, what running through one rank's pass costs relative to annbatch."""
    for configuration in CONFIGURATIONS:
        ours = DistributedSampler(base(configuration), dist_info=Rank(rank, WORLD_SIZE))
        theirs = annbatch.samplers.DistributedSampler(base(configuration), dist_info=partial(tuple, (rank, WORLD_SIZE)))
        assert exhaust(ours, n_obs) == exhaust(theirs, n_obs) == ours.n_batches(n_obs)
        runs = partial(exhaust, ours, n_obs), partial(exhaust, theirs, n_obs)
        print(
            f"exhaust sample({n_obs:.0e}), rank {rank} of {WORLD_SIZE}, chunk/preload/batch "
            f"{'/'.join(map(str, configuration))}: {compare(*runs, "annbatch's", repeats)}"
        )


def compare_epochs(n_obs: int, rank: int, repeats: int) -> None:
    """Print what one rank's epochs cost relative to the wrapped sampler alone, on as many rows as the rank has.

    A SequentialSampler does the least work, so that additional work counts most.
    """
    for wrapped in (RandomSampler, SequentialSampler):
        for configuration in CONFIGURATIONS:
            for sharding in ("contiguous", Shuffled(BLOCK_SIZE)):
                alone = wrapped(*configuration)
                ours = DistributedSampler(alone, dist_info=Rank(rank, WORLD_SIZE), sharding=sharding, seed=0)
                n_rows = len(ours.plan(n_obs).shard(rank))
                assert exhaust_next_epoch(ours, n_obs) == exhaust(alone, n_rows)
                runs = partial(exhaust_next_epoch, ours, n_obs), partial(exhaust, alone, n_rows)
                print(
                    f"epoch of {n_rows} rows, {sharding}, chunk/preload/batch {'/'.join(map(str, configuration))}: "
                    f"{compare(*runs, f"the lone {wrapped.__name__}'s", repeats)}"
                )


def measure_planning(n_obs: int, world_size: int, repeats: int) -> None:
    """Print what it takes until a rank's shuffled epoch could begin, from a sampler that knows nothing yet."""

    def plan() -> None:
        rank = Rank(world_size // 2, world_size)
        sampler = DistributedSampler(base(CONFIGURATIONS[0]), dist_info=rank, sharding=Shuffled(BLOCK_SIZE), seed=0)
        shard = sampler.plan(n_obs).shard(rank.rank)
        shard.rows.slices_to_global(np.array([0]), np.array([BLOCK_SIZE]))  # works out what every later one needs

    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        plan()
        times.append(time.perf_counter() - start)
    tracemalloc.start()
    plan()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"plan an epoch of {n_obs:.0e} rows, blocks of {BLOCK_SIZE}, {world_size} ranks: "
        f"{1e3 * statistics.median(times):.3f} ms (median of {repeats}), {peak / 1e6:.3f} MB"
    )


def time_answers(n_obs: int, world_size: int, repeats: int) -> None:
    """Print how long questions about an epoch take, the first one and later ones."""
    configuration = CONFIGURATIONS[0]
    for name, ask in {
        "n_batches": lambda sampler: sampler.n_batches(n_obs),
        "plan": lambda sampler: sampler.plan(n_obs),
        "str(plan)": lambda sampler: str(sampler.plan(n_obs)),
    }.items():
        first, later = [], []
        for _ in range(repeats):
            sampler = DistributedSampler(base(configuration), dist_info=Rank(world_size // 2, world_size))
            for times in (first, later):
                start = time.perf_counter()
                ask(sampler)
                times.append(time.perf_counter() - start)
        print(
            f"{name} at {n_obs:.0e} rows and {world_size} ranks: {1e3 * statistics.median(first):.3f} ms the first "
            f"time, {1e3 * statistics.median(later):.3f} ms later"
        )


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="run in seconds, at a size for tests")
    small = parser.parse_args().small
    # otherwise, garbage collection scans all imported modules, in an arbitrary run
    gc.freeze()
    for rank in (0, WORLD_SIZE // 2):
        compare_exhausting(10**6 if small else 10**8, rank, repeats=1 if small else 31)
    compare_epochs(10**6 if small else 10**8, WORLD_SIZE // 2, repeats=1 if small else 15)
    time_answers(10**7 if small else 10**10, world_size=1024, repeats=1 if small else 51)
    for world_size in (8, 1024):
        measure_planning(10**9, world_size, repeats=1 if small else 51)


if __name__ == "__main__":
    main()
