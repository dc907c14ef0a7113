"""scvi-tools: a data module whose annbatch loaders are sharded across the ranks of a job.

The ``AnnbatchDataModule`` of scvi-tools 1.5.1 doesn't shard: each rank trains and validates on all cells. This module
works for any ``LightningDataModule``, and doesn't import scvi-tools.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any

from annbatch import Loader
from annbatch.samplers import RandomSampler

from annbatch_distributed.checks.exchange import initialized
from annbatch_distributed.core.values import check_arguments, integer, plural
from annbatch_distributed.core.warning import warn
from annbatch_distributed.core.wrapped import n_draws
from annbatch_distributed.integrations.embedding import embed
from annbatch_distributed.loader import StatefulLoader
from annbatch_distributed.loader._annbatch import obs_of
from annbatch_distributed.ranks import DistInfo, Rank, deferred
from annbatch_distributed.sampler import DistributedSampler

__all__ = ["distribute", "embed"]

#: Key of the loaders' states in the state of the data module.
_KEY = "annbatch_distributed"
_TRAINING = "train_dataloader"
_HOOKS = (_TRAINING, "val_dataloader", "test_dataloader", "predict_dataloader")


def distribute[Module](
    datamodule: Module,
    *,
    dist_info: DistInfo | None = None,
    prefetch: int = 1,
    seed: int = 0,
    **options: Any,  # noqa: ANN401 the sampler's own
) -> Module:
    """Shard a data module across the ranks of a job.

    Training reads the cells of its split, with the same number of batches on every rank. If the data module samples
    classes (``class_sampler_key``), every rank samples from all cells of the split, and all ranks together sample as
    many cells as a single rank would. Validation reads each of its cells once. A checkpoint has the position in the
    epoch: with ``ckpt_path``, a job resumes mid-epoch, on any number of ranks. Before the first epoch, ranks check that
    they have the same configuration.

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

    Parameters
    ----------
    datamodule
        ``AnnbatchDataModule`` of scvi-tools, or any ``LightningDataModule`` whose hooks return annbatch loaders. It is
        copied, and not changed.
    dist_info
        Source of the rank and the world size, as for :class:`.DistributedSampler`. None asks the trainer of the data
        module, which is right on any number of devices (default).
    prefetch
        Number of load requests of the training to prefetch (default 1), as for :class:`.StatefulLoader`.
    seed
        Seed of the order, the same on every rank (default 0).
    options
        Other arguments of the :class:`.DistributedSampler` of the training, such as ``sharding="shuffled"`` for cells
        that are sorted on disk, ``virtual_ranks=8``, or ``weights``, of which only cells of the training are drawn. The
        default of ``remainder`` is ``"exact"``.

    Returns
    -------
    LightningDataModule
        Shallow copy of ``datamodule`` in a subclass of its class, for any number of trainings.

    Raises
    ------
    TypeError
        If ``datamodule`` is not a data module, is already distributed, or has a hook that was assigned to the object;
        or if an option has an unknown name or a wrong type.
    ValueError
        If ``dist_info`` is unknown, or an option has an invalid value.
    """
    if isinstance(datamodule, _Distributed):
        raise TypeError(
            f"{type(datamodule).__name__} is already distributed, and its rows would be sharded twice. Pass the "
            "original data module."
        )
    is_module = callable(getattr(datamodule, "train_dataloader", None)) and not hasattr(datamodule, "training_step")
    if isinstance(datamodule, type) or not is_module:
        hint = " Pass an instance, not the class." if isinstance(datamodule, type) else ""
        raise TypeError(
            "datamodule must be a LightningDataModule, such as scvi-tools' AnnbatchDataModule, got "
            f"{datamodule!r}.{hint}"
        )
    if assigned := [name for name in _HOOKS if name in vars(datamodule)]:
        raise TypeError(
            f"{', '.join(assigned)} must be a method of {type(datamodule).__name__}, got an attribute of the object, "
            "whose loaders can't be sharded. Define it in a subclass of LightningDataModule."
        )
    check_arguments("distribute", options, signature(DistributedSampler).parameters.keys() - {"sampler"})
    # wrong options raise here, and not when a trainer asks for loaders. This sampler takes any option: sampling with
    # replacement for sharding="independent", and without for weights, whose copies don't meet in this many chunks
    if options.get("weights") is None:
        trial = RandomSampler(1, 1, 1, replacement=True, num_samples=1)
    else:
        trial = RandomSampler(1, 1 << 20, 1)
    DistributedSampler(trial, dist_info=Rank(0, 1), seed=integer("seed", seed, least=0), **options)
    integer("prefetch", prefetch, least=0)
    _warn_of_missing_labels(datamodule)
    if dist_info is not None:
        deferred(dist_info)
    distributed: Any = copy.copy(datamodule)
    distributed.__class__ = _distributed_class(distributed.__class__)
    if options.get("remainder") is None and "enforce_equal_batches" not in options:
        options["remainder"] = "exact"
    distributed._sharing = _Sharing(dist_info, prefetch, {"seed": seed, **options})
    return distributed  # type: ignore[no-any-return]  # of a subclass that is made at run time


def _warn_of_missing_labels(datamodule: Any) -> None:  # noqa: ANN401 any data module
    """Warn if cells have no value in a column of scvi-tools' data module, which takes them for a category ``nan``."""
    loader = getattr(datamodule, "dataset", None)
    names = [getattr(datamodule, f"_{name}_key", None) for name in ("batch", "label", "sample")]
    columns = dict.fromkeys([*names, *(getattr(datamodule, "_categorical_covariate_keys", None) or ())])
    tables = obs_of(loader) if isinstance(loader, Loader) else []
    for column in columns:
        n_missing = sum(int(obs[column].isna().sum()) for obs in tables if column in obs)
        if n_missing:
            warn(
                f"{plural(n_missing, 'cell')} have no value in {column!r}, so scvi-tools trains them as a category "
                "'nan'. Leave them out of the collection, or name them if they belong together."
            )


class _Sharing:
    """Loaders of a data module on this rank, made once for each trainer."""

    def __init__(self, dist_info: DistInfo | None, prefetch: int, options: dict[str, Any]) -> None:
        self._dist_info, self._prefetch, self._options = dist_info, prefetch, options
        #: by hook: the trainer and the number of the reload, and the loaders
        self._loaders: dict[str, tuple[tuple[Any, int | None], Any]] = {}
        #: the trainer, or None for any trainer, and the states to load into its training loaders
        self.to_load: tuple[Any, Sequence[Mapping[str, Any]]] | None = None
        #: the trainer that has resumed an epoch, and the user's reload_dataloaders_every_n_epochs
        self._resumed: tuple[Any, int] = None, 0

    def loaders(self, hook: str, trainer: Any, make: Callable[[], Any]) -> Any:  # noqa: ANN401 whatever hooks return
        """Return this rank's loaders for a trainer, the same ones until the trainer reloads them."""
        (of_trainer, of_epoch), known = self._loaders.get(hook, ((None, None), None))
        n_epochs = getattr(trainer, "reload_dataloaders_every_n_epochs", 0)
        # after a resume, this package makes the trainer reload in every epoch
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
        """Return loaders of this rank's shard; loaders other than annbatch's are unchanged."""
        if isinstance(loaders, list | tuple):
            return [self._shared(hook, trainer, loader) for loader in loaders]
        if isinstance(loaders, Mapping):
            return {name: self._shared(hook, trainer, loader) for name, loader in loaders.items()}
        if isinstance(loaders, Loader):
            return self._loader(hook, trainer, loaders)
        if isinstance(getattr(loaders, "dataset", None), Loader):
            raise TypeError(
                f"{hook} must return an annbatch Loader itself, got a {type(loaders).__name__} of a Loader, whose "
                "cells every rank would read. Return the Loader, which makes the batches."
            )
        return loaders

    def _loader(self, hook: str, trainer: Any, loader: Loader[Any, Any]) -> StatefulLoader:  # noqa: ANN401 Lightning's
        dist_info = trainer if self._dist_info is None else self._dist_info
        if dist_info is None:
            raise RuntimeError(
                "The rank is unknown, because this data module is not attached to a trainer yet. To make its loaders "
                "without a trainer, pass dist_info to distribute(), such as Rank(0, 2)."
            )
        if isinstance(loader, StatefulLoader) or isinstance(loader.batch_sampler, DistributedSampler):
            raise TypeError(
                f"{hook} must return annbatch's own Loader and sampler, got a {type(loader).__name__} with a "
                f"{type(loader.batch_sampler).__name__}, whose rows would be sharded twice, or without the mask of the "
                "split. Pass annbatch's own Loader and sampler to the data module."
            )
        options: dict[str, Any] = {"remainder": "exact", "seed": self._options["seed"]}
        if hook == _TRAINING:
            draws = n_draws(loader.batch_sampler, loader.n_obs) is not None
            options = ({"sharding": "independent"} if draws else {}) | self._options
        sampler = DistributedSampler(loader.batch_sampler, dist_info=dist_info, **options)
        prefetch = self._prefetch if hook == _TRAINING else 0
        # Lightning moves batches to the GPU, which threads that prefetch must not use
        options_of_loader = {"prefetch": prefetch, "preload_to_gpu": False}
        sharded = StatefulLoader.from_loader(loader, batch_sampler=sampler, **options_of_loader)
        if initialized() is not None:
            sharded.check_ranks_agree()
        return sharded

    def training(self) -> list[StatefulLoader]:
        """Return the training loaders that have states."""
        _, loaders = self._loaders.get(_TRAINING, (None, None))
        return list(_stateful(loaders))

    def __getstate__(self) -> dict[str, Any]:
        # copies and spawned ranks make their own loaders, and load only states that are for any trainer
        states = self.to_load if self.to_load is not None and self.to_load[0] is None else None
        return vars(self) | {"_loaders": {}, "_resumed": (None, 0), "to_load": states}

    def _load(self, trainer: Any, states: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401 Lightning's
        """Resume from the states of a checkpoint; ``trainer`` is None outside of a training."""
        loaders = self.training()
        if len(states) != len(loaders):
            raise ValueError(
                f"The state must be of {len(loaders)} training loaders, as in this data module, got {len(states)} "
                "states. Resume with the data module that saved it."
            )
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
        if trainer is None:
            return
        if trainer is not self._resumed[0]:
            self._resumed = trainer, trainer.reload_dataloaders_every_n_epochs
        # a resumed epoch may have a different number of batches than later epochs
        trainer.reload_dataloaders_every_n_epochs = 1
        done = trainer.fit_loop.epoch_loop.batch_progress.current
        if done.ready and loaders and all(loader.next_epoch > trainer.current_epoch for loader in loaders):
            # the epoch has ended, but the trainer can't tell: it counted the batches on a different number of ranks
            done.ready = done.started = done.processed = done.completed = max(map(len, loaders))


def _stateful(loaders: Any) -> Iterator[StatefulLoader]:  # noqa: ANN401 whatever hooks return
    if isinstance(loaders, StatefulLoader):
        yield loaders
    elif isinstance(loaders, list | Mapping):
        for each in loaders.values() if isinstance(loaders, Mapping) else loaders:
            yield from _stateful(each)


class _Distributed:
    """First base class of a distributed data module."""

    _sharing: _Sharing
    trainer: Any

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]  # only the data module mixed in has it
        states = [loader.state_dict() for loader in self._sharing.training()]
        return {**state, _KEY: states} if states else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        of_module = {name: value for name, value in state_dict.items() if name != _KEY}
        super().load_state_dict(of_module)  # type: ignore[misc]  # only the data module mixed in has it
        # a trainer that isn't running is of an earlier training
        trainer = self.trainer if self.trainer is not None and self.trainer.state.status == "running" else None
        if trainer is None or trainer.state.fn == "fit":  # not for an evaluation of a checkpoint
            states = state_dict.get(_KEY)
            self._sharing.to_load = None if states is None else (trainer, states)

    def __copy__(self) -> Any:  # noqa: ANN401 a data module
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self), _sharing=copy.copy(self._sharing))
        return duplicate

    def __reduce__(self) -> tuple[Any, ...]:
        base = type(self).__mro__[2]
        return _unpickled, (base,), self.__getstate__()


def _unpickled(base: type) -> Any:  # noqa: ANN401 a data module
    return object.__new__(_distributed_class(base))


@cache
def _distributed_class(base: type[Any]) -> Any:  # noqa: ANN401 a class
    """Return a subclass of the same name, which is Lightning's key for states."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    subclass = type(base.__name__, (_Distributed, base), names)
    for name in _HOOKS:
        owner = next((kind for kind in base.__mro__ if name in vars(kind)), object)
        # only hooks that the data module defines; Lightning's own hooks raise
        if owner.__module__.partition(".")[0] not in {"lightning", "pytorch_lightning", "builtins"}:
            setattr(subclass, name, _hook(name, subclass))
    return subclass


def _hook(name: str, kind: type) -> Callable[[_Distributed], Any]:
    def loaders(self: _Distributed) -> Any:  # noqa: ANN401 whatever hooks return
        return self._sharing.loaders(name, self.trainer, getattr(super(kind, self), name))

    return loaders
