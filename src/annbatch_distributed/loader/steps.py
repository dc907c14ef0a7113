"""Steps: how many of the batches that a pass has yielded are done.

A batch is done when it is yielded, unless someone says more: the loop that calls ``step_done()`` after each step, or
Lightning's ``Trainer``. So a state that is saved within a step, by a signal or an error, doesn't have its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from annbatch_distributed.loader import trainer as lightning

if TYPE_CHECKING:
    from annbatch_distributed.loader.trainer import Trainer

__all__ = ["Steps"]


@dataclass(eq=False)
class Steps:
    """Steps of one pass."""

    trainer: Trainer | None = None
    """Lightning's trainer, if it trains on the batches."""
    is_told: bool = False
    """Whether ``step_done()`` says which are done."""
    n_yielded: int = 0
    """How many batches were yielded."""
    _n_told: int = 0
    _n_begun: int | None = None
    """How many steps the trainer had begun when the last batch was yielded."""

    def deliver(self) -> None:
        """Note that the next batch is yielded."""
        self.n_yielded += 1
        self._n_begun = None if self.trainer is None else lightning.n_begun(self.trainer)

    def done(self) -> None:
        """Note that the step of the batch that was yielded last is done."""
        self.is_told, self._n_told = True, self.n_yielded

    @property
    def n_done(self) -> int:
        """How many batches are done."""
        if self.is_told:
            return self._n_told
        is_within_step = self._n_begun is not None and lightning.n_done(self.trainer) <= self._n_begun
        return self.n_yielded - is_within_step

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"trainer": None, "_n_begun": None}  # a trainer stays in its process
