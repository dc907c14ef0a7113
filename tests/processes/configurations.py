"""The collection that every job reads, and configurations of samplers.

Tests and the scripts of ranks import the same definitions from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

    from annbatch_distributed.core.config import ShardingName
    from annbatch_distributed.core.lanes import Remainder
    from annbatch_distributed.ranks import DistInfo

N_OBS = 347
BATCH_SIZE = 8
CHUNKS = {"chunk_size": 8, "preload_nchunks": 4, "batch_size": BATCH_SIZE}

TRAINING = slice(0, 250)
# 97 rows: on 2 and on 3 ranks, one rank has one more row than the others, and would have one more batch
HELD_OUT = slice(250, N_OBS)
FOLDS = [slice(0, 60), slice(120, 157)]

# these classes change far from any boundary between shards
CLASSES = np.repeat([0, 1, 2, 3], [50, 95, 60, 142])
# labels for the examples; some of the training cells and of the held-out cells have no label
LABELS = pd.Categorical.from_codes(np.where(np.arange(N_OBS) % 35 == 17, -1, CLASSES), [*"abcd"])
LABELED = np.flatnonzero(LABELS.codes >= 0).tolist()
# cells of all donors are everywhere, as in a shuffled collection
DONORS = np.array([f"d{donor}" for donor in np.random.default_rng(0).integers(5, size=N_OBS)])
# on 2 and on 3 ranks, only rank 0 has fewer rows of a class (three) than a chunk has (eight)
CUT_CLASSES = np.repeat([0, 1, 2], [77, 40, 230])

#: Number of samples of one configuration: more than one load request per rank, on 2 and on 3 ranks.
N_SAMPLES = 130


@dataclass(frozen=True)
class Configuration:
    """A sampler, its rows, its options and the epochs to read."""

    wrapped: Callable[[], Sampler]
    """Function that makes the wrapped sampler."""
    window: tuple[slice, ...]
    """Rows to shard: several ranges are the wrapper's mask, a single range is the wrapped sampler's mask."""
    remainder: Remainder = "drop"
    sharding: ShardingName = "contiguous"
    epochs: tuple[int | None, ...] = (0,)
    """Epoch to set before each iteration; with None, iterate without setting an epoch."""

    def sampler(self, dist_info: DistInfo) -> DistributedSampler:
        """Make one rank's sampler."""
        return DistributedSampler(
            self.wrapped(),
            dist_info=dist_info,
            remainder=self.remainder,
            sharding=self.sharding,
            mask=list(self.window) if len(self.window) > 1 else None,
            seed=0,
        )


def random(mask: slice) -> Callable[[], Sampler]:
    """Sample chunks in any order."""
    return lambda: RandomSampler(**CHUNKS, mask=mask, rng=np.random.default_rng())


def sequential() -> Sampler:
    """Sample chunks in their order."""
    return SequentialSampler(**CHUNKS)


def by_class(classes: np.ndarray, num_samples: int = 64) -> Callable[[], Sampler]:
    """Sample batches of one class each."""
    return lambda: ClassSampler(**CHUNKS, classes=pd.Categorical(classes), num_samples=num_samples, mask=TRAINING)


GOOD = {
    "drop": Configuration(random(TRAINING), (TRAINING,), epochs=(0, 1, 2, 0, None)),
    "keep": Configuration(random(HELD_OUT), (HELD_OUT,), "keep"),
    "pad": Configuration(random(HELD_OUT), (HELD_OUT,), "pad"),
    "shuffled folds": Configuration(sequential, tuple(FOLDS), "exact", "shuffled", epochs=(0, 1)),
    # samples from runs that no boundary between shards can cut
    "independent": Configuration(by_class(CUT_CLASSES, N_SAMPLES), (TRAINING,), sharding="independent", epochs=(0, 1)),
}
