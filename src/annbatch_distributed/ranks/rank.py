"""Rank: the rank of a process and its world size, as a user gives them, or as a mesh has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from annbatch_distributed.core.rank import Placement
from annbatch_distributed.ranks import jax, torch

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Rank:
    """Rank of a process and world size of its job, for ``dist_info``.

    With a ``Rank``, a single process can show what any rank of a job would read.

    Parameters
    ----------
    rank
        Rank of the process, an integer within ``[0, world_size)``.
    world_size
        Number of ranks, an integer from 1 to 2**20.

    Raises
    ------
    TypeError
        If ``rank`` or ``world_size`` is not an integer.
    ValueError
        If ``world_size`` is outside ``[1, 2**20]``, or ``rank`` outside ``[0, world_size)``.

    Examples
    --------
    >>> Rank(1, 4)
    Rank(rank=1, world_size=4)
    >>> Rank(4, 4)
    Traceback (most recent call last):
    ...
    ValueError: rank must be in [0, world_size), got rank 4 and world_size 4. Ranks count from 0.
    """

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        self._place(Placement(self.rank, self.world_size))

    def _place(self, placement: Placement) -> None:
        """Keep the checked numbers, and the placement, of which a mesh knows more."""
        # a Rank is frozen, and the placement is no field
        vars(self).update(rank=placement.rank, world_size=placement.world_size, _placement=placement)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh | Mesh | NamedSharding, dims: str | Sequence[str] | None = None) -> Self:
        """Return the data-parallel rank of this process in a PyTorch or JAX mesh.

        Pass it as ``dist_info``. Processes with the same coordinates along the data-parallel dimensions have the
        same rank and read the same rows. For four processes in a mesh of 2 x 2 whose first dimension is data-parallel::

            process              0  1  2  3
            mesh coordinates    00 01 10 11
            rank                 0  0  1  1    (world size 2)

        Parameters
        ----------
        mesh
            PyTorch ``DeviceMesh``, JAX ``Mesh``, or JAX ``NamedSharding`` of the batches.
        dims
            Name or list of names of the data-parallel dimensions; the first one varies slowest. None takes the only
            dimension of the mesh, or the axes along which a ``NamedSharding`` splits rows (default).

        Returns
        -------
        Rank
            Rank of this process and world size.

        Raises
        ------
        TypeError
            If ``mesh`` is not a mesh, or ``dims`` is not a name or a list of names.
        ValueError
            If the mesh has no such dimensions, or this process isn't in the mesh, or the rows of two JAX processes
            would overlap partly.
        RuntimeError
            If JAX is not initialized.

        Examples
        --------
        A PyTorch job with a single process:

        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from annbatch_distributed import Rank
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh(
        ...     "cpu", (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
        ... )
        >>> Rank.from_mesh(mesh, ("dp_replicate", "dp_shard"))
        Rank(rank=0, world_size=1)
        >>> dist.destroy_process_group()
        """
        if isinstance(dims, str):
            dims = [dims]
        # a set has a different order in every process
        elif dims is not None and not (isinstance(dims, list | tuple) and all(isinstance(name, str) for name in dims)):
            raise TypeError(f"dims must be a name or a list of names of data-parallel dimensions, got {dims!r}.")
        known = torch.mesh(mesh, dims) if torch.is_mesh(mesh) else jax.mesh(mesh, dims)
        rank = cls(known.rank, known.world_size)
        rank._place(known)
        return rank


def placement_of(rank: Rank) -> Placement:
    """Return the placement of a rank."""
    placement: Placement = vars(rank)["_placement"]
    return placement
