"""The member that this process is in torch's process groups and device meshes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed.ranks.rank import Placement, Rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import TypeIs


def default_group() -> Placement:
    """Return which member of torch's default process group this process is.

    A RuntimeError if the group has not been initialised, an ImportError if torch is not installed.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ImportError("dist_info='torch' needs PyTorch: install annbatch-distributed[torch].") from error
    if not is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized. Call torch.distributed.init_process_group() before a "
            "DistributedSampler asks torch for its rank, and start the script with torchrun. Where a framework does so "
            "later on, pass dist_info=deferred('torch'), or what knows the rank: Lightning's Trainer or Fabric, "
            "accelerate's Accelerator or PartialState, or Ray Train's context."
        )
    rank = Rank(dist.get_rank(), dist.get_world_size())
    return Placement(rank, source="torch's default process group", framework="torch", can_be_asked=True)


def _distributed() -> Any:  # noqa: ANN401 a module
    """Return ``torch.distributed`` if it can be used and was imported, without which there are no groups; else None."""
    dist = sys.modules.get("torch.distributed")
    # a build of torch without distributed support has no is_initialized
    return dist if dist is not None and dist.is_available() else None


def is_initialized() -> bool:
    """Whether there is a default process group."""
    dist = _distributed()
    return dist is not None and dist.is_initialized()


def is_group(thing: object) -> TypeIs[ProcessGroup]:
    """Whether something is a process group; a ValueError if torch gave it to a process that isn't in the group."""
    dist = _distributed()
    if dist is not None and type(thing) is int and thing == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"dist_info is {thing!r}, which torch.distributed.new_group gives to a process that isn't in the group. "
            "Make the sampler in the processes of the group only."
        )
    return dist is not None and isinstance(thing, dist.ProcessGroup)


def is_mesh(thing: object) -> TypeIs[DeviceMesh]:
    """Whether something is a device mesh."""
    device_mesh = sys.modules.get("torch.distributed.device_mesh")
    return device_mesh is not None and isinstance(thing, device_mesh.DeviceMesh)


def group(members: ProcessGroup) -> Placement:
    """Return which member of a process group this process is."""
    import torch.distributed as dist

    # processes 4 and 6 of the default group are ranks 0 and 1 of a group of both
    rank_of = {process: rank for rank, process in enumerate(dist.get_process_group_ranks(members))}
    return _placement(rank_of, "process group", "a torch process group")


def mesh(devices: DeviceMesh, names: Sequence[str] | None) -> Placement:
    """Return which share of the data this process has in a device mesh.

    ``names`` are its data-parallel dimensions, of which the first varies slowest; None if it has one dimension only. A
    ValueError if the mesh has no such dimensions, or this process isn't in it.
    """
    dimensions = _dimensions(devices, names)
    # (dimensions, processes): coordinates of each process in the mesh; those along the data-parallel dimensions make
    # its rank: in 2 x 2, the first dimension gives ranks 0 0 1 1
    places = np.indices(devices.mesh.shape).reshape(devices.ndim, -1)
    ranks = np.ravel_multi_index(tuple(places[dimensions]), [devices.size(dimension) for dimension in dimensions])
    rank_of = dict(sorted(zip(devices.mesh.flatten().tolist(), ranks.tolist(), strict=True)))
    return _placement(rank_of, "device mesh", f"{f'{_quoted(names)} of ' if names else ''}a torch device mesh")


def _placement(rank_of: Mapping[int, int], kind: str, source: str) -> Placement:
    """Return that of this process in a job in which each process has the rank that a mapping says."""
    import torch.distributed as dist

    here = dist.get_rank()
    if here not in rank_of:
        raise ValueError(f"This process, rank {here}, is not in the {kind}, which is one of ranks {tuple(rank_of)}.")
    return Placement.of_ranks(rank_of, here, source, "torch")


def _dimensions(devices: DeviceMesh, names: Sequence[str] | None) -> list[int]:
    """Return the numbers of dimensions."""
    if names is None and devices.ndim == 1:
        return [0]
    known = devices.mesh_dim_names or ()
    there_are = (
        f"Its dimensions are {_quoted(known)}." if known else "Its dimensions have no names: give mesh_dim_names."
    )
    if names is None:
        raise ValueError(
            f"The device mesh has {devices.ndim} dimensions. {there_are} Say which of them are data-parallel, for "
            "instance dist_info=mesh_ranks(mesh, ('dp_replicate', 'dp_shard'))."
        )
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"The device mesh has no dimension {_quoted(unknown)}. {there_are} (One that others were flattened to is a "
            "mesh of its own: name those that it was made of.)"
        )
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"Name each of the data-parallel dimensions of the device mesh once, got {list(names)}. {there_are}"
        )
    return [known.index(name) for name in names]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
