"""Steps: how many batches of a pass the consumer of a loader has taken and done.

A batch is done when it is yielded, unless the loop calls ``step_done()`` after each step, or Lightning's ``Trainer``
counts steps. A state that is saved within a step, by a signal or an error, then resumes with the batch of that step.
"""

from __future__ import annotations

from typing import Any

from annbatch_distributed.loader.lightning import Training


class StepCounter:
    """Numbers of yielded and of done batches of one pass."""

    def __init__(self, training: Training | None = None, *, uses_step_done: bool = False) -> None:
        self.n_yielded = 0
        self._training = training
        self._uses_step_done, self._n_reported = uses_step_done, 0

    def next(self, training: Training | None) -> StepCounter:
        """Return the counter of the next pass; a loop that has called ``step_done()`` will call it again."""
        return StepCounter(training, uses_step_done=self._uses_step_done)

    def count(self) -> None:
        """Count a batch that is about to be yielded."""
        self.n_yielded += 1
        if self._training is not None:
            self._training.note_step()

    def done(self) -> None:
        """Mark the step of the last yielded batch as done."""
        self._uses_step_done, self._n_reported = True, self.n_yielded

    @property
    def is_training(self) -> bool:
        """True if Lightning counts the steps."""
        return self._training is not None

    @property
    def n_done(self) -> int:
        """Number of done batches."""
        if self._uses_step_done:
            return self._n_reported
        return self.n_yielded - (self._training is not None and self._training.is_within_step)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_training": None}  # a trainer stays in its process
