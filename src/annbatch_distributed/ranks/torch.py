"""The member that this process is in torch's process groups and device meshes."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from annbatch_distributed.ranks.membership import Membership
from annbatch_distributed.ranks.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import TypeIs  # typing's is new in Python 3.13


def default_group() -> Membership:
    """Return which member of torch's default process group this process is.

    Raises
    ------
    RuntimeError
        If the process group has not been initialised.
    ImportError
        If torch is not installed.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        msg = "dist_info='torch' needs PyTorch: install annbatch-distributed[torch]."
        raise ImportError(msg) from error
    if not is_initialized():
        msg = (
            "torch.distributed is not initialized. Call torch.distributed.init_process_group() before a "
            "DistributedSampler asks torch for its rank, and start the script with torchrun."
        )
        raise RuntimeError(msg)
    rank = Rank(dist.get_rank(), dist.get_world_size())
    return Membership(rank, source="torch's default process group", framework="torch", name="torch")


def is_initialized() -> bool:
    """Whether there is a default process group."""
    # nobody has one without having imported this, and importing the package doesn't
    dist = sys.modules.get("torch.distributed")
    # a build of torch without distributed support has no is_initialized
    return dist is not None and dist.is_available() and dist.is_initialized()


def is_group(thing: object) -> TypeIs[ProcessGroup]:
    """Whether something is a process group."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and isinstance(thing, dist.ProcessGroup)


def is_no_group(thing: object) -> bool:
    """Whether something is what torch gives instead of a process group to a process that isn't in it."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return False
    no_group = dist.GroupMember.NON_GROUP_MEMBER
    return isinstance(thing, type(no_group)) and bool(thing == no_group)


def is_mesh(thing: object) -> TypeIs[DeviceMesh]:
    """Whether something is a device mesh."""
    device_mesh = sys.modules.get("torch.distributed.device_mesh")
    return device_mesh is not None and isinstance(thing, device_mesh.DeviceMesh)


def group(members: ProcessGroup) -> Membership:
    """Return which member of a process group this process is.

    Raises
    ------
    ValueError
        If it isn't in the group.
    """
    import torch.distributed as dist

    processes = tuple(dist.get_process_group_ranks(members))
    here = dist.get_rank()
    if here not in processes:
        msg = f"This process, rank {here}, is not in the process group, which is one of ranks {processes}."
        raise ValueError(msg)
    rank = Rank(processes.index(here), len(processes))
    by_process = sorted((process, number) for number, process in enumerate(processes))
    return Membership(
        rank,
        source="a torch process group",
        framework="torch",
        processes=tuple(process for process, _ in by_process),
        ranks=tuple(number for _, number in by_process),
    )


def mesh(devices: DeviceMesh, names: Sequence[str] | None) -> Membership:
    """Return which share of the data this process has in a device mesh.

    Parameters
    ----------
    devices
        The mesh.
    names
        Its data-parallel dimensions, of which the first varies slowest. None if it has one dimension only.

    Raises
    ------
    ValueError
        If the mesh has no such dimensions, or this process isn't in it.
    """
    import torch.distributed as dist

    dimensions = _dimensions(devices, names)
    sizes = [devices.size(dimension) for dimension in dimensions]
    places = np.indices(devices.mesh.shape).reshape(devices.ndim, -1)
    of_devices = np.ravel_multi_index(tuple(places[dimensions]), sizes)
    by_process = dict(sorted(zip(devices.mesh.flatten().tolist(), of_devices.tolist(), strict=True)))
    processes, here = tuple(by_process), dist.get_rank()
    if here not in by_process:
        msg = f"This process, rank {here}, is not in the device mesh, which is one of ranks {processes}."
        raise ValueError(msg)
    rank = Rank(by_process[here], prod(sizes))
    along = f"{_quoted(names)} of " if names else ""
    n_peers, ranks = len(processes) // rank.world_size, tuple(by_process.values())
    return Membership(rank, f"{along}a torch device mesh", "torch", processes, n_peers, ranks=ranks)


def _dimensions(devices: DeviceMesh, names: Sequence[str] | None) -> list[int]:
    """Return the numbers of dimensions."""
    known = devices.mesh_dim_names or ()
    there_are = (
        f"Its dimensions are {_quoted(known)}." if known else "Its dimensions have no names: give mesh_dim_names."
    )
    if names is None:
        if devices.ndim != 1:
            msg = (
                f"The device mesh has {devices.ndim} dimensions. {there_are} Say which of them are data-parallel, for "
                "instance dist_info=mesh_ranks(mesh, ('dp_replicate', 'dp_shard'))."
            )
            raise ValueError(msg)
        return [0]
    if unknown := [name for name in names if name not in known]:
        msg = (
            f"The device mesh has no dimension {_quoted(unknown)}. {there_are} (One that others were flattened to is a "
            "mesh of its own: name those that it was made of.)"
        )
        raise ValueError(msg)
    if not names or len(set(names)) < len(names):
        msg = f"Name each of the data-parallel dimensions of the device mesh once, got {list(names)}. {there_are}"
        raise ValueError(msg)
    return [known.index(name) for name in names]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
