"""What goes with which sampler, a sharding or another wrapper, as far as that can be told without the collection."""

from __future__ import annotations

import sys
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Literal

import numpy as np
from annbatch.samplers import DistributedSampler

from annbatch_distributed.masks import resolve_mask
from annbatch_distributed.passes.private_copy import attributes
from annbatch_distributed.passes.shard import needs_global_rows
from annbatch_distributed.passes.traits import chunk_size, drawable_classes, is_random, n_draws, set_draws
from annbatch_distributed.plan import POLICIES
from annbatch_distributed.sharding import Contiguous, Independent, Shuffled, checked_sharding

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch.abc import Sampler

    from annbatch_distributed.masks import Mask
    from annbatch_distributed.plan import Remainder
    from annbatch_distributed.sharding import Sharding

__all__ = [
    "ShardingName",
    "check_batch_size",
    "check_interface",
    "check_not_within_annbatchs",
    "check_shares_out_nothing",
    "checked_rng",
    "chunk_grid",
    "own_mask",
    "rank_warning",
    "resolve_remainder",
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
    if isinstance(resolved, Independent):
        _check_draws(sampler)
    return resolved


def chunk_grid(sampler: Sampler, align: int | None) -> int | None:
    """Return of which number the first rows of a rank's chunks are to be multiples; None leaves rows in their order.

    ``align`` is what the user gave. Rows stay in order for samplers that keep it, that draw with replacement, where a
    chunk begins at any row, and that hold something for each row, such as class samplers, which need whole runs.
    """
    align = chunk_size(sampler) if align is None else align
    if align is None or align < 2 or not is_random(sampler) or n_draws(sampler, 1) is not None:
        return None
    return None if needs_global_rows(sampler) else int(align)


def _of_name(sharding: object) -> Sharding:
    expected = f"one of {', '.join(map(repr, _NAMES))}, or a function (rows, *, epoch, seed) that returns Rows"
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


def check_shares_out_nothing(sampler: Sampler, ours: type[Sampler]) -> None:
    """Raise if a sampler that is to be wrapped is a ``DistributedSampler``, annbatch's or ``ours``."""
    if isinstance(sampler, DistributedSampler | ours):
        raise TypeError(
            "A DistributedSampler can't be in another one, got one of "
            f"{type(sampler).__module__.partition('.')[0]}: each rank would have a share of its share, and rows would "
            "never be read. Wrap the sampler that it wraps. For ranks within nodes, say which rank of all this is: "
            'dist_info=mesh_ranks(mesh, ("node", "local")), or a callable that returns it.'
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


def rank_warning(sampler: Sampler) -> str | None:
    """Return the warning that a sampler may share out rows by itself, if it has an attribute of a rank; None if not."""
    # without asking a property, which may raise anything before there is a process group
    names = attributes(sampler).keys() | {name for cls in type(sampler).__mro__ for name in vars(cls)}
    name, attribute = type(sampler).__name__, next((name for name in ("rank", "world_size") if name in names), None)
    if attribute is None:
        return None
    return (
        f"{name} has an attribute {attribute!r}. If it gives each rank a part of the rows by itself, the "
        "DistributedSampler around it shares out that part once more, and most rows are never read. Wrap a sampler "
        "that knows nothing of ranks, or one that was made as if there were a single rank."
    )


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
    return replace(sharding, block_size=int(own))


def _check_draws(sampler: Sampler) -> None:
    name = type(sampler).__name__
    if n_draws(sampler, 1) is None:
        raise ValueError(
            f"sharding='independent' is for samplers that draw with replacement, and {name} isn't known to: every rank "
            "would read every row. Use sharding='shuffled', under which rows move between ranks from epoch to "
            "epoch, or 'contiguous'. If it does draw with replacement, register functions for its type with "
            "annbatch_distributed.passes.n_draws and set_draws."
        )
    if set_draws.dispatch(type(sampler)) is set_draws.dispatch(object):
        set_draws(sampler, 1)  # raises, and says what to do


def own_mask(sampler: Sampler) -> Mask:
    """Return the mask that a sampler has, resolved: the rows that a wrapper of it may share out."""
    mask: slice | None = sampler.mask  # a user's sampler may have none
    try:
        return resolve_mask(slice(None) if mask is None else mask)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{type(sampler).__name__}.mask can't be shared out: {error}") from None


def resolve_remainder(remainder: Remainder | None, *, enforce_equal_batches: bool) -> Remainder:
    """Return the policy that two arguments name; raise if they are wrong or contradict each other."""
    if not isinstance(enforce_equal_batches, bool | np.bool_):
        raise TypeError(
            f"enforce_equal_batches must be True or False, got {enforce_equal_batches!r} of type "
            f"{type(enforce_equal_batches).__name__}. Pass True for remainder='drop', False for remainder='keep'."
        )
    if remainder is not None and not isinstance(remainder, str):
        raise TypeError(f"remainder must be one of {', '.join(map(repr, POLICIES))}, or None, got {remainder!r}.")
    if remainder is None:
        remainder = "drop" if enforce_equal_batches else "keep"
    if remainder not in POLICIES:
        raise ValueError(f"Unknown remainder {remainder!r}. Expected one of {', '.join(map(repr, POLICIES))}, or None.")
    if not enforce_equal_batches and remainder != "keep":
        raise ValueError(
            f"remainder={remainder!r} gives every rank the same number of batches, but enforce_equal_batches=False was "
            "passed as well. Leave enforce_equal_batches out."
        )
    return remainder


def check_batch_size(sampler: Sampler, remainder: Remainder) -> None:
    """Raise if a sampler has no batch size that a policy can keep its promise with, whatever the rows."""
    name = type(sampler).__name__
    size: object = sampler.batch_size
    if size is not None and (not isinstance(size, Integral) or isinstance(size, bool)):
        raise TypeError(
            f"{name} has batch_size {size!r} of type {type(size).__name__}, but it must be an integer or None."
        )
    if size is not None and size < 1:
        raise ValueError(f"{name} has batch_size {size}, but a batch needs at least one row.")
    if sampler.batch_size is None and remainder != "keep":
        raise ValueError(
            f"{name} has batch_size None, so that equal numbers of batches on every rank can't be promised, as "
            f"remainder={remainder!r} does. Give it a batch_size, or pass enforce_equal_batches=False."
        )


def checked_rng(rng: object) -> np.random.Generator | None:
    """Return what was given as a generator, once it is known to be one."""
    if rng is not None and not isinstance(rng, np.random.Generator):
        raise TypeError(
            f"rng must be a numpy.random.Generator or None, got {rng!r}. Make one with numpy.random.default_rng(...)."
        )
    return rng
