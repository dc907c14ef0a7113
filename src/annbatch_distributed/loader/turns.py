"""Turns: which source each step of a mixture takes, as a function of the weights, the seed and the step.

1. After every number of steps, each source has had its share to within one batch (Tijdeman, The chairman assignment
   problem, 1980): its j-th batch has a window of steps, from where its share exceeds j - 1 to where it reaches j.
2. That the earliest deadline goes first fits all batches into their windows.
3. Then steps are exchanged at random, as far as windows allow.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from annbatch_distributed.integers import BOUND, integer
from annbatch_distributed.state import bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    type Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]

__all__ = ["Turns", "Weights", "turns"]

#: How far apart steps are that are exchanged, one round after the other; windows allow it or don't.
_STRIDES = tuple(2**power for power in (10, 8, 6, 5, 4, 3, 2, 1, 0, 0))
#: Steps behind the last one that is asked for can't reach back over more.
_MARGIN = 2 * sum(_STRIDES)
#: What sums of shares are off by at most.
_TINY = 1e-6


class Turns:
    """Which source each step takes."""

    def __init__(self, weights: Weights, names: list[str], seed: int) -> None:
        self._shares, self._seed = _checked(weights, names), integer("seed", seed, least=0, below=BOUND)
        self._order = np.empty(0, dtype=np.intp)
        #: Whether each source has a share in the end.
        self.lasts = self._shares[-1][1] > 0

    def first(self, n_steps: int) -> npt.NDArray[np.intp]:
        """Return the number of the source that each of the first steps takes."""
        if len(self._order) < n_steps:
            self._order = turns(self._shares, max(n_steps, 2 * len(self._order)), self._seed)
        return self._order[:n_steps]

    def step_after(self, step: int, number: int, n_batches: int) -> int:
        """Return the step after that in which a source has so many more batches, from a step on."""
        n_steps = step + n_batches
        while len(own := np.flatnonzero(self.first(n_steps)[step:] == number)) < n_batches:
            n_steps *= 2
        return step + int(own[n_batches - 1]) + 1

    def __str__(self) -> str:
        """What tells them from others."""
        shares = "; ".join(f"{own.tolist()} from step {step} on" for step, own in self._shares)
        return bounded(f"shares {shares}, seed {self._seed}")


def _checked(weights: Weights, names: list[str]) -> list[tuple[int, npt.NDArray[np.float64]]]:
    """Return the shares of the sources, with the step from which on they are."""
    given = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
    steps = [integer("a step of weights", step, least=0, below=BOUND) for step, _ in given]
    if not steps or steps[0] or sorted(set(steps)) != steps:
        raise ValueError(f"Weights must begin at step 0, and later ones at later steps, got those of steps {steps}.")
    checked = []
    for step, own in given:
        if own.keys() != set(names):
            raise ValueError(f"Weights must be of {', '.join(names)}, got those of {', '.join(own) or 'none'}.")
        values = np.array([own[name] for name in names], dtype=np.float64)
        if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
            raise ValueError(f"Weights must be finite, none of them negative and one more than 0, got {dict(own)}.")
        checked.append((step, values / values.sum()))
    return checked


def turns(weights: list[tuple[int, npt.NDArray[np.float64]]], n_steps: int, seed: int) -> npt.NDArray[np.intp]:
    """Return which source each step takes; the first steps are the same for any number of them."""
    total = n_steps + _MARGIN
    which = np.searchsorted([step for step, _ in weights], np.arange(total), side="right") - 1
    due = np.cumsum(np.array([own for _, own in weights])[which], axis=0)  # batches of each source after each step
    jobs: list[tuple[int, int, int]] = []
    for source in range(due.shape[1]):
        numbers = np.arange(1, int(np.ceil(due[-1, source] - _TINY)) + 1)
        begin = np.searchsorted(due[:, source], numbers - 1 + _TINY, side="right")
        end = np.searchsorted(due[:, source], numbers - _TINY)
        jobs += zip(begin.tolist(), end.tolist(), [source] * len(numbers), strict=True)
    jobs.sort(reverse=True)
    waiting: list[tuple[int, int, int]] = []
    firsts, lasts, sources = np.empty((3, total), dtype=np.intp)
    for step in range(total):
        while jobs and jobs[-1][0] <= step:
            first, last, source = jobs.pop()
            heapq.heappush(waiting, (last, source, first))
        lasts[step], sources[step], firsts[step] = heapq.heappop(waiting)
    for number, stride in enumerate(_STRIDES):
        here = np.arange(total - stride)
        here = here[(here // stride) % 2 == number % 2]
        is_free = (lasts[here] >= here + stride) & (firsts[here + stride] <= here)
        here = here[is_free & (np.random.default_rng([seed, number]).random(total)[here] < 0.5)]
        for values in (firsts, lasts, sources):
            values[here], values[here + stride] = values[here + stride], values[here].copy()
    return sources[:n_steps].copy()
