"""Weights: cells that are drawn in proportion to a weight for each of them.

It is systematic sampling with probability proportional to size. The weights of all cells are laid end to end, and the
epoch's draws lie at even distances on them, from a random point of the first distance on. So a cell of weight ``w``
is drawn ``n * w / total`` times on average, for ``n`` draws, and in each epoch one of the two integers next to that.

The sampler treats a draw like a row: the wrapped sampler samples numbers of draws, ``[0, n)``, and shards, remainders,
states and replay count draws. Draws are numbered in the order of the cells, so consecutive draws are cells close to
each other, and an epoch reads no chunk of the collection much more often than once.

Copies of a cell are consecutive draws. With several rounds, draws are divided among rounds over all cells, each with
its own random point, so that copies are far apart.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from annbatch.abc import Sampler

from annbatch_distributed.core.masks import ALL, Mask
from annbatch_distributed.core.rows import Rows
from annbatch_distributed.core.units import EpochUnits, UnitRows, Units
from annbatch_distributed.core.values import BOUND, Int64Array, as_array, digest, integer, names_of, plural
from annbatch_distributed.core.warning import warn
from annbatch_distributed.core.wrapped import batches_per_request, n_draws, needs_global_rows, reads_every_row

if TYPE_CHECKING:
    import pandas as pd

type Weight = npt.NDArray[np.floating[Any]]

#: Number of cells whose weights are summed up; only these sums are kept, and the cells of a draw's block are added up.
_BLOCK = 1_024
#: Number of blocks that are summed up at a time.
_BLOCKS = 1_024
#: Number of cells that represent all, to estimate the number of copies in a batch.
_MOST_SUMMED = 1 << 20
#: Share of copies in a batch above which a sampler warns.
_MOST_COPIES = 0.1
#: Word of a generator's key that keeps the draws apart from other random numbers of an epoch.
_KEY = 2


class Weights(Units):
    """Draws of all epochs, by a weight for each cell.

    Parameters
    ----------
    values
        Weight of each cell, of shape ``(n_obs,)``.
    num_samples
        Number of draws of an epoch, over all ranks; None takes the number of cells that the mask selects and
        whose weight is above 0.
    rounds
        Number of rounds over all cells.
    names
        Names of the cells, if they are known.
    """

    def __init__(
        self, values: Weight, num_samples: int | None, rounds: int, names: pd.Index[Any] | None = None
    ) -> None:
        self.values, self.num_samples, self.rounds, self.names = values, num_samples, rounds, names
        # of the last mask, as each plan asks for them
        self._masked: tuple[Mask, Sums] | None = None

    @classmethod
    def of(cls, weights: object, num_samples: int | None, rounds: int) -> Self:
        """Return the units of the arguments of a sampler; raise if they are invalid."""
        if isinstance(weights, cls):  # from_collection has needed them before
            return weights
        # is_masked alone would look for an attribute of a Series, see as_array
        if isinstance(weights, np.ma.MaskedArray) and np.ma.is_masked(weights):
            raise ValueError("weights must have a value for each cell, got a masked array. Fill it with 0.")
        values = as_array(weights)
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise TypeError(
                "weights must be a number for each cell, in an array or a Series of shape (n_obs,), got "
                f"{shortened(weights)} of type {type(weights).__name__}."
            )
        values = values.view() if values.dtype in (np.float32, np.float64) else values.astype(np.float64)
        values.flags.writeable = False
        # of many cells, flags of all of them are made for a message only; NaN is the least and the most
        if len(values) and not (values.min() >= 0 and values.max() < np.inf):
            for what, wrong in (("negative", values < 0), ("NaN or infinite", ~np.isfinite(values))):
                if n_wrong := int(np.count_nonzero(wrong)):
                    place = int(np.argmax(wrong))
                    raise ValueError(
                        f"weights must be finite and at least 0, got {plural(n_wrong, 'value')} that are {what}, such "
                        f"as {values[place]} at position {place:,}. Pass 0 to leave a cell out."
                    )
        if num_samples is not None:
            num_samples = integer("num_samples", num_samples, least=1, below=BOUND)
        names = names_of("weights", weights)
        return cls(values, num_samples, integer("rounds", rounds, least=1, below=BOUND), names)

    def without_names(self) -> Self:
        """Return the same weights without the names of the cells, which may be many."""
        without = copy.copy(self)
        without.names = None
        return without

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Weights, number of draws and of rounds, as JSON."""
        text = f"{self.values.dtype}:{digest(np.ascontiguousarray(self.values))}"
        return {"weights": {"digest": text, "num_samples": self.num_samples, "rounds": self.rounds}}

    def check(self, mask: Mask, seed: int | None, sampler: Sampler) -> None:
        """Raise a ValueError if no cell that the mask selects has a weight above 0, or there is no seed.

        It warns if many draws of a batch are copies of each other.
        """
        if seed is None:
            raise ValueError(
                "weights require a seed, so that every rank has the same draws. Pass seed=... to DistributedSampler."
            )
        n_samples = self._n_samples(self._sums(mask))
        if n_samples < self.rounds:
            raise ValueError(
                f"rounds must be at most the number of draws of an epoch, {n_samples:,}, got {self.rounds:,}. Pass a "
                "larger num_samples, or fewer rounds."
            )
        self._warn_of_copies(mask, sampler)

    def selected(self, mask: Mask, n_units: int) -> Rows:
        """Return all draws, since all are of cells that the mask selects."""
        del mask
        return Rows((range(n_units),))

    def in_epoch(self, n_obs: int, epoch: int, seed: int | None, mask: Mask = ALL) -> EpochDraws:
        """Return the draws of an epoch of a collection of ``n_obs`` cells; ``seed`` is the sampler's seed."""
        if n_obs != len(self.values):
            raise ValueError(
                f"weights must have one value for each of the {n_obs:,} cells of the collection, got "
                f"{len(self.values):,} values. Make them from the obs of this collection, or check that every dataset "
                "has been added to the loader."
            )
        assert seed is not None  # check raises without a seed
        sums = self._sums(mask)
        starts = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, _KEY, epoch])).random(self.rounds)
        # 10 draws in 3 rounds are 3 3 4
        firsts = np.arange(self.rounds + 1) * self._n_samples(sums) // self.rounds
        return EpochDraws(sums, firsts, starts)

    def _warn_of_copies(self, mask: Mask, sampler: Sampler) -> None:
        if (n_batches := batches_per_request(sampler)) is None:
            return
        draws = self.in_epoch(len(self.values), 0, 0, mask)
        if (share := draws.share_of_copies(n_batches)) <= _MOST_COPIES:
            return
        warn(
            f"About {share:.0%} of the draws of a batch are copies of others: a cell is drawn up to "
            f"{draws.most_copies:,} times in a round, and its copies are in one load request of "
            f"{plural(n_batches, 'batch')}. Pass a larger rounds=, now {self.rounds}; or, for few cells of large "
            "weights, mix their own loader in with MixedLoader."
        )

    def _sums(self, mask: Mask) -> Sums:
        """Return the summed weights of the cells that a mask selects."""
        masked = self._masked  # another thread may replace it
        if masked is None or masked[0] != mask:
            values = self.values
            rows = mask.selected(len(values)) if len(values) else Rows()
            if len(rows) < len(values):
                # of 5 rows, 1:3 have the steps 0 1 0 -1 0, and are the flags 0 1 1 0 0
                steps = np.zeros(len(values) + 1, dtype=np.int8)
                steps[rows.starts], steps[rows.stops] = 1, -1
                values = values * np.cumsum(steps, dtype=np.int8)[:-1].view(np.bool_)
            masked = self._masked = mask, Sums.of(values)
        return masked[1]

    def _n_samples(self, sums: Sums) -> int:
        return sums.n_weighted if self.num_samples is None else self.num_samples

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_masked": None}  # it may be large, and is computed again

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes

    def __repr__(self) -> str:
        return f"<weights of {plural(len(self.values), 'cell')}>"


class Sums(NamedTuple):
    """Weights of cells, and the sums of blocks of them, in units of the largest weight, so that no sum overflows."""

    values: Weight
    bounds: npt.NDArray[np.float64]
    """Sum of all weights before each block, and of all; of shape ``(n_blocks + 1,)``."""
    n_weighted: int
    """Number of cells with a weight above 0."""
    most: np.float64
    """Largest weight."""

    @classmethod
    def of(cls, values: Weight) -> Self:
        """Sum weights up; a ValueError if all are 0."""
        most = np.float64(values.max(initial=0))
        if not most:
            raise ValueError(
                "weights must be above 0 for some of the cells that the mask selects, got only 0. Pass a weight above "
                "0 for each cell to draw."
            )
        # copies, since a view would hold all cumulated weights
        totals = [np.zeros(1), *(cumulated[:, -1].copy() for cumulated in _cumulated(values, most))]
        return cls(values, np.cumsum(np.concatenate(totals)), int(np.count_nonzero(values)), most)

    def rows_at(self, points: npt.NDArray[np.float64]) -> Int64Array:
        """Return the row in whose part of the summed weights each point lies.

        For weights 2 0 1, the points 0 to 2 are of row 0, and from 2 on, of row 2.
        """
        # rounding may move the last point to the end, which is in no row
        points = np.minimum(points, np.nextafter(self.bounds[-1], 0))
        blocks = np.unique(np.searchsorted(self.bounds, points, side="right") - 1)
        rows = blocks[:, np.newaxis] * _BLOCK + np.arange(_BLOCK)
        weights = self.values.take(rows, mode="clip") / self.most
        weights[rows >= len(self.values)] = 0
        # (blocks, _BLOCK): the sum of all weights up to each row. It is never smaller than the one before, also from a
        # block to the next, since the bounds are added up in the same order
        sums = self.bounds[blocks][:, np.newaxis] + np.cumsum(weights, axis=1)
        # to the right: rows of weight 0 have the sum of the row before, and no point
        return rows.ravel()[np.searchsorted(sums.ravel(), points, side="right")]


def _cumulated(values: Weight, most: np.float64) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the cumulated weights of blocks, as parts of the largest weight, some blocks at a time."""
    for first in range(0, len(values), _BLOCK * _BLOCKS):
        part = np.zeros(-(-min(len(values) - first, _BLOCK * _BLOCKS) // _BLOCK) * _BLOCK)
        part[: len(values) - first] = values[first : first + len(part)] / most
        yield np.cumsum(part.reshape(-1, _BLOCK), axis=1)


@dataclass(frozen=True, eq=False)
class EpochDraws(EpochUnits):
    """Draws of one epoch, and their cells."""

    sums: Sums
    firsts: Int64Array
    """Number of the first draw of each round, and the number of all draws; of shape ``(rounds + 1,)``."""
    starts: npt.NDArray[np.float64]
    """Place of the first point of each round, as a part of the distance between points."""

    noun = "draw"

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def most_copies(self) -> int:
        """Largest number of draws of a cell in a round."""
        n_draws = int(np.diff(self.firsts).max())
        return min(n_draws, math.ceil(n_draws / float(self.sums.bounds[-1])))

    def share_of_copies(self, n_batches: int) -> float:
        """Return the expected share of draws that are another copy of a cell of their batch.

        Copies of a cell are consecutive draws, and mostly in one load request, which has ``n_batches``.
        """
        step = -(-len(self.sums.values) // _MOST_SUMMED)  # of many cells, some are representative
        weights = self.sums.values[::step] / self.sums.most
        copies = int(np.diff(self.firsts).max()) * weights / self.sums.bounds[-1]
        # of 2.3 copies, there are 2 or 3; c copies are in n (1 - (1 - 1/n)^c) of n batches on average
        fewer = np.floor(copies)
        low, high = (n - n_batches * (1 - (1 - 1 / n_batches) ** n) for n in (fewer, fewer + 1))
        return float((low + (high - low) * (copies - fewer)).sum() / max(copies.sum(), 1e-300))

    def rows_of(self, numbers: Int64Array, *, first: int = 0) -> UnitRows:
        """Return the cell of each draw."""
        del first
        rounds = np.searchsorted(self.firsts, numbers, side="right") - 1
        # (draws,): distances between the points of a draw's round
        distances = self.sums.bounds[-1] / np.diff(self.firsts)[rounds]
        points = (numbers - self.firsts[rounds] + self.starts[rounds]) * distances
        return UnitRows(self.sums.rows_at(points), np.arange(len(numbers)), {})


def check_sampler(sampler: Sampler) -> None:
    """Raise a ValueError if a wrapped sampler can't sample draws: if it samples rows, or has a value for each."""
    kind, way_out = type(sampler).__name__, "Wrap a RandomSampler(chunk_size, preload_nchunks, batch_size)."
    if needs_global_rows(sampler):
        raise ValueError(f"weights can't be combined with {kind}, which holds a value for each row. {way_out}")
    if n_draws(sampler, 1) is not None:
        raise ValueError(f"weights can't be combined with {kind}, which samples with replacement. {way_out}")
    if not reads_every_row(sampler):
        raise ValueError(
            f"weights can't be combined with num_samples of {kind}. Pass num_samples to DistributedSampler instead, "
            "where it is the number of draws of all ranks."
        )
