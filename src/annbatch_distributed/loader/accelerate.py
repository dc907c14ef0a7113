"""Accelerate's part: it must know when an epoch ends, to apply the gradients that ``accumulate`` has left.

``accelerator.prepare`` returns the loaders of this package unchanged, so they report the end of an epoch themselves, as
a ``DataLoader`` that Accelerate has prepared does. tests/frameworks fails if Accelerate renames what is used here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any


def reported[Batch](batches: Generator[Batch], has_ended: Callable[[], bool]) -> Generator[Batch]:
    """Yield the batches of a loader; Accelerate, if it is imported, sees whether ``has_ended`` with each of them."""
    with closing(batches):
        report: Any = _report() if "accelerate" in sys.modules else None
        if report is None:
            yield from batches
            return
        report.begin()
        report.remainder = 0  # gather_for_metrics leaves out no rows of the last step
        try:
            for batch in batches:
                report.end_of_dataloader = has_ended()
                yield batch
                del batch  # else it would stay in memory until the next one is read
        finally:
            report.end()


def _report() -> Any:  # noqa: ANN401 of a class that is made here, as Accelerate is optional
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    class Report(DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types
        """What Accelerate knows of a loader while it is iterated over."""

        def __init__(self) -> None:
            self.gradient_state = GradientState()

    return Report()
