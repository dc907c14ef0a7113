"""Rows per core second of this package relative to annbatch, by the number of values of a cell and the batch size.

Sparse cells with 30 to 3,000 values, as of targeted panels and of whole transcriptomes, are written by annbatch, and
read by both from the page cache in one process, in batches of 32 to 8,192. Both read one store with one sampler, so the
ratio is of code and not of storage. Rounds measure each once, in turns; medians and the least ratio of a single epoch
are reported, and the ratio of annbatch to itself. Measurements go to a JSON file, with the versions.

    python -m benchmarks.sizes                                # ten minutes; the file of the documentation
    python -m benchmarks.sizes --small --out small.json       # the same at a size for tests
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
import zarrs  # noqa: F401 registers the codecs that annbatch recommends
from annbatch import Loader, write_sharded
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from benchmarks import record

#: Values of a cell.
N_VALUES = 30, 100, 300, 1_000, 3_000
#: chunk_size, preload_nchunks, batch_size.
SIZES = (64, 32, 32), (64, 32, 256), (64, 64, 1_024), (512, 32, 4_096), (512, 32, 8_192)
#: Values of all cells, and the largest number of cells.
N_ALL, MOST_CELLS = 40_000_000, 100_000


def write(folder: Path, n_cells: int, n_values: int) -> None:
    """Write cells with about as many values each, of ten times as many genes."""
    rng = np.random.default_rng(0)
    # a value in each of as many parts of ten genes
    indices = np.arange(n_values) * 10 + rng.integers(0, 10, (n_cells, n_values))
    is_kept = rng.random(indices.shape) < rng.uniform(0.6, 1, (n_cells, 1))
    indptr = np.append(0, is_kept.sum(axis=1).cumsum())
    data = (1 + rng.poisson(1, indptr[-1])).astype(np.float32)
    counts = sp.csr_matrix((data, indices[is_kept].astype(np.int32), indptr), (n_cells, 10 * n_values))
    obs = pd.DataFrame({"donor": pd.Categorical(rng.integers(0, 20, n_cells).astype(str))})
    obs.index = pd.Index([f"cell {number}" for number in range(n_cells)])
    write_sharded(zarr.open_group(folder, mode="w"), ad.AnnData(counts, obs=obs))


def loader(kind: type[Loader[Any, Any]], folder: Path, sizes: tuple[int, int, int]) -> Loader[Any, Any]:
    """Return a loader of all cells."""
    sampler = DistributedSampler(RandomSampler(*sizes), dist_info=Rank(0, 1), seed=0, remainder="exact")
    made = kind(batch_sampler=sampler, preload_to_gpu=False)
    group: Any = zarr.open_group(folder, mode="r")
    return made.add_adata(ad.AnnData(ad.io.sparse_dataset(group["X"]), obs=ad.io.read_elem(group["obs"])))


def rate(made: Loader[Any, Any]) -> float:
    """Return the rows per core second of an epoch."""
    began = time.process_time()
    n_rows: int = sum(batch["X"].shape[0] for batch in made)
    return n_rows / (time.process_time() - began)


def main() -> None:
    """Measure all sizes, and write what was measured."""
    arguments = record.arguments(__doc__, "sizes")
    warnings.simplefilter("ignore")
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    repeats, n_all = (1, 3_000_000) if arguments.small else (7, N_ALL)
    lines = []
    for n_values in N_VALUES[1:2] if arguments.small else N_VALUES:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), min(MOST_CELLS, n_all // n_values), n_values)
            for sizes in SIZES:
                ways = {
                    "annbatch": loader(Loader, Path(folder), sizes),
                    "again": loader(Loader, Path(folder), sizes),
                    "annbatch-distributed": loader(StatefulLoader, Path(folder), sizes),
                }
                rates: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(repeats + 1):
                    for name, made in ways.items():
                        one = rate(made)
                        if number:  # the first epoch opens arrays
                            rates[name].append(one)
                ratios, control = (
                    [own / theirs for own, theirs in zip(rates[name], rates["annbatch"], strict=True)]
                    for name in ("annbatch-distributed", "again")
                )
                lines += record.show(
                    {
                        "values": n_values,
                        "sizes": sizes,
                        "of annbatch's": statistics.median(ratios),
                        "least": min(ratios),
                        "control": statistics.median(control),
                        "least of control": min(control),
                        "rows/core s": statistics.median(rates["annbatch-distributed"]),
                    }
                )
    record.write(arguments.out, rounds=repeats, lines=lines)


if __name__ == "__main__":
    main()
