"""What users see of the package: names, and defaults."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any

import annbatch
import pytest
from annbatch.abc import Sampler
from torch.utils.data import DataLoader

from annbatch_distributed import (
    AlignedLoader,
    CellSets,
    DistributedSampler,
    EpochPlan,
    MixedLoader,
    Rank,
    Rows,
    StatefulLoader,
    suggest_sizes,
)
from annbatch_distributed.cli import _parser
from annbatch_distributed.integrations.scvi import distribute
from annbatch_distributed.loader.workers import WorkerDataLoader
from tests.processes.launch import ROOT

CONFIGURATION = (ROOT / "docs" / "conf.py").read_text()


def shown(name: str) -> set[str]:
    """The members of a class that the documentation lists."""
    (names,) = re.findall(rf'"annbatch_distributed\.{name}": \[(.*?)\]', CONFIGURATION, re.DOTALL)
    return set(re.findall(r'"(\w+)"', names))


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("kind", "of_others"), [(DistributedSampler, Sampler), (StatefulLoader, annbatch.Loader), (EpochPlan, object)]
)
def test_documentation_lists_every_public_name(kind: type, of_others: type) -> None:
    """Tab shows the names that the documentation lists, and those of annbatch's class."""
    listed = shown(kind.__name__)
    assert public(kind) - public(of_others) <= listed <= public(kind)


@pytest.mark.parametrize("kind", [AlignedLoader, MixedLoader, WorkerDataLoader])
def test_other_loaders_have_no_further_names(kind: type) -> None:
    """Other loaders have the names of a StatefulLoader, a few of their own, and those of PyTorch's DataLoader."""
    own = {"from_collections", "stores", "to_dataloader", "batch_sampler", "batch_size", "use_stateful_dataloader"}
    of_torch = public(DataLoader) | {"dataset"} if kind is WorkerDataLoader else set[str]()
    assert public(kind) - of_torch <= shown("StatefulLoader") | own
    assert {"set_epoch", "next_epoch", "batches_done", "state_dict", "reshard", "cells_of", "plan"} <= public(kind)


def defaults(function: Any) -> dict[str, Any]:
    return {name: one.default for name, one in signature(function).parameters.items()}


def test_own_entry_points_share_their_defaults() -> None:
    """Names of annbatch have annbatch's defaults; `from_collection` and all others of this package share theirs."""
    own = {"seed": 0, "prefetch": 1, "memory": 1 << 30, "batch_size": 256}
    for function in (StatefulLoader.from_collection, AlignedLoader.from_collections):
        assert own.items() <= defaults(function).items()
    assert {name: defaults(suggest_sizes)[name] for name in ("prefetch", "memory", "batch_size")} == {
        name: own[name] for name in ("prefetch", "memory", "batch_size")
    }
    assert {name: defaults(distribute)[name] for name in ("seed", "prefetch")} == {"seed": 0, "prefetch": 1}
    for command in ("plan", "check"):
        options = vars(_parser().parse_args([command, "cells.zarr"]))
        own_of_command = {**own, "memory": "1GiB", "remainder": "exact", "no_shuffle": False}
        assert own_of_command.items() <= options.items()
    theirs = {"remainder": None, "enforce_equal_batches": True, "seed": None, "mask": None}
    assert theirs.items() <= defaults(DistributedSampler).items()
    assert defaults(StatefulLoader)["prefetch"] == 0


def test_one_word_has_one_name() -> None:
    """Arguments have the names of the documentation's table."""
    assert {"max_gap", "virtual_ranks", "sharding", "sets"} <= defaults(DistributedSampler).keys()
    assert "align" not in defaults(DistributedSampler)
    assert {"set_size", "chunk_size", "remainder"} <= defaults(CellSets.from_obs).keys()
    assert {"n_steps", "stopping_strategy", "within_batch"} <= defaults(MixedLoader).keys()
    assert {"prefetch", "return_file"} <= defaults(StatefulLoader).keys()
    assert [*defaults(Rank.from_mesh)] == ["mesh", "dims"]
    assert {"from_indices", "from_mask"} <= public(Rows)
