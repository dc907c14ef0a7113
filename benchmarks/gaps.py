"""Cost of reading selected rows: only these rows, or also the rows in the gaps between them.

A simulated collection, sparse or dense, is written by annbatch, and a fraction of its rows is selected at random.
These rows are read in chunks in random order by: annbatch's Loader with index arrays of exactly these rows; this
package, with and without over-reading gaps; and this package from a collection of these rows alone. Rows per second
are reported relative to an iteration over all rows: medians of the ratios within a round, in which each method runs
once. Batches are made dense, as users do. Measurements go to a JSON file, with the versions.

    python -m benchmarks.gaps                             # 10^5 cells, some minutes; the file of the documentation
    python -m benchmarks.gaps --sweep --out sweep.json    # for several lengths of gaps, to choose the default
    python -m benchmarks.gaps --small --out small.json    # the same at a size for tests
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
import zarr
import zarrs  # noqa: F401 registers the codecs that annbatch recommends
from annbatch import Loader, write_sharded
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank
from benchmarks import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from annbatch.types import LoadRequest

    type Flags = npt.NDArray[np.bool_]

CHUNK, PRELOAD, BATCH = 512, 8, 512
#: Which part of the rows is selected.
PARTS = 0.9, 0.5, 0.2, 0.1, 0.02
LENGTHS = 0, 8, 16, 32, 64, 128, 256, 1024


class IndexArrays(Sampler):
    """annbatch without this package: chunks of the rows that are selected, in random order, as index arrays."""

    batch_size, shuffle = BATCH, False

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self.rows = rows

    def validate(self, n_obs: int) -> None:
        """Take any rows."""

    def n_batches(self, n_obs: int) -> int:
        """Return how many batches the rows make."""
        del n_obs
        return -(-len(self.rows) // BATCH)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        del n_obs
        rng = np.random.default_rng(0)
        chunks = np.array_split(self.rows, range(CHUNK, len(self.rows), CHUNK))
        order = rng.permutation(len(chunks))
        for start in range(0, len(order), PRELOAD):
            rows = np.concatenate([chunks[index] for index in order[start : start + PRELOAD]])
            positions = rng.permutation(len(rows))
            splits = np.array_split(positions, range(BATCH, len(rows), BATCH))
            yield {"requests": rows, "splits": [split for split in splits if len(split)]}


def write(folder: Path, matrix: sp.csr_array | npt.NDArray[np.float32]) -> Path:
    """Write a collection as annbatch does, in chunks of 64 rows."""
    write_sharded(zarr.open_group(folder, mode="w"), ad.AnnData(matrix))
    return folder


def read(folder: Path, sampler: Sampler) -> float:
    """Return how many seconds a pass takes, for a row."""
    group = zarr.open_group(folder, mode="r")["X"]
    cells = ad.io.sparse_dataset(group) if isinstance(group, zarr.Group) else group
    loader = Loader(batch_sampler=sampler, preload_to_gpu=False, to=None).add_dataset(cells)
    n_rows, began = 0, time.perf_counter()
    for batch in loader:
        n_rows += np.asarray(batch["X"].todense() if sp.issparse(batch["X"]) else batch["X"]).shape[0]
    return (time.perf_counter() - began) / n_rows


def ours(mask: Flags | None = None, length: int | None = None) -> Sampler:
    """Return this package's sampler for a job of one rank."""
    options = {} if length is None else {"max_gap": length}
    sampler = RandomSampler(CHUNK, PRELOAD, BATCH)
    return DistributedSampler(sampler, dist_info=Rank(0, 1), seed=0, mask=mask, remainder="exact", **options)


def compare(
    about: dict[str, Any], whole: Callable[[], float], ways: dict[str, Callable[[], float]], repeats: int
) -> list[dict[str, Any]]:
    """Return how many rows each way delivers in the time in which a pass over all rows delivers one."""
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        base = whole()
        for name, way in ways.items():
            times[name].append(1e6 * way())
            ratios[name].append(1e6 * base / times[name][-1])
    medians = {
        name: {"us a row": statistics.median(times[name]), "of all": statistics.median(ratios[name])} for name in ways
    }
    return record.show(*(about | {"way": name} | of_way for name, of_way in medians.items()))


def main() -> None:
    """Measure all parts of both collections, and write what was measured."""
    sweep = {"action": "store_true", "help": "compare lengths of gaps"}
    arguments = record.arguments(__doc__, "gaps", sweep=sweep)
    n_obs, repeats = (6_000, 1) if arguments.small else (100_000, 9)
    warnings.simplefilter("ignore")  # harmless warnings of anndata and zarr
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    rng = np.random.default_rng(0)
    collections: dict[str, Callable[[], sp.csr_array | npt.NDArray[np.float32]]] = {
        "sparse": lambda: sp.random_array((n_obs, 2_000), density=0.05, format="csr", dtype=np.float32, rng=rng),
        "dense": lambda: rng.random((n_obs, 512), dtype=np.float32),
    }
    lines: list[dict[str, Any]] = []
    for name, make in collections.items():
        matrix = make()
        with tempfile.TemporaryDirectory() as folder:
            every = write(Path(folder) / "all", matrix)
            whole = partial(read, every, ours())
            lines += compare({"collection": name, "selected": 1}, whole, {"all": whole}, repeats)  # the noise
            for part in PARTS[1:] if arguments.sweep else PARTS:
                mask = rng.random(n_obs) < part
                if arguments.sweep:
                    ways = {str(length): partial(read, every, ours(mask, length)) for length in LENGTHS}
                else:
                    alone = write(Path(folder) / "some", matrix[mask])
                    ways = {
                        "index arrays": partial(read, every, IndexArrays(np.flatnonzero(mask))),
                        "no gaps": partial(read, every, ours(mask, 0)),
                        "gaps": partial(read, every, ours(mask)),
                        "a collection": partial(read, alone, ours()),
                    }
                lines += compare({"collection": name, "selected": part}, whole, ways, repeats)
    record.write(arguments.out, cells=n_obs, chunk=CHUNK, rounds=repeats, lines=lines)


if __name__ == "__main__":
    main()
