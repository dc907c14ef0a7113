"""The collection that every launch reads, and the configurations that it runs through.

All ranks' scripts and the tests import this, so that they mean the same.
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

    from annbatch_distributed.config import ShardingName
    from annbatch_distributed.lanes import Remainder
    from annbatch_distributed.ranks import DistInfo

N_OBS = 347
BATCH_SIZE = 8
CHUNKS = {"chunk_size": 8, "preload_nchunks": 4, "batch_size": BATCH_SIZE}

TRAINING = slice(0, 250)
# 97 rows: on 2 ranks as on 3, one has a row more than the others, and with it would have a batch more
HELD_OUT = slice(250, N_OBS)
FOLDS = [slice(0, 60), slice(120, 157)]

# no boundary between shards comes close to where these classes change
CLASSES = np.repeat([0, 1, 2, 3], [50, 95, 60, 142])
# what the examples learn: some cells have no label, of those to train on and of those that are held out
LABELS = pd.Categorical.from_codes(np.where(np.arange(N_OBS) % 35 == 17, -1, CLASSES), [*"abcd"])
LABELLED = np.flatnonzero(LABELS.codes >= 0).tolist()
# cells of all donors are everywhere, as in a collection that was shuffled
DONORS = np.array([f"d{donor}" for donor in np.random.default_rng(0).integers(5, size=N_OBS)])
# on 2 ranks as on 3, rank 0 has three rows of a class, and a chunk takes eight; no other rank has too few
CUT_CLASSES = np.repeat([0, 1, 2], [77, 40, 230])

#: What the ranks of one configuration share out: on 2 ranks as on 3, more than one load request for each.
DRAWS = 130


@dataclass(frozen=True)
class Configuration:
    """A sampler, the rows to share out, how, and in which passes."""

    wrapped: Callable[[], Sampler]
    """Makes the sampler to wrap."""
    window: tuple[slice, ...]
    """The rows to share out; several stretches are the wrapper's mask, one is the wrapped sampler's."""
    remainder: Remainder = "drop"
    sharding: ShardingName = "contiguous"
    epochs: tuple[int | None, ...] = (0,)
    """The epoch to set before each pass; None makes one more pass without setting any."""

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
    # draws from runs that no boundary between shards can cut
    "independent": Configuration(by_class(CUT_CLASSES, DRAWS), (TRAINING,), sharding="independent", epochs=(0, 1)),
}
