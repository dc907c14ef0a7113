"""What goes with which sampler, a sharding or another wrapper, as far as that can be told without the collection."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from annbatch.samplers import DistributedSampler

from annbatch_distributed.passes.private_copy import attributes
from annbatch_distributed.passes.traits import chunk_size, drawable_classes, n_draws, set_draws
from annbatch_distributed.sharding import Contiguous, Independent, Shuffled
from annbatch_distributed.sharding.contract import checked_sharding, draws

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

    from annbatch_distributed.sharding import Sharding

__all__ = [
    "ShardingName",
    "check_interface",
    "check_not_within_annbatchs",
    "check_shares_out_nothing",
    "rank_attribute",
    "resolve_sharding",
]

_NAMES: dict[str, Callable[[], Sharding]] = {"contiguous": Contiguous, "shuffled": Shuffled, "independent": Independent}

type ShardingName = Literal["contiguous", "shuffled", "independent"]


def resolve_sharding(sharding: ShardingName | Sharding, sampler: Sampler, *, seed: int | None) -> Sharding:
    """Return the sharding of a name, or an object of the contract, if it can deal the rows of a sampler.

    ``seed`` is the job's, if the user gave one. A TypeError if ``sharding`` is neither; a ValueError if the name is
    unknown, or the sampler can't run on such shards.
    """
    resolved = _of_name(sharding)
    if isinstance(resolved, Shuffled):
        return _shuffled(resolved, sampler, seed)
    if draws(resolved):
        _check_draws(resolved, sampler)
    return resolved


def _of_name(sharding: object) -> Sharding:
    expected = f"one of {', '.join(map(repr, _NAMES))}, or an object with a method deal"
    if not isinstance(sharding, str):
        return checked_sharding(sharding, f"sharding must be {expected}")
    if sharding not in _NAMES:
        raise ValueError(f"Unknown sharding {sharding!r}. Expected {expected}.")
    return _NAMES[sharding]()


def check_interface(sampler: Sampler) -> None:
    """Raise if what every sampler tells can't be read of one."""
    for name in ("batch_size", "shuffle", "mask", "rng"):
        try:
            getattr(sampler, name)
        except Exception as error:
            kind = type(sampler).__name__
            raise TypeError(
                f"{kind}.{name} raised {type(error).__name__}: {error}. Every sampler needs batch_size, shuffle, mask "
                f"and rng that can be read as soon as it is made; see whether {kind}.__init__ sets what they return."
            ) from error


def check_shares_out_nothing(sampler: Sampler) -> None:
    """Raise if a sampler that is to be wrapped is annbatch's own ``DistributedSampler``."""
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "An annbatch.samplers.DistributedSampler within one of annbatch_distributed gives each rank a share of its "
            "share, and rows would never be read. Wrap the sampler that it wraps; for ranks within nodes, use "
            "annbatch_distributed.DistributedSampler for both."
        )


def check_not_within_annbatchs() -> None:
    """Raise a ValueError if annbatch's own ``DistributedSampler`` has called the caller, directly or through others."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != DistributedSampler.__module__:
        frame = frame.f_back
    if frame.f_back is None:
        return
    raise ValueError(
        "An annbatch.samplers.DistributedSampler around one of annbatch_distributed shares out rows that are shared "
        "out already, and rows would never be read. Leave it out; for ranks within nodes, wrap the sampler in another "
        "annbatch_distributed.DistributedSampler."
    )


def rank_attribute(sampler: Sampler) -> str | None:
    """Return the attribute by which a sampler seems to know its rank; None if it has none."""
    # without asking a property, which may raise anything before there is a process group
    names = attributes(sampler).keys() | {name for cls in type(sampler).__mro__ for name in vars(cls)}
    return next((name for name in ("rank", "world_size") if name in names), None)


def _shuffled(sharding: Shuffled, sampler: Sampler, seed: int | None) -> Shuffled:
    name = type(sampler).__name__
    if drawable_classes(sampler):
        raise ValueError(
            f"{name} draws from runs of consecutive rows of a class, which sharding='shuffled' would cut. Use "
            "sharding='independent', under which every rank draws from all rows, or 'contiguous'."
        )
    sharding.check_seed(seed)
    if sharding.block_size is not None:
        return sharding
    own = chunk_size(sampler)
    if own is None:
        raise ValueError(
            f"sharding='shuffled' takes its block size from the sampler's chunk size, which isn't known of {name}. "
            "Pass Shuffled(block_size=...), the number of consecutive rows to be read at a time, or register a "
            "function for its type with annbatch_distributed.passes.chunk_size."
        )
    return replace(sharding, block_size=own)


def _check_draws(sharding: Sharding, sampler: Sampler) -> None:
    name = type(sampler).__name__
    rule, what = "sharding='independent'", "every row"
    if type(sharding) is not Independent:
        rule, what = f"sharding={type(sharding).__name__}", "every row that it is dealt"
    if n_draws(sampler, 1) is None:
        if drawable_classes(sampler):
            raise ValueError(
                f"{rule} around a {name} of a class sampler needs sharding='independent' in that one as well: else it "
                "would cut the rows that all ranks are to draw from."
            )
        raise ValueError(
            f"{rule} is for samplers that draw with replacement, and {name} isn't known to: every rank would read "
            f"{what}. Use sharding='shuffled', under which rows move between ranks from epoch to "
            "epoch, or 'contiguous'. If it does draw with replacement, register functions for its type with "
            "annbatch_distributed.passes.n_draws and set_draws."
        )
    if set_draws.dispatch(type(sampler)) is set_draws.dispatch(object):
        set_draws(sampler, 1)  # raises, and says what to do
