"""Orders of the sources of a mixture: the sources whose batches each step yields.

An order is a function of the weights, the names, the seed and the step. :class:`RandomOrder` takes one source per step:
the source that is furthest behind its share, minus a random part of a batch, which is sampled again for each of its
batches. So the order is random, and after any number of steps each source is within two batches of its share.
:class:`EveryStep` takes all sources in each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from annbatch_distributed.rows import BOUND, integer
from annbatch_distributed.state import listed

#: Weights of the sources by name, or a schedule of (first step, weights) pairs.
type Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]

#: Largest random part of a batch. At 0.75, sources were at most 1.9 batches off their share (3 to 32 sources, up to
#: five changes of weights). At 1, they were up to 2.2 batches off, and at 0.5 the order was less random.
_RANDOM_PART = 0.75


class RandomOrder:
    """Order with one source per step, by weights. Steps count over all epochs of the mixture.

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
    >>> [*map(order.at, range(4))]
    [['tahoe'], ['tahoe'], ['census'], ['tahoe']]
    >>> order.steps_of("census", 0, 12).tolist()
    [2, 5, 9]
    """

    def __init__(self, weights: Weights, names: Iterable[str], seed: int) -> None:
        self._names = sorted(names)
        self._shares = _checked(weights, self._names)
        self._seed = integer("seed", seed, least=0, below=BOUND)
        # the number of the source of each step, up to the last step that was needed
        self._order = np.empty(0, dtype=np.intp)
        self._later: Iterator[int] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that determine the order, as JSON."""
        # for each source: [[first step, share], ...]
        by_source = zip(*(shares.tolist() for _, shares in self._shares), strict=True)
        steps = [step for step, _ in self._shares]
        schedules = ([list(pair) for pair in zip(steps, shares, strict=True)] for shares in by_source)
        return {"weights": dict(zip(self._names, map(listed, schedules), strict=True)), "seed": self._seed}

    @property
    def lasting(self) -> frozenset[str]:
        """Names of the sources whose last weight isn't 0."""
        _, last = self._shares[-1]
        return frozenset(name for name, share in zip(self._names, last, strict=True) if share)

    def at(self, step: int) -> list[str]:
        """Return the names of the sources of a step."""
        return [self._names[self._first(step + 1)[step]]]

    def steps_of(self, name: str, start: int, stop: int) -> npt.NDArray[np.intp]:
        """Return the steps in a range that take a batch of a source."""
        return start + np.flatnonzero(self._first(stop)[start:] == self._names.index(name))

    def end(self, step: int, n_left: Mapping[str, int], until: Literal["first", "all"]) -> int:
        """Return the end of the steps from ``step`` on in which one source, or all, yield ``n_left`` batches."""
        stop = step + 1
        while True:
            # doubled until one source, or all, have their batches: the other sources may have theirs much later
            steps = {name: self.steps_of(name, step, stop) for name in n_left}
            ends = [int(steps[name][n - 1]) + 1 if n else step for name, n in n_left.items() if len(steps[name]) >= n]
            if ends and (until == "first" or len(ends) == len(n_left)):
                return min(ends) if until == "first" else max(ends)
            stop += stop - step

    def _first(self, n_steps: int) -> npt.NDArray[np.intp]:
        """Return the number of the source of each of the first ``n_steps`` steps."""
        if len(self._order) < n_steps:
            if self._later is None:
                self._later = source_order(self._shares, self._seed)
            n_more = max(n_steps - len(self._order), len(self._order))
            self._order = np.append(self._order, np.fromiter(islice(self._later, n_more), np.intp, n_more))
        return self._order[:n_steps]

    def __getstate__(self) -> dict[str, Any]:
        # a generator can't be copied, so a copy starts a new one
        return vars(self) | {"_order": np.empty(0, dtype=np.intp), "_later": None}


class EveryStep:
    """Order with all sources in each step.

    Parameters
    ----------
    names
        Names of the sources.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that determine the order, as JSON."""
        return {"within_batch": self._names}

    @property
    def lasting(self) -> frozenset[str]:
        """Names of the sources."""
        return frozenset(self._names)

    def at(self, step: int) -> list[str]:  # noqa: ARG002 the same in every step
        """Return the names of the sources of a step."""
        return self._names

    def steps_of(self, name: str, start: int, stop: int) -> npt.NDArray[np.intp]:  # noqa: ARG002 all of them
        """Return the steps in a range that take a batch of a source."""
        return np.arange(start, stop)

    def end(self, step: int, n_left: Mapping[str, int], until: Literal["first", "all"]) -> int:
        """Return the end of the steps from ``step`` on in which one source, or all, yield ``n_left`` batches."""
        return step + (min if until == "first" else max)(n_left.values())


#: An order of sources.
type SourceOrder = RandomOrder | EveryStep


def _checked(weights: Weights, names: list[str]) -> list[tuple[int, npt.NDArray[np.float64]]]:
    """Return (first step, shares of the sources) pairs."""
    schedule = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
    steps = [integer("a step of weights", step, least=0, below=BOUND) for step, _ in schedule]
    if not steps or steps[0] or sorted(set(steps)) != steps:
        raise ValueError(f"The steps of weights must begin at 0 and increase, got {steps}.")
    checked = []
    for step, by_name in schedule:
        if by_name.keys() != set(names):
            raise ValueError(f"Weights must name the sources {', '.join(names)}, got {', '.join(by_name) or 'none'}.")
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


def source_order(weights: list[tuple[int, npt.NDArray[np.float64]]], seed: int) -> Iterator[int]:
    """Yield the number of the source of each step, forever."""
    generator = np.random.default_rng(seed)
    n_sources = len(weights[0][1])
    # for each source, the batches by which it lags behind its share, and the random part of its next batch
    lag = np.zeros(n_sources)
    random_part = _RANDOM_PART * generator.random(n_sources)
    ends = [*(start for start, _ in weights[1:]), None]
    for (start, shares), end in zip(weights, ends, strict=True):
        for _ in count(start) if end is None else range(start, end):
            # for shares of 3/4 and 1/4 and no random part, the lags are (0.75, 0.25), which takes source 0, then
            # (0.5, 0.5), source 0, (0.25, 0.75), source 1, (1, 0), source 0, and (0.75, 0.25) again
            lag += shares
            priority = np.where(shares > 0, lag - random_part, -np.inf)  # excludes sources of weight 0
            source = int(priority.argmax())
            yield source
            lag[source] -= 1
            random_part[source] = _RANDOM_PART * generator.random()
