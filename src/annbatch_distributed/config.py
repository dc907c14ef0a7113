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

from annbatch_distributed.lanes import POLICIES, Remainder
from annbatch_distributed.masks import ALL, AnyMask, Mask, open_ended, resolve_mask
from annbatch_distributed.rows import BOUND, Rows, integer
from annbatch_distributed.sets import Sets
from annbatch_distributed.sharding import Contiguous, Independent, Sharding, Shuffled, checked_sharding
from annbatch_distributed.state import Identity
from annbatch_distributed.wrapped import (
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
    """The validated arguments of a sampler: all that doesn't depend on the rank."""

    sampler: Sampler
    """A private copy of the wrapped sampler, of which again only copies are run."""
    remainder: Remainder
    """What becomes of the rows that don't divide evenly."""
    sharding: Sharding
    """What puts the rows into an order."""
    seed: int | None
    """What the sharding's own randomness begins from, if the user gave it."""
    root_seed: int
    """What the randomness of all streams begins from."""
    rng: np.random.Generator | None
    """What the root seed was drawn from; None if it is the seed."""
    align: int | None
    """Of which number the first rows of whole chunks are to be multiples; None leaves rows in their order."""
    allowed: Mask
    """The rows that the wrapped sampler's own mask selects."""
    mask: Mask
    """The rows that are shared out."""
    sets: Sets | None
    """What the sampler samples in place of rows; None if rows."""

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
        align: int | None,
        sets: Sets | None,
    ) -> Self:
        """Validate the arguments of a :class:`.DistributedSampler`."""
        # what needs no copy of the sampler first: a copy may be large
        remainder = _remainder(remainder, enforce_equal_batches)
        _check_batch_size(sampler, remainder)
        seed = None if seed is None else integer("seed", seed, least=0, below=BOUND)
        align = None if align is None else integer("align", align, least=1, below=BOUND)
        allowed = _own_mask(sampler)
        sampler = private_copy(sampler)
        make_numbers_ints(sampler)
        # a seed takes the place of the wrapped sampler's generator
        rng = _checked_rng(first_generator(sampler)) if seed is None else None
        resolved = _sharding(sharding, sampler, seed)
        selected = resolve_mask(slice(None) if mask is None else mask, allowed)
        _check_sets(sets, selected, seed)
        return cls(
            sampler,
            remainder,
            resolved,
            seed,
            draw_root_seed(rng) if seed is None else seed,
            rng,
            _chunk_grid(sampler, align, resolved),
            allowed,
            selected,
            None if sets is None else replace(sets, names=None),  # of very many cells, and compared by the sampler
        )

    def with_mask(self, mask: AnyMask) -> Self:
        """Return the same, with another mask."""
        selected = resolve_mask(mask, self.allowed)
        _check_sets(self.sets, selected, self.seed)
        return replace(self, mask=selected)

    def with_rng(self, rng: object) -> Self:
        """Return the same, with randomness that begins from another generator."""
        own = copy.deepcopy(_checked_rng(rng))
        return replace(self, rng=own, root_seed=draw_root_seed(own))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes, and only copies of the sampler are run

    @property
    def batch_size(self) -> int | None:
        """Rows of a full batch of a stream."""
        size = self.sampler.batch_size
        return None if size is None else int(size)  # numpy's integers go round, and aren't for JSON

    @cached_property
    def _identity(self) -> Identity:
        """The identity but for the rows."""
        return {
            # other samplers than annbatch's have their batch size in a digest only
            "sampler": description(self.sampler) | {"batch_size": self.batch_size},
            "sharding": description(self.sharding),
            "remainder": self.remainder,
            "seed": self.seed,
            "root": self.root_seed if is_random(self.sampler) else None,
            # both leave rows in the order of the sharding
            "align": self.align or 1,
            "versions": self._versions(),
        }

    def _versions(self) -> dict[str, str]:
        """Return the versions of the packages that draw rows."""
        # a sampler or sharding of a user's own package draws by that package's version, too
        packages = {type(thing).__module__.partition(".")[0] for thing in (self.sampler, self.sharding)}
        versions = {name: getattr(sys.modules[name], "__version__", None) for name in {"annbatch", "numpy", *packages}}
        return {name: version for name, version in sorted(versions.items()) if isinstance(version, str)}

    @cached_property
    def _rows(self) -> dict[str, Any]:
        return self.mask.to_json()  # which goes through all ranges of the mask

    def identity(self, n_obs: int | None) -> Identity:
        """Return what the rows of a collection and their order follow from, as JSON."""
        sets = {} if self.sets is None else {"sets": self.sets.identity}
        return {**self._identity, "n_obs": n_obs, "rows": open_ended(self._rows, n_obs), **sets}


def check_wrapped(sampler: object, ours: type[Sampler]) -> list[str]:
    """Raise if something is no sampler that ``ours`` can wrap; return warnings that it may share out rows by itself."""
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
                f"{kind}.{name} raised {type(error).__name__}: {error}. Every sampler needs batch_size, shuffle, mask "
                f"and rng that can be read as soon as it is made; see whether {kind}.__init__ sets what they return."
            ) from error
    # a sampler may hold others, at any depth
    held = samplers_in(sampler)
    for within in held:
        if isinstance(within, DistributedSampler | ours):
            raise TypeError(
                "A DistributedSampler can't be in another one, got one of "
                f"{type(within).__module__.partition('.')[0]}: each rank would have a share of its share, and rows "
                "would never be read. Wrap the sampler that it wraps. For ranks within nodes, say which rank of all "
                'this is: dist_info=mesh_ranks(mesh, ("node", "local")), or a callable that returns it.'
            )
    return [warning for within in held if (warning := _rank_warning(within))]


def _check_sets(sets: object, mask: Mask, seed: int | None) -> None:
    """Raise if sets are none, are to be narrowed down by a mask, or have no seed that all ranks have."""
    if sets is None:
        return
    sets = Sets.checked(sets)
    # class samplers have the mask of all sets, for each of which they have a label
    if mask is not ALL and mask.rows != Rows((range(len(sets)),)):
        raise ValueError(
            "A sampler of sets takes no mask, and neither does the one that it wraps, which samples the numbers of "
            "sets. Select cells by Sets.from_obs(mask=...)."
        )
    if sets.seed is None and seed is None:
        raise ValueError(
            "Sets must be the same on every rank, so they need a seed: pass seed=... to DistributedSampler or to "
            "Sets.from_obs."
        )


def _sharding(sharding: ShardingName | Sharding, sampler: Sampler, seed: int | None) -> Sharding:
    """Return the sharding of a name, or a user's own, if a sampler can run on such shards."""
    resolved = _of_name(sharding)
    if isinstance(resolved, Shuffled):
        return _shuffled(resolved, sampler, seed)
    if isinstance(resolved, Independent):
        _check_draws(sampler)
    return resolved


def _chunk_grid(sampler: Sampler, align: int | None, sharding: Sharding) -> int | None:
    """Return of which number the first rows of a rank's chunks are to be multiples; None leaves rows in their order.

    ``align`` is what the user gave. Rows stay in order for samplers that keep it, that draw with replacement, where a
    chunk begins at any row, and that hold something for each row, such as class samplers, which need whole runs.
    """
    if n_draws(sampler, 1) is not None or needs_global_rows(sampler):
        return None
    align = chunk_size(sampler) if align is None else align
    if align is None or align < 2 or not is_random(sampler):
        align = None
    # chunks can be aligned within blocks, if blocks begin at multiples of `align`; else blocks themselves are
    block_size = sharding.block_size if isinstance(sharding, Shuffled) else None
    if block_size is not None and (align is None or block_size % align):
        align = block_size
    return None if align is None else int(align)


def _of_name(sharding: object) -> Sharding:
    expected = f"one of {', '.join(map(repr, _NAMES))}, or a function (rows, *, epoch, seed) that returns Rows"
    if not isinstance(sharding, str):
        return checked_sharding(sharding, f"sharding must be {expected}")
    if sharding not in _NAMES:
        raise ValueError(f"Unknown sharding {sharding!r}. Expected {expected}.")
    return _NAMES[sharding]()


def _shuffled(sharding: Shuffled, sampler: Sampler, seed: int | None) -> Shuffled:
    name = type(sampler).__name__
    if drawable_classes(sampler) is not None:
        raise ValueError(
            f"{name} draws from runs of consecutive rows of a class, which sharding='shuffled' would cut. Use "
            "sharding='independent', under which every rank draws from all rows, or 'contiguous'."
        )
    sharding.check_seed(seed)
    if sharding.block_size is not None:
        return sharding
    # blocks of whole chunks are read as fast as contiguous rows
    own = chunk_size(sampler)
    if own is None:
        raise ValueError(
            f"sharding='shuffled' takes its block size from the sampler's chunk size, which isn't known of {name}. "
            "Pass Shuffled(block_size=...), the number of consecutive rows to be read at a time, or give it an "
            "attribute chunk_size."
        )
    return replace(sharding, block_size=int(own))


def _check_draws(sampler: Sampler) -> None:
    name = type(sampler).__name__
    if n_draws(sampler, 1) is None or not can_set_draws(sampler):
        raise ValueError(
            f"sharding='independent' is for samplers that draw with replacement, and {name} isn't known to: every rank "
            "would read every row. Use sharding='shuffled', under which rows move between ranks from epoch to "
            "epoch, or 'contiguous'. If it does draw with replacement, give it the methods n_draws(n_rows), which "
            "returns how many samples it draws, and set_draws(n_draws), which has it draw another number."
        )


def _rank_warning(sampler: Sampler) -> str | None:
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


def _own_mask(sampler: Sampler) -> Mask:
    """Return the mask that a sampler has, resolved: the rows that a wrapper of it may share out."""
    mask: slice | None = sampler.mask  # a user's sampler may have none
    try:
        return resolve_mask(slice(None) if mask is None else mask)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{type(sampler).__name__}.mask can't be shared out: {error}") from None


def _remainder(remainder: Remainder | None, enforce_equal_batches: object) -> Remainder:
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
    # annbatch's argument and ours may not contradict each other
    if not enforce_equal_batches and remainder != "keep":
        raise ValueError(
            f"remainder={remainder!r} gives every rank the same number of batches, but enforce_equal_batches=False was "
            "passed as well. Leave enforce_equal_batches out."
        )
    return remainder


def _check_batch_size(sampler: Sampler, remainder: Remainder) -> None:
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


def _checked_rng(rng: object) -> np.random.Generator | None:
    """Return what was given as a generator, once it is known to be one."""
    if rng is not None and not isinstance(rng, np.random.Generator):
        raise TypeError(
            f"rng must be a numpy.random.Generator or None, got {rng!r}. Make one with numpy.random.default_rng(...)."
        )
    return rng


def draw_root_seed(rng: np.random.Generator | None) -> int:
    """Return the root seed that the wrapped sampler's generator stands for, without advancing it.

    It is what annbatch 0.3.1 draws to spawn the generators of its workers. None stands for fresh entropy from the
    operating system.
    """
    source = np.random.default_rng() if rng is None else copy.deepcopy(rng)
    return int(source.integers(np.iinfo(np.int64).max))
