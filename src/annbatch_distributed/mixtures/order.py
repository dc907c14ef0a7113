"""Orders of the sources of a mixture: the sources whose batches each step yields.

An order is a function of the weights, the names, the seed and the step. It counts the batches of every source before
any step, without a walk through the steps before.

:class:`RandomOrder` takes one source per step. It splits the steps between the source with the largest weight and all
others, then the steps of the others between the next source and the rest, and so on:

1. In each split, batches of the rarer part are spread evenly, each at a random place of its own stretch of steps.
2. After any number of steps, a split is less than one batch off its shares. Over all splits, a source was less than two
   batches off (2 to 32 sources, in 3,000 steps or with 500 changes of weights).
3. When weights change, the first steps make up for what a source is behind or ahead.

:class:`EveryStep` takes all sources in each step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from numbers import Real
from reprlib import repr as shortened
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from annbatch_distributed.core.rows import hashes
from annbatch_distributed.core.state import listed
from annbatch_distributed.core.values import BOUND, Int64Array, integer

#: Weights of the sources by name, or a schedule of (first step, weights) pairs.
type SourceWeights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]
#: End of an epoch: when one source has ended, or all have.
type StoppingStrategy = Literal["first_exhausted", "all_exhausted"]
type Shares = npt.NDArray[np.float64]

#: Random part of the distance between batches. Below 1, so that rounding never puts two batches into one step.
_RANDOM_PART = 0.9

#: Number of steps whose sources are computed at a time.
_AT_ONCE = 1024


class SourceOrder(ABC):
    """Order of sources by step, counted over all epochs of the mixture."""

    names: list[str]
    """Names of the sources, sorted."""
    identity: dict[str, Any]
    """Settings that determine the order, as JSON."""
    lasting: frozenset[str]
    """Names of the sources that the order takes forever."""

    @abstractmethod
    def counts(self, steps: Int64Array) -> Int64Array:
        """Return the number of batches of each source before each of some ascending steps.

        The array has shape ``(n_sources, n_steps)``.
        """

    def count(self, name: str, start: int, stop: int) -> int:
        """Return the number of batches of a source in the steps ``[start, stop)``."""
        before, after = self.counts(np.array([start, stop]))[self.names.index(name)].tolist()
        return int(after - before)

    def at(self, start: int, stop: int) -> Iterator[list[str]]:
        """Yield the names of the sources of each step in ``[start, stop)``."""
        for first in range(start, stop, _AT_ONCE):
            # (sources, steps): True if a step takes a batch of a source
            takes = np.diff(self.counts(np.arange(first, min(first + _AT_ONCE, stop) + 1))) > 0
            for of_step in takes.T.tolist():
                yield [*compress(self.names, of_step)]

    def end(self, step: int, n_left: Mapping[str, int], stopping_strategy: StoppingStrategy) -> int:
        """Return the end of the steps from ``step`` on in which one source, or all, yield ``n_left`` batches."""
        return (min if stopping_strategy == "first_exhausted" else max)(
            self._end(name, step, n) for name, n in n_left.items()
        )

    def _end(self, name: str, step: int, n_batches: int) -> int:
        """Return the end of the steps from ``step`` on in which a source yields some batches."""
        stop = step + n_batches
        while self.count(name, step, stop) < n_batches:
            stop += stop - step
        return bisect_left(range(stop), n_batches, lo=step, key=lambda end: self.count(name, step, end))


@dataclass(frozen=True)
class _Split:
    """Split of steps between a source and all sources after it."""

    source: int
    """Number of the source."""
    rate: float
    """Share of the rarer part in the steps, at most 1/2."""
    lag: float
    """Number of batches by which the rarer part is behind its share at the first step; negative if it is ahead."""
    is_rarer: bool
    """True if the source is the rarer part, False if it is the other one."""
    key: np.uint64
    """Key of the random places."""

    def taken(self, n_steps: Int64Array) -> Int64Array:
        """Return the number of batches of the source in the first steps, for each number of steps."""
        # Batch k of the rarer part belongs to the steps in which due is in [k, k + 1), which are 1 / rate steps. At a
        # rate of 1/4, due is 0.0 0.25 0.5 0.75 1.0 after 0 1 2 3 4 steps. The batch is taken once due has passed
        # k + 1/2 plus a random part. The random parts leave a step between batches k and k + 1.
        due = self.rate * n_steps + self.lag
        number = np.floor(due).astype(np.int64)
        # 53 random bits for each batch, as a float within [-0.5, 0.5)
        random = (hashes(number.astype(np.uint64) + self.key) >> np.uint64(11)) * 2.0**-53 - 0.5
        is_taken = due - number >= 0.5 + _RANDOM_PART * (1 - self.rate) * random
        # a lag of several batches is made up for in as many steps
        rarer = np.clip(number + is_taken, 0, n_steps)
        return rarer if self.is_rarer else n_steps - rarer


@dataclass(frozen=True)
class _Part:
    """Part of an order with the same weights in all steps."""

    first: int
    """First step."""
    before: Int64Array
    """Number of batches of each source before it, of shape ``(n_sources,)``."""
    splits: list[_Split]
    """Splits of the steps, by descending share of their source; the last one leaves nothing to others."""

    @classmethod
    def of(cls, first: int, before: Int64Array, shares: Shares, lags: Shares, keys: npt.NDArray[Any]) -> _Part:
        """Return a part at whose beginning each source lags behind its shares by some batches."""
        # shares 0.2 0.5 0.3 are split into 0.5 of all steps for source 1, 0.6 of the rest for 2, and 1.0 for 0
        order = [source for source in np.argsort(-shares, kind="stable").tolist() if shares[source] > 0]
        splits = []
        for place, source in enumerate(order):
            rest = order[place:]
            share = 1.0 if len(rest) == 1 else float(shares[source] / shares[rest].sum())
            # the rest as a whole lags, too, by which its steps come later; the source has its share of that
            lag = float(lags[source] - share * lags[rest].sum())
            is_rarer = share <= 0.5
            splits.append(_Split(source, min(share, 1 - share), lag if is_rarer else -lag, is_rarer, keys[place]))
        return cls(first, before, splits)

    def counts(self, steps: Int64Array) -> Int64Array:
        """Return the number of batches of each source before each step, of shape ``(n_sources, n_steps)``."""
        counts = np.repeat(self.before[:, np.newaxis], len(steps), axis=1)
        n_left = steps - self.first
        for split in self.splits:
            n_taken = split.taken(n_left)
            counts[split.source] += n_taken
            n_left = n_left - n_taken
        return counts


class RandomOrder(SourceOrder):
    """Order with one source per step, by weights.

    Parameters
    ----------
    weights
        Weights of the sources by name, or a schedule of ``(first_step, weights)`` pairs.
    names
        Names of the sources, in any order.
    seed
        Seed of the order.

    Examples
    --------
    >>> order = RandomOrder({"tahoe": 3, "census": 1}, {"tahoe", "census"}, seed=1)
    >>> [*order.at(0, 4)]
    [['tahoe'], ['census'], ['tahoe'], ['tahoe']]
    >>> order.count("census", 0, 12)
    3
    >>> order.count("census", 10**9, 10**9 + 12)
    3
    """

    def __init__(self, weights: SourceWeights, names: Iterable[str], seed: int) -> None:
        self.names = sorted(names)
        seed = integer("seed", seed, least=0, below=BOUND)
        schedule = _checked(weights, self.names)
        # for each source: [[first step, share], ...]
        by_source = zip(*(shares.tolist() for _, shares in schedule), strict=True)
        steps = [step for step, _ in schedule]
        schedules = ([list(pair) for pair in zip(steps, shares, strict=True)] for shares in by_source)
        self.identity = {"weights": dict(zip(self.names, map(listed, schedules), strict=True)), "seed": seed}
        _, last = schedule[-1]
        self.lasting = frozenset(name for name, share in zip(self.names, last, strict=True) if share)
        self._parts = list(_parts(schedule, seed))

    def counts(self, steps: Int64Array) -> Int64Array:
        """Return the number of batches of each source before each of some ascending steps."""
        # steps 3 7 12 with parts that begin at 0 and 10: the first two are in part 0
        bounds = np.searchsorted(steps, [part.first for part in self._parts[1:]])
        pieces = zip(self._parts, np.split(steps, bounds), strict=True)
        none = np.zeros((len(self.names), 0), dtype=np.int64)
        return np.concatenate([none, *(part.counts(own) for part, own in pieces if len(own))], axis=1)


class EveryStep(SourceOrder):
    """Order with all sources in each step.

    Parameters
    ----------
    names
        Names of the sources.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(names)
        self.identity = {"within_batch": self.names}
        self.lasting = frozenset(self.names)

    def counts(self, steps: Int64Array) -> Int64Array:
        """Return the steps themselves for each source, since every source has a batch in each step."""
        return np.broadcast_to(steps, (len(self.names), len(steps)))


def _parts(schedule: list[tuple[int, Shares]], seed: int) -> Iterator[_Part]:
    """Yield the parts of a schedule of (first step, shares) pairs."""
    n_sources = len(schedule[0][1])
    before, lags = np.zeros(n_sources, dtype=np.int64), np.zeros(n_sources)
    ends = [first for first, _ in schedule[1:]]
    for number, (first, shares) in enumerate(schedule):
        keys = np.random.SeedSequence([seed, number]).generate_state(n_sources, np.uint64)
        part = _Part.of(first, before, shares, lags, keys)
        yield part
        if number < len(ends):
            stop = ends[number]
            after = part.counts(np.array([stop]))[:, 0]
            lags = lags + shares * (stop - first) - (after - before)
            before = after


def _scheduled(weights: SourceWeights) -> list[tuple[Any, Mapping[str, float]]]:
    """Return weights as (first step, weights by name) pairs; a TypeError if they have another form."""
    schedule = [(0, weights)] if isinstance(weights, Mapping) else weights
    if not isinstance(schedule, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], Mapping) for pair in schedule
    ):
        raise TypeError(
            "weights must be a dict of weights by name, or a list of (first_step, weights) pairs, got "
            f"{shortened(weights)}."
        )
    return list(schedule)


def _checked(weights: SourceWeights, names: list[str]) -> list[tuple[int, Shares]]:
    """Return (first step, shares of the sources) pairs."""
    schedule = _scheduled(weights)
    steps = [integer("a step of weights", step, least=0, below=BOUND) for step, _ in schedule]
    if not steps or steps[0] or sorted(set(steps)) != steps:
        raise ValueError(f"The steps of weights must begin at 0 and increase, got {steps}.")
    checked = []
    for step, by_name in schedule:
        if by_name.keys() != set(names):
            raise ValueError(f"Weights must name the sources {', '.join(names)}, got {', '.join(by_name) or 'none'}.")
        for name, weight in by_name.items():
            if not isinstance(weight, Real) or isinstance(weight, bool):
                raise TypeError(f"The weight of {name!r} must be a number, got {shortened(weight)}.")
        try:
            values = np.array([by_name[name] for name in names], dtype=np.float64)
        except OverflowError:  # an integer above the largest float
            values = np.array([np.inf])
        if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
            raise ValueError(f"Weights must be finite and not negative, and one must be above 0, got {dict(by_name)}.")
        with np.errstate(over="ignore"):
            is_normalized = abs(values.sum() - 1) < 1e-9  # shares from a state, which must not change
        if not is_normalized:
            values /= values.max()  # first, since the sum of the largest floats is infinite
            values /= values.sum()
        values = values.round(12)  # so that weights in any unit give the same shares
        checked.append((step, values))
    return checked
