"""States that were saved once, as files: every later version goes on from them with the rows that are written there.

``states/format_1.json`` was written by the first version of format 1 and is never written again. Each case says how the
sampler was made, the state, how many ranks and workers load it, and what each rank yields then.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import annbatch.samplers
import anndata as ad
import numpy as np
import pandas as pd
import pytest

from annbatch_distributed import DistributedSampler, Rank, Shuffled, StatefulLoader
from tests.samplers import batches
from tests.workers import Workers, as_worker

if TYPE_CHECKING:
    from annbatch.abc import Sampler

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "states" / "format_1.json").read_text(encoding="utf-8"))
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def made(case: dict[str, Any], rank: int) -> DistributedSampler:
    """A rank's sampler, as a process that has just started makes it."""
    options = dict(case["options"])
    if "mask" in options:
        options["mask"] = list(starmap(slice, options["mask"]))
    if "block_size" in options:
        options["sharding"] = Shuffled(options.pop("block_size"))
    return DistributedSampler(wrapped(**case["sampler"]), dist_info=Rank(rank, case["world_size"]), **options)


def wrapped(kind: str, *, runs: list[tuple[str, int]] | None = None, rng: int | None = None, **options: Any) -> Sampler:
    """The wrapped sampler; ``runs`` are its classes with their numbers of rows."""
    if runs is not None:
        names, sizes = zip(*runs, strict=True)
        options["classes"] = pd.Categorical(np.repeat(names, sizes))
    if "class_weights" in options:
        options["class_weights"] = np.array(options["class_weights"])
    if rng is not None:
        options["rng"] = np.random.default_rng(rng)
    found: Sampler = getattr(annbatch.samplers, kind)(**options)
    return found


@each_case
def test_a_sampler_goes_on_from_every_saved_state_with_the_rows_that_were_due_then(case: dict[str, Any]) -> None:
    for rank, expected in enumerate(case["batches"]):
        with as_worker(*case["state"]["worker"]) if "worker" in case["state"] else nullcontext():
            sampler = made(case, rank)
            sampler.load_state_dict(case["state"])
            if case["n_workers"]:
                found = list(Workers(sampler, case["n_workers"], n_obs=case["n_obs"]))
            else:
                assert "worker" in case["state"] or sampler.n_batches(case["n_obs"]) == len(expected)
                found = batches(sampler.sample(case["n_obs"]))
        assert found == expected


@each_case
def test_a_loader_goes_on_from_every_saved_state_with_the_rows_that_were_due_then(case: dict[str, Any]) -> None:
    for rank, expected in enumerate(case["batches"]):
        with as_worker(*case["state"]["worker"]) if "worker" in case["state"] else nullcontext():
            loader = StatefulLoader(batch_sampler=made(case, rank), return_index=True, preload_to_gpu=False)
            loader.add_adata(ad.AnnData(np.arange(case["n_obs"], dtype="float32").reshape(-1, 1)))
            loader.load_state_dict(case["state"])
            read = Workers(loader, case["n_workers"]) if case["n_workers"] else loader
            found = [batch if isinstance(batch, list) else batch["index"].tolist() for batch in read]
        assert found == expected


@each_case
def test_the_rows_of_a_saved_state_are_not_those_of_a_sampler_that_has_not_loaded_it(case: dict[str, Any]) -> None:
    assert [batches(made(case, rank).sample(case["n_obs"])) for rank in range(case["world_size"])] != case["batches"]
