"""The order of the sources of a mixture: the sources of which each step takes a batch.

It is a function of the weights, the names, the seed and the step. :class:`RandomOrder` takes one source a step: the
source that is furthest behind its share, minus a random part of a batch, which is drawn again for each of its batches.
So the order is random, and after any number of steps each source has had its share to within less than two batches.
:class:`EveryStep` takes all of them in each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from annbatch_distributed.rows import BOUND, integer
from annbatch_distributed.state import listed

#: Weights of the sources, or several of them with the step from which on they hold.
type Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]

#: Largest random part of a batch. Sources were then at most 1.9 batches off (3 to 32 sources, up to five changes of
#: weights); with 1, they were up to 2.2 off, and with 0.5 the order was less random.
_RANDOM_PART = 0.75


class RandomOrder:
    """One source a step, by weights. Steps are counted over all epochs of the mixture.

    Parameters
    ----------
    weights
        Weights of the sources, or several of them with the step from which on they hold.
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
        # the number of the source of each step, as far as it was asked for
        self._order = np.empty(0, dtype=np.intp)
        self._later: Iterator[int] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What the order follows from, as JSON."""
        # for each source: [[first step, share], ...]
        shares = zip(*(own.tolist() for _, own in self._shares), strict=True)
        steps = [step for step, _ in self._shares]
        schedules = ([list(pair) for pair in zip(steps, own, strict=True)] for own in shares)
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
        """Return the steps of a range that take a batch of a source."""
        return start + np.flatnonzero(self._first(stop)[start:] == self._names.index(name))

    def end(self, step: int, n_left: Mapping[str, int], until: Literal["first", "all"]) -> int:
        """Return the step after which the first source, or all of them, have given some batches, from a step on."""
        stop = step + 1
        while True:
            # as far as the first source or all of them need: the others may have their batches much later
            steps = {name: self.steps_of(name, step, stop) for name in n_left}
            ends = [int(steps[name][n - 1]) + 1 if n else step for name, n in n_left.items() if len(steps[name]) >= n]
            if ends and (until == "first" or len(ends) == len(n_left)):
                return min(ends) if until == "first" else max(ends)
            stop += stop - step

    def _first(self, n_steps: int) -> npt.NDArray[np.intp]:
        """Return the number of the source of each of the first steps."""
        if len(self._order) < n_steps:
            if self._later is None:
                self._later = source_order(self._shares, self._seed)
            n_more = max(n_steps - len(self._order), len(self._order))
            self._order = np.append(self._order, np.fromiter(islice(self._later, n_more), np.intp, n_more))
        return self._order[:n_steps]

    def __getstate__(self) -> dict[str, Any]:
        # a generator can't be copied: a copy begins it again
        return vars(self) | {"_order": np.empty(0, dtype=np.intp), "_later": None}


class EveryStep:
    """All sources in each step.

    Parameters
    ----------
    names
        Names of the sources.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)

    @property
    def identity(self) -> dict[str, Any]:
        """What the order follows from, as JSON."""
        return {"within_batch": self._names}

    @property
    def lasting(self) -> frozenset[str]:
        """Names of the sources."""
        return frozenset(self._names)

    def at(self, step: int) -> list[str]:  # noqa: ARG002 the same in every step
        """Return the names of the sources of a step."""
        return self._names

    def steps_of(self, name: str, start: int, stop: int) -> npt.NDArray[np.intp]:  # noqa: ARG002 all of them
        """Return the steps of a range that take a batch of a source."""
        return np.arange(start, stop)

    def end(self, step: int, n_left: Mapping[str, int], until: Literal["first", "all"]) -> int:
        """Return the step after which the first source, or all of them, have given some batches, from a step on."""
        return step + (min if until == "first" else max)(n_left.values())


#: An order of sources.
type SourceOrder = RandomOrder | EveryStep


def _checked(weights: Weights, names: list[str]) -> list[tuple[int, npt.NDArray[np.float64]]]:
    """Return the shares of the sources, with the step from which on they hold."""
    schedule = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
    steps = [integer("a step of weights", step, least=0, below=BOUND) for step, _ in schedule]
    if not steps or steps[0] or sorted(set(steps)) != steps:
        raise ValueError(f"Weights must begin at step 0, and later ones at later steps, got steps {steps}.")
    checked = []
    for step, own in schedule:
        if own.keys() != set(names):
            raise ValueError(f"Weights must name the sources {', '.join(names)}, got {', '.join(own) or 'none'}.")
        try:
            values = np.array([own[name] for name in names], dtype=np.float64)
        except OverflowError:  # an integer that no float holds
            values = np.array([np.inf])
        if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
            raise ValueError(f"Weights must be finite and not negative, and one must be above 0, got {dict(own)}.")
        with np.errstate(over="ignore"):
            is_normalized = abs(values.sum() - 1) < 1e-9  # as shares of a state are, which must stay as they are
        if not is_normalized:
            values /= values.max()  # the sum of the largest floats is infinite
            values /= values.sum()
        values = values.round(12)  # the same shares of weights in any unit
        checked.append((step, values))
    return checked


def source_order(weights: list[tuple[int, npt.NDArray[np.float64]]], seed: int) -> Iterator[int]:
    """Yield the number of the source of each step, without an end."""
    generator = np.random.default_rng(seed)
    n_sources = len(weights[0][1])
    # for each source, the batches by which it lags behind its share, and the random part of its next batch
    lag = np.zeros(n_sources)
    random_part = _RANDOM_PART * generator.random(n_sources)
    ends = [*(start for start, _ in weights[1:]), None]
    for (start, shares), end in zip(weights, ends, strict=True):
        for _ in count(start) if end is None else range(start, end):
            # for shares of 3/4 and 1/4 and no random part: (0.75, 0.25) takes source 0, then (0.5, 0.5) takes source 0,
            # (0.25, 0.75) takes source 1, (1, 0) takes source 0, and all begins again
            lag += shares
            priority = np.where(shares > 0, lag - random_part, -np.inf)  # a source of weight 0 is left out
            source = int(priority.argmax())
            yield source
            lag[source] -= 1
            random_part[source] = _RANDOM_PART * generator.random()
