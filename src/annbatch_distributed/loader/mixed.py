"""The MixedLoader: one training over several collections, by weights, in an order that is the same on all ranks.

Each step takes a batch of one source. A source that has come to its end begins its next epoch. Which source a step
takes is a function of the weights, the seed and the step: the source that is furthest behind its share, less a random
part of a batch that is drawn again for each of its batches. So the order is random, and after any number of steps each
source has had its share to within less than two batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from annbatch_distributed import checks
from annbatch_distributed.checks import Description, Gather, Read, Timeout
from annbatch_distributed.loader.epochs import StepCounter
from annbatch_distributed.loader.prefetch import threads
from annbatch_distributed.loader.stateful import StatefulLoader
from annbatch_distributed.ranks import Placement
from annbatch_distributed.rows import BOUND, integer
from annbatch_distributed.state import Position, bounded
from annbatch_distributed.stream import Pass

if TYPE_CHECKING:
    from annbatch_distributed.loader.workers import WorkerDataLoader

type Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]


#: Largest random part of a batch. Sources were then at most 1.9 batches off (3 to 32 sources, up to five changes of
#: weights); with 1, they were up to 2.2 off, and with 0.5 the order was less random.
_RANDOM_PART = 0.75


class SourceOrder:
    """The source that each step takes, by weights."""

    def __init__(self, weights: Weights, names: list[str], seed: int) -> None:
        self._shares, self._seed = _checked(weights, names), integer("seed", seed, least=0, below=BOUND)
        self._order = np.empty(0, dtype=np.intp)
        #: Whether each source has a share in the end.
        self.lasts = self._shares[-1][1] > 0

    def first(self, n_steps: int) -> npt.NDArray[np.intp]:
        """Return the number of the source that each of the first steps takes."""
        if len(self._order) < n_steps:
            self._order = source_order(self._shares, max(n_steps, 2 * len(self._order)), self._seed)
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


def source_order(weights: list[tuple[int, npt.NDArray[np.float64]]], n_steps: int, seed: int) -> npt.NDArray[np.intp]:
    """Return the source of each step; the first steps are the same for any number of them."""
    generator = np.random.default_rng(seed)
    n_sources = len(weights[0][1])
    order = np.empty(n_steps, dtype=np.intp)
    # for each source, the batches by which it lags behind its share, and the random part of its next batch
    lag = np.zeros(n_sources)
    random_part = _RANDOM_PART * generator.random(n_sources)
    ends = [*(start for start, _ in weights[1:]), n_steps]
    for (start, shares), end in zip(weights, ends, strict=True):
        for step in range(start, min(end, n_steps)):
            # for shares of 3/4 and 1/4 and no random part: (0.75, 0.25) takes source 0, then (0.5, 0.5) takes source 0,
            # (0.25, 0.75) takes source 1, (1, 0) takes source 0, and all begins again
            lag += shares
            priority = np.where(shares > 0, lag - random_part, -np.inf)  # a source of weight 0 is left out
            source = int(priority.argmax())
            order[step] = source
            lag[source] -= 1
            random_part[source] = _RANDOM_PART * generator.random()
    return order


class MixedLoader:
    """Batches of several loaders, one training: which source each step takes is random, and the same on all ranks.

    A batch has the key ``"source"``, the name of its source. Epochs of the sources are set by themselves.

    Parameters
    ----------
    loaders
        For each source its name and its :class:`StatefulLoader`, or what that one's ``to_dataloader`` returns: each
        with a sampler, a mask and genes of its own, and none of them begun.
    weights
        For each source its part of the steps, in any unit; 0 leaves it out. Several of them with the step from which on
        they are: ``[(0, {...}), (5_000, {...})]``.
    n_steps
        How many steps a pass has.
    until
        In place of ``n_steps``: ``"first"``, until one of the sources has been read once, or ``"all"``, until each has.
        Sources whose last weight is 0 don't count.
    seed
        What the order of the sources follows from, within ``[0, 2**63)``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not what it can be: no sources, weights that are negative, not finite, all zero or of other
        names, loaders of different ranks, one whose ranks may have different numbers of batches (``remainder="keep"``).

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import (
    ...     DistributedSampler,
    ...     MixedLoader,
    ...     Rank,
    ...     StatefulLoader,
    ... )
    >>> def loader(n_rows):
    ...     sampler = DistributedSampler(
    ...         RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0
    ...     )
    ...     made = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
    ...     return made.add_adata(ad.AnnData(np.zeros((n_rows, 1))))
    >>> mixed = MixedLoader(
    ...     {"tahoe": loader(800), "census": loader(80)},
    ...     weights={"tahoe": 3, "census": 1},
    ...     n_steps=8,
    ... )
    >>> sources = [batch["source"] for batch in mixed]
    >>> sources.count("tahoe"), sources.count("census")
    (6, 2)
    """

    def __init__(
        self,
        loaders: Mapping[str, StatefulLoader | WorkerDataLoader],
        *,
        weights: Weights,
        n_steps: int | None = None,
        until: Literal["first", "all"] | None = None,
        seed: int = 0,
    ) -> None:
        self._loaders = dict(loaders)
        self._names = list(self._loaders)
        if not self._names:
            raise ValueError("A mixture needs a loader at least, got none.")
        self._turns = SourceOrder(weights, self._names, seed)
        if (n_steps is None) == (until is None) or until not in (None, "first", "all"):
            raise ValueError(f"Pass n_steps, or until='first' or 'all', got n_steps={n_steps} and until={until!r}.")
        self._n_steps = None if n_steps is None else integer("n_steps", n_steps, least=1, below=BOUND)
        self._until = until
        self._sources = {name: _source(name, loader) for name, loader in self._loaders.items()}
        for name, source in self._sources.items():
            if source.sampler.remainder == "keep":
                raise ValueError(
                    f"The ranks of {name} may have different numbers of batches, as its remainder is 'keep'. Pass "
                    "remainder='exact', 'drop' or 'pad'."
                )
        self._step, self._has_ended = 0, False
        # the passes that are under way, how many batches are left of each, and a process with its threads
        self._open: dict[str, Iterator[Any]] = {}
        self._left: dict[str, int] = {}
        self._readers: tuple[int, Executor] | None = None
        # of each source, the passes that have ended since they were checked, and the rows that were read
        self._ended: dict[str, list[tuple[Pass, Read | None]]] = {name: [] for name in self._names}
        # the steps that are done, and the state after them
        self._steps = StepCounter()
        self._done: dict[str, Any] = {}

    def _check(self) -> None:
        """Raise if the loaders are of different ranks, or one has too little to read."""
        ranks = {name: (source.sampler.rank, source.sampler.world_size) for name, source in self._sources.items()}
        if len({*ranks.values()}) > 1:
            ranks_of = ", ".join(f"{name} of rank {rank} of {world_size}" for name, (rank, world_size) in ranks.items())
            raise ValueError(f"All loaders must be of the same rank, got {ranks_of}. Give all the same dist_info.")
        for name, source in self._sources.items():
            try:
                source.sampler.n_batches(source.n_obs)
            except ValueError as error:
                raise ValueError(f"The source {name}: {error}") from error

    def __len__(self) -> int:
        """Return how many steps a pass has, those included that were done before a resume."""
        if self._n_steps is not None:
            return self._n_steps
        # sources whose last weight is 0 never come to an end
        ends = [self._end(name) for name, lasts in zip(self._names, self._turns.lasts, strict=True) if lasts]
        return min(ends) if self._until == "first" else max(ends)

    def _end(self, name: str) -> int:
        """Return after how many steps a source has been read once, or this one if it was."""
        source = self._sources[name]
        # the next epoch is the one after a pass that is under way
        if source.sampler.epoch if name in self._open else source.next_epoch:
            return self._step
        n_left = self._left[name] if name in self._open else source.sampler.n_batches(source.n_obs)
        return self._turns.step_after(self._step, self._names.index(name), n_left) if n_left else self._step

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of the steps that come, up to the end of the pass, each with its ``"source"``.

        After a pass of ``n_steps`` comes the next one, with the steps after these.

        Raises
        ------
        ValueError
            If the loaders are of different ranks, or one has too few rows.
        RuntimeError
            If the sources have been read ``until`` the end before.
        """
        if self._has_ended:
            raise RuntimeError(
                f"The sources have been read, until={self._until!r}: there is no other pass. Pass n_steps for "
                "passes that follow each other."
            )
        self._check()
        steps = self._begin_steps()
        self._done, n_steps = self._state(), len(self)
        if self._until is None:
            n_steps += self._step // n_steps * n_steps
        while self._step < n_steps:
            if steps.is_training:
                self._done = self._state()
            name = self._names[self._turns.first(self._step + 1)[self._step]]
            batch = self._next(name)
            self._step += 1  # before it is yielded: whoever saves a state has this batch
            steps.count()
            yield {**batch, "source": name}
        self._has_ended = self._until is not None

    def _begin_steps(self) -> StepCounter:
        """Begin to count the steps of a pass, as a training that reads it has it."""
        from annbatch_distributed.integrations.lightning import training_on

        objects = [source.sampler.framework_object for source in self._sources.values()]
        training = training_on(self, next((one for one in objects if one is not None), None))
        if training is not None:
            if training.overfits and training.is_at_beginning:
                for source in self._sources.values():
                    source.sampler.go_to(Position())
                self._step, self._open = 0, {}
            training.check_all_are_read(len(self), self._step)
        self._steps = self._steps.next(training)
        return self._steps

    def _next(self, name: str) -> Any:  # noqa: ANN401 whatever annbatch yields
        """Return the next batch of a source, of its next epoch if one has ended."""
        loader, source = self._loaders[name], self._sources[name]
        if name not in self._open:
            epoch = loader.next_epoch
            loader.set_epoch(epoch)
            if not source.sampler.n_batches(source.n_obs):  # on more ranks, drop may lose all that was left
                loader.set_epoch(epoch + 1)
            self._left[name] = source.sampler.n_batches(source.n_obs)
            # the mixture alone holds the threads, which end with it
            self._open[name] = source.iterate(self._threads()) if loader is source else iter(loader)
        batch = next(self._open[name])
        self._left[name] -= 1
        if not self._left[name]:
            next(self._open.pop(name), None)
            self._ended[name].append(loader.read_of_last_pass())
        return batch

    def _threads(self) -> Executor | None:
        """Return the threads of this process in which all sources read ahead."""
        n_ahead = max(source._read_ahead for source in self._sources.values())
        if n_ahead and (self._readers is None or self._readers[0] != os.getpid()):
            self._readers = os.getpid(), threads(n_ahead)
        return self._readers[1] if self._readers else None

    def step_done(self) -> None:
        """Say that the step of the batch that was yielded last is done: see :meth:`StatefulLoader.step_done`."""
        self._steps.done()
        self._done = self._state()

    def state_dict(self) -> dict[str, Any]:
        """Return how far the mixture and each of its sources are, the same on every rank."""
        return self._state() if self._steps.n_done == self._steps.n_yielded else self._done

    def _state(self) -> dict[str, Any]:
        sources = {name: loader.state_dict() for name, loader in self._loaders.items()}
        return {"step": self._step, "mixture": str(self._turns), "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was saved, on every rank, of which there may be another number.

        Raises
        ------
        TypeError, ValueError
            If the state is of other sources, weights or another seed, or one of a source can't be loaded. The mixture
            is then as it was.
        """
        try:
            step = integer("step", state["step"], least=0, below=BOUND)
            text, sources = state["mixture"], dict(state["sources"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The state is no state of a mixture: {error!r}. Load another checkpoint.") from error
        if sources.keys() != self._loaders.keys() or text != str(self._turns):
            raise ValueError(
                f"The state is of another mixture: {text} of {', '.join(sources)} in the state, and {self._turns} of "
                f"{', '.join(self._names)} here. Make it as it was made then."
            )
        # states to go back to, if the state of one source can't be loaded
        before = {name: loader.state_dict() for name, loader in self._loaders.items()}
        self._open = {}  # their passes end
        try:
            for name, loader in self._loaders.items():
                loader.load_state_dict(sources[name])
        except (TypeError, ValueError) as error:
            for other, loader in self._loaders.items():
                loader.load_state_dict(before[other])
            error.add_note(f"It is the state of the source {name!r}.")
            raise
        self._step, self._ended = step, {name: [] for name in self._names}
        self._steps, self._has_ended = self._steps.next(None), False

    def plan(self, n_steps: int | None = None) -> pd.DataFrame:
        """Return for each source how often it will be read.

        Parameters
        ----------
        n_steps
            In how many steps; None for all.

        Returns
        -------
        A table with a line for each source: its ``share`` of the steps, its ``steps``, the ``batches`` of an epoch on
        each rank, how many ``epochs`` the steps are, and the ``rows`` that an epoch has over all ranks. (What each rank
        reads of a source is in its loader's ``plan()``.)
        """
        self._check()
        takes = self._turns.first(len(self) if n_steps is None else n_steps)
        lines = []
        for number, (name, source) in enumerate(self._sources.items()):
            plan, n_own = source.plan(), int(np.count_nonzero(takes == number))
            n_batches = plan.most_batches
            line = {"source": name, "share": n_own / len(takes), "steps": n_own, "batches": n_batches}
            lines.append(line | {"epochs": n_own / n_batches, "rows": sum(plan.sizes)})
        return pd.DataFrame(lines).set_index("source")

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks mix the same: see :meth:`StatefulLoader.check_ranks_agree`."""
        for name, source in self._sources.items():
            checks.ranks_agree(
                source.sampler.agreeing, partial(self._description, name), timeout=timeout, gather=gather
            )

    def _description(self, name: str, place: Placement) -> Description:
        self._check()
        source = self._sources[name]
        mine: dict[str, Any] = {
            "mixture": str(self._turns),
            "sources": ", ".join(self._names),
            "step": self._step,
        }
        mine |= {"steps": "until " + str(self._until) if self._n_steps is None else self._n_steps, "source": name}
        return source.sampler.describe(place, source.n_obs, source._collection | mine)

    def check_epoch_read(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> str:
        """Check that all ranks together have read what was planned in the epochs of sources that have ended.

        See :meth:`StatefulLoader.check_epoch_read`. It is about those since it was last called, or a state loaded. A
        source that workers read needs ``return_index=True``.

        Returns
        -------
        A line for each epoch that a source has come to the end of.
        """
        lines = []
        for name in self._names:
            sampler = self._sources[name].sampler
            for last, read in self._ended[name]:
                reading = partial(sampler.reading, n_obs=last.plan.n_obs, read=read, last=last)
                lines.append(f"{name}, {checks.epoch_read(sampler.agreeing, reading, timeout=timeout, gather=gather)}")
            self._ended[name] = []
        return "\n".join(lines) or "no source has come to the end of an epoch"


def _source(name: str, loader: Any) -> StatefulLoader:  # noqa: ANN401 whatever a user gives
    """Return the loader of a source, whoever reads it."""
    source = getattr(loader, "_loader", loader)  # of a WorkerDataLoader
    if not isinstance(source, StatefulLoader):
        raise TypeError(f"A mixture is of StatefulLoaders, got {loader!r} as {name!r}.")
    return source
