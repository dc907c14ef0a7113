"""The member that this process is among JAX's: of all its processes, or of a mesh's shares of the data.

The shares of a mesh come from the mesh alone, so that every process finds the same ones:

1. A *place* is a position along the data axes, counted as in the mesh, the last axis fastest.
2. A process holds the places of its devices.
3. Processes that hold the same places are peers, and have the same share; shares count by their places.
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

from annbatch_distributed.ranks.rank import Placement, Rank

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding
    from typing_extensions import TypeIs


def all_processes() -> Placement:
    """Return which of all of JAX's processes this one is.

    A RuntimeError if ``jax.distributed`` has not been initialised, an ImportError if jax is not installed.
    """
    try:
        import jax
    except ImportError as error:
        raise ImportError("dist_info='jax' needs JAX: install annbatch-distributed[jax].") from error
    _check_initialised()
    rank = Rank(jax.process_index(), jax.process_count())
    return Placement(rank, source="JAX's processes", framework="jax")


def mesh(mesh: Mesh | NamedSharding, axes: str | Sequence[str] | None = None) -> Placement:
    """Return which share of the data this process has in a mesh, see :func:`mesh_ranks`.

    Two processes with two devices each, in two meshes of 2 x 2 with the axes ``"data"`` and ``"model"``, of which
    ``"data"`` splits rows::

        processes in the mesh     0 0     0 1
                                  1 1     0 1
        ranks of both processes   0, 1    0, 0
        world size                2       1
    """
    devices, names = _devices_and_axes(mesh, axes)
    _check_initialised()
    by_rank, rank = _shares_and_rank(devices, names)
    # shares of processes 0 1 and 2 3 give the ranks 0: 0, 1: 0, 2: 1, 3: 1
    rank_of = {process: number for number, share in enumerate(by_rank) for process in share.processes}
    return Placement.of_ranks(rank_of, by_rank[rank].processes[0], f"{_axes(names)} of a JAX mesh", "jax")


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
    """
    # (places along the data axes, devices of a place): a 2 x 2 mesh of processes 0 0 / 1 1 has the places [0 0] and
    # [1 1] if its first axis splits rows, and [0 1] and [0 1] if the second one does
    in_front = np.moveaxis(processes, axes, range(len(axes)))
    by_place = in_front.reshape(math.prod(in_front.shape[: len(axes)]), -1)
    places_of: dict[int, list[int]] = {}
    for place, holders in enumerate(by_place.tolist()):
        for process in sorted(set(holders)):
            places_of.setdefault(process, []).append(place)
    # processes with the same places are peers; shares are numbered by their places
    peers: dict[tuple[int, ...], list[int]] = {}
    for process, places in sorted(places_of.items()):
        peers.setdefault(tuple(places), []).append(process)
    by_rank = [Share(places, tuple(members)) for places, members in sorted(peers.items())]
    # each place belongs to one share, and all shares are of one size
    first = by_rank[0]
    holder: dict[int, Share] = {}
    for share in by_rank:
        for place in share.places:
            if (other := holder.setdefault(place, share)) is not share:
                raise _not_shares(other, share, "overlap without being the same")
        if len(share.places) != len(first.places):
            raise _not_shares(first, share, "are not as many")
        if len(share.processes) != len(first.processes):
            raise _not_shares(first, share, "are not held by as many processes")
    return by_rank


def _not_shares(one: Share, other: Share, problem: str) -> ValueError:
    return ValueError(
        "Any two processes of a mesh must hold the same places along the data axes, or different ones and as many. "
        f"Process {_listed(one.processes)} holds place {_listed(one.places)}, and process {_listed(other.processes)} "
        f"holds place {_listed(other.places)}: these {problem}. Make the mesh with its devices in another order, or "
        "name other axes."
    )


def is_initialized() -> bool:
    """Whether JAX's processes are connected."""
    # nobody has connected them without having imported this, and importing the package doesn't
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def _check_initialised() -> None:
    if not is_initialized():
        raise RuntimeError(
            "JAX distributed is not initialized. Call jax.distributed.initialize() in every process before a "
            "DistributedSampler asks JAX for its rank."
        )


def is_mesh(thing: object) -> TypeIs[Mesh | NamedSharding]:
    """Whether something is a mesh, or a sharding over one."""
    return _is("Mesh", thing) or _is("NamedSharding", thing)


def _is(name: str, thing: object) -> bool:
    """Whether something is of one of JAX's types, without an import of JAX."""
    return isinstance(thing, getattr(sys.modules.get("jax.sharding"), name, ()))


def _devices_and_axes(
    mesh: Any,  # noqa: ANN401 what mesh() is given
    axes: str | Sequence[str] | None,
) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh, and the names of the axes that split rows."""
    is_sharding = _is("NamedSharding", mesh)
    devices = mesh.mesh if is_sharding else mesh
    if not _is("Mesh", devices) or devices.empty:
        raise TypeError(
            "Expected a mesh of devices: a torch DeviceMesh, or JAX's Mesh or a NamedSharding over one, got "
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


def named_axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes that one dimension of a ``PartitionSpec`` names."""
    # PartitionSpec("data", ("model", "x"), None) has a part of each kind
    names = (part or ()) if not isinstance(part, str) else (part,)
    if not isinstance(names, tuple):
        raise ValueError(f"A sharding must say along which axes it splits each dimension, got {part!r}.")
    return names


def _shares_and_rank(mesh: Mesh, names: tuple[str, ...]) -> tuple[list[Share], int]:
    """Return the shares, and which of them this process has."""
    import jax

    # the process of each device, in the order of the mesh
    owners = [device.process_index for device in mesh.devices.flat]
    this = jax.process_index()
    if this not in owners:
        raise ValueError(
            f"Process {this} has no devices in the JAX mesh, whose devices are those of process "
            f"{_listed(sorted(set(owners)))}. Only processes in the mesh can have a share."
        )
    processes = np.array(owners, dtype=np.int64).reshape(mesh.devices.shape)
    by_rank = shares(processes, [mesh.axis_names.index(name) for name in names])
    return by_rank, next(rank for rank, share in enumerate(by_rank) if this in share.processes)


def _axes(names: Sequence[str]) -> str:
    quoted = ", ".join(map(repr, names))
    return {0: "no axis", 1: f"axis {quoted}"}.get(len(names), f"axes {quoted}")


def _listed(numbers: Sequence[int]) -> str:
    """Show the first few numbers."""
    return shortened(list(numbers)).strip("[]")
