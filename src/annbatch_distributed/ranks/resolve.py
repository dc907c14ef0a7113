"""Resolving ``dist_info``: from what the user names to a :class:`Membership`.

There is no fallback to rank 0: in a job of several processes it would give every one of them all rows.
"""

from __future__ import annotations

import copy
import inspect
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

__all__ = ["DistInfo", "asker", "resolve"]


class LightningsTrainer(Protocol):
    """Lightning's ``Trainer`` or ``Fabric``."""

    @property
    def strategy(self) -> object:
        """How it starts processes."""


class Accelerator(Protocol):
    """accelerate's ``Accelerator`` or ``PartialState``."""

    @property
    def process_index(self) -> int:
        """Which process this is."""

    @property
    def num_processes(self) -> int:
        """How many there are."""


class RaysContext(Protocol):
    """The context of Ray Train."""

    def get_world_rank(self) -> int:
        """Return which worker this is."""

    def get_world_size(self) -> int:
        """Return how many there are."""


type OfFramework = LightningsTrainer | Accelerator | RaysContext
type Known = Rank | Membership | ProcessGroup | DeviceMesh | Mesh | NamedSharding | OfFramework
type DistInfo = Literal["torch", "jax", "env"] | Callable[[], tuple[int, int] | list[int] | Known] | Known

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
    return asker(dist_info)()


def asker(dist_info: DistInfo) -> Callable[[], Membership]:
    """Return the function that asks a ``dist_info``, once it is known to be one.

    What has a place for this process already is asked at once.
    """
    if isinstance(dist_info, str):
        if dist_info not in _SOURCES:
            raise ValueError(f"Unknown dist_info {dist_info!r}. {_EXPECTED}")
        return _SOURCES[dist_info]
    if frameworks.knows_rank(dist_info):
        return frameworks.Asker(dist_info)
    if (known := _known(dist_info)) is not None:
        return partial(copy.copy, known)  # which can be pickled
    if not callable(dist_info) or inspect.isclass(dist_info):
        hint = " Pass an instance, not the class." if inspect.isclass(dist_info) else ""
        raise TypeError(f"Unknown dist_info {dist_info!r}. {_EXPECTED}{hint}")
    _check_takes_nothing(dist_info)
    return partial(_call, cast("Callable[[], object]", dist_info))  # a Mesh can be called too, but was dealt with


_EXPECTED = (
    f"Expected one of {', '.join(map(repr, _SOURCES))}, a callable that returns (rank, world_size), a Rank, a torch "
    "ProcessGroup or DeviceMesh, a JAX Mesh or NamedSharding, what mesh_ranks or deferred returns, Lightning's Trainer "
    "or Fabric, accelerate's Accelerator or PartialState, or Ray Train's context."
)


def _call(callable_: Callable[[], object]) -> Membership:
    answer = callable_()
    if frameworks.knows_rank(answer):
        return frameworks.Asker(answer)()
    return _known(answer) or Membership(_from_pair(answer), source="a callable")


def _check_takes_nothing(callable_: Callable[..., object]) -> None:
    """Raise if a callable can't be called without arguments."""
    try:
        parameters = inspect.signature(callable_)
    except (TypeError, ValueError):  # builtins needn't have any
        return
    try:
        parameters.bind()
    except TypeError as error:
        name = getattr(callable_, "__qualname__", repr(callable_))
        raise TypeError(
            f"A callable as dist_info is called without arguments, and returns (rank, world_size), but {name}"
            f"{parameters} can't be: {error}. Pass one that needs none, such as a lambda that calls it."
        ) from None


def _known(thing: object) -> Membership | None:
    """Return the membership that an object stands for; None if it is none of those that do."""
    if isinstance(thing, Membership):
        return thing
    if isinstance(thing, Rank):
        return Membership(thing, source="a Rank")
    if torch.is_group(thing):
        return torch.group(thing)
    if torch.is_no_group(thing):
        raise ValueError(
            f"dist_info is {thing!r}, which torch.distributed.new_group gives to a process that isn't in the group. "
            "Make the sampler in the processes of the group only."
        )
    return mesh_ranks(thing) if torch.is_mesh(thing) or jax.is_mesh(thing) else None


def _from_pair(pair: object) -> Rank:
    """Check what a user's callable returned."""
    expected = "The dist_info callable must return a tuple of two integers (rank, world_size)"
    if not isinstance(pair, tuple | list):
        raise TypeError(f"{expected}, got {pair!r} of type {type(pair).__name__}.")
    if len(pair) != 2:
        raise ValueError(f"{expected}, got {len(pair)} values: {pair!r}.")
    try:
        return Rank(*pair)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{expected} with 0 <= rank < world_size, got {pair!r}: {error}") from None
