"""Loaders of collections in which each row contains its own number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np

from annbatch_distributed import StatefulLoader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from annbatch_distributed import DistributedSampler


def numbered(sampler: DistributedSampler, n_obs: int, **options: Any) -> StatefulLoader:
    """A loader of a collection of `n_obs` rows."""
    loader = StatefulLoader(batch_sampler=sampler, **{"return_index": True, "preload_to_gpu": False} | options)
    return loader.add_adata(ad.AnnData(np.arange(float(n_obs))[:, None]))


def rows(batches: Iterable[Any]) -> list[list[int]]:
    """The rows of each batch, after comparing them with its data."""
    result = []
    for batch in batches:
        assert batch["X"][:, 0].tolist() == batch["index"].tolist()
        result.append(batch["index"].tolist())
    return result
