"""The rank that JAX's multi-process runtime gives this process."""

from __future__ import annotations

from annbatch_distributed.ranks.rank import Rank


def rank() -> Rank:
    """Return this process's index among JAX's processes.

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
    return Rank(jax.process_index(), jax.process_count())
