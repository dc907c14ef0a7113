"""JAX: the rank of this process among all processes, or among the row shards of a mesh.

The shards follow from the mesh alone, so that every process computes the same ones:

1. A *place* is a position along the data axes, in the order of the mesh, the last axis fastest.
2. A process has the places of its devices.
3. Processes with the same places are peers, and have the same shard. Shards are ordered by their places.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from annbatch_distributed.core.rank import Placement

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding
    from typing_extensions import TypeIs


def all_processes() -> Placement:
    """Return the placement of this process among all JAX processes.

    A RuntimeError if ``jax.distributed`` is not initialized, an ImportError if JAX is not installed.
    """
    try:
        import jax
    except ImportError as error:
        raise ImportError("dist_info='jax' needs JAX: install annbatch-distributed[jax].") from error
    _check_initialized()
    return Placement(jax.process_index(), jax.process_count(), source="JAX's processes", framework="jax")


def mesh(mesh: Mesh | NamedSharding, axes: str | Sequence[str] | None = None) -> Placement:
    """Return the placement of this process among the row shards of a mesh, see :meth:`.Rank.from_mesh`.

    Two processes with two devices each, in two meshes of 2 x 2 with the axes ``"data"`` and ``"model"``, where
    ``"data"`` splits rows::

        processes in the mesh     0 0     0 1
                                  1 1     0 1
        ranks of both processes   0, 1    0, 0
        world size                2       1
    """
    devices, names = _devices_and_axes(mesh, axes)
    _check_initialized()
    by_rank, rank = _shares_and_rank(devices, names)
    # shards of the processes 0 1 and 2 3 give the ranks {0: 0, 1: 0, 2: 1, 3: 1}
    rank_of = {process: number for number, share in enumerate(by_rank) for process in share.processes}
    return Placement.of_ranks(rank_of, by_rank[rank].processes[0], f"{_axes(names)} of a JAX mesh", "jax")


@lru_cache(maxsize=8)  # called for every batch
def rows_of(sharding: NamedSharding) -> tuple[list[Share], int]:
    """Return the row shards of a sharding, and the number of this process's shard.

    In a single process, ``jax.distributed`` need not be initialized. It raises as :func:`mesh`.
    """
    return _shares_and_rank(*_devices_and_axes(sharding, None))


@dataclass(frozen=True)
class Share:
    """Row shard: the places of some processes."""

    places: tuple[int, ...]
    """Positions along the data axes, in ascending order."""
    processes: tuple[int, ...]
    """Processes that have these places, in ascending order."""


def shares(processes: npt.NDArray[np.int64], axes: Sequence[int]) -> list[Share]:
    """Return the row shards of a mesh, by rank.

    ``processes`` has the process of each device, in the shape of the mesh. ``axes`` are the dimensions that split rows;
    the first one varies slowest. A ValueError if shards overlap, or differ in numbers of places or processes.

    >>> two_by_two = np.array([[0, 0], [1, 1]])
    >>> shares(two_by_two, [0])
    [Share(places=(0,), processes=(0,)), Share(places=(1,), processes=(1,))]
    >>> shares(two_by_two, [1])
    [Share(places=(0, 1), processes=(0, 1))]
    """
    # (places along the data axes, devices of a place): a 2 x 2 mesh of the processes 0 0 / 1 1 has the places [0 0] and
    # [1 1] if its first axis splits rows, and the places [0 1] and [0 1] if its second axis does
    in_front = np.moveaxis(processes, axes, range(len(axes)))
    by_place = in_front.reshape(math.prod(in_front.shape[: len(axes)]), -1)
    places_of: dict[int, list[int]] = {}
    for place, holders in enumerate(by_place.tolist()):
        for process in sorted(set(holders)):
            places_of.setdefault(process, []).append(place)
    # processes with the same places are peers, and shards are sorted by their places
    peers: dict[tuple[int, ...], list[int]] = {}
    for process, places in sorted(places_of.items()):
        peers.setdefault(tuple(places), []).append(process)
    by_rank = [Share(places, tuple(members)) for places, members in sorted(peers.items())]
    # each place must be in one shard, and all shards must have the same numbers of places and processes
    first = by_rank[0]
    holder: dict[int, Share] = {}
    for share in by_rank:
        for place in share.places:
            if (other := holder.setdefault(place, share)) is not share:
                raise _not_shares(other, share, "overlap only partly")
        if len(share.places) != len(first.places):
            raise _not_shares(first, share, "differ in number")
        if len(share.processes) != len(first.processes):
            raise _not_shares(first, share, "are held by different numbers of processes")
    return by_rank


def _not_shares(one: Share, other: Share, problem: str) -> ValueError:
    return ValueError(
        "Any two processes of a mesh must have the same positions along the data axes, or equally many different ones. "
        f"Process {_listed(one.processes)} has position {_listed(one.places)}, and process {_listed(other.processes)} "
        f"has position {_listed(other.places)}: these {problem}. Change the order of the devices in the mesh, or name "
        "different axes."
    )


def is_initialized() -> bool:
    """Return True if JAX's processes are connected."""
    # if JAX was never imported, its processes aren't connected
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def _check_initialized() -> None:
    if not is_initialized():
        raise RuntimeError(
            "JAX distributed is not initialized. Call jax.distributed.initialize() in every process before you create "
            "the DistributedSampler."
        )


def is_mesh(thing: object) -> TypeIs[Mesh | NamedSharding]:
    """Return True for a JAX mesh, or a sharding over one."""
    return _is("Mesh", thing) or _is("NamedSharding", thing)


def _is(name: str, thing: object) -> bool:
    """Return True for an object of a class of ``jax.sharding``, without importing JAX."""
    return isinstance(thing, getattr(sys.modules.get("jax.sharding"), name, ()))


def _devices_and_axes(
    mesh: Any,  # noqa: ANN401 the argument of mesh()
    axes: str | Sequence[str] | None,
) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh and the names of the axes that split rows."""
    is_sharding = _is("NamedSharding", mesh)
    devices = mesh.mesh if is_sharding else mesh
    if not _is("Mesh", devices) or devices.empty:
        raise TypeError(
            "mesh must be a PyTorch DeviceMesh, or a JAX Mesh or NamedSharding with devices, got "
            f"{mesh!r} of type {type(mesh).__name__}."
        )
    known = devices.axis_names
    if axes is not None:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
    elif is_sharding:
        names = named_axes(mesh.spec[0]) if len(mesh.spec) else ()
    elif len(known) == 1:
        names = known
    else:
        raise ValueError(
            f"The JAX mesh has {_axes(known)}. Name the axes that split rows, beginning with the slowest one, or pass "
            "the NamedSharding of the batches."
        )
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"The JAX mesh has no {_axes(unknown)}. It has {_axes(known)}.")
    if len(set(names)) < len(names):
        raise ValueError(f"Names of axes must be different, got {_axes(names)}. The JAX mesh has {_axes(known)}.")
    return devices, names


def named_axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes in one part of a ``PartitionSpec``."""
    # PartitionSpec("data", ("model", "x"), None) has the three kinds of parts
    names = (part or ()) if not isinstance(part, str) else (part,)
    if not isinstance(names, tuple):
        raise ValueError(
            f"A sharding must name the axes of each dimension, got {part!r}. Pass a PartitionSpec of names."
        )
    return names


def _shares_and_rank(mesh: Mesh, names: tuple[str, ...]) -> tuple[list[Share], int]:
    """Return the row shards, and the number of this process's shard."""
    import jax

    # the process of each device, in the order of the mesh
    owners = [device.process_index for device in mesh.devices.flat]
    this = jax.process_index()
    if this not in owners:
        raise ValueError(
            f"Process {this} must have devices in the JAX mesh, which has only devices of process "
            f"{_listed(sorted(set(owners)))}. Make the sampler only in processes of the mesh."
        )
    processes = np.array(owners, dtype=np.int64).reshape(mesh.devices.shape)
    by_rank = shares(processes, [mesh.axis_names.index(name) for name in names])
    return by_rank, next(rank for rank, share in enumerate(by_rank) if this in share.processes)


def _axes(names: Sequence[str]) -> str:
    quoted = ", ".join(map(repr, names))
    return {0: "no axis", 1: f"axis {quoted}"}.get(len(names), f"axes {quoted}")


def _listed(numbers: Sequence[int]) -> str:
    """Format the first few numbers."""
    return shortened(list(numbers)).strip("[]")
