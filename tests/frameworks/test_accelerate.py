"""Accelerate on two ranks: loaders that it leaves unchanged, and errors of loaders that it wraps."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from annbatch.samplers import SequentialSampler

from annbatch_distributed import AlignedLoader, DistributedSampler, MixedLoader, Rank
from tests.loaders import numbered
from tests.processes.configurations import LABELED
from tests.processes.launch import forked_ranks, run
from tests.processes.results import read_results
from tests.processes.rows import check_reads_everything

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from accelerate import Accelerator

    from annbatch_distributed import StatefulLoader


def test_accelerate_example_saves_states(collection: Path, tmp_path: Path) -> None:
    """The example reads each labeled row once in each epoch, and saves its states."""
    script = "-m", "tests.processes.logging_rows", tmp_path, "examples/accelerate_ddp.py", "--collection", collection
    options = "--label", "label", "--epochs", 2, "--checkpoints", tmp_path, "--every", 3
    done, _ = run(*forked_ranks(*script, *options, ranks=2))
    lines = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert lines == ["epoch 0", "epoch 1"]
    check_reads_everything(tmp_path, epochs=2, among=LABELED)
    for epoch in range(2):
        # of a registered loader, in the middle of the epoch
        state = torch.load(tmp_path / f"epoch-{epoch}-step-3" / "custom_checkpoint_0.pkl", weights_only=True)
        assert (state["epoch"], state["segments"]) == (epoch, [[2, 1, 3]])


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """Accelerator of a single process, whose state is reset afterwards."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loader_of(n_rows: int, dist_info: Any) -> StatefulLoader:
    return numbered(DistributedSampler(SequentialSampler(2, 1, 2), dist_info=dist_info), n_rows)


@pytest.mark.parametrize("dispatch", [True, False])
def test_prepared_dataloader_raises_in_single_process(accelerator: Accelerator, *, dispatch: bool) -> None:
    """A prepared DataLoader raises, even in a single process."""
    from torch.utils.data import DataLoader

    loader = loader_of(8, Rank(0, 1))
    accelerator.dataloader_config.dispatch_batches = dispatch
    prepared = accelerator.prepare(DataLoader(loader, batch_size=None))
    with pytest.raises(RuntimeError, match="a second time"):
        next(iter(prepared))
    loader.set_epoch(1)
    assert len(list(loader)) == len(list(DataLoader(loader, batch_size=None))) == 4
    for kind in ("aligned", "mixture"):
        with pytest.raises(RuntimeError, match="a second time"):
            next(iter(accelerator.prepare(DataLoader(seven_batches(kind), batch_size=None))))


def test_prepare_accepts_result_of_to_dataloader(accelerator: Accelerator, tmp_path: Path) -> None:
    """prepare accepts the result of to_dataloader, and checkpoints have its state."""
    batches, again = (
        loader_of(24, Rank(1, 2)).to_dataloader(num_workers=2, multiprocessing_context="fork") for _ in range(2)
    )
    for option in ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler"):
        for value in (True, False):
            setattr(accelerator.dataloader_config, option, value)
            assert accelerator.prepare(batches) is batches
    assert accelerator.prepare(again) is again
    for done, batch in enumerate(batches, start=1):
        assert batch["index"].tolist() == [10 + 2 * done, 11 + 2 * done]
        if done == 2:
            state = batches.state_dict()
    again.load_state_dict(state)
    accelerator.save_state(tmp_path)
    again.set_epoch(3)
    accelerator.load_state(tmp_path)  # without register_for_checkpointing
    assert [batch["index"].tolist() for batch in again] == [[16, 17], [18, 19], [20, 21], [22, 23]]


def test_registered_loaders_are_saved_unchanged(accelerator: Accelerator, tmp_path: Path) -> None:
    """Accelerate leaves a loader and a mixture unchanged, and saves them once they are registered."""
    loaders = {"large": loader_of(24, accelerator), "small": loader_of(8, accelerator)}
    mixture = MixedLoader(loaders, weights={"large": 3, "small": 1}, n_steps=12)
    both: list[Any] = [mixture, loader_of(24, accelerator)]
    assert all(accelerator.prepare(one) is one for one in both)
    accelerator.register_for_checkpointing(*both)
    whole = [[batch["index"].tolist() for batch in one] for one in both]
    for one in both:
        one.set_epoch(0)
        assert len(list(islice(one, 5))) == 5
    accelerator.save_state(tmp_path)
    for one in both:
        one.set_epoch(3)
    accelerator.load_state(tmp_path)
    assert [[batch["index"].tolist() for batch in one] for one in both] == [batches[5:] for batches in whole]


def seven_batches(kind: str) -> Any:
    """A loader of any kind with an epoch of seven batches."""
    from torch.utils.data import DataLoader

    def source() -> StatefulLoader:
        return loader_of(14, Rank(0, 1))

    if kind == "torch":
        return DataLoader([*range(14)], batch_size=2)
    if kind == "mixture":
        return MixedLoader({"a": source(), "b": source()}, weights={"a": 1, "b": 1}, n_steps=7)
    if kind == "mixture of workers":
        sources = {name: source().to_dataloader(num_workers=0) for name in "ab"}
        return MixedLoader(sources, n_steps=7, within_batch=True)
    if kind == "aligned":
        return AlignedLoader({"a": source(), "b": source()}, batch_sampler=source().sampler)
    if kind == "workers":
        return source().to_dataloader(num_workers=2, multiprocessing_context="fork")
    return source().to_dataloader() if kind == "dataloader" else source()


KINDS = ["torch", "loader", "dataloader", "workers", "aligned", "mixture", "mixture of workers"]


@pytest.mark.parametrize("kind", KINDS)
def test_last_gradients_of_epoch_are_applied(accelerator: Accelerator, kind: str) -> None:
    """Accumulated gradients are applied at the end of each epoch, as with a DataLoader that Accelerate has prepared."""
    accelerator.gradient_accumulation_steps = 4
    batches, steps = accelerator.prepare(seven_batches(kind)), []
    for _ in range(2):
        for _ in batches:
            with accelerator.accumulate():
                steps.append(accelerator.sync_gradients)
                assert accelerator.gradient_state.in_dataloader
        assert not accelerator.gradient_state.in_dataloader
    assert steps == 2 * [False, False, False, True, False, False, True]


def test_abandoned_loop_leaves_no_report(accelerator: Accelerator) -> None:
    """A loop that is left, and one that continues after a resume, report their own end only."""
    accelerator.gradient_accumulation_steps = 4
    loader = loader_of(14, Rank(0, 1))
    for _ in loader:
        break
    assert not accelerator.gradient_state.in_dataloader
    loader.load_state_dict(loader.state_dict(batches_done=5))
    steps = []
    for _ in loader:
        with accelerator.accumulate():
            steps.append(accelerator.sync_gradients)
    assert steps == [False, True]


def test_metrics_of_last_step_are_complete(accelerator: Accelerator) -> None:
    """gather_for_metrics keeps all rows of the last step."""
    gathered = [accelerator.gather_for_metrics(torch.as_tensor(batch["index"])) for batch in loader_of(7, Rank(0, 1))]
    assert torch.cat(gathered).tolist() == [*range(6)]


def test_skip_first_batches_raises(accelerator: Accelerator) -> None:
    """Batches are skipped by loading a state; skip_first_batches raises."""
    from accelerate import skip_first_batches

    batches = accelerator.prepare(loader_of(8, Rank(0, 1)).to_dataloader())
    with pytest.raises(RuntimeError, match="skip_first_batches"):
        skip_first_batches(batches, 2)


@pytest.fixture(scope="module")
def results(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each of two ranks."""
    folder = tmp_path_factory.mktemp("prepared")
    run(*forked_ranks("-m", "tests.frameworks.job_accelerate", collection, folder, ranks=2))
    return read_results(folder)


def test_prepared_dataloader_raises_on_every_rank(results: list[dict[str, Any]]) -> None:
    """A prepared DataLoader raises on every rank before a row is read."""
    assert results[0]["errors"] == results[1]["errors"]
    errors = results[0]["errors"]
    assert len(errors) == 4
    for name, error in errors.items():
        taker = "IterableDatasetShard" if name.endswith("False") else "DataLoaderDispatcher"
        assert f"Accelerate's {taker}" in error
        assert error.endswith("prepare(loader) returns it unchanged.")
    assert [rank["iterations of wrong ways"] for rank in results] == [0, 0]


def test_prepare_returns_loader_unchanged(results: list[dict[str, Any]]) -> None:
    """prepare returns the loader itself, which reads its own shard."""
    assert all(rank["unchanged"] for rank in results)
    rows = [set(rank["rows"]) for rank in results]
    assert len(rows[0]) == len(rows[1]) == len(results[0]["rows"])
    assert not rows[0] & rows[1]
