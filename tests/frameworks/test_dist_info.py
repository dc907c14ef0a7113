"""Frameworks' own objects as ``dist_info``: on two ranks, on one device, and in what a rank starts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from annbatch.samplers import RandomSampler
from lightning import Fabric, Trainer

from annbatch_distributed import DistributedSampler, deferred
from annbatch_distributed.ranks import resolve
from tests.loaders import numbered
from tests.processes.launch import forked_ranks, run
from tests.processes.told import told_by

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def sampler(dist_info: Any) -> DistributedSampler:
    return DistributedSampler(RandomSampler(4, 2, 4), dist_info=dist_info, seed=0)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks was told."""
    folder = tmp_path_factory.mktemp("told")
    run(*forked_ranks("-m", "tests.frameworks.job_dist_info", folder, ranks=2))
    return told_by(folder)


RANKS = {
    **dict.fromkeys(["Trainer", "Fabric", "a callable", "Accelerator", "PartialState", "AcceleratorState"], (0, 1)),
    "Accelerator with a mesh of dp_replicate": (0, 1),
    "Accelerator with a mesh of dp_shard and tp": (0, 1),
    # their processes split up a model, and have the same share
    "Fabric that splits up a model": (0, 0),
    "Accelerator with a mesh of tp": (0, 0),
}


def test_two_ranks_are_told_by_what_has_started_them(told: list[dict[str, Any]]) -> None:
    found = {name: [rank_told[name] for rank_told in told] for name in RANKS}
    assert found == {name: [[rank, max(ranks) + 1] for rank in ranks] for name, ranks in RANKS.items()}


def test_a_loader_that_was_made_before_fit_reads_every_ranks_share(told: list[dict[str, Any]]) -> None:
    assert sorted(row for one in told for row in one["rows"]) == list(range(64))
    assert all("2 ranks have read 64 rows" in one["read"] for one in told)


def test_a_trainer_that_has_not_started_its_processes_is_an_error_that_says_where_to_ask(
    told: list[dict[str, Any]],
) -> None:
    for one in told:
        assert one["Trainer, before"].startswith("RuntimeError: Lightning's Trainer with strategy")
        assert "train_dataloader" in one["Trainer, before"]


def test_what_takes_a_process_of_a_job_for_the_only_one_is_an_error(told: list[dict[str, Any]]) -> None:
    sources = {"Trainer of one device": "Lightning's Trainer", "accelerate on its own": "Accelerate's PartialState"}
    for name, source in sources.items():
        for rank, rank_told in enumerate(told):
            assert rank_told[name].startswith(
                f"ValueError: This process is rank 0 of 1 for {source}, but rank {rank} of 2 for "
            )


@pytest.fixture
def _accelerate() -> Iterator[None]:
    """Leave nothing of accelerate's state behind."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


ON_ONE_DEVICE = pytest.mark.parametrize(
    "make",
    [
        lambda: Trainer(accelerator="cpu", devices=1, **QUIET),
        lambda: Fabric(accelerator="cpu", devices=1),
        lambda: Accelerator(cpu=True),
        lambda: PartialState(cpu=True),
    ],
    ids=["Trainer", "Fabric", "Accelerator", "PartialState"],
)


@pytest.mark.usefixtures("_accelerate")
@ON_ONE_DEVICE
def test_on_one_device_there_is_no_process_group_and_one_rank(make: Any) -> None:
    thing = make()
    for made in (sampler(thing), sampler(lambda: thing), sampler(deferred(thing)), copy.deepcopy(sampler(thing))):
        assert (made.rank, made.world_size) == (0, 1)
    assert type(thing).__name__ in resolve(thing).source


@pytest.mark.usefixtures("_accelerate")
@ON_ONE_DEVICE
def test_what_takes_its_process_for_the_only_one_where_a_launcher_started_more_is_an_error(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    thing = make()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        resolve("env")  # RANK alone
    assert sampler(thing).rank == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"is rank 0 of 1 for .*, but rank 1 of 2 for .*'env' or Rank"):
        _ = sampler(thing).rank


@pytest.mark.parametrize("name", ["pytorch_lightning.trainer.trainer.Trainer", "lightning_fabric.fabric.Fabric"])
def test_lightning_s_older_packages_are_known_by_name_too(name: str) -> None:
    module, _, kind = name.rpartition(".")
    own = type("Own", (type(kind, (), {"__module__": module, "strategy": object()}),), {})
    assert (sampler(own()).rank, sampler(own()).world_size) == (0, 1)


def test_a_sampler_that_asks_a_trainer_says_so_until_it_is_asked() -> None:
    made = sampler(Trainer(accelerator="cpu", devices=1, **QUIET))
    assert "rank=?" in repr(made)
    assert made.rank == 0
    assert 'source="Lightning\'s Trainer"' in repr(made)


def test_workers_that_are_spawned_are_told_the_rank_and_no_trainer() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, **QUIET)
    trainer.unpicklable = (number for number in range(3))  # type: ignore[attr-defined]  # as users hang things on it
    loader = numbered(sampler(trainer), 40)
    read = [row for batch in loader.to_dataloader(num_workers=1) for row in batch["index"].tolist()]
    assert sorted(read) == list(range(40))
