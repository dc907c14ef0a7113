"""scvi-tools: a data module of annbatch's loaders that gives every rank of a job its own share.

scvi-tools 1.5.1 trains from annbatch by its ``AnnbatchDataModule``, which knows nothing of ranks: each rank trains and
validates on all cells. This module needs only what any ``LightningDataModule`` has, and imports nothing of scvi-tools.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from annbatch import Loader
from annbatch.samplers import RandomSampler

from annbatch_distributed.checks.exchange import initialized
from annbatch_distributed.integrations.embedding import embed
from annbatch_distributed.loader import StatefulLoader
from annbatch_distributed.ranks import Deferred, DistInfo, Rank, deferred
from annbatch_distributed.rows import integer
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.wrapped import n_draws

__all__ = ["distribute", "embed"]

#: Where the data module's state has the states of the training's loaders.
_KEY = "annbatch_distributed"
_TRAINING = "train_dataloader"
_HOOKS = (_TRAINING, "val_dataloader", "test_dataloader", "predict_dataloader")


def distribute[Module](
    datamodule: Module,
    *,
    dist_info: DistInfo | Deferred | None = None,
    read_ahead: int = 0,
    seed: int = 0,
    **options: Any,  # noqa: ANN401 the sampler's own
) -> Module:
    """Have every rank train and validate on its own share of a data module's cells.

    Training reads the cells of its split, shared out anew for each number of ranks, with the same number of batches on
    every rank. Where the data module draws classes (``class_sampler_key``), every rank draws from all cells of the
    split, and the job as many as one rank would alone. Validation reads each of its cells once. A checkpoint holds how
    far the epoch is: with ``ckpt_path``, a job resumes in the middle of it, on as many ranks as there are then. Before
    the first epoch, ranks check that they have the same configuration.

    Parameters
    ----------
    datamodule
        scvi-tools' ``AnnbatchDataModule``, or any ``LightningDataModule`` whose hooks return annbatch loaders. It stays
        as it is: what is returned is a shallow copy.
    dist_info
        As for :class:`.DistributedSampler`. None asks the trainer that the data module is used with, which is right on
        any number of devices.
    read_ahead
        How many load requests of the training are read ahead, see :class:`.StatefulLoader`.
    seed
        Shuffles, on every rank alike. Another one gives other epochs.
    options
        Further arguments of the :class:`.DistributedSampler` of the training, such as ``sharding="shuffled"`` for cells
        that are sorted on disk, ``remainder="exact"`` or ``virtual_ranks=8``.

    Returns
    -------
    A data module of a subclass, with all that ``datamodule`` has, for any number of trainings.

    Raises
    ------
    TypeError
        If ``datamodule`` is no data module, has been distributed before, or has a hook that was assigned to it; or if
        an option has a name or a type that the sampler doesn't take.
    ValueError
        If ``dist_info`` is unknown, or an option has a value that the sampler doesn't take.

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> from annbatch import Loader
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import Rank
    >>> from annbatch_distributed.integrations.scvi import distribute
    >>> from lightning import LightningDataModule
    >>> class Cells(LightningDataModule):
    ...     def train_dataloader(self):
    ...         loader = Loader(
    ...             batch_sampler=RandomSampler(4, 2, 4, mask=slice(0, 40)),
    ...             preload_to_gpu=False,
    ...         )
    ...         return loader.add_adata(ad.AnnData(np.zeros((48, 1))))
    >>> rank_1 = distribute(Cells(), dist_info=Rank(1, 2)).train_dataloader()
    >>> rank_1.sampler.plan(rank_1.n_obs).shard(1).rows
    Rows(20:40)
    """
    if isinstance(datamodule, _Distributed):
        raise TypeError(
            f"{type(datamodule).__name__} was distributed before, and its rows would be shared out once more."
        )
    is_module = callable(getattr(datamodule, "train_dataloader", None)) and not hasattr(datamodule, "training_step")
    if isinstance(datamodule, type) or not is_module:
        hint = " Pass an instance, not the class." if isinstance(datamodule, type) else ""
        raise TypeError(
            f"Expected a LightningDataModule such as scvi-tools' AnnbatchDataModule, got {datamodule!r}.{hint}"
        )
    if own := [name for name in _HOOKS if name in vars(datamodule)]:
        raise TypeError(
            f"The {', '.join(own)} of this {type(datamodule).__name__} was assigned to it, so that what it returns "
            "can't be shared out. Make it a method of a subclass of LightningDataModule."
        )
    # raise here what would fail when a trainer asks for loaders; any option fits this sampler
    trial = RandomSampler(1, 1, 1, replacement=True, num_samples=1)
    DistributedSampler(trial, dist_info=Rank(0, 1), seed=integer("seed", seed, least=0), **options)
    integer("read_ahead", read_ahead, least=0)
    if dist_info is not None:
        deferred(dist_info)
    distributed: Any = copy.copy(datamodule)
    distributed.__class__ = _distributed_class(distributed.__class__)
    distributed._sharing = _Sharing(dist_info, read_ahead, {"seed": seed, **options})
    return distributed  # type: ignore[no-any-return]  # of a subclass that is made at run time


class _Sharing:
    """The loaders of a data module on this rank, which it makes once for each trainer."""

    def __init__(self, dist_info: DistInfo | Deferred | None, read_ahead: int, options: dict[str, Any]) -> None:
        self._dist_info, self._read_ahead, self._options = dist_info, read_ahead, options
        #: for each hook: the trainer and the reload that the loaders are for, and the loaders
        self._loaders: dict[str, tuple[tuple[Any, int | None], Any]] = {}
        #: the trainer that states are for, None for any, and the state of each loader of the training
        self.to_load: tuple[Any, Sequence[Mapping[str, Any]]] | None = None
        #: the trainer that has resumed an epoch, and after how many epochs the user has it reload
        self._resumed: tuple[Any, int] = None, 0

    def loaders(self, hook: str, trainer: Any, make: Callable[[], Any]) -> Any:  # noqa: ANN401 whatever hooks return
        """Return this rank's loaders for a trainer: the same loaders whoever asks, until the user has it reload."""
        (of_trainer, of_epoch), known = self._loaders.get(hook, ((None, None), None))
        n_epochs = getattr(trainer, "reload_dataloaders_every_n_epochs", 0)
        # the reload of every epoch after a resume is this package's, not the user's
        if trainer is self._resumed[0]:
            n_epochs = self._resumed[1]
        epoch = trainer.current_epoch // n_epochs if n_epochs else None
        if trainer is None or of_trainer is not trainer or of_epoch != epoch:
            known = self._shared(hook, trainer, make())
            self._loaders[hook] = (trainer, epoch), known
        if hook == _TRAINING and self.to_load is not None:
            of_trainer, states = self.to_load
            self.to_load = None
            # a trainer may have failed between restoring the state and asking for loaders
            if of_trainer is None or of_trainer is trainer:
                self._load(trainer, states)
        return known

    def _shared(self, hook: str, trainer: Any, loaders: Any) -> Any:  # noqa: ANN401 whatever hooks return
        """Return this rank's part of what loaders read; other loaders than annbatch's stay as they are."""
        if isinstance(loaders, list | tuple):
            return [self._shared(hook, trainer, loader) for loader in loaders]
        if isinstance(loaders, Mapping):
            return {name: self._shared(hook, trainer, loader) for name, loader in loaders.items()}
        if isinstance(loaders, Loader):
            return self._loader(hook, trainer, loaders)
        if isinstance(getattr(loaders, "dataset", None), Loader):
            raise TypeError(
                f"{hook} returns a {type(loaders).__name__} around an annbatch Loader, of which every rank would read "
                "everything. Return the Loader itself: it makes the batches."
            )
        return loaders

    def _loader(self, hook: str, trainer: Any, loader: Loader[Any, Any]) -> StatefulLoader:  # noqa: ANN401 Lightning's
        dist_info = trainer if self._dist_info is None else self._dist_info
        if dist_info is None:
            raise RuntimeError(
                "Which rank this is says the trainer, and this data module has none yet: its loaders are there in a "
                "training. To look at one by itself, pass dist_info to distribute, such as Rank(0, 2)."
            )
        if isinstance(loader, StatefulLoader) or isinstance(loader.batch_sampler, DistributedSampler):
            raise TypeError(
                f"{hook} returns a {type(loader).__name__} with a {type(loader.batch_sampler).__name__}, and its rows "
                "would be shared out twice, or without the mask of the split. Give the data module annbatch's own "
                "Loader and sampler."
            )
        options: dict[str, Any] = {"remainder": "exact", "seed": self._options["seed"]}
        if hook == _TRAINING:
            draws = n_draws(loader.batch_sampler, loader.n_obs) is not None
            options = ({"sharding": "independent"} if draws else {}) | self._options
        sampler = DistributedSampler(loader.batch_sampler, dist_info=dist_info, **options)
        read_ahead = self._read_ahead if hook == _TRAINING else 0
        made = StatefulLoader.from_loader(loader, batch_sampler=sampler, read_ahead=read_ahead)
        if initialized() is not None:
            made.check_ranks_agree()
        return made

    def training(self) -> list[StatefulLoader]:
        """Return the loaders of the training that have states."""
        _, loaders = self._loaders.get(_TRAINING, (None, None))
        return list(_stateful(loaders))

    def __getstate__(self) -> dict[str, Any]:
        # copies and started ranks make their own loaders
        by_hand = self.to_load if self.to_load is not None and self.to_load[0] is None else None
        return vars(self) | {"_loaders": {}, "_resumed": (None, 0), "to_load": by_hand}

    def _load(self, trainer: Any, states: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401 Lightning's
        """Resume from the states of a checkpoint, in a trainer or by hand."""
        loaders = self.training()
        if len(states) != len(loaders):
            raise ValueError(
                f"The state is one of {len(states)} loaders of the training, and this data module has {len(loaders)}. "
                "Resume with the data module that it was saved with."
            )
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
        if trainer is None:
            return
        if trainer is not self._resumed[0]:
            self._resumed = trainer, trainer.reload_dataloaders_every_n_epochs
        # a resumed epoch may have another number of batches than the epochs that follow
        trainer.reload_dataloaders_every_n_epochs = 1
        done = trainer.fit_loop.epoch_loop.batch_progress.current
        if done.ready and loaders and all(loader.next_epoch > trainer.current_epoch for loader in loaders):
            # the epoch has ended, which the trainer can't tell from the batches of another number of ranks
            done.ready = done.started = done.processed = done.completed = max(map(len, loaders))


def _stateful(loaders: Any) -> Iterator[StatefulLoader]:  # noqa: ANN401 whatever hooks return
    if isinstance(loaders, StatefulLoader):
        yield loaders
    elif isinstance(loaders, list | Mapping):
        for each in loaders.values() if isinstance(loaders, Mapping) else loaders:
            yield from _stateful(each)


class _Distributed:
    """The first base of a data module that was distributed."""

    _sharing: _Sharing
    trainer: Any

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]  # only the data module mixed in has it
        states = [loader.state_dict() for loader in self._sharing.training()]
        return {**state, _KEY: states} if states else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = {name: value for name, value in state_dict.items() if name != _KEY}
        super().load_state_dict(own)  # type: ignore[misc]  # only the data module mixed in has it
        # a trainer that isn't running is an earlier training's
        trainer = self.trainer if self.trainer is not None and self.trainer.state.status == "running" else None
        if trainer is None or trainer.state.fn == "fit":  # not to evaluate what a checkpoint holds
            states = state_dict.get(_KEY)
            self._sharing.to_load = None if states is None else (trainer, states)

    def __copy__(self) -> Any:  # noqa: ANN401 a data module
        made = object.__new__(type(self))
        vars(made).update(vars(self), _sharing=copy.copy(self._sharing))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        base = type(self).__mro__[2]
        return _unpickled, (base,), self.__getstate__()


def _unpickled(base: type) -> Any:  # noqa: ANN401 a data module
    return object.__new__(_distributed_class(base))


@cache
def _distributed_class(base: type[Any]) -> Any:  # noqa: ANN401 a class
    """Return a subclass of the same name, by which Lightning finds states."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made = type(base.__name__, (_Distributed, base), names)
    # hooks that the data module has itself; Lightning's own only raise
    for name in _HOOKS:
        owner = next((kind for kind in base.__mro__ if name in vars(kind)), object)
        # Lightning's own hook is for data modules without such cells, and raises
        if owner.__module__.partition(".")[0] not in {"lightning", "pytorch_lightning", "builtins"}:
            setattr(made, name, _hook(name, made))
    return made


def _hook(name: str, kind: type) -> Callable[[_Distributed], Any]:
    def loaders(self: _Distributed) -> Any:  # noqa: ANN401 whatever hooks return
        return self._sharing.loaders(name, self.trainer, getattr(super(kind, self), name))

    return loaders
