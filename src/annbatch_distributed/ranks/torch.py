"""The member that this process is in torch's process groups."""

from __future__ import annotations

from annbatch_distributed.ranks.membership import Membership
from annbatch_distributed.ranks.rank import Rank


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
    # a build of torch without distributed support has no is_initialized
    if not dist.is_available() or not dist.is_initialized():
        msg = (
            "torch.distributed is not initialized. Call torch.distributed.init_process_group() before creating a "
            "DistributedSampler with dist_info='torch', and start the script with torchrun."
        )
        raise RuntimeError(msg)
    rank = Rank(dist.get_rank(), dist.get_world_size())
    return Membership(rank, source="torch's default process group", framework="torch")
