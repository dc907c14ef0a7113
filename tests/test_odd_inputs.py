"""Odd inputs: each is an error of the expected kind, which names what is wrong."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
from annbatch import Loader
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, Rank, Shuffled, StatefulLoader, deferred

if TYPE_CHECKING:
    from collections.abc import Callable

N_OBS = 40


def sampler(**options: Any) -> DistributedSampler:
    return DistributedSampler(RandomSampler(4, 2, 4), **{"dist_info": Rank(0, 2), "seed": 0} | options)


def plan(**options: Any) -> Any:
    return sampler(**options).plan(N_OBS)


def loader(**options: Any) -> StatefulLoader:
    made = StatefulLoader(batch_sampler=sampler(), preload_to_gpu=False, **options)
    return made.add_adata(ad.AnnData(np.zeros((N_OBS, 1))))


def argument(name: str, value: Any) -> Callable[[], object]:
    return partial(plan, **{name: value})


NO_INTEGERS = {"text": "5", "float": 1.5, "nan": math.nan, "bool": True, "list": [5]}
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
