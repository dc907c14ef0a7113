"""Meshes: which of a mesh's data-parallel places this process has.

The other dimensions of a mesh split up a model. Processes that differ along those alone have the same share, and read
the same rows in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from annbatch_distributed.ranks import jax, torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Mesh, NamedSharding
    from torch.distributed.device_mesh import DeviceMesh

    from annbatch_distributed.ranks.membership import Membership

__all__ = ["mesh_ranks"]


def mesh_ranks(mesh: DeviceMesh | Mesh | NamedSharding, names: str | Sequence[str] | None = None) -> Membership:
    """Return which share of the data this process has in a mesh of torch or JAX, as ``dist_info``.

    Four processes in a mesh of 2 x 2, of which the first dimension is data-parallel::

        process             0  1  2  3
        place in the mesh  00 01 10 11
        rank                0  0  1  1    of a world of 2

    Parameters
    ----------
    mesh
        A torch ``DeviceMesh``, a JAX ``Mesh``, or a JAX ``NamedSharding`` of the batches.
    names
        The data-parallel dimensions by name, in a list if they are several, of which the first varies slowest. None if
        the mesh has one dimension only, or for the axes along which a ``NamedSharding`` splits rows.

    Raises
    ------
    TypeError
        If ``mesh`` is something else, or ``names`` are no names.
    ValueError
        If there are no such dimensions; the message lists those there are. If this process isn't in the mesh. If the
        rows of two JAX processes would overlap without being the same.
    RuntimeError
        If JAX is not initialised.

    Examples
    --------
    A job of torch, of which this is the only process:

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from annbatch_distributed import mesh_ranks
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh(
    ...     "cpu", (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
    ... )
    >>> mesh_ranks(mesh, ("dp_replicate", "dp_shard")).rank
    Rank(rank=0, world_size=1)
    >>> dist.destroy_process_group()
    """
    if isinstance(names, str):
        names = [names]
    # a set has another order in every process
    elif names is not None and not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"names must be a name, or a list of names of the dimensions that split rows, got {names!r}.")
    return torch.mesh(mesh, names) if torch.is_mesh(mesh) else jax.mesh(mesh, names)
