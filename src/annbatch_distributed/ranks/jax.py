"""The member that this process is among JAX's: of all its processes, or of a mesh's shares of the data.

The shares of a mesh come from the mesh alone, so that every process finds the same ones:

1. A *place* is a position along the data axes, counted as in the mesh, the last axis fastest.
2. A process holds the places of its devices.
3. Processes that hold the same places are peers, and have the same share; shares count by their places.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from annbatch_distributed.ranks.membership import Membership
from annbatch_distributed.ranks.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from jax.sharding import Mesh, NamedSharding
    from typing_extensions import TypeIs  # typing's is new in Python 3.13

__all__ = ["Share", "all_processes", "is_initialized", "is_mesh", "mesh", "named_axes", "rows_of", "shares"]


def all_processes() -> Membership:
    """Return which of all of JAX's processes this one is.

    A RuntimeError if ``jax.distributed`` has not been initialised, an ImportError if jax is not installed.
    """
    try:
        import jax
    except ImportError as error:
        raise ImportError("dist_info='jax' needs JAX: install annbatch-distributed[jax].") from error
    _check_initialised()
    rank = Rank(jax.process_index(), jax.process_count())
    return Membership(rank, source="JAX's processes", framework="jax", name="jax")


def mesh(mesh: Mesh | NamedSharding, axes: str | Sequence[str] | None = None) -> Membership:
    """Return which share of the data this process has in a mesh.

    Two processes with two devices each, in two meshes of 2 x 2 with the axes ``"data"`` and ``"model"``, of which
    ``"data"`` splits rows::

        processes in the mesh     0 0     0 1
                                  1 1     0 1
        ranks of both processes   0, 1    0, 0
        world size                2       1

    ``axes`` are the names of the mesh's axes that split rows, of which the first varies slowest. None if the mesh has
    one axis only, or for those that a sharding has in its first dimension. What :func:`mesh_ranks` says is an error is
    one here.
    """
    devices, names = _devices_and_axes(mesh, axes)
    _check_initialised()
    found, rank = _shares_and_rank(devices, names)
    rank_of = {process: number for number, share in enumerate(found) for process in share.processes}
    return Membership.of_ranks(rank_of, found[rank].processes[0], f"{_axes(names)} of a JAX mesh", "jax")


@lru_cache(maxsize=8)  # it is asked for every batch
def rows_of(sharding: NamedSharding) -> tuple[list[Share], int]:
    """Return the shares that a sharding splits rows into, and which of them this process has.

    In a single process, ``jax.distributed`` need not be initialised. It raises what :func:`mesh` does.
    """
    return _shares_and_rank(*_devices_and_axes(sharding, None))


@dataclass(frozen=True)
class Share:
    """Places that processes hold together."""

    places: tuple[int, ...]
    """Positions along the data axes, in ascending order."""
    processes: tuple[int, ...]
    """Those that hold each of these places, in ascending order."""


def shares(processes: npt.NDArray[np.int64], axes: Sequence[int]) -> list[Share]:
    """Return the shares of a mesh, by rank.

    ``processes`` has the process of each device of the mesh, and ``axes`` says which of its dimensions split rows, of
    which the first varies slowest. A ValueError if shares overlap, or are of different sizes or numbers of processes.

    >>> two_by_two = np.array([[0, 0], [1, 1]])
    >>> shares(two_by_two, [0])
    [Share(places=(0,), processes=(0,)), Share(places=(1,), processes=(1,))]
    >>> shares(two_by_two, [1])
    [Share(places=(0, 1), processes=(0, 1))]
    >>> shares(two_by_two, [0, 1])
    [Share(places=(0, 1), processes=(0,)), Share(places=(2, 3), processes=(1,))]
    """
    in_front = np.moveaxis(processes, axes, range(len(axes)))
    by_place = in_front.reshape(math.prod(in_front.shape[: len(axes)]), -1)
    held: dict[int, list[int]] = {}
    for place, holders in enumerate(by_place.tolist()):
        for process in sorted(set(holders)):
            held.setdefault(process, []).append(place)
    peers: dict[tuple[int, ...], list[int]] = {}
    for process, places in sorted(held.items()):
        peers.setdefault(tuple(places), []).append(process)
    found = [Share(places, tuple(members)) for places, members in sorted(peers.items())]
    _check(found)
    return found


def _check(found: list[Share]) -> None:
    """Raise unless each row belongs to one share, and as many to each."""
    holder: dict[int, Share] = {}
    for share in found:
        for place in share.places:
            other = holder.setdefault(place, share)
            if other is not share:
                raise ValueError(_not_shares(other, share, "overlap without being the same"))
        if len(share.places) != len(found[0].places):
            raise ValueError(_not_shares(found[0], share, "are not as many"))
        if len(share.processes) != len(found[0].processes):
            raise ValueError(_not_shares(found[0], share, "are not held by as many processes"))


def _not_shares(one: Share, other: Share, problem: str) -> str:
    return (
        "Any two processes of a mesh must hold the same places along the data axes, or different ones and as many. "
        f"Process {_listed(one.processes)} holds place {_listed(one.places)}, and process {_listed(other.processes)} "
        f"holds place {_listed(other.places)}: these {problem}. Make the mesh with its devices in another order, or "
        "name other axes."
    )


def _check_initialised() -> None:
    if not is_initialized():
        raise RuntimeError(
            "JAX distributed is not initialized. Call jax.distributed.initialize() in every process before a "
            "DistributedSampler asks JAX for its rank."
        )


def _devices_and_axes(mesh: Mesh | NamedSharding, axes: str | Sequence[str] | None) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh, and the names of the axes that split rows."""
    devices = mesh.mesh if _is_sharding(mesh) else mesh
    if not _is_mesh(devices) or devices.empty:
        raise TypeError(
            "Expected a mesh of devices: a torch DeviceMesh, or JAX's Mesh or a NamedSharding over one, got "
            f"{mesh!r} of type {type(mesh).__name__}."
        )
    known = devices.axis_names
    if axes is not None:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
    elif _is_sharding(mesh):
        names = named_axes(mesh.spec[0]) if len(mesh.spec) else ()
    elif len(known) == 1:
        names = known
    else:
        raise ValueError(
            f"The JAX mesh has {_axes(known)}. Name those that split rows, the one that varies slowest first, or "
            "give the NamedSharding of the batches."
        )
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"The JAX mesh has no {_axes(unknown)}. It has {_axes(known)}.")
    if len(set(names)) < len(names):
        raise ValueError(
            f"An axis can split rows only once, but {_axes(names)} were named. The JAX mesh has {_axes(known)}."
        )
    return devices, names


def is_initialized() -> bool:
    """Whether JAX's processes are connected."""
    # nobody has connected them without having imported this, and importing the package doesn't
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def is_mesh(thing: object) -> TypeIs[Mesh | NamedSharding]:
    """Whether something is a mesh, or a sharding over one."""
    return _is_mesh(thing) or _is_sharding(thing)


def _is_mesh(thing: object) -> TypeIs[Mesh]:
    return isinstance(thing, getattr(sys.modules.get("jax.sharding"), "Mesh", ()))


def _is_sharding(thing: object) -> TypeIs[NamedSharding]:
    return isinstance(thing, getattr(sys.modules.get("jax.sharding"), "NamedSharding", ()))


def named_axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes that one dimension of a ``PartitionSpec`` names."""
    if part is None:
        return ()
    if isinstance(part, str):
        return (part,)
    if not isinstance(part, tuple):
        raise ValueError(f"A sharding must say along which axes it splits each dimension, got {part!r}.")
    return part


def _shares_and_rank(mesh: Mesh, names: tuple[str, ...]) -> tuple[list[Share], int]:
    """Return the shares, and which of them this process has."""
    import jax

    owners = [device.process_index for device in mesh.devices.flat]
    processes = np.array(owners, dtype=np.int64).reshape(mesh.devices.shape)
    this = jax.process_index()
    if this not in owners:
        raise ValueError(
            f"Process {this} has no devices in the JAX mesh, whose devices are those of process "
            f"{_listed(sorted(set(owners)))}. Only processes in the mesh can have a share."
        )
    found = shares(processes, [mesh.axis_names.index(name) for name in names])
    return found, next(rank for rank, share in enumerate(found) if this in share.processes)


def _axes(names: Sequence[str]) -> str:
    quoted = ", ".join(map(repr, names))
    return {0: "no axis", 1: f"axis {quoted}"}.get(len(names), f"axes {quoted}")


def _listed(numbers: Sequence[int]) -> str:
    """Show a few numbers, as 0, 1, 2 or 0, 1, ..., 7."""
    first, last = numbers[:-1], numbers[-1]
    shown = [*map(str, first)] if len(numbers) <= 8 else [*map(str, first[:3]), "..."]
    return ", ".join([*shown, str(last)])
