"""Odd inputs: each raises an error of the expected type, whose message names the problem."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from itertools import product
from operator import add
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
import pytest
from annbatch import Loader
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler

from annbatch_distributed import (
    DistributedSampler,
    MixedLoader,
    Rank,
    Rows,
    Shuffled,
    StatefulLoader,
    deferred,
    suggest_sizes,
)
from annbatch_distributed.checks import Tally
from annbatch_distributed.core.masks import resolve_mask
from annbatch_distributed.loader import stateful
from tests.loaders import numbered
from tests.samplers import Counting, MaskBlind, NoBatchSize, job
from tests.strategies import POLICIES, selected, unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

N_OBS = 40


def sampler(**options: Any) -> DistributedSampler:
    return DistributedSampler(RandomSampler(4, 2, 4), **{"dist_info": Rank(0, 2), "seed": 0} | options)


def plan(**options: Any) -> Any:
    return sampler(**options).plan(N_OBS)


def loader(remainder: Any = "drop", **options: Any) -> StatefulLoader:
    return numbered(sampler(remainder=remainder), N_OBS, **options)


def rank_3(wrapped: Sampler, n_obs: int, **options: Any) -> Callable[[], object]:
    """The plan of the last of four ranks."""
    return lambda: job(wrapped, 4, **options)[3].plan(n_obs)


def counted(
    count: Callable[[int], Any], batch_size: int = 4, n_obs: int = N_OBS, **options: Any
) -> Callable[[], object]:
    """The plan of two ranks of a sampler whose number of batches is a function of the number of rows."""
    return lambda: job(Counting(batch_size, count), 2, **options)[0].plan(n_obs)


def of_count(pair: tuple[Any, Any]) -> object:
    """The plan of a sampler whose number of batches is any object, under a policy."""
    answer, policy = pair
    return counted(lambda _: answer, remainder=policy)()


def of_size(pair: tuple[Any, Any]) -> object:
    size, policy = pair
    return job(MaskBlind(size), 2, remainder=policy)


def of_classes(*runs: int, cls: type[ClassSampler] = ClassSampler, **options: Any) -> ClassSampler:
    """A sampler of runs of the labels B, N, T, B, ..."""
    labels = pd.Categorical.from_codes(np.repeat(np.arange(len(runs)) % 3, runs), categories=[*"BNT"])
    return cls(4, 2, 4, classes=labels, num_samples=20, **options)


def rows_of_mask(mask: Any) -> Rows:
    """The rows that a mask selects of 100."""
    return resolve_mask(mask).selected(100)


def wrapping(options: dict[str, Any] | None = None, **attributes: Any) -> DistributedSampler:
    """A sampler that wraps a sampler with some attributes."""
    wrapped = MaskBlind(2)
    vars(wrapped).update({f"_{name}": value for name, value in attributes.items()})
    return DistributedSampler(wrapped, dist_info=Rank(0, 2), **(options or {}))


def shuffled_classes(cls: type[ClassSampler]) -> list[DistributedSampler]:
    return job(of_classes(20, 20, cls=cls), 2, sharding="shuffled", seed=0)


def samples_of_classes(of_sampler: dict[str, Any], **options: Any) -> Callable[[], object]:
    """The plan of three ranks that sample from runs of four labels."""
    labels = pd.Categorical(np.repeat([*"BDNT"], [100, 60, 40, 600]))
    wrapped = ClassSampler(4, 4, 8, classes=labels, **{"num_samples": 400} | of_sampler)
    return lambda: job(wrapped, 3, sharding="independent", **options)[2].plan(800)


def mixture(**options: Any) -> Callable[[], object]:
    """A mixture of two sources."""
    arguments = {"weights": dict.fromkeys("ab", 1), "n_steps": 9} | options
    return lambda: MixedLoader({"a": loader(), "b": loader()}, **arguments)


def gathering(texts: Any) -> None:
    """Run the check of the first of two ranks, with a function that returns some texts."""
    sampler().check_ranks_agree(N_OBS, gather=lambda _: texts)


def garbling(answer: str) -> None:
    """Run the check with a garbled text of the second rank, in which CALL stands for the call of the first."""

    def gather(text: str) -> list[str]:
        return [text, answer.replace("CALL", json.dumps(json.loads(text)["call"]))]

    sampler().check_ranks_agree(N_OBS, gather=gather)


def on_ranks(numbers: tuple[int, int]) -> DistributedSampler:
    """A sampler of a number of virtual ranks on a number of ranks."""
    virtual_ranks, world_size = numbers
    return sampler(dist_info=Rank(0, world_size), virtual_ranks=virtual_ranks)


def sharded_by(answer: Callable[[Rows], Any]) -> object:
    """The pass of a rank whose sharding returns the result of a function for the rows 0:13."""

    def sharding(rows: Rows, *, epoch: int, seed: int | None) -> Any:
        return answer(rows)

    return job(SequentialSampler(2, 1, 2), 2, sharding=sharding, remainder="keep")[1].sample(13)


def set_an_earlier_epoch() -> None:
    """Load a state, and set an epoch before the epoch of the state."""
    saved, loaded = sampler(), sampler()
    saved.set_epoch(3)
    loaded.load_state_dict(saved.state_dict(batches_done=2))
    loaded.set_epoch(2)


def returning(pair: Any) -> DistributedSampler:
    return sampler(dist_info=lambda: pair)


def with_dist_info(dist_info: Any) -> DistributedSampler:
    return sampler(dist_info=dist_info)


def with_deferred(dist_info: Any) -> DistributedSampler:
    return sampler(dist_info=deferred(dist_info))


def rank_of(rank: int) -> tuple[int, int]:
    return rank, 2


def each(name: str, values: list[Any], call: Callable[[Any], object], error: Any, message: str) -> dict[str, Odd]:
    """One entry for each value; VALUE in a message is the value, and NAME the name of the value."""
    return {
        f"{name} {number}": (
            partial(call, value),
            error,
            message.replace("VALUE", re.escape(shortened(value))).replace("NAME", getattr(value, "__name__", "")),
        )
        for number, value in enumerate(values)
    }


def argument(name: str, value: Any) -> Callable[[], object]:
    return partial(plan, **{name: value})


#: A call, the type of its error, and a part of the message.
type Odd = tuple[Callable[[], object], type[Exception], str]
NO_PAIR = r"must return a tuple of two integers \(rank, world_size\).*VALUE"
A_CLASS = "dist_info must be .*NAME.*Pass an instance"
WITH_ARGUMENTS = "must need no arguments, .*NAME"
NO_GENERATORS: list[Any] = [np.random.RandomState(0), 7, "seed"]
NO_GENERATOR = r"rng must be a numpy\.random\.Generator or None, got"
NO_INTEGERS: list[Any] = ["5", 1.5, math.nan, True, [5]]
NO_SIZE = "MaskBlind.batch_size must be an integer or None"
NO_SIZES: list[Any] = [8.0, math.nan, True, "8", np.float32(8), np.bool_(True), 2.5]
ODD_COUNTS: list[Any] = [5.5, math.nan, math.inf, -1, -1.0, 2**63, 10.0**30]
NO_COUNTS: list[Any] = [None, True, np.bool_(True), "5", np.array([5]), 5 + 0j]
NO_RANK = r"rank must be in \[0, 2\), the ranks of this plan, got VALUE"
NO_COUNT = r"Counting.n_batches\(20\) must return the number of batches"
NO_TALLIES: list[Any] = [(-1,), (0, -1), (1.0,), (0, None), (True,), (1, 1, 2**64), (1, 1, -1)]
ODD_MASK = r"MaskBlind\.mask is invalid: mask must be a slice"
ODD_MASKS: list[Any] = [np.ones(3), "0:3", 7, [True, False], {"start": 0}]
#: Masks of 100 rows that select no row, a row twice, or a row beyond the collection.
WRONG_MASKS: list[tuple[Any, str]] = [
    (slice(-5, None), "must be at least 0, got slice(-5, None, None)"),
    (slice(0, -5), "must be at least 0, got slice(0, -5, None)"),
    (slice(9, 3), "start < stop"),
    (slice(5, 5), "start < stop"),
    (slice(0, 0), "start < stop"),
    (slice(2**70, None), "start < stop"),
    (slice(0, 10, 2), "must not have a step"),
    (slice(10, 0, -1), "must not have a step"),
    ([slice(0, 10), slice(9, 20)], "must not overlap, got [0, 10) and [9, 20)"),
    ([slice(5, None), slice(90, 95)], "must not overlap, got [5, end) and [90, 95)"),
    ([slice(5, None), slice(5, 10)], "must not overlap, got [5, 10) and [5, end)"),
    ([slice(0, 5), slice(0, 5)], "must not overlap"),
    ([slice(0, 5), slice(7, 6)], "start < stop"),
    ([], "at least one row, got an empty list"),
    (Rows(), "at least one row, got empty Rows"),
    (Rows((range(5), range(3, 9))), "2 of the 11 are duplicates"),
    (np.zeros(9, dtype=bool), "9 values that are all False"),
    (np.ones((3, 3), dtype=bool), "one dimension, got an array of shape (3, 3)"),
    (np.array([], dtype=int), "at least one row, got an empty array"),
    (np.array([3, -1]), "at least 0, got -1"),
    (np.array([2**63 - 1], dtype=np.uint64), "must be below 2**63 - 1"),
    (np.array([3, 5, 3]), "1 of the 3 are duplicates. Pass each row once"),
    (np.array([0, 1, 1, 0]), "2 of the 4 are duplicates. If they are flags"),
    (pd.Series([True, None, False], dtype="boolean"), "1 of 3 values are missing"),
    (np.ma.MaskedArray([True, False], mask=[False, True]), "1 of 2 values are missing"),
    (pd.Series([True, False, True]).iloc[::-1], "at position 0"),
    *[
        (mask, "must lie within the rows of the collection, [0, 100)")
        for slices in ([slice(0, 101)], [slice(100, None)], [slice(100, 120)], [slice(0, 10), slice(90, 101)])
        for mask in (slices, Rows.from_indices(selected(slices, 200)))
    ],
]
#: Objects that aren't masks.
NO_MASKS: list[Any] = [slice(0.0, 5), slice("a", None), slice(True, 5), range(5), 5, "train", np.ones(3)]
#: Arguments of suggest_sizes for 1,000 rows.
WRONG_SIZES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, TypeError, "got 1000 without row_bytes"),
    ({"row_bytes": 0}, ValueError, "row_bytes must be above 0, got 0"),
    ({"row_bytes": 10, "world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
    ({"row_bytes": 10, "batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
    ({"row_bytes": 10, "prefetch": -1}, ValueError, "prefetch must be at least 0, got -1"),
    (
        {"row_bytes": 10**6, "memory": 10**8},
        ValueError,
        "256 rows needs up to 1,024.00 MB, more than the memory of 100.00 MB",
    ),
    ({"row_bytes": 10, "store_chunk": 0}, ValueError, "store_chunk"),
    ({"row_bytes": 10, "memory": 0}, ValueError, "memory"),
    ({"row_bytes": 10, "mask": slice(0, 1_001)}, ValueError, "mask"),
]
#: Shardings of 13 rows that don't return each of them once.
NO_ORDERS: dict[str, tuple[Callable[[Rows], Any], type[Exception], str]] = {
    "nothing": (lambda rows: None, TypeError, "must return Rows, got an object of type NoneType"),
    "a list": (lambda rows: [rows, rows], TypeError, "must return Rows, got an object of type list"),
    "too few": (lambda rows: rows.cyclic(0, 12), ValueError, r"each of the 13 rows 0:13 once, .* got 12 rows"),
    "a row twice": (lambda rows: Rows((range(12), range(11, 12))), ValueError, "once, and no other"),
    "another row": (lambda rows: Rows((range(12), range(99, 100))), ValueError, r"got 13 rows, 0:12, 99"),
}
ODD: dict[str, Odd] = {
    # ranks
    "a rank beyond": (lambda: Rank(2, 2), ValueError, "world_size"),
    "a negative rank": (lambda: Rank(-1, 2), ValueError, "rank"),
    "no world": (lambda: Rank(0, 0), ValueError, "world_size"),
    "a rank that is a string": (lambda: Rank("0", 2), TypeError, "integer"),
    "an unknown dist_info": (argument("dist_info", "mpi"), ValueError, "'torch', 'jax', 'env'"),
    "a dist_info that is a number": (argument("dist_info", 3), TypeError, "callable"),
    "a callable that returns one number": (argument("dist_info", lambda: 3), TypeError, "rank"),
    "deferred None": (lambda: deferred(None), TypeError, "dist_info"),
    **each("no integers", [None, "01", {0: 1}, (0, 2.0), (True, 2), np.array([0, 2])], returning, TypeError, NO_PAIR),
    **each("no rank", [(2, 2), (-1, 2), (0, 0), (0, 1, 2), ()], returning, ValueError, NO_PAIR),
    "a world of 21 bits": (lambda: Rank(0, 2**20 + 1), ValueError, r"at most 1048576, got about 2\*\*20\."),
    "a world of 10**9": (lambda: Rank(0, 10**9), ValueError, r"at most 1048576, got about 2\*\*29\."),
    "a world of 10**5000": (lambda: Rank(0, 10**5000), ValueError, r"at most 1048576, got about 2\*\*16609\."),
    "torch, not initialized": (argument("dist_info", "torch"), RuntimeError, r"torch\.distributed is not initialized"),
    "jax, not initialized": (argument("dist_info", "jax"), RuntimeError, "JAX distributed is not initialized"),
    **each("a class", [Rank, dict, RandomSampler], with_dist_info, TypeError, A_CLASS),
    **each("a class, later", [Rank, dict, RandomSampler], with_deferred, TypeError, A_CLASS),
    "a callable that fails": (argument("dist_info", lambda: {}["SLURM_PROCID"]), KeyError, "SLURM_PROCID"),
    "deferred, not initialized": (
        lambda: sampler(dist_info=deferred("torch")).check_ranks_agree(N_OBS),
        RuntimeError,
        r"torch\.distributed is not initialized",
    ),
    **each(
        "virtual ranks", [(24, 7)], on_ranks, ValueError, "the world size, 7, got 24. .*: 1, 2, 3, 4, 6, 8, 12, 24."
    ),
    **each("fewer virtual ranks", [(2, 4), (1, 2)], on_ranks, ValueError, "a multiple of the world size"),
    "virtual ranks, later": (
        lambda: sampler(dist_info=deferred(Rank(0, 4)), virtual_ranks=2).plan(N_OBS),
        ValueError,
        "virtual_ranks must be a multiple of the world size, 4, got 2",
    ),
    **each("arguments", [rank_of, deferred], with_dist_info, TypeError, WITH_ARGUMENTS),
    **each("arguments, later", [rank_of, deferred], with_deferred, TypeError, WITH_ARGUMENTS),
    "a sampler as dist_info": (argument("dist_info", RandomSampler(1, 1, 1)), TypeError, "dist_info must be"),
    # masks
    **{
        f"mask {number}": (partial(rows_of_mask, mask), ValueError, re.escape(message))
        for number, (mask, message) in enumerate(WRONG_MASKS)
    },
    **each("no mask", NO_MASKS, rows_of_mask, TypeError, "(?s)mask.*VALUE"),
    **each("no masks", [[slice(0, 5), 7], [True]], rows_of_mask, TypeError, "(?s)mask.*(7|True)"),
    "a mask with missing values": (
        lambda: rows_of_mask(pd.Series([1.0, np.nan])),
        TypeError,
        r"float64 and NaN.*obs\['split'\] == 'train'",
    ),
    **each(
        "flags of 100 rows",
        [99, 101],
        resolve_mask(np.ones(100, dtype=bool)).selected,
        ValueError,
        "the VALUE rows of the collection, got 100 values",
    ),
    "a mask beyond the sampler's mask": (
        partial(setattr, wrapping(mask=slice(10, 60)), "mask", [slice(20, 30), slice(50, 70)]),
        ValueError,
        re.escape("wrapped sampler, [10, 60), got [20, 30), [50, 70), which also selects [60, 70)"),
    ),
    # rows
    "rows: no ranges": (lambda: Rows(5), TypeError, "a tuple of ranges, got 5"),
    "rows: a bare range": (lambda: Rows(range(5)), TypeError, "a tuple of ranges"),
    "rows: numbers": (lambda: Rows((3, 4)), TypeError, r"a tuple of ranges, got .3, 4.*Rows\.from_indices"),
    "rows: a step": (
        lambda: Rows((range(0, 12, 3),)),
        ValueError,
        r"step 1, got range\(0, 12, 3\).*Rows\.from_indices",
    ),
    "rows: backwards": (lambda: Rows((range(5, 0, -1),)), ValueError, "step 1"),
    "rows: a range below 0": (lambda: Rows((range(-1, 3),)), ValueError, "at least 0"),
    "rows: a range beyond": (lambda: Rows((range(2**63),)), ValueError, "below 2"),
    "rows: numbers below 0": (lambda: Rows.from_indices([3, -1]), ValueError, "at least 0, got -1"),
    "rows: numbers beyond": (lambda: Rows.from_indices([2**63 - 1]), ValueError, "below 2"),
    "rows: two dimensions": (lambda: Rows.from_indices([[1, 2]]), ValueError, r"one dimension, got shape \(1, 2\)"),
    **each(
        "bounds of rows", [1.5, "a", True], lambda value: Rows().within(value, 3), TypeError, "start must be .*VALUE"
    ),
    **each("ends of rows", [1.5, "a", True], lambda value: Rows().within(0, value), TypeError, "stop must be .*VALUE"),
    "rows: flags of two dimensions": (lambda: Rows.from_mask([[True]]), TypeError, "boolean array of one dimension"),
    "rows: flags that are numbers": (lambda: Rows.from_mask(np.ones(3)), TypeError, "boolean array of one dimension"),
    "rows: a number added to rows": (lambda: add(Rows(), 1), TypeError, "Only Rows"),
    "rows: a range of no rows": (lambda: Rows().cyclic(0, 1), ValueError, "length must be 0"),
    "rows: a range of negative length": (
        lambda: Rows((range(3),)).cyclic(0, -1),
        ValueError,
        "length must be at least 0",
    ),
    "rows: half a start": (lambda: Rows((range(3),)).cyclic(0.5, 1), TypeError, "start must be an integer"),
    "rows: a local row beyond": (lambda: Rows((range(3),)).to_global(np.array([3])), IndexError, r"in \[0, 3\), got 3"),
    "rows: a local row below 0": (lambda: Rows((range(3),)).to_global(np.array([-1])), IndexError, r"in \[0, 3\)"),
    "rows: local flags": (lambda: Rows((range(3),)).to_global(np.array([True])), TypeError, "must be integers"),
    "rows: a slice beyond": (
        lambda: Rows((range(3), range(5, 6))).slices_to_global(np.array([2]), np.array([5])),
        IndexError,
        r"within \[0, 4\)",
    ),
    "rows: a slice below 0": (
        lambda: Rows((range(3),)).slices_to_global(np.array([-1]), np.array([2])),
        IndexError,
        r"within \[0, 3\)",
    ),
    # wrapped samplers
    **each("rng of a sampler", NO_GENERATORS, lambda rng: wrapping(rng=rng), TypeError, NO_GENERATOR),
    **each("rng", NO_GENERATORS, partial(setattr, sampler(), "rng"), TypeError, NO_GENERATOR),
    **each("mask of a sampler", ODD_MASKS, lambda mask: wrapping(mask=mask), TypeError, ODD_MASK),
    **each("mask of both", ODD_MASKS, lambda mask: wrapping({"mask": slice(0, 8)}, mask=mask), TypeError, ODD_MASK),
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
    # batch sizes and numbers of batches
    **each(
        "no batch size",
        [None, "drop", "exact", "pad"],
        lambda policy: job(NoBatchSize(4), 2, remainder=policy),
        ValueError,
        "NoBatchSize.batch_size must be an integer.*remainder='keep'",
    ),
    "batch_size=0": (partial(job, MaskBlind(0), 2), ValueError, "MaskBlind.batch_size must be at least 1, got 0"),
    **each(
        "batch_size",
        [*product(NO_SIZES, POLICIES)],
        of_size,
        TypeError,
        "MaskBlind.batch_size must be an integer or None",
    ),
    "ranks with a batch size that wraps around": (
        lambda: job(MaskBlind(np.int8(100)), 3)[0].plan(250),
        ValueError,
        "3 ranks times batch size 100 is 300",
    ),
    "more samples than a shard has rows": (
        rank_3(RandomSampler(4, 2, 8, num_samples=26), 100),
        ValueError,
        r"num_samples \(26\) cannot exceed the observation range",
    ),
    "more samples than one shard has rows": (
        rank_3(RandomSampler(4, 2, 8, num_samples=26), 101, remainder="keep"),
        ValueError,
        r"rank 0 of 4.*num_samples \(26\)",
    ),
    "every row of a sampler that drops some": (
        rank_3(RandomSampler(4, 2, 8, drop_last=True), 101, remainder="exact"),
        ValueError,
        "requires every row. Pass drop_last=False",
    ),
    "equal numbers of batches of single rows": (
        rank_3(RandomSampler(1, 1, 1), 101, remainder="exact"),
        ValueError,
        "RandomSampler yields 25 for the 25 rows of rank 0, and 26 on rank 3",
    ),
    "labels of fewer rows": (rank_3(of_classes(25, 25, 25, 25), 101), ValueError, "does not match loader n_obs"),
    "a class with too few rows in one shard": (
        rank_3(of_classes(26, 26, 26, 22), 100, remainder="keep"),
        ValueError,
        r"rank 1 of 4, rows 25:50 .* chunk_size \(4\)",
    ),
    "a shard without a class to sample": (
        rank_3(of_classes(50, 50, class_weights=np.array([1.0, 0.0, 0.0])), 100, remainder="keep"),
        ValueError,
        "rank 2 of 4.*No class with positive weight",
    ),
    "counts two apart": (
        counted(lambda n: 1 + 2 * max(0, n - 10), 20, 21, remainder="exact"),
        ValueError,
        "Counting yields 1 for the 10 rows of rank 0, and 3 on rank 1",
    ),
    "a count that drops rows": (
        counted(lambda n: n // 8 * 2, n_obs=44, remainder="exact"),
        ValueError,
        "Counting .*4 batches of at most 4 rows leave out some of its 22 rows",
    ),
    "more batches than rows": (
        counted(lambda n: 2 * n, 1, 20, remainder="exact"),
        ValueError,
        "Counting .*too few for 20 ",
    ),
    "more batches than full ones": (
        counted(lambda n: n // 2, n_obs=80, remainder="pad"),
        ValueError,
        "Counting .*too few for 20 ",
    ),
    "an unknown count": (counted(unknown), NotImplementedError, "that depends on 20"),
    **each("a count", [*product(ODD_COUNTS, POLICIES)], of_count, ValueError, NO_COUNT),
    **each("no count", [*product(NO_COUNTS, POLICIES)], of_count, TypeError, NO_COUNT),
    # arguments
    **each("seed", NO_INTEGERS, lambda value: plan(seed=value), TypeError, "seed"),
    "a negative seed": (argument("seed", -1), ValueError, "seed"),
    "a seed of 64 bits": (argument("seed", 2**63), ValueError, "seed"),
    "a negative max_gap": (argument("max_gap", -1), ValueError, "max_gap"),
    "batches of numpy": (lambda: loader(to="numpy"), ValueError, "to must be 'torch', 'jax', or None .*'numpy'"),
    "a collection of 2**63 rows": (
        lambda: sampler().plan(2**63),
        ValueError,
        "n_obs must be .* below 9223372036854775808",
    ),
    "virtual_ranks=0": (argument("virtual_ranks", 0), ValueError, "virtual_ranks"),
    "an unknown remainder": (argument("remainder", "droop"), ValueError, "'drop', 'keep', 'exact', 'pad'"),
    "a remainder that is a number": (argument("remainder", 1), TypeError, "remainder"),
    "enforce_equal_batches=1": (argument("enforce_equal_batches", 1), TypeError, "enforce_equal_batches"),
    "remainder and enforce_equal_batches": (
        lambda: sampler(remainder="drop", enforce_equal_batches=False),
        ValueError,
        "enforce_equal_batches",
    ),
    "an unknown sharding": (argument("sharding", "random"), ValueError, "'contiguous', 'shuffled'"),
    "a sharding that is a number": (argument("sharding", 5), TypeError, "sharding"),
    "a sharding that is None": (argument("sharding", None), TypeError, "sharding"),
    "a sharding that is a class": (argument("sharding", Shuffled), TypeError, "instance"),
    "blocks of no rows": (lambda: Shuffled(0), ValueError, "block_size"),
    "blocks of 2**70 rows": (lambda: Shuffled(2**70), ValueError, "block_size must be .* below 9223372036854775808"),
    "blocks of a string": (lambda: Shuffled("4"), TypeError, "block_size"),
    "shuffled without a seed": (lambda: plan(sharding="shuffled", seed=None), ValueError, "seed"),
    **{
        f"a sharding that returns {name}": (partial(sharded_by, call), error, text)
        for name, (call, error, text) in NO_ORDERS.items()
    },
    "a sharding of different arguments": (
        argument("sharding", lambda rows: rows),
        TypeError,
        r"sharding must be a function \(rows, \*, epoch, seed\), got <lambda>: ",
    ),
    **each(
        "shuffled classes", [ClassSampler, WeightedClassSampler], shuffled_classes, ValueError, "Use .*'independent'"
    ),
    **each(
        "independent",
        [RandomSampler(4, 2, 8), RandomSampler(4, 2, 8, num_samples=30), SequentialSampler(4, 2, 8), MaskBlind(4)],
        lambda wrapped: job(wrapped, 2, sharding="independent"),
        ValueError,
        "isn't known to be: .* Use sharding='shuffled'",
    ),
    "samples that fill no batch": (
        samples_of_classes({"num_samples": 5, "drop_last": True}, remainder="pad"),
        ValueError,
        "The wrapped sampler takes 0 samples",
    ),
    "samples that exact would drop": (
        samples_of_classes({"num_samples": 250, "drop_last": True}, remainder="exact"),
        ValueError,
        "some of its 82 samples, but remainder='exact' .* Pass drop_last=False",
    ),
    "samples that keep would drop": (
        samples_of_classes({"num_samples": 20, "drop_last": True}, remainder="keep"),
        ValueError,
        "some of its 5 samples, but remainder='keep' .* Pass drop_last=False",
    ),
    "a mask that cuts a run of a class": (
        samples_of_classes({}, mask=slice(97, 200)),
        ValueError,
        "rows 97:200 .* run.s. are shorter",
    ),
    # numbers of rows, epochs and batches
    **each("n_obs", NO_INTEGERS, sampler().plan, TypeError, "n_obs"),
    "a negative n_obs": (lambda: sampler().n_batches(-1), ValueError, "n_obs"),
    **each("epoch", NO_INTEGERS, sampler().set_epoch, TypeError, "epoch"),
    "a negative epoch": (lambda: sampler().set_epoch(-1), ValueError, "epoch"),
    "an epoch before a state's epoch": (
        set_an_earlier_epoch,
        ValueError,
        r"set_epoch\(2\) would discard",
    ),
    "negative batches": (lambda: sampler().state_dict(batches_done=-1), ValueError, "batches_done"),
    "half a batch": (lambda: sampler().state_dict(batches_done=0.5), TypeError, "batches_done"),
    "a rank that is no number": (lambda: plan().n_batches("0"), TypeError, "rank"),
    **each("the batches of a rank", [-1, 2], lambda rank: plan().n_batches(rank), IndexError, NO_RANK),
    **each("the shard of a rank", [-1, 2], lambda rank: plan().shard(rank), IndexError, NO_RANK),
    # labels
    "labels of different rows": (lambda: plan().composition(["a"]), ValueError, "40 rows"),
    "labels in two dimensions": (lambda: plan().composition(np.zeros((N_OBS, 2))), ValueError, "dimensions"),
    "labels that are a string": (lambda: plan().composition("a" * N_OBS), ValueError, "labels"),
    # loaders
    "a loader of a sampler without ranks": (
        lambda: StatefulLoader(batch_sampler=SequentialSampler(2, 1, 2)),
        TypeError,
        "DistributedSampler",
    ),
    "prefetch of a string": (lambda: loader(prefetch="1"), TypeError, "prefetch"),
    "a negative prefetch": (lambda: loader(prefetch=-1), ValueError, "prefetch"),
    "negative workers": (lambda: loader().to_dataloader(num_workers=-1), ValueError, "num_workers"),
    # sizes, mixtures, tallies
    **{
        f"sizes {number}": (partial(suggest_sizes, 1_000, **options), error, message)
        for number, (options, error, message) in enumerate(WRONG_SIZES)
    },
    "weights of different sources": (
        mixture(weights={"a": 1}),
        ValueError,
        "name the sources a, b, got a",
    ),
    "a negative weight": (mixture(weights={"a": 1, "b": -1}), ValueError, "finite and not negative"),
    "a weight that is nan": (mixture(weights={"a": 1, "b": math.nan}), ValueError, "must be finite"),
    "weights of 0": (mixture(weights={"a": 0, "b": 0}), ValueError, "one must be above 0"),
    "a weight beyond floats": (mixture(weights={"a": 10**400, "b": 1}), ValueError, "must be finite"),
    "no weights": (mixture(weights=None), ValueError, "weight of each source"),
    "weights that are not the batch sizes": (
        mixture(weights={"a": 4, "b": 5}, within_batch=True),
        ValueError,
        "weights must be the batch sizes",
    ),
    "a plan of no steps": (lambda: cast("MixedLoader", mixture()()).plan(0), ValueError, "n_steps must be at least 1"),
    **each(
        "malformed weights",
        [[(0, [1, 2])], "ab", [(0,)], 5, [3], {(0, 1)}],
        lambda weights: mixture(weights=weights)(),
        TypeError,
        "weights must be a dict of weights by name, or a list of .* pairs, got VALUE",
    ),
    **each(
        "a weight that is no number",
        ["x", "3", [1], None, True],
        lambda weight: mixture(weights={"a": weight, "b": 1})(),
        TypeError,
        "The weight of 'a' must be a number, got VALUE",
    ),
    "loaders in a list": (
        lambda: MixedLoader(cast("Any", [3]), n_steps=3),
        TypeError,
        "a dict of loaders .* got a list",
    ),
    "a number as a name": (
        lambda: MixedLoader(cast("Any", {1: 3}), n_steps=3),
        TypeError,
        "The names of loaders must be strings, got 1",
    ),
    "weights of later steps": (mixture(weights=[(3, {"a": 1, "b": 1})]), ValueError, "must begin at 0"),
    "steps and an end": (mixture(stopping_strategy="first_exhausted", n_steps=3), ValueError, "must end by n_steps"),
    "neither steps nor an end": (mixture(n_steps=None), ValueError, "must end by n_steps"),
    "no steps": (mixture(n_steps=0), ValueError, "n_steps must be at least 1"),
    "a negative seed of a mixture": (mixture(seed=-1), ValueError, "seed must be at least 0"),
    "a mixture of nothing": (
        lambda: MixedLoader({}, weights={}, n_steps=3),
        ValueError,
        "at least one loader, got none",
    ),
    "a mixture of numbers": (
        lambda: MixedLoader({"own": cast("Any", 3)}, weights={"own": 1}, n_steps=3),
        TypeError,
        "The source 'own' must be a loader",
    ),
    "a mixture of unequal ranks": (
        lambda: MixedLoader({"own": loader(remainder="keep")}, weights={"own": 1}, n_steps=3),
        ValueError,
        "same number of batches of the source 'own'",
    ),
    **each("a tally", NO_TALLIES, lambda numbers: Tally(*numbers), (TypeError, ValueError), "Tally"),
    "a tally and a number": (lambda: add(Tally(), 1), TypeError, "unsupported operand"),
    "a timeout of nothing": (lambda: sampler().check_ranks_agree(N_OBS, timeout=0), ValueError, "timeout"),
    "a timeout of nan": (lambda: loader().check_ranks_agree(timeout=math.nan), ValueError, "timeout"),
    "a timeout of None": (lambda: sampler().check_ranks_agree(N_OBS, timeout=None), TypeError, "must be a number"),
    "no process to communicate with": (
        lambda: sampler().check_ranks_agree(N_OBS),
        RuntimeError,
        "2 ranks can't communicate.*pass gather=",
    ),
    **each("texts", ["text", ["another"], [1, 2]], gathering, TypeError, "gather must return a list"),
    **each(
        "garbled texts",
        ["no JSON", "[]", '{"call": []}', '{"call": CALL, "said": {}}'],
        garbling,
        ValueError,
        "can't be read.*strings unchanged",
    ),
    "a gather that is no function": (lambda: loader().check_ranks_agree(gather=3), TypeError, "gather"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_input_raises_and_is_named(name: str) -> None:
    """An odd input is an error of the expected type, whose message names the problem."""
    call, error, word = ODD[name]
    with pytest.raises(error, match=word):
        call()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_missing_framework_raises_before_reading(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader for a framework that isn't installed raises when it is made, whatever it prefetches."""
    monkeypatch.setattr(stateful, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"to='jax' requires jax.* annbatch-distributed\[jax\]"):
        loader(to="jax", prefetch=prefetch)
