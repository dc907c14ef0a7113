"""The MixedLoader: one training over several collections, by weights, in an order that is the same on all ranks.

Each step takes a batch of one source, see :mod:`turns`. A source that has come to its end begins its next epoch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from annbatch_distributed import checks
from annbatch_distributed.checks import Tally
from annbatch_distributed.integers import BOUND, integer
from annbatch_distributed.loader.inside import described
from annbatch_distributed.loader.stateful import StatefulLoader
from annbatch_distributed.loader.turns import checked_weights, turns
from annbatch_distributed.state import bounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from annbatch_distributed.checks import Description, Gather, Timeout
    from annbatch_distributed.checks.coverage import Reading
    from annbatch_distributed.loader.turns import Weights
    from annbatch_distributed.loader.workers import WorkerDataLoader
    from annbatch_distributed.ranks import Membership

__all__ = ["MixedLoader"]


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
        How many steps there are.
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
        self._seed = integer("seed", seed, least=0, below=BOUND)
        self._weights = checked_weights(weights, self._names)
        if (n_steps is None) == (until is None) or until not in (None, "first", "all"):
            raise ValueError(f"Pass n_steps, or until='first' or 'all', got n_steps={n_steps} and until={until!r}.")
        self._n_steps = None if n_steps is None else integer("n_steps", n_steps, least=1, below=BOUND)
        self._until = until
        for name in self._names:
            loader = self._source(name)
            if loader.sampler._job.arguments.remainder == "keep":
                raise ValueError(
                    f"The ranks of {name} may have different numbers of batches, as its remainder is 'keep'. Pass "
                    "remainder='exact', 'drop' or 'pad'."
                )
        ranks = {(loader.sampler.rank, loader.sampler.world_size) for loader in self._loaders.values()}
        if len(ranks) > 1:
            raise ValueError(f"All loaders must be of the same rank, got (rank, world size) {sorted(ranks)}.")
        self._step = 0
        self._order = np.empty(0, dtype=np.intp)
        # the passes that are under way, and how many batches are left of each
        self._open: dict[str, Iterator[Any]] = {}
        self._left: dict[str, int] = {}
        # what the workers of a source have read; a loader knows it of itself
        self._tallies: dict[str, Tally | None] = {}
        # what each source has read in epochs that have ended, since that was checked
        self._read: dict[str, list[Reading]] = {name: [] for name in self._names}

    def _source(self, name: str) -> StatefulLoader:
        """Return the loader of a source, whoever reads it."""
        loader = self._loaders[name]
        loader = getattr(loader, "_loader", loader)  # of a WorkerDataLoader
        if not isinstance(loader, StatefulLoader):
            raise TypeError(f"A mixture is of StatefulLoaders, got {loader!r} as {name!r}.")
        return loader

    def _sources(self, n_steps: int) -> npt.NDArray[np.intp]:
        """Return which source each of some first steps takes."""
        if len(self._order) < n_steps:
            self._order = turns(self._weights, max(n_steps, 2 * len(self._order)), self._seed)
        return self._order[:n_steps]

    def __len__(self) -> int:
        """Return how many steps there are in all, those included that were done before a resume."""
        if self._n_steps is not None:
            return self._n_steps
        ends = [self._end(number, name) for number, name in enumerate(self._names) if self._weights[-1][1][number]]
        return min(ends) if self._until == "first" else max(ends)

    def _end(self, number: int, name: str) -> int:
        """Return after how many steps a source has been read once, or this one if it was."""
        loader = self._source(name)
        # the next epoch is the one after a pass that is under way
        if loader.sampler.epoch if name in self._open else loader.next_epoch:
            return self._step
        n_left = self._left[name] if name in self._open else loader.sampler.n_batches(loader.n_obs)
        if not n_left:
            return self._step
        n_steps = self._step + 1
        while np.count_nonzero(self._sources(n_steps)[self._step :] == number) < n_left:
            n_steps *= 2
        return self._step + int(np.flatnonzero(self._sources(n_steps)[self._step :] == number)[n_left - 1]) + 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches that are left, each with its ``"source"``."""
        n_steps = len(self)
        while self._step < n_steps:
            name = self._names[self._sources(self._step + 1)[self._step]]
            batch = self._next(name)
            self._step += 1  # before it is yielded: whoever saves a state has this batch
            yield {**batch, "source": name}

    def _next(self, name: str) -> Any:  # noqa: ANN401 whatever annbatch yields
        """Return the next batch of a source, of its next epoch if one has ended."""
        loader, source = self._loaders[name], self._source(name)
        if name not in self._open:
            epoch = loader.next_epoch
            loader.set_epoch(epoch)
            if not source.sampler.n_batches(source.n_obs):  # on more ranks, drop may lose all that was left
                loader.set_epoch(epoch + 1)
            self._left[name] = source.sampler.n_batches(source.n_obs)
            self._open[name] = iter(loader)
            self._tallies[name] = None if loader is source else Tally()
        batch = next(self._open[name])
        if (tally := self._tallies[name]) is not None and batch["index"] is not None:
            tally.add(batch["index"])
        self._left[name] -= 1
        if not self._left[name]:
            next(self._open.pop(name), None)
            self._read[name].append(source._reading(source.sampler._job.membership, tally))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return how far the mixture and each of its sources are, the same on every rank."""
        sources = {name: loader.state_dict() for name, loader in self._loaders.items()}
        return {"step": self._step, "mixture": self._text, "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was saved, on every rank, of which there may be another number.

        Raises
        ------
        TypeError, ValueError
            If the state is of other sources, weights or another seed, or one of a source can't be loaded.
        """
        try:
            step = integer("step", state["step"], least=0, below=BOUND)
            text, sources = state["mixture"], dict(state["sources"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The state is no state of a mixture: {error!r}. Load another checkpoint.") from error
        if sources.keys() != self._loaders.keys() or text != self._text:
            raise ValueError(
                f"The state is of another mixture: {text} of {', '.join(sources)} in the state, and {self._text} of "
                f"{', '.join(self._names)} here. Make it as it was made then."
            )
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
        self._step, self._read = step, {name: [] for name in self._names}

    @property
    def _text(self) -> str:
        """What the order of the sources follows from."""
        weights = "; ".join(f"{shares.tolist()} from step {step} on" for step, shares in self._weights)
        return bounded(f"shares {weights}, seed {self._seed}")

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
        sources = self._sources(len(self) if n_steps is None else n_steps)
        lines = []
        for number, name in enumerate(self._names):
            plan, n_own = self._source(name).plan(), int(np.count_nonzero(sources == number))
            n_batches = plan.most_batches
            line = {"source": name, "share": n_own / len(sources), "steps": n_own, "batches": n_batches}
            lines.append(line | {"epochs": n_own / n_batches, "rows": sum(plan.sizes)})
        return pd.DataFrame(lines).set_index("source")

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks mix the same: see :meth:`StatefulLoader.check_ranks_agree`."""
        for name in self._names:
            job = self._source(name).sampler._job
            checks.ranks_agree(job.agreeing, partial(self._description, name), timeout=timeout, gather=gather)

    def _description(self, name: str, place: Membership) -> Description:
        loader = self._source(name)
        mine: dict[str, int | str] = {"mixture": self._text, "sources": ", ".join(self._names), "step": self._step}
        mine |= {"steps": "until " + str(self._until) if self._n_steps is None else self._n_steps, "source": name}
        return loader.sampler._job.description(place, loader.n_obs, described(loader) | mine)

    def check_epoch_read(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> str:
        """Check that all ranks together have read what was planned in the epochs of sources that have ended.

        See :meth:`StatefulLoader.check_epoch_read`. It is about those since it was last called, or a state loaded. The
        loader of a source that workers read needs ``return_index=True``.

        Returns
        -------
        A line for each epoch that a source has come to the end of.
        """
        lines = []
        for name in self._names:
            job = self._source(name).sampler._job
            for reading in self._read[name]:
                said = partial(_said, reading)
                lines.append(f"{name}, {checks.epoch_read(job.agreeing, said, timeout=timeout, gather=gather)}")
            self._read[name] = []
        return "\n".join(lines) or "no source has come to the end of an epoch"


def _said(reading: Reading, place: Membership) -> Reading:  # noqa: ARG001 it is that of this process
    return reading
