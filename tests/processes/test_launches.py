"""Real jobs of PyTorch and JAX: each rank reads the same rows as in a single process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from annbatch_distributed import Rank
from tests.processes.configurations import GOOD, N_OBS
from tests.processes.job_launch import ODD
from tests.processes.launch import forked_ranks, run
from tests.processes.results import read_results
from tests.samplers import batches

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module", params=["3 ranks of torch", "2 ranks of jax"])
def ranks(request: pytest.FixtureRequest, collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results of each rank of a job."""
    folder = tmp_path_factory.mktemp("results")
    n_ranks, *_, framework = request.param.split()
    job = "-m", "tests.processes.job_launch", framework, collection, folder
    run(*forked_ranks(*job, ranks=int(n_ranks)))
    return read_results(folder)


def test_processes_are_ranks_of_initialized_framework(ranks: list[Any]) -> None:
    """Each process is a different rank of the same world, once the framework is initialized."""
    assert [report["rank"] for report in ranks] == [[rank, len(ranks)] for rank in range(len(ranks))]
    assert all("distributed is not init" in report["too early"] for report in ranks)


@pytest.mark.parametrize("name", GOOD)
def test_ranks_read_same_rows_as_in_one_process(ranks: list[Any], name: str) -> None:
    """Each rank reads the rows that it reads when all ranks run in one process."""
    for rank, report in enumerate(ranks):
        sampler = GOOD[name].sampler(Rank(rank, len(ranks)))
        if rank == 0:  # rank 0 has looked at a batch before
            next(sampler.sample(N_OBS))
        for epoch, read in zip(GOOD[name].epochs, report["passes"][name], strict=True):
            if epoch is not None:
                sampler.set_epoch(epoch)
            assert read["batches"] == batches(sampler.sample(N_OBS))
            assert read["n_batches"] == len(read["batches"])


def test_ranks_compare_each_other_in_store_of_framework(ranks: list[Any]) -> None:
    (same,), (other_seed,) = ({report[name] for report in ranks} for name in ("same", "other seed"))
    assert not same
    others = " and ".join(str(rank) for rank in range(len(ranks)) if rank != ODD)
    assert f"  seed: 0 on rank{'s' * (len(ranks) > 2)} {others}; 1 on rank {ODD}\n" in other_seed


def test_missing_process_is_named_on_every_other_rank(ranks: list[Any]) -> None:
    (message,) = {report["missing"] for report in ranks if "missing" in report}
    assert message.startswith("TimeoutError: ")
    assert f"of {len(ranks)} processes, process {ODD} did not make " in message
