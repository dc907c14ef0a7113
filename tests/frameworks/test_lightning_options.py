"""Options and checkpoints of Lightning's Trainer, row by row of the table in the documentation."""

from __future__ import annotations

import os
import signal
from itertools import islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
import torch
from annbatch.samplers import RandomSampler
from lightning import Fabric, LightningDataModule, LightningModule, Trainer
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities import CombinedLoader

from annbatch_distributed import AlignedLoader, DistributedSampler, MixedLoader, Rank, StatefulLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


#: Batches of an epoch.
N = 8


def loader_of(
    dist_info: Any, *, n_rows: int = 8 * N, batch_size: int = 8, seed: int = 0, **options: Any
) -> StatefulLoader:
    sampler = DistributedSampler(
        RandomSampler(8, 2, batch_size), dist_info=dist_info, seed=seed, sharding="shuffled", remainder="exact"
    )
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, to="torch", preload_to_gpu=False, **options)
    return loader.add_adata(ad.AnnData(np.arange(n_rows, dtype="float32").reshape(-1, 1)))


def rows_in(batch: Any) -> list[int]:
    """Return the rows of a batch, which are the same in all of its stores."""
    parts = [batch] if "index" in batch else list(batch.values())
    rows: list[int] = parts[0]["index"].tolist()
    assert all(part["index"].tolist() == rows for part in parts)
    return rows


class Module(LightningModule):
    """A model that records the rows of each step, and calls `within` or `after` at one step."""

    def __init__(
        self,
        within: Callable[[Trainer], object] | None = None,
        at: tuple[int, int] = (1, 3),
        after: Callable[[Trainer], object] | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.within, self.after, self.at = within, after, at
        self.read: list[tuple[int, list[int]]] = []
        self.asks_for_steps, self.lr = False, 0.1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.within is not None and (self.current_epoch, batch_idx) == self.at:
            self.within(self.trainer)
        first = batch[0] if isinstance(batch, list) else batch
        loss: torch.Tensor = (self.weight * first.get("rna", first)["X"]).sum()
        return loss

    def on_train_batch_end(self, outputs: object, batch: Any, batch_idx: int) -> None:
        self.read.append((self.current_epoch, rows_in(batch)))
        if self.after is not None and (self.current_epoch, batch_idx) == self.at:
            self.after(self.trainer)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch.get("rna", batch)["index"]

    def configure_optimizers(self) -> Any:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches == 3 * N
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer_of(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 3, "logger": False, "enable_progress_bar": False}
        | {"enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder}
        | options
    )


def epochs_of(module: Module) -> list[list[list[int]]]:
    """Return the batches of each epoch that the module was trained on."""
    return [[rows for epoch, rows in module.read if epoch == number] for number in range(3)]


def alone(make: Callable[[Any], Any] | None = None, **options: Any) -> list[list[list[int]]]:
    """Return the batches of each epoch of a loader in a plain loop."""
    rank = Rank(0, 1)
    loader, epochs = loader_of(rank, **options) if make in (None, by_workers) else make(rank), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append([rows_in(batch) for batch in loader])
    return epochs


def by_trainer(trainer: Trainer) -> Any:
    return loader_of(trainer)


def by_nothing(trainer: Trainer) -> Any:
    return loader_of(Rank(0, 1))


def by_workers(trainer: Trainer) -> Any:
    return loader_of(trainer).to_dataloader(num_workers=2, multiprocessing_context="fork")


def by_mixture(trainer: Any) -> MixedLoader:
    loaders = {"large": loader_of(trainer), "small": loader_of(trainer, n_rows=24, seed=1)}
    return MixedLoader(loaders, weights={"large": 2, "small": 1}, n_steps=N)


def by_aligned(trainer: Any) -> AlignedLoader:
    stores = {"rna": loader_of(trainer), "protein": loader_of(trainer)}
    return AlignedLoader(stores, batch_sampler=stores["rna"].sampler)


WAYS = [by_trainer, by_nothing, by_workers, by_mixture, by_aligned]
#: One function for each kind of loader.
KINDS = [by_nothing, by_workers, by_mixture, by_aligned]


def fail(trainer: Trainer) -> None:
    raise InterruptedError


def preempt(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def save_to(folder: Path) -> Callable[[Trainer], None]:
    return lambda trainer: trainer.save_checkpoint(folder / "within.ckpt")


@pytest.mark.parametrize(
    ("how", "make"),
    [
        *(("by hand", make) for make in WAYS),
        *(("by an error", make) for make in (by_nothing, by_mixture)),
        *(("by slurm", make) for make in (by_trainer, by_workers, by_mixture)),
    ],
)
def test_checkpoint_within_step_leads_to_its_batch(
    how: str, make: Callable[[Trainer], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint saved within a step leads to the batch of that step."""
    options: dict[str, Any] = {}
    first = Module({"by hand": save_to(tmp_path), "by an error": fail, "by slurm": preempt}[how])
    if how == "by slurm":
        for name, value in {"NTASKS": "1", "JOB_ID": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        options["plugins"] = [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]
    if how == "by an error":
        options |= {"callbacks": [callback := OnExceptionCheckpoint(tmp_path, "within")], "enable_checkpointing": True}
        monkeypatch.setattr(callback, "teardown", lambda *_, **__: None)  # teardown would remove the checkpoint
    trainer = trainer_of(tmp_path, **options)
    try:
        trainer.fit(first, make(trainer))
    except InterruptedError:
        assert how == "by an error"
    before = first.read[: N + 3]
    (checkpoint,) = tmp_path.glob("*.ckpt")
    monkeypatch.undo()
    trainer, rest = trainer_of(tmp_path), Module()
    trainer.fit(rest, make(trainer), ckpt_path=checkpoint)
    whole = [(epoch, batch) for epoch, batches in enumerate(alone(make)) for batch in batches]
    if make is by_workers:
        assert sorted(before + rest.read) == sorted(whole)
    else:
        assert before + rest.read == whole


@pytest.mark.parametrize(("make", "at"), [(by_nothing, (1, 3)), *((make, (0, N - 1)) for make in KINDS)])
def test_checkpoint_after_step_leads_to_next_batch(
    make: Callable[[Trainer], Any], at: tuple[int, int], tmp_path: Path
) -> None:
    """A checkpoint saved after a step leads to the next batch."""
    first, rest = Module(at=at, after=save_to(tmp_path)), Module()
    for module, checkpoint in ((first, None), (rest, tmp_path / "within.ckpt")):
        trainer = trainer_of(tmp_path)
        trainer.fit(module, make(trainer), ckpt_path=checkpoint)
    epoch, step = at
    assert rest.read == first.read[epoch * N + step + 1 :]
    assert [sorted(batches) for batches in epochs_of(first)] == [sorted(batches) for batches in alone(make)]


@pytest.mark.parametrize("make", KINDS)
def test_estimated_steps_keep_loaded_state(make: Callable[[Trainer], Any], tmp_path: Path) -> None:
    """A schedule that reads the number of steps does not drop the state."""

    def fit(checkpoint: Path | None) -> Module:
        module, trainer = Module(save_to(tmp_path) if checkpoint is None else None), trainer_of(tmp_path)
        module.asks_for_steps = True
        trainer.fit(module, make(trainer), ckpt_path=checkpoint)
        return module

    whole = fit(None).read
    assert fit(tmp_path / "within.ckpt").read == whole[N + 3 :]


@pytest.mark.parametrize("make", KINDS)
def test_overfit_batches_repeats_first_batches(make: Callable[[Trainer], Any], tmp_path: Path) -> None:
    """overfit_batches gives the first batches in every epoch."""
    trainer, module = trainer_of(tmp_path, overfit_batches=3), Module()
    trainer.fit(module, make(trainer))
    first, second, third = epochs_of(module)
    assert first == second == third
    assert len(first) == 3
    if make is not by_workers:
        assert first == alone(make)[0][:3]


OPTIONS: list[tuple[dict[str, Any], list[int]]] = [
    ({"limit_train_batches": 3}, [3, 3, 3]),
    ({"fast_dev_run": 2}, [2, 0, 0]),
    ({"reload_dataloaders_every_n_epochs": 1}, [N, N, N]),
    ({"use_distributed_sampler": False}, [N, N, N]),
    ({"max_steps": N + 2, "max_epochs": -1}, [N, 2, 0]),
    ({"val_check_interval": 0.5, "limit_val_batches": 1}, [N, N, N]),
]


@pytest.mark.parametrize(
    ("make", "options", "n_batches"),
    [(make, *options) for make, options in zip(2 * [by_trainer, by_mixture, by_aligned], OPTIONS, strict=True)],
)
def test_options_cut_epochs_short_and_change_nothing_else(
    options: dict[str, Any], n_batches: list[int], make: Callable[[Trainer], Any], tmp_path: Path
) -> None:
    trainer, module = trainer_of(tmp_path, **options), Module()
    trainer.fit(module, make(trainer), make(trainer) if "limit_val_batches" in options else None)
    assert epochs_of(module) == [epoch[:n] for epoch, n in zip(alone(make), n_batches, strict=True)]


@pytest.mark.parametrize("make", [by_trainer, by_mixture, by_aligned])
def test_validations_are_whole_and_leave_the_training(make: Callable[[Trainer], Any], tmp_path: Path) -> None:
    """Each validation reads a whole epoch, also after the sanity check, and doesn't change the training."""

    class Validated(Module):
        def on_validation_epoch_start(self) -> None:
            self.validated = [*getattr(self, "validated", []), []]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated[-1].append(rows_in(batch))

    trainer, module = trainer_of(tmp_path, num_sanity_val_steps=3, limit_train_batches=5), Validated()
    trainer.fit(module, make(trainer), make(trainer))
    whole = alone(make)
    assert module.validated == [whole[0][:3], *whole]
    assert epochs_of(module) == [epoch[:5] for epoch in whole]


@pytest.mark.parametrize("make", [by_trainer, by_mixture, by_aligned])
def test_lr_find_reads_batches_that_training_reads_again(make: Callable[[Trainer], Any], tmp_path: Path) -> None:
    trainer, module = trainer_of(tmp_path, enable_checkpointing=True), Module()
    loader = make(trainer)
    Tuner(trainer).lr_find(module, loader, num_training=5, update_attr=False)
    module.read.clear()
    trainer.fit(module, loader)
    assert epochs_of(module) == alone(make)


def test_predicting_takes_either_form_of_a_loader(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    for make in (by_trainer, by_workers):
        rows_of_batches = trainer.predict(Module(), make(trainer))
        assert sorted(torch.cat([torch.as_tensor(rows) for rows in rows_of_batches]).tolist()) == list(range(8 * N))


class Two(Module):
    """A model with two loaders, one of which ends before the other."""

    def on_train_batch_end(self, outputs: object, batch: Any, batch_idx: int) -> None:
        rows = [(number, part["index"].tolist()) for number, part in enumerate(batch) if part is not None]
        self.read.append((self.current_epoch, rows))


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
def test_ended_loader_of_two_is_not_restarted(mode: str, tmp_path: Path) -> None:
    """Of two loaders, the one that has ended is not read again; if it cycles, its next epoch can't be resumed here."""

    def fit(checkpoint: Path | None) -> list[Any]:
        trainer = trainer_of(tmp_path)
        module = Two(save_to(tmp_path) if checkpoint is None else None, at=(1, 5 if mode != "min_size" else 2))
        loaders = [loader_of(trainer), loader_of(trainer, n_rows=24, seed=1)]
        trainer.fit(module, CombinedLoader(loaders, mode), ckpt_path=checkpoint)
        return module.read

    whole = fit(None)
    n_epoch = 3 if mode == "min_size" else N
    assert len(whole) == 3 * n_epoch
    if mode == "max_size_cycle":
        with pytest.raises(ValueError, match=r"set_epoch\(1\) would discard the loaded state of epoch 2"):
            fit(tmp_path / "within.ckpt")
        return
    assert fit(tmp_path / "within.ckpt") == whole[n_epoch + (2 if mode == "min_size" else 5) :]


class Pairs:
    """An object unknown to Lightning that takes two batches of a loader in each step."""

    def __init__(self, loader: StatefulLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader) // 2

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        return ({"X": first["X"], "index": second["index"]} for first, second in zip(batches, batches, strict=True))


def test_wrapped_loader_counts_yielded_batches(tmp_path: Path) -> None:
    """A loader inside another object counts the batches that it has yielded."""
    trainer = trainer_of(tmp_path)
    loader, states = loader_of(trainer), list[Any]()
    module = Module(lambda _: states.append(loader.state_dict()), at=(0, 2))
    trainer.fit(module, Pairs(loader))
    assert epochs_of(module)[0] == alone()[0][1::2]
    assert states[0]["segments"] == [[1, 1, 6]]


class Cells(LightningDataModule):
    """A data module whose loader Lightning saves in checkpoints."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"dist_info": Rank(0, 1)} | options

    def setup(self, stage: str) -> None:
        self.loader = loader_of(**self.options)

    def train_dataloader(self) -> StatefulLoader:
        return self.loader


class Saving(Cells):
    """A data module that saves the state of its loader, as in the example."""

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_data_module_resumes_on_other_devices(before: int, after: int, tmp_path: Path) -> None:
    """A data module that saves its loader's state resumes on more or fewer devices, and completes the epoch."""
    always = {"reload_dataloaders_every_n_epochs": 1}
    first, rest = Module(at=(1, 1), after=save_to(tmp_path)), Module()
    trainer_of(tmp_path, **always).fit(first, Saving(dist_info=Rank(0, before)))
    trainer_of(tmp_path, **always).fit(rest, Saving(dist_info=Rank(0, after)), ckpt_path=tmp_path / "within.ckpt")
    stopped, resumed = (loader_of(Rank(0, n)) for n in (before, after))
    stopped.set_epoch(1)
    assert len([*islice(stopped, 2)]) == 2
    resumed.load_state_dict(stopped.state_dict())
    assert epochs_of(rest) == [[], *([rows_in(batch) for batch in resumed] for _ in range(2))]


class Restarting(Module):
    """A model that restarts the epoch of a checkpoint, as in the documentation."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        loop = checkpoint["loops"]["fit_loop"]
        loop["state_dict"].pop("combined_loader")
        progress = loop["epoch_loop.batch_progress"]
        progress["current"].update(ready=0, started=0, processed=0, completed=0)
        progress["total"]["completed"] = progress["total"]["processed"]


def test_epoch_longer_than_lightning_expects_raises(tmp_path: Path) -> None:
    """An epoch with more batches than Lightning expects raises."""
    trainer = trainer_of(tmp_path)
    trainer.fit(Module(save_to(tmp_path)), loader_of(Rank(0, 1)))
    trainer = trainer_of(tmp_path)
    with pytest.raises(RuntimeError, match=r"Lightning will read 4 batches.*reload_dataloaders_every_n_epochs=1"):
        trainer.fit(Module(), loader_of(Rank(0, 2)), ckpt_path=tmp_path / "within.ckpt")


@pytest.mark.parametrize("change", [{"n_rows": 9 * N}, {"batch_size": 16}])
def test_resized_epoch_raises_with_fix(change: dict[str, Any], tmp_path: Path) -> None:
    """An epoch of a different size raises, and the error says how to restart it."""
    trainer = trainer_of(tmp_path)
    trainer.fit(Module(save_to(tmp_path)), Cells())
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match="different settings") as caught:
        trainer.fit(Module(), Cells(**change), ckpt_path=tmp_path / "within.ckpt")
    assert ["restart the epoch" in note for note in caught.value.__notes__] == [True]
    trainer, module = trainer_of(tmp_path), Restarting()
    trainer.fit(module, Cells(**change), ckpt_path=tmp_path / "within.ckpt")
    assert epochs_of(module) == [[], *alone(**change)[1:]]


@pytest.mark.parametrize("at", [(1, 3), (0, N - 1)])
def test_restarted_epoch_counts_from_zero(at: tuple[int, int], tmp_path: Path) -> None:
    """A restarted epoch counts its steps from 0, even after the last step of an epoch."""
    more = {"n_rows": 9 * N}
    trainer = trainer_of(tmp_path)
    trainer.fit(Module(at=at, after=save_to(tmp_path)), Cells())
    trainer = trainer_of(tmp_path)
    if at == (0, N - 1):  # there is no order to restore, so the state can be loaded
        with pytest.raises(RuntimeError, match=f"Lightning counts {N} batches of this epoch as done"):
            trainer.fit(Module(), Cells(**more), ckpt_path=tmp_path / "within.ckpt")
    trainer, module = trainer_of(tmp_path), Restarting()
    trainer.fit(module, Cells(**more), ckpt_path=tmp_path / "within.ckpt")
    assert epochs_of(module)[at[0] :] == alone(**more)[at[0] :]


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end", "on_train_end"])
def test_training_loader_is_refused_in_hooks(hook: str, tmp_path: Path) -> None:
    """A hook that reads the loader that trains raises, since it would change the state; a second loader works."""
    loader, second = loader_of(Rank(0, 1)), loader_of(Rank(0, 1))
    read: list[int] = []

    def read_in(other: StatefulLoader) -> None:
        module = Module()
        setattr(module, hook, lambda *_: read.append(sum(1 for _ in other)))
        trainer_of(tmp_path, max_epochs=2).fit(module, loader)

    with pytest.raises(RuntimeError, match=r"iterated over in a hook, .* Iterate over a second loader"):
        read_in(loader)
    read.clear()
    loader.set_epoch(0)
    read_in(second)
    assert set(read) == {N}


def test_fabric_keeps_state_of_to_dataloader() -> None:
    """Fabric accepts the result of to_dataloader, and its epoch count does not drop the state."""
    fabric = Fabric(accelerator="cpu", devices=1)

    def batches() -> Any:
        return fabric.setup_dataloaders(loader_of(fabric).to_dataloader())

    whole = alone()
    first = batches()
    assert [[batch["index"].tolist() for batch in first] for _ in range(3)] == whole
    source = loader_of(fabric)
    source.set_epoch(1)
    next(iter(source))
    again = batches()
    again._dataloader.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match="would discard"):
        next(iter(again))
