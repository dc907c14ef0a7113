"""Jobs: what the ranks of a job read, and through which kind of loader; a seed decides it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler

from annbatch_distributed import (
    AlignedLoader,
    CellSets,
    DistributedSampler,
    MixedLoader,
    Rank,
    Shuffled,
    StatefulLoader,
)
from tests.samplers import IndexArrays, MaskBlind
from tests.simulated.disk import Disk
from tests.simulated.workers import InThread

if TYPE_CHECKING:
    import random

    from annbatch.abc import Sampler

#: Kinds of loaders, as often as a job has them.
KINDS = {
    "loader": 18,
    "workers": 8,
    "aligned": 4,
    "mixture": 7,
    "mixture by workers": 3,
    "mixture of batches": 2,
}
#: Kinds whose batches workers read.
BY_WORKERS = "workers", "mixture by workers"
#: Number of jobs of which one has 1,000 ranks, which takes a minute or two.
MANY = 2500
#: Samplers whose epochs don't have each row of their range once.
DRAWING = ("classes", "replacement")

#: A row, and True if this is its second time in the epoch.
type Read = tuple[int, bool]
#: A row, a draw, or the rows of a set with its controls.
type Unit = tuple[Read, ...]
type Batch = tuple[Unit, ...]


def one_of[Value](rng: random.Random, weights: dict[Value, int]) -> Value:
    """Draw a value by its weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


@dataclass(frozen=True)
class Source:
    """A collection, and how it is sampled."""

    name: str
    n_obs: int
    unit: str
    """What the sampler numbers: rows, sets or draws."""
    batch_size: int
    kind: str
    """Kind of the wrapped sampler."""
    sampler: Sampler
    prefetch: int
    options: dict[str, Any]
    """Arguments of the DistributedSampler."""
    disk: Disk

    @property
    def remainder(self) -> str:
        return str(self.options["remainder"])

    @property
    def virtual_ranks(self) -> int | None:
        number: int | None = self.options.get("virtual_ranks")
        return number

    @cached_property
    def selected(self) -> list[int]:
        """The rows that the mask selects, enumerated."""
        mask = self.options.get("mask")
        rows = np.arange(self.n_obs)
        return [*map(int, rows if mask is None else np.concatenate([rows[part] for part in _parts(mask)]))]

    def sampler_of(self, rank: Rank, **changed: Any) -> DistributedSampler:
        """The sampler of a rank."""
        return DistributedSampler(self.sampler, dist_info=rank, **self.options | changed)

    def loader(self, rank: Rank, **changed: Any) -> StatefulLoader:
        """The loader of a rank."""
        return self.disk.loader(self.sampler_of(rank, **changed), self.prefetch)

    def __str__(self) -> str:
        told = {name: _told(value) for name, value in self.options.items()}
        told |= {"prefetch": str(self.prefetch), "disk": str(self.disk)}
        options = ", ".join(f"{name}={value}" for name, value in told.items())
        return f"{self.name}: {self.n_obs} rows by {self.kind}, {self.batch_size} {self.unit}s a batch, {options}"


def _parts(mask: Any) -> list[Any]:
    return mask if isinstance(mask, list) else [mask]


def _told(value: Any) -> str:
    match value:
        case np.ndarray() if value.dtype == bool:
            return f"{np.count_nonzero(value)} of {len(value)}"
        case np.ndarray():
            return f"{len(value)} values"
        case Shuffled():
            return f"Shuffled({value.block_size})"
    return str(value)


@dataclass(frozen=True)
class Job:
    """A job: its kind of loader, its sources, and the numbers of ranks on which it may run."""

    seed: int
    kind: str
    sources: tuple[Source, ...]
    world_sizes: tuple[int, ...]
    """In the order in which the job may be started again; the first one begins."""
    n_workers: tuple[int, ...] = (1,)
    """Numbers of workers, one of which each start takes."""
    calls_step_done: bool = False
    saves_every: int = 0
    """Number of steps after each of which a state is saved, and at the end of an epoch; 0 for never."""
    n_steps: int = 0
    """Steps of an epoch of a mixture."""
    weights: dict[str, int] = field(default_factory=dict)

    @property
    def is_mixture(self) -> bool:
        return self.kind.startswith("mixture")

    @classmethod
    def of(cls, rng: random.Random, seed: int) -> Job:
        """Draw a job."""
        kind, disk = one_of(rng, KINDS), one_of(rng, {"memory": 24, "files": 5, "fast": 3})
        if kind != "loader" and disk == "files":
            disk = "memory"
        world_sizes = rng.sample([1, 2, 3, 4, rng.choice([5, 6, 7])], 3)
        if seed % MANY == MANY - 1:
            kind, disk, world_sizes = "loader", "fast", [1000, rng.randint(2, 999), 999]
        elif disk == "fast":
            kind, most = "loader", one_of(rng, {16: 9, 64: 1})
            world_sizes = [most, rng.randint(2, most), most - 1]
        virtual: dict[str, Any] = {}
        if disk != "fast" and rng.random() < 0.25:
            virtual = {"virtual_ranks": rng.choice([2, 3, 4, 6])}
            sizes = range(1, virtual["virtual_ranks"] + 1)
            world_sizes = rng.sample([size for size in sizes if virtual["virtual_ranks"] % size == 0], 2)
        n_sources = rng.randint(2, 3) if kind.startswith("mixture") else 1
        most = max(*world_sizes, *virtual.values())
        sources = [_source(rng, name, kind, disk, most, virtual) for name in "abc"[:n_sources]]
        return cls(
            seed,
            kind,
            tuple(sources),
            tuple(world_sizes),
            tuple(rng.sample([1, 2, 3], 2)) if kind in BY_WORKERS else (1,),
            rng.random() < 0.4,
            rng.choice([0, 1, 2, 3]),
            rng.choice([5, 8, 13]),
            {source.name: rng.randint(1, 4) for source in sources},
        )

    def of_another_collection(self) -> Job:
        """The same job, with as many other cells."""
        first, *others = self.sources
        return replace(self, sources=(replace(first, disk=Disk.of("memory", first.n_obs, "other")), *others))

    def loader(self, rank: Rank, n_workers: int = 1, **changed: Any) -> Any:
        """The loader of a rank; `changed` are other arguments of its first sampler."""
        first, *others = self.sources
        match self.kind:
            case "loader":
                return first.loader(rank, **changed)
            case "workers":
                return InThread(first.loader(rank, **changed), num_workers=n_workers)
            case "aligned":
                sampler = first.sampler_of(rank, **changed)
                stores = {"rna": first.disk.loader(sampler, 0), "protein": first.disk.other.loader(sampler, 0)}
                return AlignedLoader(stores, batch_sampler=sampler, prefetch=first.prefetch)
        loaders: dict[str, Any] = {first.name: first.loader(rank, **changed)} | {
            one.name: one.loader(rank) for one in others
        }
        if rank.rank % 2:  # the order of names makes no difference
            loaders = dict(reversed(loaders.items()))
        if self.kind == "mixture by workers":
            loaders = {name: InThread(loader, num_workers=n_workers) for name, loader in loaders.items()}
        if self.kind != "mixture of batches":
            return MixedLoader(loaders, weights=self.weights, n_steps=self.n_steps, seed=self.seed % 7)
        return MixedLoader(loaders, n_steps=self.n_steps, within_batch=True)

    def __str__(self) -> str:
        lines = [f"job {self.seed}: {self.kind}, on {' or '.join(map(str, self.world_sizes))} ranks"]
        if self.kind in BY_WORKERS:
            lines[0] += f" with {' or '.join(map(str, self.n_workers))} workers"
        if self.calls_step_done:
            lines[0] += ", which call step_done()"
        if self.saves_every:
            lines[0] += f", saved after each {self.saves_every} steps"
        if self.is_mixture:
            lines[0] += f", epochs of {self.n_steps} steps by weights {self.weights}"
        return "\n  ".join([*lines, *map(str, self.sources)])


def _source(rng: random.Random, name: str, kind: str, disk: str, most: int, virtual: dict[str, Any]) -> Source:
    """Draw a source with a few batches for each of `most` ranks."""
    batch_size = rng.choice([1, 2, 3, 4, 8]) if most < 64 else rng.choice([1, 2])
    n_obs = batch_size * most * rng.randint(1, 7 if most < 16 else 2) + rng.randrange(batch_size * most) + 6
    numbers = np.random.default_rng(rng.randrange(2**32))
    policies = {"exact": 5, "drop": 3, "pad": 3} | ({} if kind.startswith("mixture") else {"keep": 2})
    options: dict[str, Any] = {"remainder": one_of(rng, policies), "seed": rng.randrange(4)} | virtual
    of_sampler = (
        "random"
        if most > 64
        else one_of(
            rng, {"random": 9, "sequential": 3, "mask-blind": 2, "index arrays": 2, "classes": 1, "replacement": 2}
        )
    )
    unit = (
        one_of(rng, {"row": 7, "set": 6 if virtual else 2, "draw": 2})
        if of_sampler not in DRAWING and disk == "memory"
        else "row"
    )
    # these samplers have no chunks, which are the blocks of "shuffled"
    has_chunks = of_sampler not in ("mask-blind", "index arrays")
    sharding = one_of(rng, {"contiguous": 4, "shuffled": 4 * has_chunks, "blocks": 2})
    options["sharding"] = Shuffled(rng.randint(1, 20)) if sharding == "blocks" else sharding
    options["max_gap"] = rng.choice([0, 3, 64])
    if of_sampler in DRAWING:
        options["sharding"] = "independent"
    drawn_disk = Disk.of(disk, n_obs, name)
    n_obs = drawn_disk.n_obs
    match unit:
        case "set":
            obs = drawn_disk.obs.assign(drug=_drugs(rng, n_obs))
            has_controls, set_size = rng.random() < 0.7, rng.choice([1, 2, 3])
            options["sets"] = CellSets.from_obs(
                obs,
                by="drug",
                set_size=set_size,
                chunk_size=1,
                remainder=rng.choice(["drop", "keep", "pad"]),
                seed=rng.randrange(3),
                **({"controls": {"drug": "DMSO"}} if has_controls else {}),
            )
        case "draw":
            weights = numbers.random(n_obs) * (numbers.random(n_obs) < 0.9)
            weights[0] = 1
            options |= {
                "weights": weights,
                "num_samples": rng.choice([n_obs, n_obs + 7]),
                "rounds": rng.choice([1, 1, 2]),
            }
        case _ if rng.random() < 0.4:
            options["mask"] = _mask(rng, numbers, n_obs)
    sampler = _sampler(rng, of_sampler, batch_size, n_obs, numbers)
    prefetch = one_of(rng, {0: 8, 1: 1, 2: 1}) if disk == "memory" and kind not in BY_WORKERS else 0
    return Source(name, n_obs, unit, batch_size, of_sampler, sampler, prefetch, options, drawn_disk)


def _drugs(rng: random.Random, n_obs: int) -> list[str]:
    drugs = [*("a" for _ in range(n_obs // 2)), *("b" for _ in range(n_obs // 4))]
    drugs += ["DMSO"] * (n_obs - len(drugs))
    if rng.random() < 0.5:
        rng.shuffle(drugs)
    return drugs


def _mask(rng: random.Random, numbers: np.random.Generator, n_obs: int) -> Any:
    cut = rng.randint(1, max(1, n_obs // 4))
    return rng.choice(
        [slice(cut, None), slice(0, n_obs - cut), [slice(0, cut), slice(2 * cut, n_obs)], numbers.random(n_obs) < 0.7]
    )


def _sampler(rng: random.Random, kind: str, batch_size: int, n_obs: int, numbers: np.random.Generator) -> Sampler:
    # load requests of whole batches: for chunks of 4 rows and batches of 6, a multiple of 3 chunks
    chunk_size = rng.choice([1, 2, 4, 5])
    n_chunks = math.lcm(chunk_size, batch_size) // chunk_size * rng.choice([1, 2, 3])
    sizes = chunk_size, n_chunks, batch_size
    match kind:
        case "sequential":
            return SequentialSampler(*sizes)
        case "mask-blind":
            return MaskBlind(batch_size, rng.randint(1, 4))
        case "index arrays":
            return IndexArrays(batch_size, rng.randint(1, 4), rng=numbers)
        case "classes":
            codes = np.sort(numbers.integers(3, size=n_obs))
            labels = pd.Categorical.from_codes(codes.astype(np.int8), ["B", "NK", "T"])
            return ClassSampler(1, chunk_size * n_chunks, batch_size, classes=labels, num_samples=n_obs // 2)
        case "replacement":
            return RandomSampler(*sizes, replacement=True, num_samples=n_obs, rng=numbers)
    return RandomSampler(*sizes, rng=numbers)
