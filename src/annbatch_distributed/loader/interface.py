"""What a training loop and frameworks ask of a loader, whichever kind it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from annbatch_distributed.checks import Gather, Timeout
from annbatch_distributed.planner import StepSelection
from annbatch_distributed.ranks import Deferred, DistInfo

if TYPE_CHECKING:
    import pandas as pd


class HasEpochs(Protocol):
    """An object whose epoch frameworks set."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""


@runtime_checkable
class TrainingLoader(Protocol):
    """A loader of this package: :class:`.StatefulLoader`, :class:`.MixedLoader` or another one.

    The ``DataLoader`` that ``to_dataloader`` returns is one, too.
    """

    @property
    def sampler(self) -> HasEpochs:
        """The sampler, where frameworks look for an object whose ``set_epoch`` they can call."""

    @property
    def batch_sampler(self) -> Any:  # noqa: ANN401 torch's DataLoader has None
        """The sampler, if it isn't one of torch's; Lightning asks for it where there is a ``sampler``."""

    @property
    def n_obs(self) -> int:
        """Number of cells, over all ranks."""

    @property
    def n_var(self) -> int:
        """Number of genes; a ValueError if there is no common one."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, on every rank."""

    @property
    def next_epoch(self) -> int:
        """The epoch to resume or begin."""

    @property
    def batches_done(self) -> int:
        """Number of batches of the epoch that are done before the next pass."""

    def __len__(self) -> int:
        """Return the number of batches of the epoch on this rank, those included that were done before a resume."""

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of a pass."""

    def step_done(self) -> None:
        """Say that the step of the batch that was yielded last is done."""

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return how far the epoch is, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume where a state was saved, on every rank."""

    def reshard(self, dist_info: DistInfo | Deferred | None = None, *, batches_done: int | None = None) -> None:
        """Change the rank and the world size within an epoch, without a restart."""

    def plan(self) -> object:
        """Return what is read in the epoch, as an object with a text."""

    def cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None = None,
        ranks: int | Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> pd.DataFrame:
        """Return which cells each rank has read in some steps of an epoch, or will read."""

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks have the same configuration."""

    def check_epoch_read(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> str:
        """Check that all ranks together have read what was planned."""


if TYPE_CHECKING:
    from annbatch_distributed.loader.aligned import AlignedLoader
    from annbatch_distributed.loader.mixed import MixedLoader
    from annbatch_distributed.loader.stateful import StatefulLoader
    from annbatch_distributed.loader.workers import WorkerDataLoader

    def _are_held(
        stateful: StatefulLoader, workers: WorkerDataLoader, mixed: MixedLoader, aligned: AlignedLoader
    ) -> tuple[TrainingLoader, ...]:
        """Have a type checker compare the loaders with the protocol."""
        return stateful, workers, mixed, aligned
