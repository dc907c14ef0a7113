"""The validated configuration of a sampler."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, Self

import numpy as np
from annbatch.abc import Sampler
from annbatch.samplers import DistributedSampler

from annbatch_distributed.core.lanes import POLICIES, Remainder
from annbatch_distributed.core.masks import AnyMask, Mask, open_ended, resolve_mask
from annbatch_distributed.core.sharding import Contiguous, Independent, Sharding, Shuffled, checked_sharding
from annbatch_distributed.core.state import Identity
from annbatch_distributed.core.units import Units
from annbatch_distributed.core.values import BOUND, integer
from annbatch_distributed.core.wrapped import (
    attributes,
    can_set_draws,
    chunk_size,
    description,
    drawable_classes,
    first_generator,
    is_random,
    make_numbers_ints,
    n_draws,
    needs_global_rows,
    private_copy,
    samplers_in,
)

type ShardingName = Literal["contiguous", "shuffled", "independent"]

_NAMES: dict[str, Callable[[], Sharding]] = {"contiguous": Contiguous, "shuffled": Shuffled, "independent": Independent}


@dataclass(frozen=True, eq=False)
class Config:
    """Validated arguments of a sampler, which don't depend on the rank."""

    sampler: Sampler
    """Private copy of the wrapped sampler. It is never run, only copies of it are."""
    remainder: Remainder
    """Policy for the rows that don't divide evenly."""
    sharding: Sharding
    """Function that determines the order of rows."""
    seed: int | None
    """Seed of the sharding; None if the user passed none."""
    root_seed: int
    """Seed of the generators of all streams."""
    rng: np.random.Generator | None
    """Generator that the root seed was taken from; None if there is a seed, or the sampler has no generator."""
    align: int | None
    """Number whose multiples are the first rows of whole chunks; None keeps the order of rows."""
    allowed: Mask
    """Rows that the wrapped sampler's own mask selects."""
    mask: Mask
    """Rows that are sharded."""
    units: Units
    """What the sampler samples: rows, sets or draws."""

    @classmethod
    def of(
        cls,
        sampler: Sampler,
        *,
        remainder: Remainder | None,
        enforce_equal_batches: bool,
        sharding: ShardingName | Sharding,
        mask: AnyMask | None,
        seed: int | None,
        units: Units,
    ) -> Self:
        """Validate the arguments of a :class:`.DistributedSampler`."""
        # checks that need no copy of the sampler come first, since a copy may be large
        remainder = _remainder(remainder, enforce_equal_batches)
        _check_batch_size(sampler, remainder)
        seed = None if seed is None else integer("seed", seed, least=0, below=BOUND)
        allowed = _own_mask(sampler)
        sampler = private_copy(sampler)
        make_numbers_ints(sampler)
        # a seed replaces the wrapped sampler's generator
        rng = _checked_rng(first_generator(sampler)) if seed is None else None
        resolved = _sharding(sharding, sampler, seed)
        selected = resolve_mask(slice(None) if mask is None else mask, allowed)
        units.check(selected, seed, sampler)
        return cls(
            sampler,
            remainder,
            resolved,
            seed,
            draw_root_seed(rng) if seed is None else seed,
            rng,
            _chunk_grid(sampler, resolved),
            allowed,
            selected,
            units,
        )

    def with_mask(self, mask: AnyMask) -> Self:
        """Return a copy with a new mask."""
        selected = resolve_mask(mask, self.allowed)
        self.units.check(selected, self.seed, self.sampler)
        return replace(self, mask=selected)

    def with_units(self, units: Units) -> Self:
        """Return a copy whose sampler samples other units."""
        units.check(self.mask, self.seed, self.sampler)
        return replace(self, units=units)

    def with_rng(self, rng: object) -> Self:
        """Return a copy with a root seed from a new generator."""
        own = copy.deepcopy(_checked_rng(rng))
        return replace(self, rng=own, root_seed=draw_root_seed(own))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes, and only copies of the sampler are run

    @property
    def rotates(self) -> bool:
        """True if ``drop`` drops different rows in each epoch.

        For class samplers, it drops the last rows in every epoch. If dropped rows moved, they could cut runs of a
        class, and an epoch could fail after hours.
        """
        return not needs_global_rows(self.sampler)

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a full batch of a stream."""
        size = self.sampler.batch_size
        return None if size is None else int(size)  # NumPy's integers overflow, and JSON doesn't have them

    @cached_property
    def _identity(self) -> Identity:
        """The identity without the rows."""
        return {
            # the batch size of custom samplers would only be part of a digest
            "sampler": description(self.sampler) | {"batch_size": self.batch_size},
            "sharding": description(self.sharding),
            "remainder": self.remainder,
            "seed": self.seed,
            "root": self.root_seed if is_random(self.sampler) else None,
            "versions": self._versions(),
        }

    def _versions(self) -> dict[str, str]:
        """Return the versions of the packages that determine the order of rows."""
        # they include the package of a custom sampler or sharding
        packages = {type(thing).__module__.partition(".")[0] for thing in (self.sampler, self.sharding)}
        versions = {name: getattr(sys.modules[name], "__version__", None) for name in {"annbatch", "numpy", *packages}}
        return {name: version for name, version in sorted(versions.items()) if isinstance(version, str)}

    @cached_property
    def _rows(self) -> dict[str, Any]:
        return self.mask.to_json()  # cached, since it reads all ranges of the mask

    def identity(self, n_obs: int | None) -> Identity:
        """Return the settings that determine the rows of a collection and their order, as JSON."""
        rows = {"n_obs": n_obs, "rows": open_ended(self._rows, n_obs)}
        return {**self._identity, **rows, **self.units.identity}

    def compared(
        self, saved: Identity, here: Identity, *, n_obs: int | None, is_within: bool
    ) -> tuple[Identity, Identity]:
        """Return the parts that must be equal of a state's identity, and of the identity here.

        ``here`` has what a loader knows of its collection. ``n_obs`` is its number of rows, None if it isn't known.
        ``is_within`` is True if the state is within an epoch, whose order must be the same.
        """
        # the number of rows decides how a mask is written, and may not have been known when the state was saved
        n_saved = saved.get("n_obs")
        n_known = n_saved if isinstance(n_saved, int) else n_obs
        here = self.identity(n_known) | here
        if isinstance(saved.get("rows"), dict):
            saved = saved | {"rows": open_ended(saved["rows"], n_known)}
        if not is_within:  # there is no order to restore, but other cells explain why a mask selects other rows
            unused = ["root"] if saved.get("rows") != here["rows"] else ["root", "datasets", "cells"]
            here |= {name: saved.get(name) for name in unused}
        return saved | {"versions": None}, here | {"versions": None}

    def changed_versions(self, saved: Identity) -> str:
        """Return the package versions in a state that differ from the versions here, as text; empty if none do."""
        theirs, ours = dict(saved.get("versions") or {}), self._identity["versions"]
        changed = [name for name, version in sorted(ours.items()) if theirs.get(name, version) != version]
        return ", ".join(f"{name} {theirs[name]} (here: {ours[name]})" for name in changed)


def check_wrapped(sampler: object, ours: type[Sampler]) -> list[str]:
    """Raise unless ``ours`` can wrap a sampler; return a warning for each sampler in it that may shard rows itself."""
    if not isinstance(sampler, Sampler):
        hint = " Pass an instance, not the class." if isinstance(sampler, type) else ""
        raise TypeError(f"sampler must be an annbatch Sampler, got {sampler!r}.{hint}")
    kind = type(sampler).__name__
    # a sampler that fails here would fail in the middle of a job, and not on all ranks at once
    for name in ("batch_size", "shuffle", "mask", "rng"):
        try:
            getattr(sampler, name)
        except Exception as error:
            raise TypeError(
                f"{kind}.{name} raised {type(error).__name__}: {error}. Every sampler must have the properties "
                f"batch_size, shuffle, mask and rng; set their values in {kind}.__init__."
            ) from error
    # a sampler may hold others, at any depth
    inner = samplers_in(sampler)
    for within in inner:
        if isinstance(within, DistributedSampler | ours):
            raise TypeError(
                "A DistributedSampler must not wrap another one, got a DistributedSampler of "
                f"{type(within).__module__.partition('.')[0]}: most rows would never be read. Pass the sampler that it "
                'wraps. For ranks within nodes, pass dist_info=Rank.from_mesh(mesh, ("node", "local")), or a callable '
                "that returns the global rank."
            )
    return [warning for within in inner if (warning := _rank_warning(within))]


def _sharding(sharding: ShardingName | Sharding, sampler: Sampler, seed: int | None) -> Sharding:
    """Return a sharding by its name, or a custom one; raise if the sampler can't run on its shards."""
    resolved = _of_name(sharding)
    if isinstance(resolved, Shuffled):
        return _shuffled(resolved, sampler, seed)
    if isinstance(resolved, Independent):
        _check_draws(sampler)
    return resolved


def _chunk_grid(sampler: Sampler, sharding: Sharding) -> int | None:
    """Return the number whose multiples are the first rows of a rank's chunks; None keeps the order of rows.

    The order is kept for samplers that keep it themselves; that sample with replacement, whose chunks begin at any row;
    and that hold a value for each row, such as class samplers, which need whole runs of a class.
    """
    if n_draws(sampler, 1) is not None or needs_global_rows(sampler):
        return None
    align = chunk_size(sampler)
    if align is None or align < 2 or not is_random(sampler):
        align = None
    # chunks are aligned within blocks if blocks begin at multiples of `align`; otherwise the blocks are aligned
    block_size = sharding.block_size if isinstance(sharding, Shuffled) else None
    if block_size is not None and (align is None or block_size % align):
        align = block_size
    return None if align is None else int(align)


def _of_name(sharding: object) -> Sharding:
    expected = f"one of {', '.join(map(repr, _NAMES))}, or a function (rows, *, epoch, seed) that returns Rows"
    if not isinstance(sharding, str):
        return checked_sharding(sharding, f"sharding must be {expected}")
    if sharding not in _NAMES:
        raise ValueError(f"sharding must be {expected}, got {sharding!r}.")
    return _NAMES[sharding]()


def _shuffled(sharding: Shuffled, sampler: Sampler, seed: int | None) -> Shuffled:
    name = type(sampler).__name__
    if drawable_classes(sampler) is not None:
        raise ValueError(
            f"sharding='shuffled' would cut the runs of consecutive rows of a class that {name} samples from. Use "
            "sharding='independent', under which every rank samples from all rows, or 'contiguous'."
        )
    sharding.check_seed(seed)
    if sharding.block_size is not None:
        return sharding
    # blocks of whole chunks are read as fast as contiguous rows
    size = chunk_size(sampler)
    if size is None:
        raise ValueError(
            f"sharding='shuffled' takes its block size from the sampler's chunk size, which is unknown for {name}. "
            "Pass Shuffled(block_size=...), the number of consecutive rows to read at a time, or give the sampler an "
            "attribute chunk_size."
        )
    return replace(sharding, block_size=int(size))


def _check_draws(sampler: Sampler) -> None:
    name = type(sampler).__name__
    if n_draws(sampler, 1) is None or not can_set_draws(sampler):
        raise ValueError(
            f"sharding='independent' requires a sampler with replacement, which {name} isn't known to be: every rank "
            "would read every row. Use sharding='shuffled' or 'contiguous'. If it does sample with replacement, give "
            "it the methods n_draws(n_rows), which returns the number of samples, and set_draws(n_draws), which "
            "changes this number."
        )


def _rank_warning(sampler: Sampler) -> str | None:
    """Return a warning that a sampler may shard rows itself, if it has the attribute of a rank; else None."""
    # properties aren't evaluated, since they may raise without a process group
    names = attributes(sampler).keys() | {name for cls in type(sampler).__mro__ for name in vars(cls)}
    name, attribute = type(sampler).__name__, next((name for name in ("rank", "world_size") if name in names), None)
    if attribute is None:
        return None
    return (
        f"{name} has an attribute {attribute!r}. If it shards rows itself, they are sharded twice, and most rows are "
        "never read. Wrap a sampler that doesn't shard rows, or create it with a world size of 1."
    )


def _own_mask(sampler: Sampler) -> Mask:
    """Return a sampler's own mask, resolved."""
    mask: slice | None = sampler.mask  # a custom sampler may have none
    try:
        return resolve_mask(slice(None) if mask is None else mask)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{type(sampler).__name__}.mask is invalid: {error}") from None


def _remainder(remainder: Remainder | None, enforce_equal_batches: object) -> Remainder:
    """Return the policy that the two arguments define; raise if they are invalid or contradict each other."""
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
        raise ValueError(f"remainder must be one of {', '.join(map(repr, POLICIES))}, or None, got {remainder!r}.")
    # annbatch's argument and ours must not contradict each other
    if not enforce_equal_batches and remainder != "keep":
        raise ValueError(
            f"enforce_equal_batches must be True under remainder={remainder!r}, got False. Leave enforce_equal_batches "
            "out."
        )
    return remainder


def _check_batch_size(sampler: Sampler, remainder: Remainder) -> None:
    """Raise if the batch size of a sampler is invalid, or missing although a policy requires it."""
    name = type(sampler).__name__
    size: object = sampler.batch_size
    if size is not None and (not isinstance(size, Integral) or isinstance(size, bool)):
        raise TypeError(f"{name}.batch_size must be an integer or None, got {size!r} of type {type(size).__name__}.")
    if size is not None and size < 1:
        raise ValueError(f"{name}.batch_size must be at least 1, got {size}.")
    if sampler.batch_size is None and remainder != "keep":
        raise ValueError(
            f"{name}.batch_size must be an integer under remainder={remainder!r}, which needs equal numbers of "
            "batches, got None. Give the sampler a batch_size, or pass remainder='keep'."
        )


def _checked_rng(rng: object) -> np.random.Generator | None:
    """Return the argument; raise a TypeError unless it is a generator or None."""
    if rng is not None and not isinstance(rng, np.random.Generator):
        raise TypeError(
            f"rng must be a numpy.random.Generator or None, got {rng!r}. Create one with numpy.random.default_rng(...)."
        )
    return rng


def draw_root_seed(rng: np.random.Generator | None) -> int:
    """Return a root seed from the wrapped sampler's generator, without advancing the generator.

    annbatch 0.3.1 takes the same number to spawn the generators of its workers. None takes fresh entropy from the
    operating system.
    """
    source = np.random.default_rng() if rng is None else copy.deepcopy(rng)
    return int(source.integers(np.iinfo(np.int64).max))
