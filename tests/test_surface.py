"""What users see of the package: names, and defaults."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import annbatch
import pytest
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler
from torch.utils.data import DataLoader

import annbatch_distributed
from annbatch_distributed import (
    AlignedLoader,
    CellSets,
    DistributedSampler,
    EpochPlan,
    MixedLoader,
    Rank,
    Rows,
    StatefulLoader,
    deferred,
    suggest_sizes,
)
from annbatch_distributed.cli import _parser
from annbatch_distributed.integrations.scvi import distribute
from annbatch_distributed.loader.workers import WorkerDataLoader
from tests.loaders import numbered
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
    """Tab shows the names that the documentation lists, and the names of annbatch's class."""
    listed = shown(kind.__name__)
    assert public(kind) - public(of_others) <= listed <= public(kind)


def test_package_shows_its_public_names() -> None:
    shown = {name for name in dir(annbatch_distributed) if not name.startswith("_")}
    assert shown == {*annbatch_distributed.__all__}


@pytest.mark.parametrize("kind", [AlignedLoader, MixedLoader, WorkerDataLoader])
def test_other_loaders_have_no_further_names(kind: type) -> None:
    """Other loaders have the names of a StatefulLoader and of PyTorch's DataLoader, and a few of their own."""
    own = {"from_collections", "modalities", "to_dataloader", "batch_sampler", "batch_size", "use_stateful_dataloader"}
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


def state_of(n_done: int) -> dict[str, Any]:
    return loader_of(12).state_dict(batches_done=n_done)


def loader_of(n_rows: int, dist_info: Any = Rank(0, 2), **options: Any) -> StatefulLoader:  # noqa: B008 it is frozen
    sampler = DistributedSampler(RandomSampler(2, 2, 2), dist_info=dist_info, seed=0, remainder="exact", **options)
    return numbered(sampler, n_rows, prefetch=1)


def text_of(loader: Any) -> str:
    """The text of a loader without the time that its consumer has waited, which a different test sees."""
    return re.sub(r"\n    waited: .* batch(es)?$", "", repr(loader))


def test_repr_says_where_a_loader_is() -> None:
    """The text of a loader has its rank, its batches, and where it is in the epoch."""
    loader = loader_of(12)
    first = """StatefulLoader: 12 cells x 1 gene
    rank: 0 of 2
    batches: 2 rows each, remainder='exact', prefetching 1 load request
    epoch: 0, 0 of 3 batches done"""
    assert repr(loader) == first
    batches = iter(loader)
    next(batches)
    assert text_of(loader) == first.replace("0 of 3", "1 of 3")
    assert repr(loader.to_dataloader(num_workers=0)).startswith("WorkerDataLoader: 12 cells x 1 gene\n    rank: 0 of 2")
    assert len([*batches]) == 2
    assert text_of(loader).endswith("epoch: 0, all batches done")
    loader.set_epoch(4)
    assert text_of(copy.copy(loader)).endswith("epoch: 4, 0 of 3 batches done")
    loader.load_state_dict(state_of(2))
    assert text_of(loader).endswith("epoch: 0, 2 of 3 batches done")
    loader.load_state_dict(state_of(3))
    loader.set_epoch(0)
    assert text_of(loader).endswith("epoch: 0, all batches done")


def test_repr_of_a_mixture_lists_its_sources() -> None:
    mixture = MixedLoader({"a": loader_of(12), "b": loader_of(8)}, weights={"a": 1, "b": 1}, n_steps=4)
    text = """MixedLoader: 2 sources
    a: 12 cells x 1 gene; 2 rows each, remainder='exact', prefetching 1 load request
    b: 8 cells x 1 gene; 2 rows each, remainder='exact', prefetching 1 load request
    rank: 0 of 2
    epoch: 0, 0 of 4 steps done"""
    assert repr(mixture) == text
    next(iter(mixture))
    assert text_of(mixture) == text.replace("0 of 4", "1 of 4")


def test_repr_raises_for_no_loader() -> None:
    """The text of a loader that can't read says why, and doesn't ask for a deferred rank."""

    def unknown() -> tuple[int, int]:
        pytest.fail("the rank was asked for")

    waiting = loader_of(12, deferred(unknown), virtual_ranks=4)
    assert "rank: not known yet\n    batches: 2 rows each" in repr(waiting)
    assert "no cells yet" in repr(numbered_of_none())
    few = loader_of(12, mask=slice(0, 1))
    assert repr(few).startswith("StatefulLoader: 1 of 12 cells x 1 gene")
    assert "of an unknown number of (The mask selects 1 row, too few for 2 ranks" in repr(few)
    mixtures = [
        MixedLoader({"few": few}, weights={"few": 1}, n_steps=3),
        MixedLoader({"a": loader_of(12), "b": loader_of(12, Rank(1, 2))}, weights={"a": 1, "b": 1}, n_steps=3),
    ]
    for mixture, problem in zip(mixtures, ("The source few: The mask selects 1 row", "same rank"), strict=True):
        assert problem in repr(mixture)


def numbered_of_none() -> StatefulLoader:
    return StatefulLoader(batch_sampler=loader_of(2).sampler, preload_to_gpu=False)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"version": "1.0", "model": 1, "loader": state_of(1)},
            r"got a dict with 'version', .* Pass state\['loader'\]",
        ),
        ({"train": {"loader": state_of(1)}}, r"Pass state\['train'\]\['loader'\]"),
        ({"epoch": 3}, r"got a dict with 'epoch'\. Pass the return value of state_dict\(\)"),
        (
            MixedLoader({"a": loader_of(12)}, weights={"a": 1}, n_steps=4).state_dict(),
            "The state is of a mixture of a",
        ),
    ],
)
def test_dict_that_is_no_state_is_named(state: dict[str, Any], message: str) -> None:
    """A whole checkpoint, or the state of a mixture, isn't called damaged."""
    with pytest.raises(ValueError, match=message):
        loader_of(12).load_state_dict(state)


def test_rank_has_two_numbers() -> None:
    """A Rank is a value of two numbers, and keeps what a mesh knows to itself."""
    assert public(Rank) == {"from_mesh"}
    assert {field.name for field in fields(Rank)} == {"rank", "world_size"}
    assert replace(Rank(1, 4), rank=2) == Rank(2, 4) == pickle.loads(pickle.dumps(Rank(2, 4)))
    assert len({Rank(1, 4), Rank(1, 4), Rank(0, 4)}) == 2
    assert repr(Rank(1, 4)) == "Rank(rank=1, world_size=4)"


def test_one_word_has_one_name() -> None:
    """Arguments have the names of the documentation's table."""
    assert {"max_gap", "virtual_ranks", "sharding", "sets"} <= defaults(DistributedSampler).keys()
    assert "align" not in defaults(DistributedSampler)
    assert {"set_size", "chunk_size", "remainder"} <= defaults(CellSets.from_obs).keys()
    assert {"n_steps", "stopping_strategy", "within_batch"} <= defaults(MixedLoader).keys()
    assert {"prefetch", "return_file"} <= defaults(StatefulLoader).keys()
    assert [*defaults(Rank.from_mesh)] == ["mesh", "dims"]
    assert {"from_indices", "from_mask"} <= public(Rows)
