"""Objects of frameworks as ``dist_info``: on two ranks, on one device, and in workers."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from annbatch.samplers import RandomSampler
from lightning import Fabric, Trainer

from annbatch_distributed import DistributedSampler, deferred
from annbatch_distributed.ranks import RankSource
from annbatch_distributed.sampler import cursor_of
from tests.loaders import numbered
from tests.processes.launch import forked_ranks, run
from tests.processes.results import read_results

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def sampler(dist_info: Any) -> DistributedSampler:
    return DistributedSampler(RandomSampler(4, 2, 4), dist_info=dist_info, seed=0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each of two ranks."""
    folder = tmp_path_factory.mktemp("results")
    run(*forked_ranks("-m", "tests.frameworks.job_dist_info", folder, ranks=2))
    return read_results(folder)


RANKS = {
    **dict.fromkeys(["Trainer", "Fabric", "a callable", "Accelerator", "PartialState", "AcceleratorState"], (0, 1)),
    "Accelerator with a mesh of dp_replicate": (0, 1),
    "Accelerator with a mesh of dp_shard and tp": (0, 1),
    # their processes split a model, and read the same shard
    "Fabric that splits a model": (0, 0),
    "Accelerator with a mesh of tp": (0, 0),
}


def test_frameworks_give_two_ranks(results: list[dict[str, Any]]) -> None:
    """Frameworks that start two processes have the rank of each process."""
    ranks_of = {name: [result[name] for result in results] for name in RANKS}
    assert ranks_of == {name: [[rank, max(ranks) + 1] for rank in ranks] for name, ranks in RANKS.items()}


def test_loader_made_before_fit_reads_shards(results: list[dict[str, Any]]) -> None:
    """A loader made before fit reads the shard of each rank."""
    assert sorted(row for one in results for row in one["rows"]) == list(range(64))
    assert all("2 ranks have read 64 rows" in one["read"] for one in results)


def test_trainer_before_start_raises(results: list[dict[str, Any]]) -> None:
    """A Trainer that has not started its processes raises, and the error names the hook to use."""
    for one in results:
        assert one["Trainer, before"].startswith("RuntimeError: Lightning's Trainer with strategy")
        assert "train_dataloader" in one["Trainer, before"]


def test_framework_contradicting_group_raises(results: list[dict[str, Any]]) -> None:
    """A framework that treats a process of a job as the only one raises."""
    sources = {
        "Trainer of one device": "Lightning's Trainer",
        "Accelerate without cpu=True": "Accelerate's PartialState",
    }
    for name, source in sources.items():
        for rank, result in enumerate(results):
            assert result[name].startswith(
                f"ValueError: This process is rank 0 of 1 for {source}, but rank {rank} of 2 for "
            )


@pytest.fixture
def _accelerate() -> Iterator[None]:
    """Reset the state of Accelerate after a test."""
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
def test_single_device_has_one_rank(make: Any) -> None:
    """On one device, there is no process group and one rank."""
    thing = make()
    for placed in (sampler(thing), sampler(lambda: thing), sampler(deferred(thing)), copy.deepcopy(sampler(thing))):
        assert (placed.rank, placed.world_size) == (0, 1)
    assert type(thing).__name__ in RankSource.of(thing).placement.source


@pytest.mark.usefixtures("_accelerate")
@ON_ONE_DEVICE
def test_framework_contradicting_launcher_raises(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework that treats one of several launched processes as the only one raises."""
    thing = make()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        RankSource.of("env")  # RANK alone
    assert sampler(thing).rank == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"is rank 0 of 1 for .*, but rank 1 of 2 for .*'env' or Rank"):
        _ = sampler(thing).rank


@pytest.mark.parametrize("name", ["pytorch_lightning.trainer.trainer.Trainer", "lightning_fabric.fabric.Fabric"])
def test_older_packages_of_lightning_are_recognized(name: str) -> None:
    """Lightning's older packages are recognized by name."""
    module, _, kind = name.rpartition(".")
    own = type("Own", (type(kind, (), {"__module__": module, "strategy": object()}),), {})
    assert (sampler(own()).rank, sampler(own()).world_size) == (0, 1)


def test_repr_shows_trainer_until_rank_is_known() -> None:
    """The repr of a sampler shows that its Trainer has not been queried."""
    unasked = sampler(Trainer(accelerator="cpu", devices=1, **QUIET))
    assert "rank=?" in repr(unasked)
    assert unasked.rank == 0
    assert 'source="Lightning\'s Trainer"' in repr(unasked)


def test_spawned_workers_get_rank_without_trainer() -> None:
    """Spawned workers receive the rank, and not the Trainer."""
    trainer = Trainer(accelerator="cpu", devices=1, **QUIET)
    trainer.unpicklable = (number for number in range(3))  # type: ignore[attr-defined]  # users add attributes to it
    loader = numbered(sampler(trainer), 40)
    read = [row for batch in loader.to_dataloader(num_workers=1) for row in batch["index"].tolist()]
    assert sorted(read) == list(range(40))


def test_spawned_rank_gets_workers_of_its_trainer() -> None:
    """A rank that a Trainer spawns asks this Trainer, also through a DataLoader of workers that the Trainer holds."""
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", **QUIET)
    dataloader = numbered(sampler(trainer), 40).to_dataloader(num_workers=2)
    trainer.within_fit = dataloader  # type: ignore[attr-defined]  # a trainer holds it among private attributes
    inherited: list[int] = []
    set_spawning_popen(SimpleNamespace(duplicate_for_child=inherited.append))
    try:
        pickled = bytes(ForkingPickler.dumps((trainer, dataloader)))
    finally:
        set_spawning_popen(None)
    assert len(inherited) == len(set(inherited))  # a process can't be spawned with a descriptor twice
    of_rank, workers = pickle.loads(pickled)
    assert cursor_of(workers.sampler).rank_source.framework_object is of_rank
