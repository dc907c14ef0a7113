"""The MixedLoader: batches of several collections, in an order of sources that is the same on all ranks.

Its clock says where the next pass begins, and :class:`.Mixture` what follows from a place. It sets the position of a
source before it iterates over the source, and reads no position back.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
from annbatch.compat import IterableDataset  # type: ignore[attr-defined]  # not exported; torch's, if there is torch

from annbatch_distributed import checks
from annbatch_distributed.checks import Description, Gather, Reading, Timeout
from annbatch_distributed.core.clock import Clock
from annbatch_distributed.core.epochs import StepSelection
from annbatch_distributed.core.rank import Placement
from annbatch_distributed.core.values import BOUND, integer, plural
from annbatch_distributed.core.warning import warn
from annbatch_distributed.core.worker import current_worker
from annbatch_distributed.loader.accelerate import reported
from annbatch_distributed.loader.callers import refuse_dispatch
from annbatch_distributed.loader.epoch_loader import EpochLoader, common_n_var, shown
from annbatch_distributed.loader.lightning import errors_explained, training_on
from annbatch_distributed.loader.prefetch import threads
from annbatch_distributed.loader.steps import StepCounter
from annbatch_distributed.loader.waiting import Waits
from annbatch_distributed.mixtures.mixture import Mixture
from annbatch_distributed.mixtures.order import EveryStep, RandomOrder, SourceOrder, SourceWeights, StoppingStrategy
from annbatch_distributed.mixtures.place import Place, Start
from annbatch_distributed.mixtures.source import Source
from annbatch_distributed.ranks import DistInfo

if TYPE_CHECKING:
    from annbatch_distributed.loader.workers import WorkerDataLoader


@dataclass(eq=False)
class MixturePass:
    """Pass over a mixture."""

    place: Place
    """Place at its beginning."""
    placement: Placement
    """Rank that reads it."""
    n_steps: int
    """Number of steps of the whole epoch."""
    has_ended: bool = False
    """True once its last batch was yielded."""
    is_open: bool = True
    """True while its iterator is in use, its last step included."""


class MixedLoader(Waits, IterableDataset):  # type: ignore[type-arg]  # without torch, it has no parameters
    """Loader of several collections, mixed in the same order on all ranks.

    Each step yields a batch of one source, a dict with the keys of :class:`StatefulLoader` and the name of the source
    under ``"source"``. When a source ends, its next epoch begins. Under ``within_batch=True``, each step yields a dict
    with the batch of every source, by name: ``{"tahoe": {"X": ..., "obs": ...}, "census": {...}}``.

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
    ...     empty = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
    ...     return empty.add_adata(ad.AnnData(np.zeros((n_rows, 1))))
    >>> mixed = MixedLoader(
    ...     {"tahoe": loader(800), "census": loader(80)},
    ...     weights={"tahoe": 3, "census": 1},
    ...     n_steps=8,
    ... )
    >>> for epoch in range(2):
    ...     mixed.set_epoch(epoch)
    ...     sources = [batch["source"] for batch in mixed]
    ...     print(sources.count("tahoe"), sources.count("census"))
    6 2
    6 2

    Parameters
    ----------
    loaders
        :class:`StatefulLoader` of each source by name, or the ``DataLoader`` that its ``to_dataloader`` returns. Each
        has its own sampler, mask and genes. The mixture sets their epochs.
    weights
        Relative weight of each source by name; 0 excludes a source. To change weights during training, pass a list of
        ``(first_step, weights)`` pairs, ``[(0, {...}), (5_000, {...})]``, whose steps count over all epochs. Under
        ``within_batch``, the number of rows of each source in a batch, which must be the batch size of its sampler;
        None takes the batch sizes (default). Without it, weights are required.
    n_steps
        Number of steps of an epoch of the mixture.
    stopping_strategy
        End of an epoch, instead of ``n_steps``: ``"first_exhausted"`` ends it when one source has been read once,
        ``"all_exhausted"`` when every source has. The next epoch then begins with new epochs of all sources. Sources
        whose last weight is 0 don't count.
    within_batch
        True to yield a batch of every source in each step (default False).
    seed
        Seed of the order of the sources, within ``[0, 2**63)`` (default 0).

    Raises
    ------
    TypeError
        If a source is not a loader, or an argument has the wrong type.
    ValueError
        If there are no sources, if a weight is negative or not finite, if all weights are 0, if ``weights`` and
        ``loaders`` have different names, or if a sampler has ``remainder="keep"``.
    """

    def __init__(
        self,
        loaders: Mapping[str, EpochLoader | WorkerDataLoader],
        *,
        weights: SourceWeights | None = None,
        n_steps: int | None = None,
        stopping_strategy: StoppingStrategy | None = None,
        within_batch: bool = False,
        seed: int = 0,
    ) -> None:
        given: object = loaders
        if not isinstance(given, Mapping):
            raise TypeError(f"loaders must be a dict of loaders by name, got a {type(given).__name__}.")
        if wrong := [name for name in given if not isinstance(name, str)]:
            raise TypeError(f"The names of loaders must be strings, got {shortened(wrong[0])}.")
        if not loaders:
            raise ValueError("loaders must have at least one loader, got none. Pass a dict of loaders by name.")
        # sorted, so that the order of the dict doesn't matter
        sources = {name: Source(name, loaders[name]) for name in sorted(loaders)}
        if len({source.loader.sampler for source in sources.values()}) < len(sources):
            raise ValueError("Two sources have the same sampler. Give each source its own loader and its own sampler.")
        order = _order_of(sources, weights, seed, within_batch=within_batch)
        ends_by_itself = stopping_strategy in ("first_exhausted", "all_exhausted")
        if (n_steps is None) != ends_by_itself or not (ends_by_itself or stopping_strategy is None):
            raise ValueError(
                "An epoch must end by n_steps, or by stopping_strategy='first_exhausted' or 'all_exhausted', got "
                f"n_steps={n_steps} and stopping_strategy={stopping_strategy!r}. Pass one of them."
            )
        n_steps = None if n_steps is None else integer("n_steps", n_steps, least=1, below=BOUND)
        self._mixture, self._within_batch = Mixture(sources, order, n_steps, stopping_strategy), within_batch
        self._clock = Clock[Place | Start](self._mixture.first_place)
        # the pass that the open passes of the sources belong to, which continues after another epoch was set
        self._running: MixturePass | None = None
        self._steps = StepCounter()
        # the id of a process, and its threads in which all sources prefetch
        self._readers: tuple[int, Executor] | None = None

    # Properties of the sources

    @property
    def _sources(self) -> dict[str, Source]:
        return self._mixture.sources

    @property
    def _any_source(self) -> Source:
        """A source, for what is the same for all of them, such as the rank."""
        return next(iter(self._sources.values()))

    @property
    def n_obs(self) -> int:
        """Number of cells of all sources, over all ranks."""
        return sum(source.loader.n_obs for source in self._sources.values())

    @property
    def n_var(self) -> int:
        """Number of genes.

        Raises
        ------
        ValueError
            If the sources have different numbers of genes.
        """
        return common_n_var({name: source.loader for name, source in self._sources.items()})

    @property
    def sampler(self) -> MixedLoader:
        """This mixture; frameworks call ``set_epoch`` of a loader's sampler."""
        return self

    @property
    def batch_sampler(self) -> MixedLoader:
        """This mixture; frameworks ask a batch sampler for its batch size."""
        return self

    @property
    def batch_size(self) -> int:
        """Rows of a full batch on each rank.

        It is the largest batch size of the sources, or their sum under ``within_batch``.
        """
        sizes = [source.loader.sampler.batch_size or 0 for source in self._sources.values()]
        return sum(sizes) if self._within_batch else max(sizes)

    @property
    def _framework_object(self) -> object:
        """Framework object, such as a trainer, in the ``dist_info`` of a source; None if there is none."""
        objects = (source.cursor.rank_source.framework_object for source in self._sources.values())
        return next((one for one in objects if one is not None), None)

    def _check(self) -> None:
        """Raise if the loaders are of different ranks, or a source fails its check."""
        ranks = {name: source.epochs.placement for name, source in self._sources.items()}
        if len({*ranks.values()}) > 1:
            ranks_of = ", ".join(f"{name} of rank {own.rank} of {own.world_size}" for name, own in ranks.items())
            raise ValueError(f"All loaders must be of the same rank, got {ranks_of}. Pass the same dist_info to each.")
        for source in self._sources.values():
            source.check()

    # Epochs

    @property
    def next_epoch(self) -> int:
        """Epoch to resume or to begin: the current epoch, or the next epoch if the current epoch has ended."""
        return self._clock.next_epoch

    @property
    def _next(self) -> Place:
        """Place of the next pass."""
        return self._mixture.resolved(self._clock.next)

    @property
    def _last(self) -> MixturePass | None:
        """Pass that has begun last; None if an epoch was set or a state was loaded since."""
        last: MixturePass | None = self._clock.last
        return last

    @property
    def batches_done(self) -> int:
        """Number of steps of the epoch that were done before a resume; else 0."""
        return self._clock.next.done

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, on every rank.

        Epoch ``e`` begins at step ``e * n_steps``, whatever was read before. Setting the epoch of a loaded state
        resumes it at the loaded position, until the epoch has ended. Setting it afterwards restarts it, but not the
        steps done before the number of ranks changed. If the state is of a mixture with a different ``n_steps``, later
        epochs are counted from its epoch. Under ``stopping_strategy``, an epoch begins with epochs of the sources that
        no earlier epoch has begun. A running iterator is not affected until a new one begins.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0 on.

        Raises
        ------
        ValueError
            If a state of a later epoch was loaded, and no iteration has begun since.
        """
        refuse_dispatch()
        self._clock.set_epoch(integer("epoch", epoch, least=0, below=BOUND))

    def __len__(self) -> int:
        """Return the number of steps of the whole epoch."""
        last = self._last
        if last is not None and last.is_open:
            return last.n_steps
        self._check()
        return self._mixture.length(self._next)

    # Reading

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return an iterator over the batches of the epoch.

        After a resume, it yields the remaining batches. A mixture has one iterator at a time: taking the first batch of
        a new one ends the previous one.

        Yields
        ------
        dict
            Batch of a source with the key ``"source"``, or batches by the names of their sources under
            ``within_batch``.

        Raises
        ------
        ValueError
            If the loaders are of different ranks, or a source has too few rows.
        RuntimeError
            If a worker of a ``DataLoader`` iterates. While iterating, if a newer iterator exists.
        """
        if current_worker() is not None:
            raise RuntimeError(
                "A DataLoader can't iterate over a MixedLoader in its workers. Make a DataLoader of each source with "
                "loader.to_dataloader(num_workers=...), pass these to MixedLoader, and iterate over the mixture itself."
            )
        return reported(self._timed(self._iterate()), lambda: self._last is not None and self._last.has_ended)

    def _iterate(self) -> Generator[dict[str, Any]]:
        """Iterate over the rest of an epoch."""
        has_rest = True
        while has_rest:  # once more after each reshard()
            self._check()
            steps = self._begin_steps()
            current = self._begin()
            yield from self._batches_of(current, steps)
            has_rest = self._clock.has_rest(current)

    def _begin(self) -> MixturePass:
        """Begin the next pass, at its position in each source."""
        place = self._next
        current = MixturePass(place, self._any_source.epochs.placement, self._mixture.length(place))
        self._clock.begin(current, place)
        self._running = current
        for name, position in self._mixture.positions(place).items():
            self._sources[name].go_to(position)
        return current

    def _batches_of(self, current: MixturePass, steps: StepCounter) -> Iterator[dict[str, Any]]:
        place = current.place
        try:
            steps_left = self._mixture.order.at(place.step, place.first + current.n_steps)
            for done, names in enumerate(steps_left, start=place.done + 1):
                batch = self._take(names)
                steps.count()  # before the yield: a consumer that saves a state has this batch
                if done == current.n_steps:
                    self._end_pass(current)
                yield batch
                del batch  # else it would stay in memory until the next one is read
                if self._clock.was_interrupted(current):
                    return
                if current.placement != self._any_source.epochs.placement:
                    self._any_source.cursor.check_rank(current.placement)
                if self._running is not current:
                    raise RuntimeError(
                        "A mixture has one iterator at a time, and a newer iterator has ended this one. To look at "
                        "batches in the middle of an epoch, make a second mixture."
                    )
            if place.done == current.n_steps:
                self._end_pass(current)
        except BaseException:
            if self._running is current and not current.has_ended:
                for source in self._sources.values():
                    source.close()
                self._running = None
            raise
        finally:
            current.is_open = False

    def _end_pass(self, ended: MixturePass) -> None:
        ended.has_ended = True
        ended.is_open = not self._steps.is_training  # Lightning leaves its loop here, and asks for the next length
        self._clock.end(ended, ended.place.at(ended.n_steps, ended.n_steps))

    def _take(self, names: list[str]) -> dict[str, Any]:
        """Return the batch of a step, from the sources with these names."""
        batches = {name: self._sources[name].take(self._threads()) for name in names}
        for name in names:  # after all batches were read, as any read may raise
            self._sources[name].note_taken()
        return batches if self._within_batch else {**batches[names[0]], "source": names[0]}

    def _begin_steps(self) -> StepCounter:
        """Return the step counter of the next pass, after the checks of a Lightning training."""
        training = training_on(self, self._framework_object)
        if training is not None:
            # overfit_batches reads the first batches of epoch 0 in every epoch
            if training.overfits and not self.batches_done:
                self.set_epoch(0)
            place = self._next
            training.check_all_are_read(self._mixture.length(place), place.done)
        self._steps = self._steps.next(training)
        return self._steps

    def _threads(self) -> Executor | None:
        """Return the threads of this process in which all sources prefetch."""
        n_ahead = max(source.loader.prefetch for source in self._sources.values())
        if n_ahead and (self._readers is None or self._readers[0] != os.getpid()):
            self._readers = os.getpid(), threads(n_ahead)
        return self._readers[1] if self._readers else None

    # States

    def step_done(self) -> None:
        """Mark the step of the last yielded batch as done.

        See Also
        --------
        StatefulLoader.step_done

        Examples
        --------
        >>> for step, batch in enumerate(mixed):
        ...     if step == 3:  # stopped within the fourth step
        ...         break
        ...     mixed.step_done()
        >>> mixed.state_dict()["done"]
        3
        """
        self._steps.done()

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return the position of the mixture and its sources, the same on every rank.

        Parameters
        ----------
        batches_done
            Number of steps of this epoch that every rank has done. None takes the number of batches that were yielded,
            or marked by :meth:`step_done` (default).

        Returns
        -------
        dict
            State for :meth:`load_state_dict`, on any number of ranks. It can be written as JSON.

        Raises
        ------
        ValueError
            If ``batches_done`` is not a number of steps that this iteration can have done, or is smaller than the
            number of steps that a different number of ranks has done.

        Examples
        --------
        >>> batches = iter(mixed)
        >>> _ = next(batches), next(batches)
        >>> state = mixed.state_dict()
        >>> state["epoch"], state["done"]
        (0, 2)
        """
        if batches_done is not None:
            batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        return self._mixture.to_state(self._place_after(batches_done))

    def _place_after(self, batches_done: int | None) -> Place:
        """Return the place after some steps of the epoch; by default, after the done steps of the last pass."""
        last = self._last
        if last is None and batches_done is None:
            return self._mixture.resolved(self._clock.place)
        if last is None:
            # before a pass begins, batches_done may lie before the resume
            place, least = self._next, self._next.start
            n_steps = self._mixture.length(place)
        else:
            place, least, n_steps = last.place, last.place.done, last.n_steps
            if batches_done is None:
                batches_done = place.done + self._steps.n_done
        assert batches_done is not None
        if not least <= batches_done <= n_steps:
            raise ValueError(
                f"batches_done must be from {least}, as earlier steps were done before this iteration, by a different "
                f"number of ranks or with different settings, to {n_steps}, the steps of the epoch, got {batches_done}."
            )
        has_ended = last is not None and last.has_ended
        return place if batches_done == place.done and not has_ended else place.at(batches_done, n_steps)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume from a saved state, on every rank and on any number of ranks.

        Parameters
        ----------
        state
            State that :meth:`state_dict` has returned on any rank.
        strict
            True to raise if the state is of a mixture with different sources, weights, ``n_steps`` or seed (default).
            False warns of the differences: sources of the state resume, and other sources begin their first epoch.

        Raises
        ------
        TypeError, ValueError
            If the state is damaged or of a newer format, is of a different mixture under ``strict``, or has the state
            of a source that can't be resumed. The mixture is then unchanged.

        Examples
        --------
        >>> batches = iter(mixed)
        >>> _ = next(batches), next(batches)
        >>> state = mixed.state_dict()
        >>> mixed.load_state_dict(state)  # usually in a new process
        >>> mixed.batches_done, len([batch for batch in mixed])
        (2, 6)
        """
        with errors_explained(self._framework_object):
            self._clock.go_to(self._loaded(state, strict=strict), is_loaded=True)

    def _loaded(self, state: Mapping[str, Any], *, strict: bool) -> Place:
        """Return the place of a state, after the checks of loading it."""
        place, notes = self._mixture.from_state(state, strict=strict)
        self._check()  # from now on, the rows of the sources must stay the same
        if notes:
            warn(" ".join(notes))
        for source in self._sources.values():
            source.unchecked = []
        return place

    def reshard(self, dist_info: DistInfo | None = None, *, batches_done: int | None = None) -> None:
        """Change the rank and the world size within an epoch, without a restart.

        Parameters
        ----------
        dist_info
            Source of the new rank and world size, for all sources of the mixture. None asks the ``dist_info`` of each
            sampler again (default).
        batches_done
            Number of steps of this epoch that every rank has done. None takes the number of this process (default).

        Raises
        ------
        TypeError, ValueError
            If a source can't be resumed on this number of ranks, or ``dist_info`` is invalid. The mixture is then
            unchanged.

        See Also
        --------
        StatefulLoader.reshard
        """
        state = self.state_dict(batches_done=batches_done)
        with ExitStack() as stack:
            for source in self._sources.values():
                stack.enter_context(source.resharded(dist_info))
            self._clock.continue_at(self._loaded(state, strict=True))

    # Plans and cells

    def cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None = None,
        ranks: int | Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> pd.DataFrame:
        """Return the cells of each rank in some steps of an epoch, as a table.

        Parameters
        ----------
        steps, columns, ranks, epoch
            As for :meth:`StatefulLoader.cells_of`. Steps are counted from the beginning of the mixture's epoch.

        Returns
        -------
        pandas.DataFrame
            One line for each cell, in the order of steps, sources and ranks. It has the columns of
            :meth:`StatefulLoader.cells_of` and the string ``source`` after ``step``; ``row`` is a row of the source.

        Raises
        ------
        KeyError
            If a source of these steps has no such column of ``obs``.
        IndexError
            If the epoch has no such step.
        ValueError
            If a step was done by a different number of ranks or workers, or by a mixture with a different order of
            sources, before ``load_state_dict`` or :meth:`reshard`.

        Examples
        --------
        >>> mixed.cells_of(1, "donor", ranks=1)
           step source  rank  row  dataset     cell donor
        0     1  tahoe     1   42        0  cell 42     e
        1     1  tahoe     1   43        0  cell 43     e
        2     1  tahoe     1   24        0  cell 24     c
        3     1  tahoe     1   27        0  cell 27     c
        """
        self._check()
        epoch = None if epoch is None else integer("epoch", epoch, least=0, below=BOUND)
        return self._mixture.cells(self._of_epoch(epoch), steps, columns, ranks)

    def _of_epoch(self, epoch: int | None) -> Place:
        """Return the place in an epoch; by default, in the epoch that was set, loaded or read last."""
        place: Place | Start = self._clock.place if self._last is None else self._last.place
        if epoch is None or epoch == place.epoch:
            return self._mixture.resolved(place)
        start = place.start_of(epoch)
        # the epoch of a state has steps of earlier numbers of ranks
        return self._mixture.resolved(start.origin if epoch == start.origin.epoch else start)

    def plan(self, n_steps: int | None = None) -> pd.DataFrame:
        """Return how often each source is read in the epoch, as a table.

        Parameters
        ----------
        n_steps
            Number of steps from the beginning of the epoch. None takes all steps (default).

        Returns
        -------
        pandas.DataFrame
            One line for each source. ``share`` is its fraction of the steps, ``steps`` the number of its steps,
            ``batches`` the number of batches of an epoch of the source on each rank, ``epochs`` the number of epochs of
            the source in these steps, and ``rows`` the number of rows of such an epoch over all ranks.

        See Also
        --------
        StatefulLoader.plan

        Examples
        --------
        >>> mixed.plan().reset_index()
           source  share  steps  batches    epochs  rows
        0  census   0.25      2        6  0.333333    48
        1   tahoe   0.75      6        6  1.000000    48
        """
        self._check()
        place = self._of_epoch(None)
        n_steps = self._mixture.length(place) if n_steps is None else n_steps
        return self._mixture.plan(place, integer("n_steps", n_steps, least=1, below=BOUND))

    # Checks

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks have the same mixture, sources and datasets.

        Parameters
        ----------
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

        Raises
        ------
        ValueError
            On every rank, if ranks differ. The message lists all differences.
        TimeoutError
            If a process doesn't call it within ``timeout`` seconds.

        See Also
        --------
        StatefulLoader.check_ranks_agree
        """
        checks.ranks_agree(self._any_source.cursor, self._description, timeout=timeout, gather=gather)

    def _description(self, job: Placement) -> Description:
        self._check()
        upcoming = self._next
        parts = {
            name: self._sources[name].describe(job, position)
            for name, position in self._mixture.positions(upcoming).items()
        }
        settings = {"sources": ", ".join(self._sources), **self._mixture.identity}
        return Description.joined(
            parts,
            {**settings, "epoch": upcoming.epoch, "steps done": upcoming.done},
            (upcoming.epoch, upcoming.done),
        )

    def check_epoch_read(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> str:
        """Check that all ranks together have read the planned rows of each source.

        It checks the epochs of sources that have ended since the last call, or since a state was loaded. A source that
        workers read needs ``return_index=True``.

        Parameters
        ----------
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

        Returns
        -------
        str
            One line for each epoch of a source.

        Raises
        ------
        ValueError
            On every rank, if a rank has read other rows than planned. The message lists all differences.
        TimeoutError
            If a process doesn't call it within ``timeout`` seconds.

        See Also
        --------
        StatefulLoader.check_epoch_read

        Examples
        --------
        >>> mixed.reshard(Rank(0, 1))  # this process is the only rank
        >>> for epoch in range(2):
        ...     for batch in mixed:
        ...         pass
        >>> for sentence in mixed.check_epoch_read().split(". "):
        ...     print(sentence)
        tahoe, epoch 0: 1 rank has read 48 rows in 12 batches, as planned
        Each of the 48 rows was read once; 2 of the 50 are dropped in this epoch
        """
        lines = checks.epochs_read(self._any_source.cursor, self._readings, timeout=timeout, gather=gather)
        for source in self._sources.values():
            source.unchecked = []
        return "\n".join(lines) or "no epoch of a source has ended since the last check"

    def _readings(self, job: Placement) -> tuple[Description, dict[str, Reading]]:
        """Return the rows that this process has read in ended epochs of the sources."""
        readings: dict[str, Reading] = {}
        for source in self._sources.values():
            for key, reading in source.readings(job):
                while key in readings:  # an epoch that was set and read again
                    key += " again"  # noqa: PLW2901 another name
                readings[key] = reading
        same = {"sources": ", ".join(self._sources)}
        return Description(job.rank, job.world_size, job.n_peers, same), readings

    def __repr__(self) -> str:
        loaders = {name: source.loader for name, source in self._sources.items()}
        about = {name: f"{loader._shape}; {loader._batches_about}" for name, loader in loaders.items()}
        about["rank"] = self._any_source.loader._rank_about
        epoch = self.next_epoch
        try:
            last, place = self._last, self._next
            n_done = place.done
            if last is not None and not last.has_ended:
                place, n_done = last.place, last.place.done + self._steps.n_done
            about["epoch"] = f"{place.epoch}, {n_done} of {len(self)} steps done"
        except (RuntimeError, ValueError) as error:  # such as a source with too few rows, or an unknown rank
            about["epoch"] = f"{epoch}, of an unknown number of steps ({error})"
        return shown(f"{type(self).__name__}: {plural(len(loaders), 'source')}", about | self._waited_about)

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(self.__getstate__(), _mixture=copy.copy(self._mixture))
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        clock = copy.copy(self._clock)
        # a copy has no open passes, and threads stay in their process
        clock.last = None if self._last is None else replace(self._last, is_open=False)
        return vars(self) | {"_clock": clock, "_running": None, "_readers": None}


def _order_of(
    sources: Mapping[str, Source], weights: SourceWeights | None, seed: int, *, within_batch: bool
) -> SourceOrder:
    """Return the order of sources for the arguments of a mixture."""
    if not within_batch:
        if weights is None:
            raise ValueError("weights must name the weight of each source, got None. Pass a dict of weights by name.")
        return RandomOrder(weights, sources, seed)
    if weights is not None:
        sizes = {name: source.loader.sampler.batch_size for name, source in sources.items()}
        if not isinstance(weights, Mapping) or dict(weights) != sizes:
            raise ValueError(
                f"Under within_batch=True, weights must be the batch sizes of the samplers, {sizes}, got "
                f"{weights}. Make the samplers with these batch sizes, or omit weights."
            )
    return EveryStep(sources)
