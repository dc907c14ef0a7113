"""What sharing out costs: side by side with annbatch's own DistributedSampler, in one process.

Times are CPU seconds of the process, and the runs of the two alternate, so that a machine that speeds up or slows down
meets both. What is reported is the median of the ratios of neighbouring runs.

    python benchmarks/sampling.py            # 10^8 rows
    python benchmarks/sampling.py --small    # the same at a size for tests
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import annbatch.samplers
import numpy as np
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

WORLD_SIZE = 8
#: chunk_size, preload_nchunks, batch_size: annbatch's FAQ, and its tutorial.
CONFIGURATIONS = [(512, 32, 4096), (64, 32, 256)]


def base(configuration: tuple[int, int, int]) -> RandomSampler:
    """Return the sampler to distribute."""
    return RandomSampler(*configuration, rng=np.random.default_rng(0))


def exhaust(sampler: Sampler, n_obs: int) -> int:
    """Return the number of batches in a pass, having run through it."""
    return sum(len(request["splits"]) for request in sampler.sample(n_obs))


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time that a call takes."""
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def compare_exhausting(n_obs: int, rank: int, repeats: int) -> None:
    """Print, for each configuration, what running through one rank's pass costs relative to annbatch."""
    for configuration in CONFIGURATIONS:
        ours = DistributedSampler(base(configuration), dist_info=Rank(rank, WORLD_SIZE))
        theirs = annbatch.samplers.DistributedSampler(base(configuration), dist_info=partial(tuple, (rank, WORLD_SIZE)))
        assert exhaust(ours, n_obs) == exhaust(theirs, n_obs) == ours.n_batches(n_obs)
        ratios, seconds = [], []
        for repeat in range(repeats):
            # each goes first every other time
            order = [ours, theirs] if repeat % 2 else [theirs, ours]
            taken = {id(sampler): cpu_seconds(partial(exhaust, sampler, n_obs)) for sampler in order}
            ratios.append(taken[id(ours)] / taken[id(theirs)])
            seconds.append(taken[id(ours)])
        print(
            f"exhaust sample({n_obs:.0e}), rank {rank} of {WORLD_SIZE}, chunk/preload/batch "
            f"{'/'.join(map(str, configuration))}: {statistics.median(ratios):.3f} of annbatch's time "
            f"(median of {repeats}; {min(ratios):.3f} to {max(ratios):.3f}; ours {statistics.median(seconds):.3f} s)"
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
    parser.add_argument("--small", action="store_true", help="run in about a second, for a look at whether it works")
    small = parser.parse_args().small
    for rank in (0, WORLD_SIZE // 2):
        compare_exhausting(10**6 if small else 10**8, rank, repeats=3 if small else 31)
    time_answers(10**7 if small else 10**10, world_size=1024, repeats=5 if small else 51)


if __name__ == "__main__":
    main()
