"""Growth: CPU seconds and memory of one rank by the size of a collection, and how fast they grow.

An exponent is the slope of the logarithm of the seconds over the logarithm of the size, from the size before: 1 is
linear, 0 is constant. Compare it with the exponent of an earlier version: seconds depend on the machine, exponents
hardly do. Sizes differ by a factor of 10.

Every run is a separate process; medians of seconds, memory and exponents are reported. A process prepares its data and
runs once at the smallest size, so that imports don't count. Memory is the peak beyond what the process had before the
run. Measurements go to a JSON file, with the versions.

    python -m benchmarks.growth                                # half an hour; the file of the documentation
    python -m benchmarks.growth --small --out small.json       # the same at a size for tests
    python -m benchmarks.growth --only mask --out mask.json    # tasks with this word in their names
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anndata as ad
import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.sparse as sp
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler

from annbatch_distributed import CellSets, DistributedSampler, Rank, Rows, StatefulLoader
from annbatch_distributed.checks import Tally
from benchmarks import record
from benchmarks.libraries.__main__ import status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: chunk_size, preload_nchunks, batch_size.
FEW_CHUNKS, MANY_CHUNKS = (512, 32, 4096), (64, 512, 4096)
RANK, WORLD_SIZE = 3, 8
#: Number of runs of a task that is too short to be measured once.
TIMES = 20

#: What is measured, with its data prepared.
type Run = Callable[[], object]


class Sent(Exception):
    """Ends a call that has sent its text."""


def sampler(
    sizes: tuple[int, int, int] = FEW_CHUNKS,
    rank: int = RANK,
    world_size: int = WORLD_SIZE,
    **options: Any,  # noqa: ANN401 of DistributedSampler
) -> DistributedSampler:
    """Return the sampler of a rank, which knows nothing yet."""
    return DistributedSampler(RandomSampler(*sizes), dist_info=Rank(rank, world_size), seed=0, **options)


def batches_of(of_rank: DistributedSampler, n_rows: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the rows of each batch."""
    for request in of_rank.sample(n_rows):
        slices: Any = request["requests"]
        rows = Rows(tuple(range(part.start, part.stop) for part in slices)).to_array()
        yield from (rows[split] for split in request["splits"])


def check_epoch_read(n_rows: int) -> Run:
    """Check the rows of an epoch on one rank, with the texts that the other ranks would send."""
    ranks = [sampler(rank=rank) for rank in range(WORLD_SIZE)]
    read, texts = [Tally() for _ in ranks], [""] * WORLD_SIZE

    def send(rank: int, text: str) -> list[str]:
        texts[rank] = text
        raise Sent

    for rank, tally in enumerate(read):
        for batch in batches_of(ranks[rank], n_rows):
            tally.add(batch)
        with suppress(Sent):
            ranks[rank].check_epoch_read(n_rows, tally, gather=partial(send, rank))
    return lambda: ranks[RANK].check_epoch_read(n_rows, read[RANK], gather=lambda _: texts)


def obs_of(n_cells: int) -> pd.DataFrame:
    """Return labels of cells of 10 lines and 20 drugs, in random order."""
    rng, obs = np.random.default_rng(0), pd.DataFrame(index=range(n_cells))
    for name, number in (("line", 10), ("drug", 20)):
        obs[name] = pd.Categorical.from_codes(rng.integers(number, size=n_cells), list(map(str, range(number))))
    return obs


def sets_of(obs: pd.DataFrame) -> CellSets:
    """Return sets of 64 cells with 64 controls of the same line."""
    return CellSets.from_obs(obs, by=["line", "drug"], set_size=64, controls={"drug": "0"}, match=["line"], seed=0)


def make_sets(n_cells: int) -> Run:
    """Group cells into sets."""
    return partial(sets_of, obs_of(n_cells))


def batch_of_sets(n_cells: int) -> Run:
    """Find the cells of load requests, each of one batch of 8 sets."""
    requests = sampler((1, 8, 8), 0, 1, sets=sets_of(obs_of(n_cells))).sample(n_cells)
    next(requests)
    return lambda: [next(requests) for _ in range(TIMES)]


def open_collection(n_datasets: int) -> Callable[[], StatefulLoader]:
    """Open a collection of datasets of 50 cells."""
    folder = tempfile.TemporaryDirectory()
    cells = sp.random_array((50, 100), density=0.1, format="csr", dtype=np.float32, rng=0)
    obs = pd.DataFrame({"donor": ["a"] * 50}, index=[f"cell {cell}" for cell in range(50)])
    file, path = Path(folder.name, "cells.h5ad"), Path(folder.name, "cells.zarr")
    ad.AnnData(cells, obs=obs).write_h5ad(file)
    DatasetCollection(path).add_adatas([file])
    for number in range(1, n_datasets):
        shutil.copytree(path / "dataset_0", path / f"dataset_{number}")
    # the folder is removed with this function
    return lambda: StatefulLoader.from_collection(Path(folder.name, "cells.zarr"), dist_info=Rank(0, 2), batch_size=4)


def len_of_loader(n_datasets: int) -> Run:
    """Ask a loader for its length, as progress bars do in each step."""
    loader = open_collection(n_datasets)()
    len(loader)
    return lambda: [len(loader) for _ in range(TIMES)]


def flags_of(n_rows: int) -> npt.NDArray[np.bool_]:
    """Return flags of which a random half is True."""
    return np.random.default_rng(0).integers(0, 2, n_rows, dtype=np.uint8).view(np.bool_)


def make_rows(n_rows: int) -> Run:
    """Make rows of a random mask."""
    return partial(Rows.from_mask, flags_of(n_rows))


def save_mask(n_rows: int) -> Run:
    """Make a sampler with a random mask, save its state, and load it."""
    flags = flags_of(n_rows)

    def run() -> DistributedSampler:
        of_rank = sampler(mask=flags)
        of_rank.load_state_dict(of_rank.state_dict(batches_done=0))
        return of_rank

    return run


def begin(of_rank: DistributedSampler, n_rows: int) -> Run:
    """Begin the epoch after the one that has begun."""
    next(of_rank.sample(n_rows))
    of_rank.set_epoch(1)  # the first pass is garbage now, as a pass that has ended
    return lambda: next(of_rank.sample(n_rows))


def shuffle_mask(n_rows: int) -> Run:
    """Begin an epoch of shuffled blocks of a random mask."""
    return begin(sampler(mask=flags_of(n_rows), sharding="shuffled", remainder="exact"), n_rows)


def shuffle_all(n_rows: int) -> Run:
    """Begin an epoch of shuffled blocks of 64 rows."""
    return begin(sampler(MANY_CHUNKS, sharding="shuffled", remainder="exact"), n_rows)


def first_request(sizes: tuple[int, int, int], n_rows: int) -> Run:
    """Begin the first epoch."""
    return lambda: next(sampler(sizes).sample(n_rows))


class Task(NamedTuple):
    """What is measured, and for which sizes."""

    prepare: Callable[[int], Run]
    smallest: int
    largest: int
    unit: str = "rows"
    times: int = 1

    def sizes(self, *, small: bool) -> list[int]:
        """Return sizes of which each is ten times the one before."""
        n_steps = 1 if small else round(math.log10(self.largest / self.smallest))
        return [self.smallest * 10**step for step in range(n_steps + 1)]


TASKS = {
    "check_epoch_read": Task(check_epoch_read, 10**6, 10**8),
    "batch of 8 sets": Task(batch_of_sets, 4 * 10**4, 4 * 10**6, "cells", TIMES),
    "CellSets.from_obs": Task(make_sets, 4 * 10**4, 4 * 10**6, "cells"),
    "from_collection": Task(open_collection, 1, 100, "datasets"),
    "len(loader)": Task(len_of_loader, 1, 100, "datasets", TIMES),
    "Rows.from_mask": Task(make_rows, 10**6, 10**8),
    "mask made, saved, loaded": Task(save_mask, 10**6, 10**8),
    "shuffled, random mask": Task(shuffle_mask, 10**6, 10**8),
    "shuffled, blocks of 64": Task(shuffle_all, 10**7, 10**9),
    "first request, chunks of 512": Task(partial(first_request, FEW_CHUNKS), 10**7, 10**9),
    "first request, chunks of 64": Task(partial(first_request, MANY_CHUNKS), 10**7, 10**9),
}


def measured(name: str, size: int) -> dict[str, float]:
    """Return the CPU seconds and the memory of a task in this process."""
    warnings.simplefilter("ignore")  # harmless warnings of anndata and zarr
    task = TASKS[name]
    task.prepare(task.smallest)()
    run = task.prepare(size)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory of the process: see proc(5)
    before, began = status("VmRSS"), time.process_time()
    answer = run()
    seconds = (time.process_time() - began) / task.times
    del answer
    return {"seconds": seconds, "MB": status("VmHWM") - before}


def in_process(name: str, size: int) -> dict[str, float]:
    """Return the same of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.growth", "--out", os.devnull, "--task", name, str(size)]
    done = subprocess.run(command, cwd=record.ROOT, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def measure(name: str, *, small: bool, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each size of a task."""
    before = float("nan")
    for size in TASKS[name].sizes(small=small):
        runs = [(measured if small else in_process)(name, size) for _ in range(repeats)]
        seconds, megabytes = (statistics.median(run[what] for run in runs) for what in ("seconds", "MB"))
        exponent = math.log10(max(seconds, 1e-9) / before)
        before = max(seconds, 1e-9)
        line = {"task": name, "size": size, "unit": TASKS[name].unit, "seconds": seconds, "MB": megabytes}
        yield line | {"exponent": None if math.isnan(exponent) else exponent}


def main() -> None:
    """Measure all tasks, and write what was measured."""
    arguments = record.arguments(
        __doc__,
        "growth",
        only={"default": "", "metavar": "WORD", "help": "measure only tasks with this word in their names"},
        task={"nargs": 2, "metavar": ("NAME", "SIZE"), "help": "print one measurement in this process"},
    )
    if arguments.task:
        name, size = arguments.task
        print(json.dumps(measured(name, int(size))))
        return
    repeats, lines = 1 if arguments.small else 3, []
    for name in TASKS:
        if arguments.only not in name:
            continue
        for line in measure(name, small=arguments.small, repeats=repeats):
            lines += record.show(line)
    record.write(arguments.out, **{"rank": RANK, "world size": WORLD_SIZE, "runs": repeats, "lines": lines})


if __name__ == "__main__":
    main()
