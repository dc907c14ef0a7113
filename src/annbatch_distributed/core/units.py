"""Units: what the wrapped sampler samples, and so what masks, shards, batches and states count.

A unit is to the sampler what a row is: it samples numbers within ``[0, n_units)``. A unit is a row (:class:`EachRow`),
several rows, such as a set of cells, or a draw of a row by weights. Only load requests that are about to be read, and
tables of cells, have the rows of the units: :meth:`EpochUnits.to_rows` and :meth:`EpochUnits.rows_of`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from annbatch.abc import Sampler

from annbatch_distributed.core.masks import ALL, Mask
from annbatch_distributed.core.request import Marks, Request
from annbatch_distributed.core.rows import Rows, runs
from annbatch_distributed.core.values import Int64Array

if TYPE_CHECKING:
    import pandas as pd


class UnitRows(NamedTuple):
    """Rows of some units, one unit after the other."""

    rows: Int64Array
    """Row of each cell."""
    which: Int64Array
    """For each cell, the index of its unit among these."""
    marks: Marks
    """Arrays with a value for each cell, by their name in a batch."""


class EpochUnits(ABC):
    """Units of one epoch."""

    noun = "row"
    """Noun for a unit."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of units."""

    @abstractmethod
    def rows_of(self, numbers: Int64Array, *, first: int = 0) -> UnitRows:
        """Return the rows of some units. In its marks, units are numbered from ``first`` on."""

    def to_rows(self, request: Request, *, max_gap: int) -> Request:
        """Convert a load request of units to a load request of their rows.

        Each row is read once, in the order of the collection, even if several units have it. Units in no batch are
        removed. Gaps of at most ``max_gap`` rows are read as well.
        """
        batches = [self.rows_of(request.rows_at(split)) for split in request.splits]
        # batches of rows 4 5 7 and 9 5 read 4 5 7 9: positions 0 1 2 and 3 1
        rows, positions = np.unique(np.concatenate([batch.rows for batch in batches]), return_inverse=True)
        ends = np.cumsum([len(batch.rows) for batch in batches])
        marks_of = []
        for split, batch in zip(request.splits, batches, strict=True):
            marks = dict(batch.marks)
            if request.are_repeats is not None:  # whole units
                marks["repeated"] = marks.get("repeated", False) | request.are_repeats[split][batch.which]
            marks_of.append(marks)
        read = Request(*runs(rows), np.split(positions, ends[:-1]), marks_of=marks_of)
        return read.with_gaps(max_gap)


class Units(ABC):
    """Units of all epochs, as an argument of a sampler."""

    #: Names of the cells that the argument was made for, if they are known.
    names: pd.Index[Any] | None = None

    def without_names(self) -> Self:
        """Return the same units without the names of the cells, which may be many."""
        return self

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Entry in the identity of a sampler: arguments that determine the units, as JSON; empty if a unit is a row."""

    @abstractmethod
    def check(self, mask: Mask, seed: int | None, sampler: Sampler) -> None:
        """Raise a ValueError if the units can't be combined with a mask or a seed, and warn about a wrapped sampler."""

    @abstractmethod
    def in_epoch(self, n_obs: int, epoch: int, seed: int | None, mask: Mask = ALL) -> EpochUnits:
        """Return the units of an epoch of a collection of ``n_obs`` rows; ``seed`` and ``mask`` are the sampler's."""

    def selected(self, mask: Mask, n_units: int) -> Rows:
        """Return the units that a mask selects."""
        return mask.selected(n_units)


class EachRow(Units):
    """Units that are rows."""

    identity: dict[str, Any] = {}  # noqa: RUF012 it never changes

    def check(self, mask: Mask, seed: int | None, sampler: Sampler) -> None:
        """Accept any mask, seed and sampler."""

    def in_epoch(self, n_obs: int, epoch: int, seed: int | None, mask: Mask = ALL) -> EpochUnits:
        """Return the rows of a collection, which are the same in every epoch."""
        del epoch, seed, mask
        return _AllRows(n_obs)


class _AllRows(EpochUnits):
    def __init__(self, n_obs: int) -> None:
        self._n_obs = n_obs

    def __len__(self) -> int:
        return self._n_obs

    def rows_of(self, numbers: Int64Array, *, first: int = 0) -> UnitRows:
        del first
        return UnitRows(numbers, np.arange(len(numbers)), {})

    def to_rows(self, request: Request, *, max_gap: int) -> Request:
        del max_gap  # gaps were read when local rows became global rows
        return request
