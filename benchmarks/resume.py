"""Cost of resuming in the middle of an epoch, until the first load request of one rank.

On the same number of ranks, the cost is compared with a lower bound: the wrapped sampler alone, run up to the same
position, because the numbers of a generator can't be skipped. Times are CPU seconds of one process; runs of the two
alternate, and the median of the ratios of neighboring runs is reported. On a different number of ranks, a rank's
batches begin in other shards; CPU seconds and peak memory of Python and NumPy are reported. (Memory is measured by
tracemalloc in a separate run, because it is slow.)

    python -m benchmarks.resume            # 10^8 rows
    python -m benchmarks.resume --small    # the same at a size for tests
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any

from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

#: Numbers of ranks of the first half of an epoch, and of the rest.
WORLD_SIZE, OTHER_WORLD_SIZE, RANK = 8, 6, 3
#: chunk_size, preload_nchunks, batch_size: annbatch's FAQ, the same with smaller chunks, and its tutorial.
CONFIGURATIONS = [(512, 32, 4096), (256, 32, 4096), (64, 32, 256)]

type Configuration = tuple[int, int, int]


def make(configuration: Configuration, world_size: int) -> DistributedSampler:
    """Return one rank's sampler, as its process makes it."""
    return DistributedSampler(RandomSampler(*configuration), dist_info=Rank(RANK, world_size), seed=0)


def go_on(configuration: Configuration, world_size: int, state: dict[str, Any], n_obs: int) -> None:
    """Load a state into a sampler that knows nothing yet, and ask for its first load request."""
    sampler = make(configuration, world_size)
    sampler.load_state_dict(state)
    next(sampler.sample(n_obs))


def replay(configuration: Configuration, n_rows: int, done: int) -> None:
    """Run the wrapped sampler alone until the first load request that isn't done."""
    for request in RandomSampler(*configuration).sample(n_rows):
        done -= len(request["splits"])
        if done < 0:
            return


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time that a call takes."""
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def peak_megabytes(run: Callable[[], object]) -> float:
    """Return the most memory that a call has at once."""
    gc.collect()
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def median(values: list[float], form: str) -> str:
    """Return the median of some values and their range, in words."""
    shown, least, most = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{shown} ({least} to {most})"


def measure(configuration: Configuration, n_obs: int, repeats: int) -> list[str]:
    """Return the line of the table for a configuration."""
    before = make(configuration, WORLD_SIZE)
    done = before.n_batches(n_obs) // 2
    state = before.state_dict(batches_done=done)
    same = partial(go_on, configuration, WORLD_SIZE, state, n_obs)
    alone = partial(replay, configuration, len(before.plan(n_obs).shard(RANK)), done)
    other = partial(go_on, configuration, OTHER_WORLD_SIZE, state, n_obs)
    times: dict[Callable[[], None], list[float]] = {same: [], alone: [], other: []}
    for repeat in range(repeats):
        for run in (same, alone) if repeat % 2 else (alone, same):  # alternates which one is first
            times[run].append(cpu_seconds(run))
        times[other].append(cpu_seconds(other))
    ratios = [ours / theirs for ours, theirs in zip(times[same], times[alone], strict=True)]
    return [
        "/".join(map(str, configuration)),
        median(times[same], ".3f"),
        median(times[alone], ".3f"),
        median(ratios, ".2f"),
        median(times[other], ".2f"),
        f"{peak_megabytes(other):.1f}",
    ]


def main() -> None:
    """Measure all configurations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="run in seconds, at a size for tests")
    small = parser.parse_args().small
    n_obs, repeats = (10**6, 3) if small else (10**8, 7)
    # otherwise, garbage collection scans all imported modules, in an arbitrary run
    gc.freeze()
    print(f"{n_obs:.0e} rows, half an epoch done on {WORLD_SIZE} ranks; medians of {repeats} (and ranges)")
    lines = [
        [
            "chunk/preload/batch",
            f"on {WORLD_SIZE} ranks, s",
            "sampler alone, s",
            "ratio",
            f"on {OTHER_WORLD_SIZE} ranks, s",
            "MB",
        ],
        *(measure(configuration, n_obs, repeats) for configuration in CONFIGURATIONS),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
