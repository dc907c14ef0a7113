"""The MixedLoader: batches of several collections, in an order of sources that is the same on all ranks.

The position of a mixture follows from its step. The order of sources gives the number of batches that each source has
yielded before that step (:mod:`order`), and a walk along the epochs of a source leads to its position
(:class:`_Source`). A :class:`Place` holds the position of each source at the beginning of the mixture's epoch, and the
number of its batches since then. So the cells of any step are known, on any numbers of ranks.

The mixture sets the position of a source before it iterates over the source. It reads no position back.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import pandas as pd
from annbatch.compat import IterableDataset  # type: ignore[attr-defined]  # not exported; torch's, if there is torch

from annbatch_distributed import checks
from annbatch_distributed.checks import Description, Gather, Reading, Tally, Timeout
from annbatch_distributed.cursor import Cursor, warn
from annbatch_distributed.epochs import Epochs, StepSelection, step_numbers
from annbatch_distributed.lanes import Segment
from annbatch_distributed.loader.epochs import EpochLoader, StepCounter, common_n_var
from annbatch_distributed.loader.order import EveryStep, RandomOrder, SourceOrder, Weights
from annbatch_distributed.loader.place import Place, Track, from_state, to_state
from annbatch_distributed.loader.prefetch import threads
from annbatch_distributed.ranks import DistInfo, Placement, Rank
from annbatch_distributed.ranks.worker import current_worker
from annbatch_distributed.rows import BOUND, integer
from annbatch_distributed.sampler import DistributedSampler, cursor_of
from annbatch_distributed.state import Identity, Position, check_identity, differences
from annbatch_distributed.state import from_state as from_source_state
from annbatch_distributed.state import to_state as to_source_state

if TYPE_CHECKING:
    from annbatch_distributed.loader.workers import WorkerDataLoader


_NOTE = (
    "load_state_dict(state, strict=False) resumes the sources that are in both mixtures, with the settings of this one."
)


class _Source:
    """Source of a mixture: a loader or its workers, and the position that the mixture reads next."""

    def __init__(self, name: str, reader: EpochLoader | WorkerDataLoader) -> None:
        loader = getattr(reader, "_loader", reader)  # a WorkerDataLoader has one
        if not isinstance(loader, EpochLoader):
            raise TypeError(f"The source {name!r} must be a loader such as StatefulLoader, got {reader!r}.")
        if loader.sampler.remainder == "keep":
            raise ValueError(
                f"All ranks must have the same number of batches of the source {name!r}, got a sampler with "
                "remainder='keep'. Pass remainder='exact', 'drop' or 'pad'."
            )
        self.name, self.loader, self._reader = name, loader, reader
        self._n_workers = (getattr(reader, "num_workers", 0) or 1) if reader is not loader else 1
        # at the first check: the number of rows, and how often a mask or rng was assigned
        self._first_check: tuple[int, int] | None = None
        # the position of the next pass, and the batches of the open pass
        self._position = Position()
        self._batches: Iterator[Any] | None = None
        self._has_ended = False
        #: For each complete pass since the last check: its position, and the rows that were read.
        self.unchecked: list[tuple[Position, Tally | None]] = []

    @property
    def sampler(self) -> DistributedSampler:
        """Sampler of the loader."""
        return self.loader.sampler

    @property
    def cursor(self) -> Cursor:
        """Place of this rank in the epochs of the source."""
        return cursor_of(self.loader.sampler)

    @property
    def epochs(self) -> Epochs:
        """Epochs of the source, as functions of a position."""
        return self.cursor.epochs

    def check(self) -> None:
        """Raise if the source has too few rows, or its rows have changed since the mixture began."""
        current = self.loader.n_obs, self.cursor.n_changes
        if self._first_check not in (None, current):
            raise RuntimeError(
                f"The datasets, the mask or the rng of the source {self.name!r} have changed since the mixture began. "
                "Make a new mixture."
            )
        try:
            if self._first_check is None:
                self.epochs.n_left(self.loader.n_obs, self.here(Position()))
        except ValueError as error:
            raise ValueError(f"The source {self.name}: {error}") from error
        self._first_check = current

    @contextmanager
    def resharded(self, dist_info: DistInfo | None) -> Generator[None]:
        """Change the rank for good, unless the block raises; then restore the old rank."""
        with self.cursor.resharded(dist_info):
            yield
        if self._first_check is not None:
            n_obs, n_changes = self._first_check
            self._first_check = n_obs, n_changes + 1

    def here(self, position: Position) -> Position:
        """Return a position whose last segment has the ranks and workers of this job."""
        return self.epochs.here(position, self._n_workers)

    def segment(self, n_batches: int) -> Segment:
        """Return a number of batches as a segment of this job."""
        return self.here(Position()).segments[-1]._replace(done=n_batches)

    def walk(self, track: Track, n_more: int = 0) -> Iterator[tuple[Position, int]]:
        """Walk along a track, and along ``n_more`` batches of this job.

        Yields, for each epoch of the source, the position at which the walk leaves the epoch, and the number of batches
        that were done when it entered. For epochs of 5 batches, a start after 3 batches and a walk along 9, these are
        (5 done in epoch 0, 3), (5 done in epoch 1, 0), (2 done in epoch 2, 0).
        """
        position, n_entered = track.start, track.start.done
        parts = (*track.since, self.segment(n_more))
        for number, (n_lanes, n_workers, n_batches) in enumerate(parts, start=1):
            position = position.with_lanes(n_lanes, n_workers)
            while n_batches:
                n_left = 0 if position.finished else self.epochs.n_left(self.loader.n_obs, position)
                n_taken = min(n_batches, n_left)
                position = position.at(position.done + n_taken, position.done + n_left)
                n_batches -= n_taken  # noqa: PLW2901 it counts down
                if not n_batches:
                    break
                if not position.done:
                    raise ValueError(
                        f"Every epoch of a source must have batches, got none in epoch {position.epoch} of "
                        f"{self.name!r}. Select more rows, or pass a smaller batch_size."
                    )
                yield position, n_entered
                # check_epoch_read verifies all rows of the epochs that this job reads from the beginning
                unverified = position.unverified and number < len(parts)
                position = Position(position.epoch + 1, unverified=unverified).with_lanes(n_lanes, n_workers)
                n_entered = 0
        yield position, n_entered

    def position_after(self, track: Track, n_more: int = 0) -> Position:
        """Return the position after a track and ``n_more`` batches of this job."""
        *_, (position, _) = self.walk(track, n_more)
        return position

    def n_left(self, position: Position) -> int:
        """Return the number of batches of the epoch after a position."""
        return 0 if position.finished else self.epochs.n_left(self.loader.n_obs, self.here(position))

    def go_to(self, track: Track) -> None:
        """Move to the position after a track."""
        self.close()
        position = self.position_after(track)
        self._position = position if self.n_left(position) else Position(position.epoch + 1)

    def close(self) -> None:
        """Close the open pass."""
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]  # it is a generator
            self._batches = None

    def take(self, readers: Executor | None) -> Any:  # noqa: ANN401 whatever is read
        """Return the next batch, from the next epoch if the current one has ended."""
        if self._batches is None:
            self.cursor.go_to(self.here(self._position))
            # all sources share the threads of the mixture
            has_workers = self._reader is not self.loader
            self._batches = iter(self._reader) if has_workers else self.loader.iterate(readers)
        try:
            batch = next(self._batches)
        except StopIteration:
            raise RuntimeError(
                f"The loader of the source {self.name!r} was iterated over, or its epoch was set, outside of the "
                "mixture. Use only the mixture, and iterate over it again."
            ) from None
        self._has_ended = self.sampler.next_epoch != self.sampler.epoch  # this is the last batch of its epoch
        return batch

    def note_end(self) -> None:
        """Record the open pass if the last batch has ended it."""
        if self._has_ended and self._batches is not None:
            next(self._batches, None)
            last, read = self._reader.read_of_last_pass()
            # the sum of two tallies is three numbers, without the rows that aren't added up yet
            self.unchecked.append((last.position, None if read is None else Tally() + Tally.of(read)))
            self._batches, self._position = None, Position(last.position.epoch + 1)

    def state(self, track: Track) -> dict[str, Any]:
        """Return the state of the source at the beginning of a track."""
        identity = self.epochs.config.identity(self.loader.n_obs) | self.loader._collection
        return to_source_state(self.here(track.start), identity)

    def track_of(self, state: Mapping[str, Any], since: Track, *, strict: bool) -> tuple[Track, list[str]]:
        """Return the track of a state, and the differences of its settings, which raise if ``strict``."""
        start, saved = from_source_state(state)
        start = start.trimmed()
        is_within = bool(start.done or since.since)
        n_obs, config = self.loader.n_obs, self.epochs.config
        here = {"n_obs": n_obs if is_within else None, **self.loader._collection}
        compared = config.compared(saved, here, n_obs=n_obs, is_within=is_within)
        if strict:
            check_identity(*compared)
        problems = [f"has different settings: {'; '.join(texts)}"] if (texts := differences(*compared)) else []
        if is_within and (changed := config.changed_versions(saved)):
            problems.append(f"was saved by {changed}")
        return replace(since, start=replace(start, unverified=start.unverified or bool(problems))), problems

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_batches": None}


@dataclass(eq=False)
class _Pass:
    """Pass over a mixture."""

    place: Place
    """Place at its beginning."""
    rank: Rank
    """Rank that reads it."""
    n_steps: int
    """Number of steps of the whole epoch."""
    has_ended: bool = False
    """True once its last batch was yielded."""
    is_open: bool = True
    """True while its iterator is in use, its last step included."""


class MixedLoader(IterableDataset):  # type: ignore[type-arg]  # without torch, it has no parameters
    """Loader of several collections, mixed in the same order on all ranks.

    Each step yields a batch of one source, with the name of the source under the key ``"source"``. When a source ends,
    its next epoch begins. Under ``within_batch=True``, each step yields a dict with a batch of every source, by name.

    Parameters
    ----------
    loaders
        :class:`StatefulLoader` of each source by name, or the ``DataLoader`` that its ``to_dataloader`` returns. Each
        has its own sampler, mask and genes. The mixture sets their epochs.
    weights
        Relative weight of each source by name; 0 excludes a source. To change weights during training, pass a list of
        ``(first_step, weights)`` pairs, ``[(0, {...}), (5_000, {...})]``, whose steps count over all epochs. Under
        ``within_batch``, the number of rows of each source in a batch, which must be the batch size of its sampler.
        None takes the batch sizes.
    n_steps
        Number of steps of an epoch of the mixture.
    until
        End of an epoch, instead of ``n_steps``: ``"first"`` ends it when one source has been read once, ``"all"`` when
        every source has. The next epoch then begins with new epochs of all sources. Sources whose last weight is 0
        don't count.
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
    """

    def __init__(
        self,
        loaders: Mapping[str, EpochLoader | WorkerDataLoader],
        *,
        weights: Weights | None = None,
        n_steps: int | None = None,
        until: Literal["first", "all"] | None = None,
        within_batch: bool = False,
        seed: int = 0,
    ) -> None:
        if not loaders:
            raise ValueError("loaders must have at least one loader, got none. Pass a dict of loaders by name.")
        # sorted, so that the order of the dict doesn't matter
        self._sources = {name: _Source(name, loaders[name]) for name in sorted(loaders)}
        if len({source.sampler for source in self._sources.values()}) < len(self._sources):
            raise ValueError("Two sources have the same sampler. Give each source its own loader and its own sampler.")
        self._order = self._order_of(weights, seed, within_batch=within_batch)
        if (n_steps is None) == (until is None) or until not in (None, "first", "all"):
            raise ValueError(
                f"An epoch must end by n_steps, or by until='first' or 'all', got n_steps={n_steps} and "
                f"until={until!r}. Pass one of them."
            )
        self._n_steps = None if n_steps is None else integer("n_steps", n_steps, least=1, below=BOUND)
        self._until, self._within_batch = until, within_batch
        # the start of a walk to later epochs, and the beginning of the last epoch that a walk has reached
        self._anchor = self._known = self._first_place
        # the place of the next pass, or the epoch that it begins
        self._upcoming: Place | int = 0
        # True until the epoch of a state has ended; True once set_epoch was called
        self._resumes = self._is_set = False
        # the last pass since an epoch was set or a state loaded
        self._pass: _Pass | None = None
        # the pass that reshard() has cut, as long as the rest of it comes next
        self._cut: _Pass | None = None
        # the pass whose steps the open passes of the sources are in, and the pass at whose end they are
        self._standing: _Pass | None = None
        self._reached: _Pass | None = None
        self._steps = StepCounter()
        # the id of a process, and its threads in which all sources prefetch
        self._readers: tuple[int, Executor] | None = None

    def _order_of(self, weights: Weights | None, seed: int, *, within_batch: bool) -> SourceOrder:
        if not within_batch:
            if weights is None:
                raise ValueError(
                    "weights must name the weight of each source, got None. Pass a dict of weights by name."
                )
            return RandomOrder(weights, self._sources, seed)
        if weights is not None:
            sizes = {name: source.sampler.batch_size for name, source in self._sources.items()}
            if not isinstance(weights, Mapping) or dict(weights) != sizes:
                raise ValueError(
                    f"Under within_batch=True, weights must be the batch sizes of the samplers, {sizes}, got "
                    f"{weights}. Make the samplers with these batch sizes, or omit weights."
                )
        return EveryStep(self._sources)

    # Properties of the sources

    @property
    def _first(self) -> _Source:
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
        sizes = [source.sampler.batch_size or 0 for source in self._sources.values()]
        return sum(sizes) if self._within_batch else max(sizes)

    @property
    def _framework_object(self) -> object:
        """Framework object, such as a trainer, in the ``dist_info`` of a source; None if there is none."""
        objects = (source.epochs.source.framework_object for source in self._sources.values())
        return next((one for one in objects if one is not None), None)

    def _check(self) -> None:
        """Raise if the loaders are of different ranks, or a source fails its check."""
        ranks = {name: (source.sampler.rank, source.sampler.world_size) for name, source in self._sources.items()}
        if len({*ranks.values()}) > 1:
            ranks_of = ", ".join(f"{name} of rank {rank} of {world_size}" for name, (rank, world_size) in ranks.items())
            raise ValueError(f"All loaders must be of the same rank, got {ranks_of}. Pass the same dist_info to each.")
        for source in self._sources.values():
            source.check()

    # Epochs

    @property
    def _first_place(self) -> Place:
        return Place(dict.fromkeys(self._sources, Track()))

    @property
    def next_epoch(self) -> int:
        """Epoch to resume or to begin: the current epoch, or the next epoch if the current epoch has ended."""
        if self._pass is not None:
            return self._pass.place.epoch + self._pass.has_ended
        return self._upcoming if isinstance(self._upcoming, int) else self._upcoming.epoch + self._upcoming.finished

    @property
    def batches_done(self) -> int:
        """Number of steps of the epoch that were done before a resume; else 0."""
        return self._next().done

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, on every rank.

        Epoch ``e`` begins at step ``e * n_steps``, whatever was read before. Under ``until``, it begins with epochs of
        the sources that no earlier epoch has begun. Setting the epoch of a loaded state resumes it; if the state was
        saved at the end of the epoch, no batches remain. A running iterator is not affected until a new one begins.

        Raises
        ------
        ValueError
            If a state of a later epoch was loaded, and no iteration has begun since.
        """
        epoch = integer("epoch", epoch, least=0, below=BOUND)
        loaded = self._upcoming if self._resumes and isinstance(self._upcoming, Place) else None
        if loaded is not None and self._pass is None and epoch < loaded.epoch:
            raise ValueError(
                f"A state of epoch {loaded.epoch} was loaded, and set_epoch({epoch}) would discard it. Start at "
                "loader.next_epoch."
            )
        self._is_set = True
        # frameworks set the epoch of a state that they have just loaded
        if loaded is None or epoch != loaded.epoch:
            if epoch <= self._anchor.epoch:  # begin it again; later epochs then follow from its beginning
                self._anchor = self._known = self._start_of(epoch)
            self._go_to(epoch)

    def _go_to(self, upcoming: Place | int, *, resumes: bool = False) -> None:
        """Set the place of the next pass, or the epoch that it begins."""
        self._upcoming, self._resumes, self._pass, self._cut = upcoming, resumes, None, None

    def _next(self) -> Place:
        """Return the place of the next pass."""
        upcoming = self._upcoming
        if isinstance(upcoming, Place):
            # a finished epoch that is set again has no batches left
            if not upcoming.finished or (self._resumes and self._is_set):
                return upcoming
            upcoming = upcoming.epoch + 1
        if (before := self._place_before(upcoming)) is not None:
            return self._after(before)
        start = self._start_of(upcoming)
        # the sources begin within their epochs, and whether the batches before were read is unknown
        tracks = {
            name: Track(replace(track.start, unverified=track.start.done > 0)) for name, track in start.tracks.items()
        }
        return replace(start, tracks=tracks)

    def _place_before(self, epoch: int) -> Place | None:
        """Return the place at the end of the previous epoch, if that epoch was read; else None."""
        places = [self._anchor] if self._anchor.finished else []
        if self._reached is not None:
            places = [self._reached.place]
        return next((place for place in places if place.epoch + 1 == epoch), None)

    def _start_of(self, epoch: int) -> Place:
        """Return the beginning of an epoch, by a walk from the anchor or from the first epoch."""
        place = self._anchor if epoch >= self._anchor.epoch else self._first_place
        if epoch == place.epoch:
            return place.beginning()
        if self._anchor.epoch < self._known.epoch <= epoch:
            place = self._known
        while place.epoch < epoch:
            place = self._after(place)
        self._known = place
        return place

    def _after(self, place: Place) -> Place:
        """Return the beginning of the epoch after a place."""
        stop = place.first + self._length(place)
        tracks = {}
        for name, source in self._sources.items():
            position = source.position_after(place.tracks[name], self._order.count(name, place.step, stop))
            if self._until is not None and position.done:
                position = Position(position.epoch + 1)
            tracks[name] = Track(position)
        return Place(tracks, place.epoch + 1, first=stop)

    def _length(self, place: Place) -> int:
        """Return the number of steps of the whole epoch of a place."""
        if place.finished:
            return place.done
        if self._n_steps is not None:
            return max(self._n_steps, place.done)
        assert self._until is not None
        n_left = {}
        for name in self._order.lasting:
            source, track = self._sources[name], place.tracks[name]
            position = source.position_after(track)
            # no batches are left if the source has ended its epoch since the mixture's epoch began
            n_left[name] = source.n_left(position) if position.epoch == track.start.epoch else 0
        return self._order.end(place.step, n_left, self._until) - place.first

    def __len__(self) -> int:
        """Return the number of steps of the whole epoch."""
        if self._pass is not None and self._pass.is_open:
            return self._pass.n_steps
        self._check()
        return self._length(self._next())

    # Reading

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return an iterator over the batches of the epoch.

        After a resume, it yields the remaining batches. Without :meth:`set_epoch`, the next iteration begins the next
        epoch. A mixture has one iterator at a time: taking the first batch of a new one ends the previous one. If a
        batch can't be read, the next iteration begins with it.

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
        current = None
        while current is None or (self._cut is current and self.next_epoch == current.place.epoch):
            # once more after each reshard()
            self._check()
            steps = self._begin_steps()
            current = self._begin()
            yield from self._batches_of(current, steps)

    def _begin(self) -> _Pass:
        """Begin the next pass."""
        place = self._next()
        current = self._pass = self._pass_at(place)
        if self._reached is None or self._reached.place.epoch + 1 != place.epoch:
            for name, source in self._sources.items():
                source.go_to(place.tracks[name])
        self._standing, self._reached, self._cut = current, None, None
        # a resumed epoch comes next until it has ended, so that peeking at a batch doesn't lose it
        self._upcoming, self._resumes = (place, self._resumes) if place.done else (place.epoch + 1, False)
        return current

    def _batches_of(self, current: _Pass, steps: StepCounter) -> Iterator[dict[str, Any]]:
        place = current.place
        try:
            steps_left = self._order.at(place.step, place.first + current.n_steps)
            for done, names in enumerate(steps_left, start=place.done + 1):
                batch = self._take(names)
                steps.count()  # before the yield: a consumer that saves a state has this batch
                if done == current.n_steps:
                    self._end_pass(current)
                yield batch
                del batch  # else it would stay in memory until the next one is read
                if self._cut is current:
                    return
                if current.rank != self._first.epochs.placement.rank:
                    self._first.cursor.check_rank(current.rank)
                if self._standing is not current:
                    raise RuntimeError(
                        "A mixture has one iterator at a time, and a newer iterator has ended this one. To look at "
                        "batches in the middle of an epoch, make a second mixture."
                    )
            if place.done == current.n_steps:
                self._end_pass(current)
        except BaseException as error:
            if self._standing is current and not current.has_ended:
                self._standing = None
                for source in self._sources.values():
                    source.close()
                # a GeneratorExit means that the consumer has left its loop, which is no failure
                if self._pass is current and not isinstance(error, GeneratorExit):
                    self._go_to(self._here(), resumes=self._resumes)
            raise
        finally:
            current.is_open = False

    def _pass_at(self, place: Place) -> _Pass:
        return _Pass(place, self._first.epochs.placement.rank, self._length(place))

    def _end_pass(self, ended: _Pass) -> None:
        """Note the end of a pass, unless an epoch was set since."""
        ended.has_ended = True
        ended.is_open = not self._steps.is_training  # Lightning leaves its loop here, and asks for the next length
        if self._pass is ended:
            self._upcoming, self._resumes = ended.place.epoch + 1, False
            # under until, the next epoch begins with new epochs of the sources
            self._reached = None if self._until else ended

    def _take(self, names: list[str]) -> dict[str, Any]:
        """Return the batch of a step, from the sources with these names."""
        batches = {name: self._sources[name].take(self._threads()) for name in names}
        for name in names:  # after all batches were read, as any read may raise
            self._sources[name].note_end()
        return batches if self._within_batch else {**batches[names[0]], "source": names[0]}

    def _begin_steps(self) -> StepCounter:
        """Return the step counter of the next pass, after the checks of a Lightning training."""
        from annbatch_distributed.integrations.lightning import training_on

        training = training_on(self, self._framework_object)
        if training is not None:
            # overfit_batches reads the first batches of epoch 0 in every epoch
            if training.overfits and not self.batches_done:
                self.set_epoch(0)
            place = self._next()
            training.check_all_are_read(self._length(place), place.done)
        self._steps = self._steps.next(training)
        return self._steps

    def _threads(self) -> Executor | None:
        """Return the threads of this process in which all sources prefetch."""
        n_ahead = max(source.loader.read_ahead for source in self._sources.values())
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

    def _here(self, batches_done: int | None = None) -> Place:
        """Return the place after some steps of the last epoch; by default, after the done steps."""
        if self._pass is None and batches_done is None:
            return self._upcoming if isinstance(self._upcoming, Place) else self._next()
        last = self._pass or self._pass_at(self._next())
        place = last.place
        # before a pass begins, batches_done may lie before the resume
        least = place.before if self._pass is None else place.done
        if batches_done is None:
            batches_done = place.done + self._steps.n_done
        if not least <= batches_done <= last.n_steps:
            raise ValueError(
                f"batches_done must be from {least}, the steps that were done before this iteration, to "
                f"{last.n_steps}, the steps of the epoch, got {batches_done}."
            )
        if batches_done == place.done and not last.has_ended:
            return place
        tracks, step = {}, place.first + batches_done
        for name, source in self._sources.items():
            track = place.tracks[name]
            if batches_done < place.done:
                tracks[name] = track.before(self._order.count(name, step, place.step))
            else:
                tracks[name] = track.after(source.segment(self._order.count(name, place.step, step)))
        return replace(place, tracks=tracks, done=batches_done, finished=batches_done == last.n_steps)

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
            If ``batches_done`` is not a number of steps that this iteration can have done.

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
        place = self._here(batches_done)
        states = {name: source.state(place.tracks[name]) for name, source in self._sources.items()}
        return to_state(place, self._identity, states)

    @property
    def _identity(self) -> Identity:
        return self._order.identity | {"n_steps": self._n_steps, "until": self._until}

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
        from annbatch_distributed.integrations.lightning import errors_explained

        with errors_explained(self._framework_object):
            self._load(state, strict=strict)

    def _load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        place, saved, states = from_state(state)
        if strict:
            check_identity(saved, self._identity, whose="a mixture", note=_NOTE)
        tracks, notes = {}, list[str]()
        for name, source in self._sources.items():
            track = Track()
            if name in states:
                try:
                    track, problems = source.track_of(states[name], place.tracks[name], strict=strict)
                    _ = source.n_left(source.position_after(track))  # raises if this number of ranks can't resume it
                except (TypeError, ValueError) as error:
                    error.add_note(f"This is the state of the source {name!r}.")
                    raise
                notes += [f"The state of {name} {problem}." for problem in problems]
            tracks[name] = track
        place = replace(place, tracks=tracks)
        if changed := differences(saved, self._identity):
            place = self._taken_over(place, has_other_order=bool(differences(saved, saved | self._order.identity)))
            notes.append(
                f"The state is of a different mixture: {'; '.join(changed)}. Sources of the state resume; other "
                "sources begin their first epoch."
            )
        if notes:
            warn(" ".join(notes))
        for source in self._sources.values():
            source.unchecked = []
        self._anchor = self._known = place
        self._reached, self._is_set = None, False
        self._go_to(place, resumes=True)

    def _taken_over(self, place: Place, *, has_other_order: bool) -> Place:
        """Return the place of a mixture with different settings as a place of this one."""
        here = {name: Track(self._sources[name].position_after(track)) for name, track in place.tracks.items()}
        if place.finished:  # sources resume, even if each epoch of this mixture begins new epochs of the sources
            return Place(here, place.epoch + 1, first=place.step)
        # the steps of a different order are unknown here, so tracks begin after them
        return replace(place, tracks=here, before=place.done) if has_other_order else place

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
        state, cut = self.state_dict(batches_done=batches_done), self._pass or self._cut
        with ExitStack() as stack:
            for source in self._sources.values():
                stack.enter_context(source.resharded(dist_info))
            self._load(state, strict=True)
        self._cut = cut

    # Plans and cells

    def _place_of(self, epoch: int | None) -> Place:
        """Return the place in an epoch; by default, in the epoch that was set, loaded or read last."""
        place = self._upcoming if self._pass is None else self._pass.place
        if epoch is not None and integer("epoch", epoch, least=0, below=BOUND) != getattr(place, "epoch", place):
            # the epoch of a state has steps of earlier numbers of ranks
            place = self._anchor if epoch == self._anchor.epoch else int(epoch)
        return self._start_of(place) if isinstance(place, int) else place

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
            If a mixture with a different order of sources has done a step, before ``load_state_dict(strict=False)``.

        Examples
        --------
        >>> mixed.cells_of(0, "donor", ranks=1)
           step source  rank  row  dataset     cell donor
        0     0  tahoe     1   42        0  cell 42     e
        1     0  tahoe     1   43        0  cell 43     e
        2     0  tahoe     1   24        0  cell 24     c
        3     0  tahoe     1   27        0  cell 27     c
        """
        self._check()
        place = self._place_of(epoch)
        n_steps = self._length(place)
        wanted = step_numbers(steps, n_steps)
        if len(wanted) and wanted[0] < place.before:
            raise ValueError(
                f"A mixture with a different order of sources has done the steps up to {place.before - 1} of epoch "
                f"{place.epoch}, so their cells are unknown. Ask for steps from {place.before} on."
            )
        parts = []
        for name, source in self._sources.items():
            # (batches of this source,): the step of the epoch that each batch is in, since the track began
            source_steps = self._order.steps_of(name, place.first + place.before, place.first + n_steps) - place.first
            track, n_before = place.tracks[name], 0
            for position, n_entered in source.walk(track, len(source_steps) - track.n_batches):
                # the steps in this epoch of the source
                here = source_steps[n_before : n_before + position.done - n_entered]
                # batches 3 4 5 of the source's epoch (n_entered = 3) in steps here = 2 5 6, and wanted = 5: places = 1,
                # batch 4
                places = np.flatnonzero(np.isin(here, wanted))
                if len(places):
                    try:
                        cells = source.loader.cells_at(position, n_entered + places, columns, ranks)
                    except KeyError as error:
                        raise KeyError(f"The source {name}: {error.args[0]}") from error
                    cells["step"] = here[cells["step"] - n_entered]
                    cells.insert(1, "source", name)
                    parts.append(cells)
                n_before += len(here)
        if not parts:
            return pd.DataFrame(columns=["step", "source", "rank", "row", "dataset", "cell"])
        cells = pd.concat(parts, ignore_index=True)
        if "set" in cells:  # sources without sets have missing values there
            cells = cells.astype({"set": "Int64", "is_control": "boolean"})
        # stable, so that rows of a batch keep their order
        return cells.sort_values(["step", "source", "rank"], kind="stable", ignore_index=True)

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
        place = self._place_of(None)
        stop = place.first + integer(
            "n_steps", self._length(place) if n_steps is None else n_steps, least=1, below=BOUND
        )
        lines = []
        for name, source in self._sources.items():
            first = Position(place.tracks[name].start.epoch)
            plan = source.epochs.plan(source.loader.n_obs, source.here(first))
            n_taken = self._order.count(name, place.first, stop)
            line = {"source": name, "share": n_taken / (stop - place.first), "steps": n_taken}
            lines.append(
                line | {"batches": plan.most_batches, "epochs": n_taken / plan.most_batches, "rows": sum(plan.sizes)}
            )
        return pd.DataFrame(lines).set_index("source")

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
        checks.ranks_agree(self._first.cursor, self._description, timeout=timeout, gather=gather)

    def _description(self, job: Placement) -> Description:
        self._check()
        upcoming = self._next()
        parts = {}
        for name, source in self._sources.items():
            at = source.here(source.position_after(upcoming.tracks[name]))
            parts[name] = Description.of(job, source.cursor, source.loader.n_obs, at, source.loader._collection)
        settings = {"sources": ", ".join(self._sources), **self._identity}
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
        Each of the 48 rows was read once, 2 of the 50 are dropped in this epoch
        """
        lines = checks.epochs_read(self._first.cursor, self._readings, timeout=timeout, gather=gather)
        for source in self._sources.values():
            source.unchecked = []
        return "\n".join(lines) or "no epoch of a source has ended since the last check"

    def _readings(self, job: Placement) -> tuple[Description, dict[str, Reading]]:
        """Return the rows that this process has read in ended epochs of the sources."""
        readings: dict[str, Reading] = {}
        for name, source in self._sources.items():
            n_obs = source.loader.n_obs
            for position, read in source.unchecked:
                key = f"{name}, epoch {position.epoch}"
                while key in readings:  # an epoch that was set and read again
                    key += " again"
                last = source.epochs.pass_at(n_obs, position)
                readings[key] = Reading.of(job, source.cursor, n_obs, read, last)
        same = {"sources": ", ".join(self._sources)}
        return Description(job.rank.rank, job.rank.world_size, job.n_peers, same), readings

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(self.__getstate__())
        duplicate._sources = {name: copy.copy(source) for name, source in self._sources.items()}
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        # a copy has no open passes and no threads; its sources begin at the place of its next pass
        last = None if self._pass is None else replace(self._pass, is_open=False)
        return vars(self) | {"_pass": last, "_cut": None, "_readers": None, "_standing": None, "_reached": None}
