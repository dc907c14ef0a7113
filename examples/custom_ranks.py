"""Shard cells across the processes of any launcher, without a framework.

The launcher's variables say which rank this is, and how many there are; or a callable does, here by asking MPI. Every
rank adds up the counts of its own cells and writes them down, with nothing in common between the ranks but the files.
Run it under a scheduler or under MPI, or set the variables by hand::

    srun --ntasks 2 python examples/custom_ranks.py --ranks env cells.zarr sums/
    mpirun -n 2 python examples/custom_ranks.py --ranks env cells.zarr sums/
    mpirun -n 2 python examples/custom_ranks.py --ranks mpi cells.zarr sums/  # needs mpi4py

    RANK=0 WORLD_SIZE=2 python examples/custom_ranks.py --ranks env cells.zarr sums/
    RANK=1 WORLD_SIZE=2 python examples/custom_ranks.py --ranks env cells.zarr sums/
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from annbatch import DatasetCollection
from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler, StatefulLoader


def mpi() -> tuple[int, int]:
    """Return the rank and the world size of MPI."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def share_out(ranks: str) -> DistributedSampler:
    """Return the sampler of this rank."""
    return DistributedSampler(
        SequentialSampler(chunk_size=32, preload_nchunks=8, batch_size=32),
        dist_info=mpi if ranks == "mpi" else "env",
        # each row once; ranks don't synchronize, so they may differ by one batch
        remainder="keep",
    )


def main(
    sampler: DistributedSampler, ranks: str, collection: Path, folder: Path
) -> None:
    """Run one rank."""
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
    loader.use_collection(DatasetCollection(collection, mode="r"))
    gather = None
    if ranks == "mpi":  # MPI can gather strings, which the check needs
        from mpi4py import MPI

        gather = MPI.COMM_WORLD.allgather
        loader.check_ranks_agree(gather=gather)

    sums = np.zeros(loader.n_var)
    for batch in loader:
        sums += np.asarray(batch["X"].sum(axis=0)).ravel()

    folder.mkdir(exist_ok=True)
    np.save(folder / f"rank{sampler.rank}.npy", sums)
    print(f"rank {sampler.rank} of {sampler.world_size}: {sums.sum():,.0f} counts")
    if gather is not None:
        said = loader.check_epoch_read(gather=gather)
        if sampler.rank == 0:
            print(said)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks",
        choices=["env", "mpi"],
        required=True,
        help="source of the rank",
    )
    parser.add_argument("collection", type=Path)
    parser.add_argument("folder", type=Path, help="folder for the sums of each rank")
    arguments = parser.parse_args()
    try:
        shared_out = share_out(arguments.ranks)
    except (ImportError, RuntimeError, ValueError) as error:
        # mpi4py or the variables of a launcher are missing
        parser.error(str(error))
    main(shared_out, **vars(arguments))
