"""Hypothesis strategies: collections, masks, samplers and jobs, small enough to enumerate."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank, Shuffled
from annbatch_distributed.core.rows import Rows
from tests.samplers import Counting, IndexArrays, MaskBlind, NoBatchSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

    from annbatch_distributed.core.masks import AnyMask

POLICIES = ("drop", "keep", "exact", "pad")
#: Samplers that read every row of their range once.
PASSING = ("random", "sequential", "mask-blind", "index-arrays")
#: Samplers that sample with replacement.
REPLACING = ("class", "weighted-class", "random-replacement")
DRAWING = (*REPLACING, "random-num-samples")
#: Samplers whose number of batches is unknown, invalid, or unequal on the ranks.
BROKEN = ("no-batch-size", "broken")


def unknown(n_obs: int) -> int:
    """Raise, because the number of batches is unknown."""
    raise NotImplementedError(f"that depends on {n_obs}")


#: Numbers of batches of broken samplers, as functions of the number of rows.
BROKEN_COUNTS: list[Callable[[int], Any]] = [
    unknown,
    lambda n: None,
    lambda n: True,
    lambda n: "5",
    lambda n: float("nan"),
    lambda n: -1,
    lambda n: n + 0.5,
    lambda n: 2**63,
    lambda n: 2 * n + 1,
    lambda n: 3 * (n % 2),
]


def selected(mask: AnyMask | None, n_obs: int) -> list[int]:
    """The rows that a mask selects, enumerated."""
    match mask:
        case Rows():
            return sorted(mask)
        case np.ndarray():
            return sorted((np.flatnonzero(mask) if mask.dtype == np.bool_ else mask).tolist())
        case list():
            return sorted(row for part in mask for row in range(*part.indices(n_obs)))
        case _:
            return list(range(*(slice(None) if mask is None else mask).indices(n_obs)))


@dataclass(frozen=True)
class Job:
    """A job: the collection, the sampler and the arguments of every rank."""

    n_obs: int
    world_size: int
    sampler: Sampler
    batch_size: int
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    integer: Any = int
    """Type of the integers in the arguments."""
    plain: Job | None = None
    """The same job, with Python integers."""

    def rank(self, number: int, **options: Any) -> DistributedSampler:
        """Return one rank, as its process would create it; raise if the job can't run."""
        rank = Rank(self.integer(number), self.integer(self.world_size))
        return DistributedSampler(self.sampler, dist_info=rank, **self.options | options)

    def ranks(self) -> list[DistributedSampler]:
        return list(map(self.rank, range(self.world_size)))

    @property
    def independent(self) -> bool:
        return bool(self.options["sharding"] == "independent")

    def window(self) -> list[int]:
        """The rows to shard, enumerated."""
        return selected(self.options["mask"], self.n_obs)


def masks(n_obs: int) -> st.SearchStrategy[AnyMask | None]:
    """Draw a mask of a collection, of any kind."""
    return _slices(n_obs) | _row_masks(n_obs)


@st.composite
def _row_masks(draw: st.DrawFn, n_obs: int) -> AnyMask:
    # runs of rows, also of one row: independent booleans would rarely make long runs
    flags = np.zeros(n_obs, dtype=np.bool_)
    start, value = 0, draw(st.booleans())
    while start < n_obs:
        stop = start + draw(st.integers(1, max(1, n_obs // draw(st.sampled_from((1, 10, 100))))))
        flags[start:stop] = value
        start, value = stop, not value
    if not flags.any():
        flags[draw(st.integers(0, n_obs - 1))] = True
    kind = draw(st.sampled_from(("boolean", "integers", "rows", "rows in any order")))
    if kind == "boolean":
        return flags
    if kind == "integers":
        order = np.random.default_rng(draw(st.integers(0, 3)))
        return order.permutation(np.flatnonzero(flags))
    rows = Rows.from_mask(flags)
    return rows if kind == "rows" else rows.cyclic(draw(st.integers(0, len(rows))), len(rows))


@st.composite
def _slices(draw: st.DrawFn, n_obs: int) -> slice | list[slice] | None:
    pieces = draw(st.integers(0, min(3, n_obs // 2)))
    if pieces == 0:
        return None
    cuts = sorted(draw(st.lists(st.integers(0, n_obs), min_size=2 * pieces, max_size=2 * pieces, unique=True)))
    slices = [slice(start, stop) for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]
    if slices[0].start == 0 and draw(st.booleans()):
        slices[0] = slice(None, slices[0].stop)
    if slices[-1].stop == n_obs and draw(st.booleans()):
        slices[-1] = slice(slices[-1].start, None)
    return slices[0] if pieces == 1 and draw(st.booleans()) else draw(st.permutations(slices))


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """chunk_size, preload_nchunks and batch_size that annbatch accepts."""
    chunk_size, preload_nchunks = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    read = chunk_size * preload_nchunks
    return chunk_size, preload_nchunks, draw(st.sampled_from([b for b in range(1, read + 1) if read % b == 0]))


@st.composite
def classes(draw: st.DrawFn, n_obs: int) -> pd.Categorical:
    """Labels in runs, some of them short."""
    codes: list[int] = []
    while len(codes) < n_obs:
        codes += [draw(st.integers(0, 2))] * draw(st.integers(4, 60))
    return pd.Categorical.from_codes(np.array(codes[:n_obs], dtype=np.int8), categories=["B", "NK", "T"])


@st.composite
def shardings(draw: st.DrawFn, kind: str) -> str | Shuffled:
    """A sharding that accepts samplers of a kind."""
    names = ["contiguous"]
    names += ["independent"] if kind in REPLACING else []
    names += ["shuffled"] if kind not in ("class", "weighted-class") else []
    name = draw(st.sampled_from(names))
    return Shuffled(draw(st.integers(1, 40))) if name == "shuffled" else name


def integers_for(n_obs: int) -> st.SearchStrategy[type]:
    """Draw an integer type; annbatch can't divide a number of rows by a type that is too small for it."""
    return st.sampled_from([int, np.int64, np.uint64, *([np.int8] if n_obs <= np.iinfo(np.int8).max else [])])


@st.composite
def jobs(draw: st.DrawFn, kinds: tuple[str, ...] = PASSING + DRAWING, policies: tuple[str, ...] = POLICIES) -> Job:
    """Jobs of all kinds, with numbers of any integer type; some of them can't run."""
    n_obs = draw(st.integers(1, 300))
    world_size = draw(st.integers(1, 6))
    size = draw(sizes())
    kind = draw(st.sampled_from(kinds))
    arguments: dict[str, Any] = {"drop_last": draw(st.booleans())}
    rng_seed, n_drawn = draw(st.integers(0, 5)), draw(st.integers(1, 60))
    if kind in ("class", "weighted-class"):
        weights = np.array([1.0, draw(st.sampled_from([0.0, 1.0])), 2.0])
        labels = draw(classes(n_obs).filter(lambda labels: _accepted(labels, weights, size[0])))
        arguments |= {"classes": labels, "class_weights": weights}
    if kind in ("class", "weighted-class", "random-num-samples") or (
        kind == "random-replacement" and draw(st.booleans())
    ):
        arguments["num_samples"] = n_drawn
    options = {
        "remainder": draw(st.sampled_from(policies)),
        "mask": draw(masks(n_obs)),
        "sharding": draw(shardings(kind)),
        "seed": draw(st.integers(0, 3)),
        "max_gap": draw(st.sampled_from([0, 1, 7, 64])),
    }
    if options["sharding"] in ("contiguous", "independent") and draw(st.booleans()):
        options["seed"] = None
    broken = draw(st.sampled_from(BROKEN_COUNTS)) if kind == "broken" else None

    def with_integers(of: Any) -> Job:
        rng = np.random.default_rng(rng_seed)
        sampler = _sampler(kind, [of(number) for number in size], arguments | {"rng": rng}, of, broken)
        numbers: dict[str, Any] = {name: of(value) for name, value in options.items() if isinstance(value, int)}
        if isinstance(options["sharding"], Shuffled):
            numbers["sharding"] = Shuffled(of(options["sharding"].block_size))
        return Job(n_obs, world_size, sampler, size[2], kind, options | numbers, of)

    return replace(with_integers(draw(integers_for(n_obs))), plain=with_integers(int))


def _sampler(kind: str, size: list[Any], arguments: dict[str, Any], of: Any, broken: Any) -> Sampler:
    """Return a sampler of a kind."""
    if "num_samples" in arguments:
        arguments["num_samples"] = of(arguments["num_samples"])
    batch_size, per_request = size[2], int(size[1])
    match kind:
        case "sequential":
            sampler: Sampler = SequentialSampler(*size, drop_last=arguments["drop_last"])
        case "mask-blind":
            sampler = MaskBlind(batch_size, per_request)
        case "index-arrays":
            sampler = IndexArrays(batch_size, per_request, rng=arguments["rng"])
        case "no-batch-size":
            sampler = NoBatchSize(batch_size)
        case "broken":
            sampler = Counting(batch_size, broken)
        case "class" | "weighted-class":
            sampler = (ClassSampler if kind == "class" else WeightedClassSampler)(*size, **arguments)
        case _:
            sampler = RandomSampler(*size, replacement=kind == "random-replacement", **arguments)
    return sampler


def _accepted(labels: pd.Categorical, weights: np.ndarray, chunk_size: int) -> bool:
    """Return True if a class sampler accepts these labels."""
    try:
        ClassSampler(chunk_size, 1, chunk_size, classes=labels, num_samples=1, class_weights=weights)
    except ValueError:
        return False
    return True
