"""Odd inputs: each is an error of the expected kind, which names what is wrong."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch import Loader
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, Rank, Shuffled, StatefulLoader, deferred
from tests.samplers import Counting, MaskBlind, NoBatchSize, job
from tests.strategies import POLICIES, unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

N_OBS = 40


def sampler(**options: Any) -> DistributedSampler:
    return DistributedSampler(RandomSampler(4, 2, 4), **{"dist_info": Rank(0, 2), "seed": 0} | options)


def plan(**options: Any) -> Any:
    return sampler(**options).plan(N_OBS)


def loader(**options: Any) -> StatefulLoader:
    made = StatefulLoader(batch_sampler=sampler(), preload_to_gpu=False, **options)
    return made.add_adata(ad.AnnData(np.zeros((N_OBS, 1))))


def rank_3(wrapped: Sampler, n_obs: int, **options: Any) -> Callable[[], object]:
    """The plan of the last of four ranks."""
    return lambda: job(wrapped, 4, **options)[3].plan(n_obs)


def counted(
    count: Callable[[int], Any], batch_size: int = 4, n_obs: int = N_OBS, **options: Any
) -> Callable[[], object]:
    """The plan of two ranks of a sampler that answers so when it is asked for its number of batches."""
    return lambda: job(Counting(batch_size, count), 2, **options)[0].plan(n_obs)


def always(answer: Any) -> Callable[[int], Any]:
    return lambda _: answer


def of_classes(*runs: int, **options: Any) -> ClassSampler:
    """A sampler of runs of the labels B, N, T, B, ..."""
    labels = pd.Categorical.from_codes(np.repeat(np.arange(len(runs)) % 3, runs), categories=[*"BNT"])
    return ClassSampler(4, 2, 4, classes=labels, num_samples=20, **options)


def argument(name: str, value: Any) -> Callable[[], object]:
    return partial(plan, **{name: value})


NO_INTEGERS = {"text": "5", "float": 1.5, "nan": math.nan, "bool": True, "list": [5]}
#: What is no number of batches.
NO_COUNTS: dict[type[Exception], list[Any]] = {
    ValueError: [5.5, math.nan, math.inf, -1, -1.0, 2**63, 10.0**30],
    TypeError: [None, True, np.bool_(True), "5", np.array([5]), 5 + 0j],
}
#: For each input: what is called, the kind of error, and a word of its message.
ODD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    # ranks
    "a rank beyond": (lambda: Rank(2, 2), ValueError, "world_size"),
    "a negative rank": (lambda: Rank(-1, 2), ValueError, "rank"),
    "no world": (lambda: Rank(0, 0), ValueError, "world size"),
    "a rank that is a text": (lambda: Rank("0", 2), TypeError, "integer"),
    "an unknown dist_info": (argument("dist_info", "mpi"), ValueError, "'torch', 'jax', 'env'"),
    "a dist_info that is a number": (argument("dist_info", 3), TypeError, "callable"),
    "a callable that returns one number": (argument("dist_info", lambda: 3), TypeError, "rank"),
    "a callable that returns three": (argument("dist_info", lambda: (0, 1, 2)), ValueError, "rank"),
    "a callable that returns a rank beyond": (argument("dist_info", lambda: (5, 2)), ValueError, "rank"),
    "deferred nothing": (lambda: deferred(None), TypeError, "dist_info"),
    # what is wrapped
    "no sampler": (lambda: DistributedSampler(3, dist_info=Rank(0, 1)), TypeError, "Sampler"),
    "a class": (
        lambda: DistributedSampler(RandomSampler, dist_info=Rank(0, 1)),
        TypeError,
        "instance",
    ),
    "a loader": (
        lambda: DistributedSampler(Loader(preload_to_gpu=False), dist_info=Rank(0, 1)),
        TypeError,
        "Sampler",
    ),
    # batch sizes, and numbers of batches
    **{
        f"no batch size, {policy}": (
            partial(job, NoBatchSize(4), 2, remainder=policy),
            ValueError,
            "NoBatchSize has batch_size None.*enforce_equal_batches=False",
        )
        for policy in (None, "drop", "exact", "pad")
    },
    "batch_size=0": (partial(job, MaskBlind(0), 2), ValueError, "MaskBlind has batch_size 0"),
    **{
        f"batch_size={size!r}, {policy}": (
            partial(job, MaskBlind(size), 2, remainder=policy),
            TypeError,
            "MaskBlind has batch_size .* of type .*integer",
        )
        for size in (8.0, math.nan, True, "8", np.float32(8), np.bool_(True), 2.5)
        for policy in POLICIES
    },
    "ranks with a batch size that wraps around": (
        lambda: job(MaskBlind(np.int8(100)), 3)[0].plan(250),
        ValueError,
        "3 ranks times batch size 100 is 300",
    ),
    "more draws than a shard has": (
        rank_3(RandomSampler(4, 2, 8, num_samples=26), 100),
        ValueError,
        r"num_samples \(26\) cannot exceed the observation range",
    ),
    "more draws than one shard has": (
        rank_3(RandomSampler(4, 2, 8, num_samples=26), 101, remainder="keep"),
        ValueError,
        r"rank 0 of 4.*num_samples \(26\)",
    ),
    "every row of a sampler that drops some": (
        rank_3(RandomSampler(4, 2, 8, drop_last=True), 101, remainder="exact"),
        ValueError,
        "promises every row. Use drop_last=False",
    ),
    "equally many batches of single rows": (
        rank_3(RandomSampler(1, 1, 1), 101, remainder="exact"),
        ValueError,
        "RandomSampler makes 25 of the 25 rows of rank 0, and 26 on rank 3",
    ),
    "labels of fewer rows": (rank_3(of_classes(25, 25, 25, 25), 101), ValueError, "does not match loader n_obs"),
    "a class with too few rows in one shard": (
        rank_3(of_classes(26, 26, 26, 22), 100, remainder="keep"),
        ValueError,
        r"rank 1 of 4, which are 25:50 .* chunk_size \(4\)",
    ),
    "a shard without a class to draw": (
        rank_3(of_classes(50, 50, class_weights=np.array([1.0, 0.0, 0.0])), 100, remainder="keep"),
        ValueError,
        "rank 2 of 4.*No class with positive weight",
    ),
    "counts two apart": (
        counted(lambda n: 1 + 2 * max(0, n - 10), 20, 21, remainder="exact"),
        ValueError,
        "Counting makes 1 of the 10 rows of rank 0, and 3 on rank 1",
    ),
    "a count that leaves rows out": (
        counted(lambda n: n // 8 * 2, n_obs=44, remainder="exact"),
        ValueError,
        "Counting .*4 batches of 4 rows at most, and so leaves out some of its 22 rows",
    ),
    "more batches than rows": (
        counted(lambda n: 2 * n, 1, 20, remainder="exact"),
        ValueError,
        "Counting .*makes 20 batches|Counting makes 20 batches",
    ),
    "more batches than full ones": (
        counted(lambda n: n // 2, n_obs=80, remainder="pad"),
        ValueError,
        "Counting .*makes 20 batches|Counting makes 20 batches",
    ),
    "a count that is not known": (counted(unknown), NotImplementedError, "that depends on 20"),
    **{
        f"a count of {count!r}, {policy}": (
            counted(always(count), remainder=policy),
            error,
            r"Counting.n_batches\(20\) must return how many batches it yie",
        )
        for error, counts in NO_COUNTS.items()
        for count in counts
        for policy in POLICIES
    },
    # arguments
    **{f"seed: {name}": (argument("seed", value), TypeError, "seed") for name, value in NO_INTEGERS.items()},
    **{f"align: {name}": (argument("align", value), TypeError, "align") for name, value in NO_INTEGERS.items()},
    "a negative seed": (argument("seed", -1), ValueError, "seed"),
    "a seed of 64 bits": (argument("seed", 2**63), ValueError, "seed"),
    "align=0": (argument("align", 0), ValueError, "align"),
    "a negative read_through": (argument("read_through", -1), ValueError, "read_through"),
    "virtual_ranks=0": (argument("virtual_ranks", 0), ValueError, "virtual_ranks"),
    "an unknown remainder": (argument("remainder", "droop"), ValueError, "'drop', 'keep', 'exact', 'pad'"),
    "a remainder that is a number": (argument("remainder", 1), TypeError, "remainder"),
    "enforce_equal_batches=1": (argument("enforce_equal_batches", 1), TypeError, "enforce_equal_batches"),
    "both of them": (
        lambda: sampler(remainder="drop", enforce_equal_batches=False),
        ValueError,
        "enforce_equal_batches",
    ),
    "an unknown sharding": (argument("sharding", "random"), ValueError, "'contiguous', 'shuffled'"),
    "a sharding that is a number": (argument("sharding", 5), TypeError, "sharding"),
    "a sharding that is None": (argument("sharding", None), TypeError, "sharding"),
    "a sharding that is a class": (argument("sharding", Shuffled), TypeError, "instance"),
    "blocks of no rows": (lambda: Shuffled(0), ValueError, "block_size"),
    "blocks of a text": (lambda: Shuffled("4"), TypeError, "block_size"),
    "shuffled without a seed": (lambda: plan(sharding="shuffled", seed=None), ValueError, "seed"),
    # the number of rows, epochs and batches
    **{f"n_obs: {name}": (partial(sampler().plan, value), TypeError, "n_obs") for name, value in NO_INTEGERS.items()},
    "a negative n_obs": (lambda: sampler().n_batches(-1), ValueError, "n_obs"),
    **{
        f"epoch: {name}": (partial(sampler().set_epoch, value), TypeError, "epoch")
        for name, value in NO_INTEGERS.items()
    },
    "a negative epoch": (lambda: sampler().set_epoch(-1), ValueError, "epoch"),
    "negative batches": (lambda: sampler().state_dict(batches_done=-1), ValueError, "batches_done"),
    "half a batch": (lambda: sampler().state_dict(batches_done=0.5), TypeError, "batches_done"),
    "a rank that is none": (lambda: plan().n_batches("0"), TypeError, "rank"),
    # labels
    "labels of other rows": (lambda: plan().composition(["a"]), ValueError, "40 rows"),
    "labels in two dimensions": (lambda: plan().composition(np.zeros((N_OBS, 2))), ValueError, "dimensions"),
    "labels that are a text": (lambda: plan().composition("a" * N_OBS), ValueError, "labels"),
    # loaders
    "a loader of another sampler": (
        lambda: StatefulLoader(batch_sampler=SequentialSampler(2, 1, 2)),
        TypeError,
        "DistributedSampler",
    ),
    "read_ahead of a text": (lambda: loader(read_ahead="1"), TypeError, "read_ahead"),
    "a negative read_ahead": (lambda: loader(read_ahead=-1), ValueError, "read_ahead"),
    "negative workers": (lambda: loader().to_dataloader(num_workers=-1), ValueError, "num_workers"),
    "a timeout of nothing": (lambda: sampler().check_ranks_agree(N_OBS, timeout=0), ValueError, "timeout"),
    "a timeout of nan": (lambda: loader().check_ranks_agree(timeout=math.nan), ValueError, "timeout"),
    "a gather that is none": (lambda: loader().check_ranks_agree(gather=3), TypeError, "gather"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_input_is_an_error_that_names_what_is_wrong(name: str) -> None:
    call, error, word = ODD[name]
    with pytest.raises(error, match=word):
        call()
