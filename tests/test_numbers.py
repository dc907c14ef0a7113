"""Whatever type of integer a user's numbers have, they are numbers: in plans, in states, and between ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, Rank, Shuffled
from tests.samplers import batches

N_OBS = 120
CLASSES = pd.Categorical(np.repeat(["B", "T"], [60, 60]))
SAMPLERS = {
    "random": lambda of: RandomSampler(of(4), of(2), of(4), mask=slice(of(0), of(116))),
    "draws": lambda of: RandomSampler(of(4), of(2), of(4), replacement=True, num_samples=of(40)),
    "sequential": lambda of: SequentialSampler(of(4), of(2), of(4)),
    "classes": lambda of: ClassSampler(of(4), of(2), of(4), classes=CLASSES, num_samples=of(40)),
}


def made(kind: str, of: Any, rank: int, **options: Any) -> DistributedSampler:
    if kind in {"draws", "classes"}:
        options |= {"sharding": "independent"}
    elif options.pop("is_shuffled"):
        options |= {"sharding": Shuffled(of(4))}
    options.pop("is_shuffled", None)
    return DistributedSampler(SAMPLERS[kind](of), dist_info=Rank(of(rank), of(2)), seed=of(0), **options)


@pytest.mark.parametrize("of", [np.int8, np.uint64])
@pytest.mark.parametrize("remainder", ["drop", "keep", "exact", "pad"])
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_integers_of_numpy_are_integers(of: Any, remainder: str, kind: str, is_shuffled: bool) -> None:
    options = {"remainder": remainder, "is_shuffled": is_shuffled, "read_through": 3, "virtual_ranks": 2}
    plain = [made(kind, int, rank, **options) for rank in range(2)]
    ranks = [made(kind, of, rank, **options | {"read_through": of(3), "virtual_ranks": of(2)}) for rank in range(2)]
    for one, expected in zip(ranks, plain, strict=True):
        assert str(one.plan(N_OBS)) == str(expected.plan(N_OBS))
        assert batches(one.sample(N_OBS)) == batches(expected.sample(N_OBS))
        state = json.loads(json.dumps(one.state_dict(batches_done=of(3))))
        assert state == expected.state_dict(batches_done=3)
        one.check_ranks_agree(N_OBS, gather=lambda text: [text, _of_other(text)])


def _of_other(text: str) -> str:
    """What the other rank says."""
    return text.replace('"rank": 0', '"rank": 2').replace('"rank": 1', '"rank": 0').replace('"rank": 2', '"rank": 1')
