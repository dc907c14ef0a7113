"""accelerate, on two ranks: a loader that is left as it is, and what happens to one that is not."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler, MixedLoader, Rank
from tests.loaders import numbered
from tests.processes.configurations import LABELLED
from tests.processes.launch import forked_ranks, run
from tests.processes.rows import BATCH_SIZE, check_goes_on, check_reads_everything
from tests.processes.told import told_by

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from accelerate import Accelerator

    from annbatch_distributed import StatefulLoader


N_BATCHES = -(-len(LABELLED) // (2 * BATCH_SIZE))  # of an epoch, on each of two ranks


def test_save_state_and_load_state_take_the_loader_along(collection: Path, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    for folder, options in ((whole, ("--every", 1)), (rest, ("--every", 100, "--resume", tmp_path / "step-3"))):
        folder.mkdir()
        script = "-m", "tests.processes.logging_rows", folder, "examples/accelerate_ddp.py", "--collection", collection
        always = "--label", "label", "--epochs", 2, "--checkpoints", tmp_path
        done, _ = run(*forked_ranks(*script, *always, *options, ranks=2))
        assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("epoch")] == [
            "epoch 0",
            "epoch 1",
        ]
    check_reads_everything(whole, epochs=2, among=LABELLED)
    check_goes_on(whole, rest, epoch=0, n_batches=N_BATCHES - 3)
    check_goes_on(whole, rest, epoch=1, n_batches=N_BATCHES)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """Accelerator of a single process, of which nothing is left behind."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loader_of(n_rows: int, dist_info: Any) -> StatefulLoader:
    return numbered(DistributedSampler(SequentialSampler(2, 1, 2), dist_info=dist_info), n_rows)


@pytest.mark.parametrize("dispatch", [True, False])
def test_a_dataloader_that_was_prepared_raises_in_a_single_process_too(
    accelerator: Accelerator, *, dispatch: bool
) -> None:
    from torch.utils.data import DataLoader

    loader = loader_of(8, Rank(0, 1))
    accelerator.dataloader_config.dispatch_batches = dispatch
    prepared = accelerator.prepare(DataLoader(loader, batch_size=None))
    with pytest.raises(RuntimeError, match="a second time"):
        next(iter(prepared))
    loader.set_epoch(1)
    assert len(list(loader)) == len(list(DataLoader(loader, batch_size=None))) == 4


def test_prepare_takes_what_to_dataloader_returns_and_checkpoints_have_its_state(
    accelerator: Accelerator, tmp_path: Path
) -> None:
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
    accelerator.load_state(tmp_path)  # without being told of it
    assert [batch["index"].tolist() for batch in again] == [[16, 17], [18, 19], [20, 21], [22, 23]]


def test_a_mixture_is_left_as_it_is_and_saved_where_it_was_registered(accelerator: Accelerator, tmp_path: Path) -> None:
    loaders = {"large": loader_of(24, accelerator), "small": loader_of(8, accelerator)}
    mixture = MixedLoader(loaders, weights={"large": 3, "small": 1}, n_steps=12)
    assert accelerator.prepare(mixture) is mixture
    accelerator.register_for_checkpointing(mixture)
    whole = [(batch["source"], batch["index"].tolist()) for batch in mixture]
    mixture.set_epoch(0)
    assert len(list(islice(mixture, 5))) == 5
    accelerator.save_state(tmp_path)
    mixture.set_epoch(3)
    accelerator.load_state(tmp_path)
    assert [(batch["source"], batch["index"].tolist()) for batch in mixture] == whole[5:]


def test_batches_that_make_up_no_step_are_carried_over_to_the_next_epoch(accelerator: Accelerator) -> None:
    accelerator.gradient_accumulation_steps = 3
    batches = accelerator.prepare(loader_of(8, Rank(0, 1)).to_dataloader())
    steps = []
    for _ in range(2):
        for _ in batches:
            with accelerator.accumulate():
                steps.append(accelerator.sync_gradients)
    assert steps == [False, False, True, False, False, True, False, False]


def test_batches_are_skipped_by_a_state_and_by_nothing_else(accelerator: Accelerator) -> None:
    from accelerate import skip_first_batches

    batches = accelerator.prepare(loader_of(8, Rank(0, 1)).to_dataloader())
    with pytest.raises(RuntimeError, match="skip_first_batches"):
        skip_first_batches(batches, 2)


@pytest.fixture(scope="module")
def told(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks told of loaders that it had prepared."""
    folder = tmp_path_factory.mktemp("prepared")
    run(*forked_ranks("-m", "tests.frameworks.job_accelerate", collection, folder, ranks=2))
    return told_by(folder)


def test_a_dataloader_that_was_prepared_raises_on_every_rank_before_a_row_is_read(told: list[dict[str, Any]]) -> None:
    assert told[0]["errors"] == told[1]["errors"]
    errors = told[0]["errors"]
    assert len(errors) == 4
    for name, error in errors.items():
        taker = "IterableDatasetShard" if name.endswith("False") else "DataLoaderDispatcher"
        assert f"Accelerate's {taker}" in error
        assert error.endswith("prepare(loader) returns it unchanged.")
    assert [rank["passes that wrong ways began"] for rank in told] == [0, 0]


def test_prepare_returns_the_loader_itself_which_reads_its_own_share(told: list[dict[str, Any]]) -> None:
    assert all(rank["unchanged"] for rank in told)
    rows = [set(rank["rows"]) for rank in told]
    assert len(rows[0]) == len(rows[1]) == len(told[0]["rows"])
    assert not rows[0] & rows[1]
