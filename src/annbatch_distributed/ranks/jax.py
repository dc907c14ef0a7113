"""The member that this process is among JAX's."""

from __future__ import annotations

from annbatch_distributed.ranks.membership import Membership
from annbatch_distributed.ranks.rank import Rank


def all_processes() -> Membership:
    """Return which of all of JAX's processes this one is.

    Raises
    ------
    RuntimeError
        If ``jax.distributed`` has not been initialised.
    ImportError
        If jax is not installed.
    """
    try:
        import jax
    except ImportError as error:
        msg = "dist_info='jax' needs JAX: install annbatch-distributed[jax]."
        raise ImportError(msg) from error
    if not jax.distributed.is_initialized():
        msg = (
            "JAX distributed is not initialized. Call jax.distributed.initialize() in every process before creating a "
            "DistributedSampler with dist_info='jax'."
        )
        raise RuntimeError(msg)
    rank = Rank(jax.process_index(), jax.process_count())
    return Membership(rank, source="JAX's processes", framework="jax")
