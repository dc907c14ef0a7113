"""Cost of reading with workers of PyTorch's ``DataLoader``, relative to annbatch's sampler alone.

One rank reads a simulated sparse collection, in common sizes of chunks and batches, with persistent workers: the first
epoch starts them, and the second one is timed. annbatch's ``RandomSampler`` divides its chunks among workers. This
package divides the batches of a rank. If each load request were read by every worker, the ratio would be the number of
workers. Runs alternate; medians of the ratios of neighboring runs are reported.

    python -m benchmarks.workers            # 10^5 cells
    python -m benchmarks.workers --small    # the same at a size for tests
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import scipy.sparse as sp
import zarr
from annbatch import Loader
from annbatch.samplers import RandomSampler
from torch.utils.data import DataLoader

from annbatch_distributed import DistributedSampler, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

#: chunk_size, preload_nchunks, batch_size: annbatch's FAQ, and its tutorial.
CONFIGURATIONS = [(512, 32, 4096), (64, 32, 256)]
N_WORKERS = 2


def make_cells(folder: Path, n_obs: int, n_var: int = 2_000, density: float = 0.05) -> None:
    """Write a sparse matrix as annbatch does: many chunks in a shard."""
    matrix = sp.random(n_obs, n_var, density, format="csr", dtype=np.float32, rng=np.random.default_rng(0))
    group = zarr.open_group(folder, mode="w")
    ad.io.write_elem(group, "X", matrix, dataset_kwargs={"chunks": (2**15,), "shards": (2**21,)})


def read(folder: Path, sampler: Sampler) -> float:
    """Return how many seconds the second epoch takes, for a row."""
    cells = ad.io.sparse_dataset(zarr.open_group(folder, mode="r")["X"])
    loader = Loader(batch_sampler=sampler, preload_to_gpu=False).add_dataset(cells)
    # forked where that can be, because what starting them takes is not the question
    start = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    batches = DataLoader(
        loader, batch_size=None, num_workers=N_WORKERS, multiprocessing_context=start, persistent_workers=True
    )
    sum(1 for _ in batches)
    began = time.perf_counter()
    n_rows: int = sum(batch["X"].shape[0] for batch in batches)
    return (time.perf_counter() - began) / n_rows


def annbatchs(configuration: tuple[int, int, int]) -> Sampler:
    """Return annbatch's sampler alone, which takes workers if it may drop what fills no batch in each of them."""
    return RandomSampler(*configuration, drop_last=True)


def ours(configuration: tuple[int, int, int]) -> Sampler:
    """Return the same for a job of one rank."""
    return DistributedSampler(RandomSampler(*configuration), dist_info=Rank(0, 1), seed=0)


def main() -> None:
    """Measure all configurations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="run in seconds, at a size for tests")
    small = parser.parse_args().small
    n_obs, repeats = (40_000, 1) if small else (200_000, 9)
    warnings.simplefilter("ignore")  # harmless warnings of anndata, zarr, and PyTorch about threads next to a fork
    print(f"{n_obs:.0e} cells read by {N_WORKERS} workers: microseconds for a row; medians of {repeats} (and ranges)")
    print("chunk/preload/batch    annbatch's sampler      here         ratio")
    with tempfile.TemporaryDirectory() as folder:
        make_cells(Path(folder), n_obs)
        for configuration in CONFIGURATIONS:
            makers: list[Callable[[tuple[int, int, int]], Sampler]] = [annbatchs, ours]
            times: list[list[float]] = [[], []]
            for repeat in range(repeats):
                for which in (0, 1) if repeat % 2 else (1, 0):  # alternates which one is first
                    times[which].append(1e6 * partial(read, Path(folder))(makers[which](configuration)))
            ratios = [here / theirs for theirs, here in zip(*times, strict=True)]
            name = "/".join(map(str, configuration))
            medians = [statistics.median(one) for one in (*times, ratios)]
            print(
                f"{name:>19}    {medians[0]:18.1f}    {medians[1]:6.1f}    {medians[2]:.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
