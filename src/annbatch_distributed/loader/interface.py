"""The interface of all loaders: what training loops and frameworks call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from annbatch_distributed.checks import Gather, Timeout
from annbatch_distributed.epochs import StepSelection
from annbatch_distributed.ranks import DistInfo

if TYPE_CHECKING:
    import pandas as pd


class HasEpochs(Protocol):
    """Object whose epoch frameworks set."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""


@runtime_checkable
class TrainingLoader(Protocol):
    """Interface of all loaders, for training loops and frameworks.

    :class:`.StatefulLoader`, :class:`.MixedLoader`, :class:`.AlignedLoader` and the ``DataLoader`` that
    ``to_dataloader`` returns have it.

    Examples
    --------
    >>> from annbatch_distributed.loader import TrainingLoader
    >>> isinstance(loader, TrainingLoader)
    True
    """

    @property
    def sampler(self) -> HasEpochs:
        """Object whose ``set_epoch`` frameworks call."""

    @property
    def batch_sampler(self) -> Any:  # noqa: ANN401 torch's DataLoader has None
        """Sampler, which Lightning asks for; None for a ``DataLoader``."""

    @property
    def n_obs(self) -> int:
        """Number of cells, over all ranks."""

    @property
    def n_var(self) -> int:
        """Number of genes.

        Raises
        ------
        ValueError
            If the sources or stores have different numbers of genes.
        """

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, on every rank."""

    @property
    def next_epoch(self) -> int:
        """Epoch of the next iteration: the epoch to resume or to begin."""

    @property
    def batches_done(self) -> int:
        """Number of batches of the epoch that were done before a resume."""

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch on this rank."""

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the remaining batches of the epoch."""

    def step_done(self) -> None:
        """Mark the step of the last yielded batch as done."""

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume from a saved state, on every rank."""

    def reshard(self, dist_info: DistInfo | None = None, *, batches_done: int | None = None) -> None:
        """Change the rank and the world size within an epoch, without a restart."""

    def plan(self) -> object:
        """Return the plan of the epoch, as an object that can be printed."""

    def cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None = None,
        ranks: int | Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> pd.DataFrame:
        """Return the cells of each rank in some steps of an epoch, as a table."""

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks have the same configuration."""

    def check_epoch_read(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> str:
        """Check that all ranks together have read the rows of the plan."""


if TYPE_CHECKING:
    from annbatch_distributed.loader.aligned import AlignedLoader
    from annbatch_distributed.loader.mixed import MixedLoader
    from annbatch_distributed.loader.stateful import StatefulLoader
    from annbatch_distributed.loader.workers import WorkerDataLoader

    def _satisfy_protocol(
        stateful: StatefulLoader, workers: WorkerDataLoader, mixed: MixedLoader, aligned: AlignedLoader
    ) -> tuple[TrainingLoader, ...]:
        """Let a type checker compare the loaders with the protocol."""
        return stateful, workers, mixed, aligned
