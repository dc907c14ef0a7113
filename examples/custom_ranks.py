"""Share cells out among the processes of any launcher, without a framework.

The launcher's variables say which rank this is, and how many there are; or a callable does, here by asking MPI. Every
rank adds up the counts of its own cells and writes them down, with nothing in common between the ranks but the files.
Run it under a scheduler or under MPI, or set the variables by hand::

    srun --ntasks 2 python examples/custom_ranks.py --ranks env sums/
    mpirun -n 2 python examples/custom_ranks.py --ranks env sums/
    mpirun -n 2 python examples/custom_ranks.py --ranks mpi sums/  # needs mpi4py

    RANK=0 WORLD_SIZE=2 python examples/custom_ranks.py --ranks env sums/
    RANK=1 WORLD_SIZE=2 python examples/custom_ranks.py --ranks env sums/
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anndata as ad
import numpy as np
from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler, StatefulLoader


def mpi() -> tuple[int, int]:
    """Ask MPI, whichever it is and whatever variables it sets."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def share_out(ranks: str) -> DistributedSampler:
    """Ask which rank this is, for its share of the cells."""
    return DistributedSampler(
        SequentialSampler(chunk_size=32, preload_nchunks=8, batch_size=32),
        dist_info=mpi if ranks == "mpi" else "env",
        # every row once; no rank waits for another, so that one may have a batch more
        remainder="keep",
    )


def main(sampler: DistributedSampler, ranks: str, folder: Path) -> None:
    """Run one rank."""
    loader = StatefulLoader(
        batch_sampler=sampler, return_index=True, preload_to_gpu=False
    )
    loader = loader.add_adata(made_up_cells())
    gather = None
    if ranks == "mpi":  # whoever has a way to the other ranks can check them
        from mpi4py import MPI

        gather = MPI.COMM_WORLD.allgather
        loader.check_ranks_agree(gather=gather)

    counts = np.zeros(loader.n_var)
    rows = []
    for batch in loader:
        counts += batch["X"].sum(axis=0)
        rows.append(batch["index"])

    folder.mkdir(exist_ok=True)
    np.savez(
        folder / f"rank{sampler.rank}.npz", counts=counts, rows=np.concatenate(rows)
    )
    print(
        f"rank {sampler.rank} of {sampler.world_size}: "
        f"{sum(map(len, rows)):,} cells in {len(rows)} batches"
    )
    if gather is not None:
        said = loader.check_epoch_read(gather=gather)
        if sampler.rank == 0:
            print(said)


def made_up_cells() -> ad.AnnData:
    """Make up 2,001 cells, the same in every process."""
    return ad.AnnData(
        X=np.random.default_rng(0).poisson(2, size=(2_001, 50)).astype(np.float32)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks",
        choices=["env", "mpi"],
        required=True,
        help="who says which rank this is",
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="where each rank writes the sums of its cells, and which they were",
    )
    arguments = parser.parse_args()
    try:
        shared_out = share_out(arguments.ranks)
    except (ImportError, RuntimeError, ValueError) as error:
        # without mpi4py, a launcher, or sense in its variables
        parser.error(str(error))
    main(shared_out, arguments.ranks, arguments.folder)
