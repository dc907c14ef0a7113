"""Resolving ``dist_info``: from what the user names to a :class:`Membership`.

There is no fallback to rank 0: in a job of several processes it would give every one of them all rows.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, cast

from annbatch_distributed.ranks import environment, frameworks, jax, torch
from annbatch_distributed.ranks.membership import Membership
from annbatch_distributed.ranks.mesh import mesh_ranks
from annbatch_distributed.ranks.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh, NamedSharding
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DistInfo", "resolve", "source_of"]


class _Trainer(Protocol):
    """Lightning's ``Trainer`` or ``Fabric``."""

    @property
    def strategy(self) -> object: ...


class _Accelerator(Protocol):
    """accelerate's ``Accelerator`` or ``PartialState``."""

    @property
    def process_index(self) -> int: ...
    @property
    def num_processes(self) -> int: ...


class _TrainContext(Protocol):
    """The context of Ray Train."""

    def get_world_rank(self) -> int: ...
    def get_world_size(self) -> int: ...


type _Framework = _Trainer | _Accelerator | _TrainContext
type _Known = Rank | Membership | ProcessGroup | DeviceMesh | Mesh | NamedSharding | _Framework
type DistInfo = Literal["torch", "jax", "env"] | Callable[[], tuple[int, int] | list[int] | _Known] | _Known

_SOURCES: dict[str, Callable[[], Membership]] = {
    "torch": torch.default_group,
    "jax": jax.all_processes,
    "env": environment.launcher,
}


def resolve(dist_info: DistInfo) -> Membership:
    """Return which member of a job this process is, as a ``dist_info`` of :class:`DistributedSampler` says.

    >>> resolve(lambda: (1, 2)).rank
    Rank(rank=1, world_size=2)
    """
    return source_of(dist_info)()


def source_of(dist_info: DistInfo) -> Callable[[], Membership]:
    """Return the function that says which member this process is; a TypeError or a ValueError if there is none.

    What has a place for this process already is asked at once.
    """
    if isinstance(dist_info, str):
        if dist_info not in _SOURCES:
            raise ValueError(f"Unknown dist_info {dist_info!r}. {_EXPECTED}")
        return _SOURCES[dist_info]
    if frameworks.knows_rank(dist_info):
        return frameworks.FrameworkObject(dist_info)
    if (membership := _membership_of(dist_info)) is not None:
        return partial(copy.copy, membership)  # which can be pickled
    if not callable(dist_info) or inspect.isclass(dist_info):
        hint = " Pass an instance, not the class." if inspect.isclass(dist_info) else ""
        raise TypeError(f"Unknown dist_info {dist_info!r}. {_EXPECTED}{hint}")
    parameters = None
    with suppress(TypeError, ValueError):  # builtins needn't have any
        parameters = inspect.signature(dist_info)
    try:
        if parameters is not None:
            parameters.bind()
    except TypeError as error:
        name = getattr(dist_info, "__qualname__", repr(dist_info))
        raise TypeError(
            f"A callable as dist_info is called without arguments, and returns (rank, world_size), but {name}"
            f"{parameters} can't be: {error}. Pass one that needs none, such as a lambda that calls it."
        ) from None
    return partial(_call, cast("Callable[[], object]", dist_info))  # a Mesh can be called too, but was dealt with


_EXPECTED = (
    f"Expected one of {', '.join(map(repr, _SOURCES))}, a callable that returns (rank, world_size), a Rank, a torch "
    "ProcessGroup or DeviceMesh, a JAX Mesh or NamedSharding, what mesh_ranks or deferred returns, Lightning's Trainer "
    "or Fabric, accelerate's Accelerator or PartialState, or Ray Train's context."
)


def _membership_of(thing: object) -> Membership | None:
    """Return the membership that an object stands for; None if it stands for none."""
    if isinstance(thing, Membership):
        return thing
    if isinstance(thing, Rank):
        return Membership(thing, source="a Rank")
    if torch.is_group(thing):
        return torch.group(thing)
    return mesh_ranks(thing) if torch.is_mesh(thing) or jax.is_mesh(thing) else None


def _call(function: Callable[[], object]) -> Membership:
    """Return what a user's callable says."""
    answer = function()
    if frameworks.knows_rank(answer):
        return frameworks.FrameworkObject(answer)()
    if (membership := _membership_of(answer)) is not None:
        return membership
    expected = "The dist_info callable must return a tuple of two integers (rank, world_size)"
    if not isinstance(answer, tuple | list):
        raise TypeError(f"{expected}, got {answer!r} of type {type(answer).__name__}.")
    if len(answer) != 2:
        raise ValueError(f"{expected}, got {len(answer)} values: {answer!r}.")
    try:
        return Membership(Rank(*answer), source="a callable")
    except (TypeError, ValueError) as error:
        raise type(error)(f"{expected} with 0 <= rank < world_size, got {answer!r}: {error}") from None
