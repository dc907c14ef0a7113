"""PyTorch: the rank of this process in process groups and device meshes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed.core.rank import Placement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import TypeIs


def default_group() -> Placement:
    """Return the placement of this process in PyTorch's default process group.

    A RuntimeError if the group is not initialized, an ImportError if PyTorch is not installed.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ImportError("dist_info='torch' needs PyTorch: install annbatch-distributed[torch].") from error
    if not is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized. Start the script with torchrun, and call "
            "torch.distributed.init_process_group() before you create the loader. If a framework does so "
            "later, pass dist_info=deferred('torch'), or an object of the framework: Lightning's Trainer or Fabric, "
            "Accelerate's Accelerator or PartialState, or Ray Train's context."
        )
    source = "PyTorch's default process group"
    return Placement(dist.get_rank(), dist.get_world_size(), source, framework="torch", can_be_asked=True)


def _distributed() -> Any:  # noqa: ANN401 a module
    """Return ``torch.distributed`` if it is available and was imported; else None, as there are no groups."""
    dist = sys.modules.get("torch.distributed")
    # a build of PyTorch without distributed support has no is_initialized
    return dist if dist is not None and dist.is_available() else None


def is_initialized() -> bool:
    """Return True if there is a default process group."""
    dist = _distributed()
    return dist is not None and dist.is_initialized()


def is_group(thing: object) -> TypeIs[ProcessGroup]:
    """Return True for a process group; a ValueError in a process that isn't in the group."""
    dist = _distributed()
    if dist is not None and type(thing) is int and thing == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"dist_info must be a process group with this process, got {thing!r}, which torch.distributed.new_group "
            "returns in other processes. Make the sampler only in the processes of the group."
        )
    return dist is not None and isinstance(thing, dist.ProcessGroup)


def is_mesh(thing: object) -> TypeIs[DeviceMesh]:
    """Return True for a device mesh."""
    device_mesh = sys.modules.get("torch.distributed.device_mesh")
    return device_mesh is not None and isinstance(thing, device_mesh.DeviceMesh)


def group(members: ProcessGroup) -> Placement:
    """Return the placement of this process in a process group."""
    import torch.distributed as dist

    # processes 4 and 6 of the default group are ranks 0 and 1 of a group of both
    rank_of = {process: rank for rank, process in enumerate(dist.get_process_group_ranks(members))}
    return _placement(rank_of, "process group", "a PyTorch process group")


def mesh(devices: DeviceMesh, names: Sequence[str] | None) -> Placement:
    """Return the placement of this process along the data-parallel dimensions of a device mesh.

    The first of ``names`` varies slowest; None is for a mesh of one dimension. A ValueError if the mesh has no such
    dimensions, or this process isn't in it.
    """
    dimensions = _dimensions(devices, names)
    # (dimensions, processes): coordinates of each process in the mesh. A rank counts the coordinates along the
    # data-parallel dimensions: in a mesh of 2 x 2, the first dimension gives the ranks 0 0 1 1
    coordinates = np.indices(devices.mesh.shape).reshape(devices.ndim, -1)
    ranks = np.ravel_multi_index(tuple(coordinates[dimensions]), [devices.size(number) for number in dimensions])
    rank_of = dict(sorted(zip(devices.mesh.flatten().tolist(), ranks.tolist(), strict=True)))
    return _placement(rank_of, "device mesh", f"{f'{_quoted(names)} of ' if names else ''}a PyTorch device mesh")


def _placement(rank_of: Mapping[int, int], kind: str, source: str) -> Placement:
    """Return the placement of this process, from the rank of each process."""
    import torch.distributed as dist

    here = dist.get_rank()
    if here not in rank_of:
        raise ValueError(
            f"This process, rank {here}, is not in the {kind} of ranks {tuple(rank_of)}. Make the sampler only in the "
            f"processes of the {kind}."
        )
    return Placement.of_ranks(rank_of, here, source, "torch")


def _dimensions(devices: DeviceMesh, names: Sequence[str] | None) -> list[int]:
    """Return the numbers of the named dimensions."""
    if names is None and devices.ndim == 1:
        return [0]
    known = devices.mesh_dim_names or ()
    hint = f"Its dimensions are {_quoted(known)}." if known else "Its dimensions have no names: pass mesh_dim_names."
    if names is None:
        raise ValueError(
            f"The device mesh has {devices.ndim} dimensions. {hint} Name its data-parallel dimensions, such as "
            "dist_info=Rank.from_mesh(mesh, ('dp_replicate', 'dp_shard'))."
        )
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"The device mesh has no dimension {_quoted(unknown)}. {hint} (Instead of a flattened dimension, name the "
            "dimensions that it was made of.)"
        )
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"Names of data-parallel dimensions must be different, and at least one, got {list(names)}. {hint}"
        )
    return [known.index(name) for name in names]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
