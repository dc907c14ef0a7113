"""A DataLoader that would put batches into batches, as it is by default."""

from __future__ import annotations

import os
from typing import Any

import anndata as ad
import numpy as np
import pytest
from annbatch.samplers import SequentialSampler
from torch.utils.data import DataLoader

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader


def loader() -> StatefulLoader:
    """A loader of four batches."""
    sampler = DistributedSampler(SequentialSampler(2, 2, 2), dist_info=Rank(0, 1), seed=0)
    made = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
    return made.add_adata(ad.AnnData(np.arange(8.0).reshape(8, 1)))


def _listed(batches: list[Any]) -> list[list[int]]:
    """What a user may make of batches."""
    return [batch["index"].tolist() for batch in batches]


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}])
def test_a_dataloader_with_a_batch_size_is_an_error_that_says_what_to_pass(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"The loader makes the batches.*batch_size=None"):
        list(DataLoader(loader(), **options))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_worker_says_the_same() -> None:
    batches = DataLoader(loader(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ValueError, match=r"(?s)worker process 0.*The loader makes the batches.*batch_size=None"):
        list(batches)


def test_batches_may_be_put_together_by_a_function_of_the_users_own() -> None:
    assert list(DataLoader(loader(), collate_fn=_listed)) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert len(list(DataLoader(loader(), batch_size=None))) == 4
