"""One of three ranks that check each other: ``-m tests.processes.job_agreement torch|jax RESULTS``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.checks import Tally
from annbatch_distributed.checks.exchange import store_of
from annbatch_distributed.ranks import Placement, resolve
from tests.processes.in_job import in_job
from tests.processes.told import tell
from tests.samplers import batches

if TYPE_CHECKING:
    from annbatch_distributed.ranks import DistInfo
    from tests.processes.in_job import Framework

N_OBS = 200
#: The rank that is unlike the others.
ODD = 1


def sampler(dist_info: DistInfo, *, seed: int = 0) -> DistributedSampler:
    """Make a sampler that only the seed tells from those of other ranks."""
    return DistributedSampler(RandomSampler(4, 2, 4), dist_info=dist_info, seed=seed, remainder="keep")


def agree(dist_info: DistInfo, *, seed: int = 0, timeout: float = 60.0) -> str:
    """What a rank hears that asks whether all have the same sampler."""
    try:
        sampler(dist_info, seed=seed).check_ranks_agree(N_OBS, timeout=timeout)
    except (ValueError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def have_read(dist_info: DistInfo, *, left_out: int = 0) -> str:
    """What a rank hears that has read its share, but for some batches."""
    made, tally = sampler(dist_info), Tally()
    for rows in batches(made.sample(N_OBS))[left_out:]:
        tally.add(np.array(rows))
    try:
        return made.check_epoch_read(N_OBS, tally)
    except ValueError as error:
        return str(error)


def check_all(framework: Framework, rank: int) -> dict[str, str]:
    """Let one rank be odd in one thing after the other, and tell what this rank hears."""
    is_odd = rank == ODD
    told = {
        "nothing": agree(framework),
        "seed": agree(framework, seed=int(is_odd)),
        "all rows read": have_read(framework),
        "a batch left out": have_read(framework, left_out=int(is_odd)),
    }
    if not is_odd:  # a job of the other processes alone
        part = Placement(Rank(rank // 2, 2), "a part", resolve(framework).framework, (0, 2))
        told["nothing in a part"] = agree(part)
        told["seed in a part"] = agree(part, seed=rank)
        told["a rank"] = agree(framework, timeout=3)  # it never comes
    return told


def check_store(rank: int) -> None:
    """Write to JAX's store as two processes do that give up at the same time: the first one has said it."""
    store = store_of("jax")
    for text in ("first", "second"):
        store.compare_set(f"of {rank}", "", text)
    assert store.get(f"of {rank}") == b"first"


def main(framework: Framework, results: Path) -> None:
    """Check, and tell."""
    with in_job(framework) as rank:
        if framework == "jax":
            check_store(rank)
        tell(results, rank, check_all(framework, rank))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
