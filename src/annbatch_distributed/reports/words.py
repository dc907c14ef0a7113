"""Words: what reports and checks say about rows, sets and draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from annbatch_distributed.core.units import EpochUnits
from annbatch_distributed.core.values import plural
from annbatch_distributed.sets import EpochSets
from annbatch_distributed.weights import EpochDraws


class Words:
    """Words about the units of an epoch, which are rows unless a subclass says otherwise."""

    #: Name of the column of a shard's units in tables.
    column = "global rows"
    #: True if there are gaps between the rows of consecutive units.
    has_gaps = False
    #: Claim about cells that holds if each unit was read once, as the end of a sentence.
    claim = ""
    #: Noun for what a user has a label of.
    label_noun: str

    def __init__(self, units: EpochUnits) -> None:
        self.n_labels, self.label_noun = len(units), units.noun

    @property
    def labels(self) -> Any:  # noqa: ANN401 labels in any form
        """Label of each unit; None if they have none."""
        return None

    def of_labels(self, codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the label of each unit, from ``n_labels`` labels."""
        return codes

    def note(self, n_batches: int | None) -> str:
        """Return a line for a plan about units in load requests of some batches, if known; empty if there is none."""
        del n_batches
        return ""


class _OfSets(Words):
    column, has_gaps = "numbers", True

    def __init__(self, units: EpochSets) -> None:
        super().__init__(units)
        self._sets = units.sets

    @property
    def labels(self) -> Any:  # noqa: ANN401 labels in any form
        return self._sets.groups


class _OfDraws(Words):
    column, has_gaps, label_noun = "draws", True, "cell"

    def __init__(self, units: EpochDraws) -> None:
        self._draws, self.n_labels = units, len(units.sums.values)
        in_each = f" in each of {n_rounds} rounds" if (n_rounds := len(units.starts)) > 1 else ""
        self.claim = f", so each cell was read as often as its weight says, rounded up or down{in_each}"

    def of_labels(self, codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return codes[self._draws.rows_of(np.arange(len(self._draws))).rows]

    def note(self, n_batches: int | None) -> str:
        if (most := self._draws.most_copies) == 1:
            return ""
        spread = "" if n_batches is None else f", in up to {plural(min(most, n_batches), 'batch')}"
        return f"copies: up to {most:,} of a cell in a round{spread}"


def words_of(units: EpochUnits) -> Words:
    """Return the words about the units of an epoch."""
    if isinstance(units, EpochSets):
        return _OfSets(units)
    return _OfDraws(units) if isinstance(units, EpochDraws) else Words(units)
