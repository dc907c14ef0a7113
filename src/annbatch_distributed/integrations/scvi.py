"""scvi-tools: a data module of annbatch's loaders that gives every rank of a job its own share.

scvi-tools 1.5.1 trains from annbatch by its ``AnnbatchDataModule``, which knows nothing of ranks: each of them trains
and validates on all cells. What is here needs only what any ``LightningDataModule`` has, so that it works with those of
a user's own as well, and nothing of scvi-tools is imported.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

from annbatch import Loader

from annbatch_distributed.checks.exchange import initialized
from annbatch_distributed.integrations.embedding import embed
from annbatch_distributed.loader import StatefulLoader
from annbatch_distributed.passes.traits import n_draws
from annbatch_distributed.sampler import DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from annbatch_distributed.ranks import Deferred, DistInfo

__all__ = ["distribute", "embed"]

#: Where the state of the training's loader is in that of the data module.
_KEY = "annbatch_distributed"


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
    far the epoch is: with ``ckpt_path``, a job goes on in the middle of it, on as many ranks as there are then. Before
    the first epoch, ranks check that they have the same configuration.

    Parameters
    ----------
    datamodule
        scvi-tools' ``AnnbatchDataModule``, or any ``LightningDataModule`` whose hooks return annbatch loaders. It stays
        as it is: what is returned is a shallow copy.
    dist_info
        As for :class:`DistributedSampler`. None asks the trainer that the data module is used with, which is right on
        any number of devices.
    read_ahead
        How many load requests of the training are read ahead, see :class:`StatefulLoader`.
    seed
        Shuffles, on every rank alike. Another one gives other epochs.
    options
        Further arguments of the :class:`DistributedSampler` of the training, such as ``sharding="shuffled"`` for cells
        that are sorted on disk, ``remainder="exact"`` or ``virtual_ranks=8``.

    Returns
    -------
    A data module of a subclass, with all that ``datamodule`` has, for any number of trainings.

    Raises
    ------
    TypeError
        If ``datamodule`` is no data module, or has been distributed before.

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
    ...         loader = Loader(batch_sampler=RandomSampler(4, 2, 4, mask=slice(0, 40)), preload_to_gpu=False)
    ...         return loader.add_adata(ad.AnnData(np.zeros((48, 1))))
    >>> rank_1 = distribute(Cells(), dist_info=Rank(1, 2)).train_dataloader()
    >>> rank_1.sampler.plan(rank_1.n_obs).shard(1).rows
    Rows(20:40)
    """
    if isinstance(datamodule, _Distributed):
        raise TypeError(
            f"{type(datamodule).__name__} was distributed before, and its rows would be shared out once more."
        )
    if isinstance(datamodule, type) or not callable(getattr(datamodule, "train_dataloader", None)):
        hint = " Pass an instance, not the class." if isinstance(datamodule, type) else ""
        raise TypeError(
            f"Expected a LightningDataModule such as scvi-tools' AnnbatchDataModule, got {datamodule!r}.{hint}"
        )
    made: Any = copy.copy(datamodule)
    made.__class__ = _distributed_class(made.__class__)
    made._sharing = _Sharing(dist_info, read_ahead, {"seed": seed, **options})
    distributed: Module = made
    return distributed


class _Sharing:
    """The loaders of a data module on this rank, which it makes once for each trainer."""

    def __init__(self, dist_info: DistInfo | Deferred | None, read_ahead: int, options: dict[str, Any]) -> None:
        self._dist_info, self._read_ahead, self._options = dist_info, read_ahead, options
        self._loaders: dict[str, tuple[Any, Any]] = {}
        #: The state that the next loader of the training goes on with.
        self.to_load: Mapping[str, Any] | None = None

    @property
    def training(self) -> StatefulLoader | None:
        """The loader of the last training; None if there was none, or it isn't one of annbatch's."""
        _, loader = self._loaders.get("train", (None, None))
        return loader if isinstance(loader, StatefulLoader) else None

    def loader(self, kind: str, trainer: Any, make: Callable[[], Any]) -> Any:  # noqa: ANN401 whatever hooks return
        """Return this rank's loader for a trainer: the same one whoever asks, as some look at a batch before."""
        of_trainer, known = self._loaders.get(kind, (None, None))
        if trainer is None or of_trainer is not trainer:
            known = self._shared(kind, trainer, make())
            self._loaders[kind] = trainer, known
        if kind == "train" and self.to_load is not None and isinstance(known, StatefulLoader):
            known.load_state_dict(self.to_load)
            self.to_load = None
            if trainer is not None:
                # an epoch that began on another number of ranks has another number of batches than those that follow
                trainer.reload_dataloaders_every_n_epochs = 1
        return known

    def _shared(self, kind: str, trainer: Any, loader: Any) -> Any:  # noqa: ANN401 whatever hooks return
        """Return this rank's part of what a loader reads; what is no loader of annbatch's, as it is."""
        if not isinstance(loader, Loader):
            return loader
        dist_info = trainer if self._dist_info is None else self._dist_info
        if dist_info is None:
            raise RuntimeError(
                "Which rank this is says the trainer, and this data module has none yet: its loaders are there in a "
                "training. To look at one by itself, pass dist_info to distribute, such as Rank(0, 2)."
            )
        sampler = loader.batch_sampler
        options: dict[str, Any] = {"remainder": "exact"}
        if kind == "train":
            draws = n_draws(sampler, loader.n_obs) is not None
            options = ({"sharding": "independent"} if draws else {}) | self._options
        distributed = DistributedSampler(sampler, dist_info=dist_info, **options)
        read_ahead = self._read_ahead if kind == "train" else 0
        made = StatefulLoader.from_loader(loader, batch_sampler=distributed, read_ahead=read_ahead)
        if initialized() is not None:
            made.check_ranks_agree()
        return made


class _Distributed:
    """What comes before the class of a data module that was distributed."""

    _sharing: _Sharing
    trainer: Any

    def train_dataloader(self) -> Any:  # noqa: ANN401 Lightning's
        return self._sharing.loader("train", self.trainer, super().train_dataloader)  # type: ignore[misc]

    def val_dataloader(self) -> Any:  # noqa: ANN401 Lightning's
        return self._sharing.loader("validate", self.trainer, super().val_dataloader)  # type: ignore[misc]

    def test_dataloader(self) -> Any:  # noqa: ANN401 Lightning's
        return self._sharing.loader("test", self.trainer, super().test_dataloader)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        training = self._sharing.training
        return state if training is None else {**state, _KEY: training.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        others = {name: value for name, value in state_dict.items() if name != _KEY}
        super().load_state_dict(others)  # type: ignore[misc]
        self._sharing.to_load = state_dict.get(_KEY)

    def __reduce__(self) -> tuple[Any, ...]:
        base = type(self).__mro__[2]
        return _unpickled, (base,), vars(self)


def _unpickled(base: type) -> Any:  # noqa: ANN401 a data module
    """Return a data module of a class that no module has by name."""
    distributed = _distributed_class(base)
    return object.__new__(distributed)


@cache
def _distributed_class(base: type[Any]) -> Any:  # noqa: ANN401 a class
    """Return a class of data modules, with its name, which Lightning finds their states by."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Distributed, base), names)
