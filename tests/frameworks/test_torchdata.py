"""torchdata's StatefulDataLoader, on two ranks, and in this process in every situation."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
from annbatch.samplers import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from tests.processes.configurations import LABELLED
from tests.processes.launch import forked_ranks, run
from tests.processes.rows import check_goes_on, check_reads_everything
from tests.samplers import flat

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable
    from pathlib import Path

    from annbatch_distributed.lanes import Remainder

SCRIPT = "examples/torchdata_stateful.py"


def test_an_epoch_goes_on_after_the_batch_that_was_trained_on_last(collection: Path, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    for folder in (whole, rest):
        folder.mkdir()

    def job(log: Path, *options: object) -> subprocess.CompletedProcess[str]:
        script = "-m", "tests.processes.logging_rows", log, SCRIPT, "--collection", collection, "--label", "label"
        always = "--epochs", 2, "--checkpoints", tmp_path
        done, _ = run(*forked_ranks(*script, *always, *options, ranks=2))
        return done

    first = job(whole, "--every", 2)
    second = job(rest, "--resume", tmp_path / "epoch-0-batch-4")

    check_reads_everything(whole, epochs=2, among=LABELLED)
    check_goes_on(whole, rest, epoch=0, n_batches=2)
    check_goes_on(whole, rest, epoch=1, n_batches=6)
    # one that was resumed has its full length: torchdata warns if more batches come than a loader has
    for done in (first, second):
        assert done.stdout.count("epoch 0: ") == 1
        assert done.stdout.count("after 6 batches") == 2
        assert "was reported to be" not in done.stderr


def batches_of(loader: StatefulLoader, num_workers: int, **options: Any) -> StatefulDataLoader[Any]:
    start = "fork" if num_workers else None  # which is fast
    return StatefulDataLoader(
        loader, batch_size=None, num_workers=num_workers, multiprocessing_context=start, **options
    )


def in_memory(remainder: Remainder = "exact") -> StatefulLoader:
    """One rank's loader, with 13 batches."""
    sampler = DistributedSampler(RandomSampler(8, 4, 8), dist_info=Rank(1, 2), seed=0, remainder=remainder)
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
    return loader.add_adata(ad.AnnData(np.arange(201.0).reshape(-1, 1)))


def rows(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_state_that_is_saved_after_any_batch_of_any_epoch_leads_to_the_batch_after_it(num_workers: int) -> None:
    loader = in_memory()
    batches = batches_of(loader, num_workers)
    for epoch in range(2):
        loader.set_epoch(epoch)
        whole, states = [], []
        for batch in batches:
            whole += rows([batch])
            states.append(copy.deepcopy(batches.state_dict()))
        assert len(whole) == len(batches) == 13
        for done in (1, 2, 6, 12):
            again = in_memory()
            after = batches_of(again, num_workers)
            after.load_state_dict(states[done - 1])
            again.set_epoch(epoch)
            assert rows(after) == whole[done:]
            again.set_epoch(epoch + 1)
            assert len(rows(after)) == 13


def test_epochs_that_nobody_sets_have_orders_of_their_own_which_each_rank_can_resume() -> None:
    batches = batches_of(in_memory(), 2)
    first, second = rows(batches), []
    state: dict[str, Any] = {}
    for batch in batches:
        second += rows([batch])
        if len(second) == 5:
            state = copy.deepcopy(batches.state_dict())
    assert sorted(second) != sorted(first)
    assert sorted(flat(second)) == sorted(flat(first))
    after = batches_of(in_memory(), 2)
    after.load_state_dict(state)
    assert rows(after) == second[5:]
    third = rows(after)
    assert sorted(flat(third)) == sorted(flat(first))
    assert len({str(sorted(order)) for order in (first, second, third)}) == 3
