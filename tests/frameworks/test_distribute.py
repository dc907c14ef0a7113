"""Distributed data modules of Lightning: copies, hooks, loaders and states."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from annbatch import Loader
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler
from lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.integrations.scvi import distribute
from tests.processes.launch import forked, run

if TYPE_CHECKING:
    from pathlib import Path

N_OBS, N_TRAIN = 101, 80
SIZES = {"chunk_size": 4, "preload_nchunks": 2, "batch_size": 4}


class Cells(LightningDataModule):
    """Cells, each with the number of its row as its only value."""

    def __init__(self) -> None:
        super().__init__()
        self.n_loaders, self.loaded, self.shuffle = 0, {}, True

    def of(self, sampler: Any) -> Loader:
        self.n_loaders += 1
        loader = Loader(batch_sampler=sampler, return_index=True, to="torch", preload_to_gpu=False)
        return loader.add_adata(ad.AnnData(np.arange(N_OBS, dtype="float32").reshape(-1, 1)))

    def train_dataloader(self) -> Loader:
        return self.of((RandomSampler if self.shuffle else SequentialSampler)(**SIZES, mask=slice(0, N_TRAIN)))

    def val_dataloader(self) -> Loader:
        return self.of(SequentialSampler(**SIZES, mask=slice(N_TRAIN, N_OBS)))

    def state_dict(self) -> dict[str, Any]:
        return {"own": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Others(Cells):
    """Cells whose hooks don't return annbatch's loaders."""

    def train_dataloader(self) -> Any:
        return DataLoader([1, 2, 3])

    def val_dataloader(self) -> Any:
        return []


class Classes(Cells):
    """Cells that are sampled by class."""

    def train_dataloader(self) -> Loader:
        classes = pd.Categorical(np.repeat(["B", "T"], [60, N_OBS - 60]))
        return self.of(ClassSampler(**SIZES, classes=classes, num_samples=64, mask=slice(0, N_TRAIN)))


class Reader(LightningModule):
    """A model that records the rows of each epoch, and saves a checkpoint in mid-epoch."""

    def __init__(self, checkpoint: Path | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.checkpoint = checkpoint
        self.at: Any = (1, 3)
        self.read: dict[int, list[list[int]]] = {}
        self.validated: dict[int, list[int]] = {}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.read.setdefault(self.current_epoch, []).append(batch["index"].tolist())
        loss: torch.Tensor = (self.weight * batch["X"]).sum()
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated.setdefault(self.current_epoch, []).extend(batch["index"].tolist())

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.checkpoint is not None and (self.current_epoch, batch_idx) == self.at:
            self.trainer.save_checkpoint(self.checkpoint)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(**options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return Trainer(accelerator="cpu", devices=1, **{"max_epochs": 3, "num_sanity_val_steps": 0, **quiet, **options})


def training_of(cells: LightningDataModule) -> StatefulLoader:
    """Return the training loader of a data module."""
    loader = cells.train_dataloader()
    assert isinstance(loader, StatefulLoader)
    return loader


def test_distribute_copies_data_module() -> None:
    """distribute returns a copy with all attributes of the data module."""
    cells = Cells()
    module = distribute(cells, dist_info=Rank(1, 2))
    assert type(cells) is Cells
    assert isinstance(module, Cells)
    # Lightning stores states by this name
    assert type(module).__qualname__ == Cells.__qualname__
    module.shuffle = False
    assert cells.shuffle
    assert "_sharing" not in vars(cells)
    assert type(cells.train_dataloader()) is Loader
    assert type(distribute(cells)) is type(module)


@pytest.mark.parametrize("rank", range(3))
def test_distribute_shards_training_and_validation(rank: int) -> None:
    """Training is sharded within its mask, and validation has every row once."""
    module = distribute(Cells(), dist_info=Rank(rank, 3), seed=5, sharding="shuffled", prefetch=1)
    training, validation = training_of(module), module.val_dataloader()
    assert isinstance(validation, StatefulLoader)
    assert (training._prefetch, validation._prefetch) == (1, 0)
    assert "seed=5" in repr(validation.sampler)
    assert training.sampler.plan(N_OBS).n_batches(rank) == 7
    assert "sharding=Shuffled" in repr(training.sampler)
    assert "seed=5" in repr(training.sampler)
    assert [batch["index"].tolist() for batch in validation] == [
        list(range(80 + 7 * rank, 84 + 7 * rank)),
        list(range(84 + 7 * rank, 87 + 7 * rank)),
    ]
    assert all(set(batch["index"].tolist()) <= set(range(N_TRAIN)) for batch in training)


def test_distribute_class_sampling_covers_job() -> None:
    """Samplers with replacement sample for the whole job."""
    loader = training_of(distribute(Classes(), dist_info=Rank(0, 2)))
    assert 'sharding="independent"' in repr(loader.sampler)
    assert len(loader) == 8
    other = training_of(distribute(Classes(), dist_info=Rank(0, 2), sharding="contiguous"))
    assert 'sharding="contiguous"' in repr(other.sampler)


def test_distribute_draws_training_cells_by_weights() -> None:
    """Training cells are drawn by their weights, over all ranks, and validation reads each cell once."""
    weights = np.arange(N_OBS, dtype=float)
    ranks = [distribute(Cells(), dist_info=Rank(rank, 2), weights=weights, num_samples=200) for rank in range(2)]
    drawn = np.concatenate([batch["index"] for rank in ranks for batch in rank.train_dataloader()])
    counts = np.bincount(drawn, minlength=N_OBS)
    expected = 200 * weights / weights[:N_TRAIN].sum() * (np.arange(N_OBS) < N_TRAIN)
    assert counts.sum() == 200
    assert (counts >= np.floor(expected)).all()
    assert (counts <= np.ceil(expected)).all()
    validated = np.concatenate([batch["index"] for rank in ranks for batch in rank.val_dataloader()])
    assert sorted(validated.tolist()) == list(range(N_TRAIN, N_OBS))


def test_cells_without_labels_are_warned_of() -> None:
    """Cells without a value in a column of scvi-tools' data module are named, as it makes a category of them."""
    cells: Any = Cells()
    cells.dataset = Loader(batch_sampler=RandomSampler(**SIZES), preload_to_gpu=False)
    donors = pd.Categorical(["a", None, "b", None] * 4)
    obs = pd.DataFrame({"donor": donors, "site": ["x"] * 16}, index=np.arange(16).astype(str))
    cells.dataset.add_adatas([ad.AnnData(np.ones((16, 1), "f4"), obs)] * 2)
    cells._batch_key, cells._label_key, cells._categorical_covariate_keys = "donor", "site", ["donor", "no"]
    with pytest.warns(UserWarning, match=r"16 cells have no value in 'donor', so scvi-tools .*'nan'") as caught:
        distribute(cells)
    assert len(caught) == 1


def test_distribute_leaves_other_loaders() -> None:
    """Loaders that are not annbatch's stay unchanged."""
    module = distribute(Others())
    assert isinstance(module.train_dataloader(), DataLoader)
    assert module.val_dataloader() == []
    assert module.state_dict() == {"own": 3}


class Several(Cells):
    """Cells with several loaders for each hook."""

    def train_dataloader(self) -> Any:
        return {"first": super().train_dataloader(), "others": [DataLoader([1, 2, 3])]}

    def val_dataloader(self) -> Any:
        return super().val_dataloader(), DataLoader([1])

    def test_dataloader(self) -> Any:
        return super().val_dataloader()

    def predict_dataloader(self) -> Any:
        return [super().val_dataloader()]


def test_each_of_several_loaders_is_shared_out() -> None:
    module = distribute(Several(), dist_info=Rank(1, 2))
    training = module.train_dataloader()
    assert training["first"].sampler.rank == 1
    assert isinstance(training["others"][0], DataLoader)
    validation, other = module.val_dataloader()
    assert [row for batch in validation for row in batch["index"].tolist()] == list(range(90, N_OBS))
    assert isinstance(other, DataLoader)
    assert [row for batch in module.test_dataloader() for row in batch["index"].tolist()] == list(range(90, N_OBS))
    assert module.predict_dataloader()[0].sampler.rank == 1
    next(iter(training["first"]))
    (state,) = module.state_dict()["annbatch_distributed"]
    assert state["segments"] == [[2, 1, 1]]
    again = distribute(Several(), dist_info=Rank(1, 2))
    again.load_state_dict(module.state_dict())
    assert again.train_dataloader()["first"].state_dict() == state
    other_module = distribute(Cells(), dist_info=Rank(1, 2))
    other_module.load_state_dict({"annbatch_distributed": [state, state]})
    with pytest.raises(ValueError, match=r"1 training loaders, .* got 2 states"):
        other_module.train_dataloader()


class Wrapped(Cells):
    """Cells behind a DataLoader."""

    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader(), batch_size=None)


class Shared(Cells):
    """Cells that are already sharded."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        sampler = DistributedSampler(loader.batch_sampler, dist_info=Rank(0, 2), seed=0)
        return StatefulLoader.from_loader(loader, batch_sampler=sampler)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Wrapped, r"got a DataLoader"),
        (Shared, r"got a StatefulLoader"),
    ],
)
def test_hook_returning_dataloader_raises(kind: type[Cells], message: str) -> None:
    """A hook that returns a DataLoader or sharded cells raises."""
    with pytest.raises(TypeError, match=message):
        distribute(kind(), dist_info=Rank(0, 2)).train_dataloader()


def test_validated_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    """A state that was loaded for a validation is not resumed."""
    reader, checkpoint = Reader(tmp_path / "middle.ckpt"), tmp_path / "middle.ckpt"
    reader.at = (0, 3)  # the first epoch of a training
    trainer(max_epochs=1).fit(reader, distribute(Cells()))
    module, fresh = distribute(Cells()), Reader()
    validating = trainer(max_epochs=1)
    validating.validate(Reader(), module, ckpt_path=checkpoint)
    validating.fit(fresh, module)
    assert fresh.read == {0: reader.read[0]}


class TrainingOnly(LightningDataModule):
    """Cells without held-out cells."""

    def train_dataloader(self) -> Loader:
        return Cells().train_dataloader()


def test_missing_hooks_stay_missing() -> None:
    """Hooks that a data module doesn't define stay undefined."""
    module, reader = distribute(TrainingOnly()), Reader()
    trainer(max_epochs=1).fit(reader, module)
    assert len(reader.read[0]) == 20
    assert not reader.validated


def test_loaders_without_trainer_raise() -> None:
    """Without a trainer, there is no rank and no loader."""
    module = distribute(Cells())
    assert module.state_dict() == {"own": 3}
    with pytest.raises(RuntimeError, match="not attached to a trainer"):
        module.train_dataloader()


@pytest.mark.parametrize("wrong", [3, Cells, LightningModule()])
def test_it_takes_a_data_module(wrong: Any) -> None:
    with pytest.raises(TypeError, match="datamodule must be a LightningDataModule"):
        distribute(wrong)


def test_a_hook_that_was_assigned_is_an_error() -> None:
    cells: Any = Cells()
    cells.val_dataloader = cells.val_dataloader
    assigned = LightningDataModule.from_datasets(train_dataset=TensorDataset(torch.zeros(3)))
    for wrong, name in (
        (cells, "val_dataloader must be a method of Cells"),
        (assigned, "train_dataloader must be a method of LightningDataModule"),
    ):
        with pytest.raises(TypeError, match=name):
            distribute(wrong)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"shardng": "shuffled"}, TypeError, "shardng"),
        ({"sharding": "shufled"}, ValueError, "sharding must be .* 'shufled'"),
        ({"seed": "x"}, TypeError, "seed"),
        ({"prefetch": -1}, ValueError, "prefetch"),
        ({"dist_info": "tourch"}, ValueError, "Unknown dist_info 'tourch'"),
    ],
)
def test_wrong_option_raises_before_training(option: Any, error: Any, message: str) -> None:
    """A wrong option raises before there is a trainer."""
    with pytest.raises(error, match=message):
        distribute(Cells(), **option)


def test_distribute_accepts_options_of_samplers() -> None:
    """distribute passes options that only some samplers accept, and refuses a second call."""
    for option in ({"sharding": "shuffled"}, {"sharding": "independent"}, {"virtual_ranks": 8}):
        module = distribute(Cells(), **option)
    with pytest.raises(TypeError, match="Cells is already distributed"):
        distribute(module)


def test_each_training_has_one_loader() -> None:
    """A training has one loader, and the next training has its own."""
    module = distribute(Cells())
    first = trainer(max_epochs=2)
    reader = Reader()
    first.fit(reader, module)
    loader = module.train_dataloader()
    next(iter(loader))  # as some scripts do before a training
    assert module.train_dataloader() is loader
    assert module.n_loaders == 2
    assert [len(batches) for batches in reader.read.values()] == [20, 20]
    assert reader.read[0] != reader.read[1]
    assert sorted(reader.validated[0]) == sorted(reader.validated[1]) == list(range(N_TRAIN, N_OBS))
    again = Reader()
    trainer(max_epochs=1).fit(again, module)
    assert module.n_loaders == 4
    assert again.read == {0: reader.read[0]}


def test_ranks_started_after_distribute_have_shards(tmp_path: Path) -> None:
    """Ranks that are started after distribute have their shards."""
    run(forked("-m", "tests.frameworks.job_strategies", "ddp_fork", tmp_path))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for epoch in "01":
        read = [row for rank in ranks for rows in rank["train"][epoch] for row in rows]
        assert sorted(read) == list(range(N_TRAIN))
        assert [len(rank["train"][epoch]) for rank in ranks] == [10, 10]
        validated = [row for rank in ranks for row in rank["validation"][epoch]]
        assert sorted(validated) == list(range(N_TRAIN, N_OBS))


@pytest.mark.parametrize("who", ["both", "only the data module"])
def test_distributed_module_resumes_within_epoch(who: str, tmp_path: Path) -> None:
    """A checkpoint resumes in the middle of an epoch."""
    whole, checkpoint = Reader(tmp_path / "middle.ckpt"), tmp_path / "middle.ckpt"
    trainer().fit(whole, distribute(Cells()))
    if who != "both":  # Lightning saves the states of loaders too
        saved = torch.load(checkpoint, weights_only=False)
        assert saved["loops"]["fit_loop"]["state_dict"].pop("combined_loader")
        torch.save(saved, checkpoint)
    rest, module = Reader(), distribute(Cells())
    trainer().fit(rest, module, ckpt_path=checkpoint)
    assert rest.read == {1: whole.read[1][4:], 2: whole.read[2]}
    assert rest.validated == {epoch: whole.validated[epoch] for epoch in (1, 2)}
    assert module.loaded == {"own": 3}


class Validating(Reader):
    """A model that can also save a checkpoint after the validation of an epoch."""

    def on_validation_end(self) -> None:
        if self.checkpoint is not None and self.current_epoch == 1 and self.at == "validated":
            self.trainer.save_checkpoint(self.checkpoint)


@pytest.mark.parametrize(
    ("before", "after", "done", "reload"),
    [(2, 1, 2, 0), (2, 3, 2, 2), (2, 1, "all", 1), (2, 3, "all", 0), (2, 1, "validated", 2), (2, 3, "validated", 0)],
)
def test_epochs_are_complete_after_resume_anywhere(
    before: int, after: int, done: Any, reload: int, tmp_path: Path
) -> None:
    """Epochs are complete after a resume from any step on a different number of ranks."""
    checkpoint = tmp_path / "saved.ckpt"
    options = {"reload_dataloaders_every_n_epochs": reload}
    n_before, n_after = (-(-N_TRAIN // (4 * ranks)) for ranks in (before, after))
    whole, rest = Validating(checkpoint), Validating()
    whole.at = done if done == "validated" else (1, (n_before if done == "all" else done) - 1)
    trainer(**options).fit(whole, distribute(Cells(), dist_info=Rank(0, before)))
    trainer(**options).fit(rest, distribute(Cells(), dist_info=Rank(0, after)), ckpt_path=checkpoint)
    left = 0 if done in {"all", "validated"} else -(-(N_TRAIN // 4 - before * done) // after)
    batches = {epoch: len(read) for epoch, read in rest.read.items()}
    assert batches == ({1: left} if left else {}) | {2: n_after}


@pytest.mark.parametrize("who", ["whole", "resumed"])
def test_reload_dataloaders_setting_is_respected(who: str, tmp_path: Path) -> None:
    """Loaders are created again every reload_dataloaders_every_n_epochs epochs."""
    module, of_epochs = distribute(Cells()), []

    class Asking(Reader):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            loader = module.train_dataloader()
            assert loader is self.trainer.train_dataloader
            if batch_idx == 5:
                of_epochs.append(loader)

    options = {"max_epochs": 6, "reload_dataloaders_every_n_epochs": 2}
    checkpoint = tmp_path / "middle.ckpt"
    trainer(**options).fit(Asking(checkpoint), module)
    if who == "resumed":
        of_epochs.clear()
        trainer(**options).fit(Asking(), module, ckpt_path=checkpoint)
    expected = [0, 0, 1, 1, 2, 2][-len(of_epochs) :]
    assert len(of_epochs) == (6 if who == "whole" else 5)
    assert [list(dict.fromkeys(of_epochs)).index(loader) for loader in of_epochs] == [n - expected[0] for n in expected]


class Differing(Reader):
    """A model with more parameters, into which no checkpoint can be loaded."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        more = torch.nn.Parameter(torch.zeros(1))
        return torch.optim.SGD([{"params": self.parameters()}, {"params": [more]}], lr=0.0)


def test_failed_resume_leaves_next_training_unchanged(tmp_path: Path) -> None:
    """A resume that fails does not change the next training."""
    whole, checkpoint = Reader(tmp_path / "middle.ckpt"), tmp_path / "middle.ckpt"
    trainer(max_epochs=2).fit(whole, distribute(Cells()))
    module, fresh = distribute(Cells()), Reader()
    with pytest.raises(ValueError, match="parameter group"):
        trainer(max_epochs=2).fit(Differing(), module, ckpt_path=checkpoint)
    following: Any = trainer(max_epochs=2)
    following.fit(fresh, module)
    assert fresh.read == whole.read
    assert following.reload_dataloaders_every_n_epochs == 0


def test_state_loaded_by_hand_is_resumed(tmp_path: Path) -> None:
    """A state that is loaded by hand is resumed, even after another training."""
    whole, checkpoint = Reader(tmp_path / "middle.ckpt"), tmp_path / "middle.ckpt"
    trainer(max_epochs=2).fit(whole, distribute(Cells()))
    module, rest = distribute(Cells()), Reader()
    trainer(max_epochs=1).fit(Reader(), module)
    saved = torch.load(checkpoint, weights_only=False)
    module.load_state_dict(saved["Cells"])
    resuming: Any = trainer(max_epochs=2)
    resuming.fit_loop.epoch_progress.current.processed = resuming.fit_loop.epoch_progress.current.completed = 1
    resuming.fit(rest, module)
    assert rest.read == {1: whole.read[1][4:]}


def test_a_copy_has_a_training_of_its_own() -> None:
    module = distribute(Cells())
    trainer(max_epochs=1).fit(Reader(), module)
    state = module.state_dict()
    copied = copy.copy(module)
    assert "annbatch_distributed" not in copied.state_dict()
    trainer(max_epochs=2).fit(Reader(), copied)
    assert module.state_dict() == state
    assert copied.state_dict() != state


def test_trainer_that_resumes_twice_keeps_loaders(tmp_path: Path) -> None:
    """A trainer that resumes twice keeps its loaders."""
    checkpoint, module, again = tmp_path / "middle.ckpt", distribute(Cells()), trainer()
    trainer(max_epochs=2).fit(Reader(checkpoint), distribute(Cells()))
    read = []
    for _ in range(2):
        reader = Reader()
        again.fit(reader, module, ckpt_path=checkpoint)
        read.append(reader.read)
    assert module.n_loaders == 2
    assert read[0] == read[1]


class Unpicklable(Cells):
    """Cells that exclude an attribute that can't be pickled, and the trainer, from their pickles."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in {"stream", "trainer"}}


@pytest.mark.parametrize("model", [Reader, Differing])
def test_pickle_respects_getstate_of_data_module(model: type[Reader], tmp_path: Path) -> None:
    """Attributes that a data module excludes from its pickles stay excluded."""
    checkpoint = tmp_path / "middle.ckpt"
    trainer(max_epochs=2).fit(Reader(checkpoint), distribute(Unpicklable()))
    module: Any = distribute(Unpicklable())
    resuming: Any = trainer(max_epochs=2)
    module.stream = resuming.stream = (value for value in ())
    # the optimizer raises after the state of the data module was loaded
    with pytest.raises(ValueError) if model is Differing else nullcontext():  # noqa: PT011 a message of torch
        resuming.fit(model(), module, ckpt_path=checkpoint)
    assert not hasattr(pickle.loads(pickle.dumps(module)), "stream")


def test_copy_resumes_state_loaded_by_hand() -> None:
    """A copy resumes a state that was loaded by hand."""
    on_two = distribute(Cells(), dist_info=Rank(0, 2))
    next(iter(on_two.train_dataloader()))
    module = distribute(Cells(), dist_info=Rank(0, 2))
    module.load_state_dict(on_two.state_dict())
    for copied in (copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert training_of(copied).sampler.batches_done == 1
