"""The MixedLoader: one training over several collections, in an order of sources that is the same on all ranks.

How far a mixture is follows from the step. The order of sources says how many batches each source has given before that
step (:mod:`order`), and a walk along the epochs of a source leads to its position (:class:`_Source`). A :class:`Place`
holds the positions of the sources where an epoch of the mixture begins, and what each has given since, so that the
cells of any step can be told, whatever numbers of ranks have run the epoch.

The mixture sets the position of a source before it iterates over it. Nothing is read back from the sources.
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
from annbatch_distributed.lanes import Segment
from annbatch_distributed.loader.epochs import EpochLoader, StepCounter, common_n_var
from annbatch_distributed.loader.order import EveryStep, RandomOrder, SourceOrder, Weights
from annbatch_distributed.loader.place import Place, Track, from_state, to_state
from annbatch_distributed.loader.prefetch import threads
from annbatch_distributed.planner import StepSelection, step_numbers
from annbatch_distributed.ranks import Deferred, DistInfo, Placement
from annbatch_distributed.ranks.worker import current_worker
from annbatch_distributed.rows import BOUND, integer
from annbatch_distributed.sampler import DistributedSampler, warn
from annbatch_distributed.state import Identity, Position, check_identity, differences
from annbatch_distributed.state import from_state as from_source_state

if TYPE_CHECKING:
    from annbatch_distributed.loader.workers import WorkerDataLoader


_NOTE = "load_state_dict(state, strict=False) resumes each source that both have where it was, and mixes as this one."


class _Source:
    """A source of a mixture: a loader, or the workers that read it, and where the mixture reads it next."""

    def __init__(self, name: str, reader: EpochLoader | WorkerDataLoader) -> None:
        loader = getattr(reader, "_loader", reader)  # of a WorkerDataLoader
        if not isinstance(loader, EpochLoader):
            raise TypeError(f"A mixture takes loaders such as StatefulLoader, got {reader!r} as {name!r}.")
        if loader.sampler.remainder == "keep":
            raise ValueError(
                f"The ranks of {name} may have different numbers of batches, as its remainder is 'keep'. Pass "
                "remainder='exact', 'drop' or 'pad'."
            )
        self.name, self.loader, self._reader = name, loader, reader
        self._n_workers = (getattr(reader, "num_workers", 0) or 1) if reader is not loader else 1
        # the number of rows, and how often a mask or rng was assigned, when the mixture first asked
        self._noted: tuple[int, int] | None = None
        # where its next pass begins, and the batches of the pass that is open
        self._position = Position()
        self._batches: Iterator[Any] | None = None
        self._has_ended = False
        #: Where its passes began that have ended since they were checked, and the rows that were read.
        self.ended: list[tuple[Position, Tally | None]] = []

    @property
    def sampler(self) -> DistributedSampler:
        """The sampler of the loader."""
        return self.loader.sampler

    def check(self) -> None:
        """Raise if the source has too little to read, or reads other rows than when the mixture was made."""
        here = self.loader.n_obs, self.sampler.n_changes
        if self._noted not in (None, here):
            raise RuntimeError(
                f"The datasets, the mask or the rng of the source {self.name} have changed since the mixture began. "
                "Make another mixture."
            )
        try:
            if self._noted is None:
                self.sampler.n_left(self.loader.n_obs, self.here(Position()))
        except ValueError as error:
            raise ValueError(f"The source {self.name}: {error}") from error
        self._noted = here

    @contextmanager
    def resharded(self, dist_info: DistInfo | Deferred | None) -> Generator[None]:
        """Change the rank, and resume in this context; if that raises, the rank is as it was."""
        with self.sampler.resharded(dist_info):
            yield
        if self._noted is not None:
            n_obs, n_changes = self._noted
            self._noted = n_obs, n_changes + 1

    def here(self, position: Position) -> Position:
        """Return a position with a last segment of this job."""
        return self.sampler.here(position, self._n_workers)

    def segment(self, n_batches: int) -> Segment:
        """Return some batches of this job, as a segment."""
        return self.here(Position()).segments[-1]._replace(done=n_batches)

    def epochs(self, track: Track, n_more: int = 0) -> Iterator[tuple[Position, int]]:
        """Walk along a track, and further by some batches of this job.

        Yields, for each epoch of the source, the position where the track leaves it, and the number of its batches that
        were done where the track entered it. For epochs of 5 batches, a start after 3 and 9 batches in all, these are
        (5 done of epoch 0, 3), (5 done of epoch 1, 0), (2 done of epoch 2, 0).
        """
        position, n_entered = track.start, track.start.done
        parts = (*track.since, self.segment(n_more))
        for number, (n_lanes, n_workers, n_batches) in enumerate(parts, start=1):
            position = position.with_lanes(n_lanes, n_workers)
            while n_batches:
                n_left = 0 if position.finished else self.sampler.n_left(self.loader.n_obs, position)
                n_taken = min(n_batches, n_left)
                position = position.at(position.done + n_taken, position.done + n_left)
                n_batches -= n_taken  # noqa: PLW2901 those that are left
                if not n_batches:
                    break
                if not position.done:
                    raise ValueError(f"Epoch {position.epoch} of the source {self.name} has no batches.")
                yield position, n_entered
                # rows of the epochs that this job reads from their beginning are checked in full
                unverified = position.unverified and number < len(parts)
                position = Position(position.epoch + 1, unverified=unverified).with_lanes(n_lanes, n_workers)
                n_entered = 0
        yield position, n_entered

    def position_after(self, track: Track, n_more: int = 0) -> Position:
        """Return the position after a track, and some more batches of this job."""
        *_, (position, _) = self.epochs(track, n_more)
        return position

    def n_left(self, position: Position) -> int:
        """Return the number of batches that are left of the epoch of a position."""
        return 0 if position.finished else self.sampler.n_left(self.loader.n_obs, self.here(position))

    def go_to(self, track: Track) -> None:
        """Read what comes after a track next."""
        self.close()
        position = self.position_after(track)
        self._position = position if self.n_left(position) else Position(position.epoch + 1)

    def close(self) -> None:
        """Close the pass that is open."""
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]  # it is a generator
            self._batches = None

    def take(self, readers: Executor | None) -> Any:  # noqa: ANN401 whatever is read
        """Return the next batch, of the next epoch if one has ended."""
        if self._batches is None:
            self.sampler.go_to(self.here(self._position))
            # the mixture alone holds the threads, which end with it
            is_own = self._reader is self.loader
            self._batches = self.loader.iterate(readers) if is_own else iter(self._reader)
        try:
            batch = next(self._batches)
        except StopIteration:
            raise RuntimeError(
                f"The source {self.name} was read, or its epoch set, outside of its mixture. Iterate over the mixture "
                "again, and leave the loaders of its sources alone."
            ) from None
        self._has_ended = self.sampler.next_epoch != self.sampler.epoch  # that was the last one of its epoch
        return batch

    def note_end(self) -> None:
        """Take note of the pass that the batch that was taken last has ended, if it has."""
        if self._has_ended and self._batches is not None:
            next(self._batches, None)
            last, read = self._reader.read_of_last_pass()
            # the sum of two is made up of three numbers, without the rows that wait to be added up
            self.ended.append((last.position, None if read is None else Tally() + Tally.of(read)))
            self._batches, self._position = None, Position(last.position.epoch + 1)

    def state(self, track: Track) -> dict[str, Any]:
        """Return the state of the source where a track begins."""
        return self.sampler.state_of(self.here(track.start), self.loader.n_obs, self.loader._collection)

    def track_of(self, state: Mapping[str, Any], since: Track, *, strict: bool) -> tuple[Track, list[str]]:
        """Return the track of a state, and how its settings differ from those here, an error if ``strict``."""
        start, saved = from_source_state(state)
        start = replace(start, segments=tuple(segment for segment in start.segments if segment.done))
        is_within = bool(start.done or since.since)
        compared = self.sampler.compared(saved, self.loader.n_obs, self.loader._collection, is_within=is_within)
        if strict:
            check_identity(*compared)
        problems = [f"has other settings: {'; '.join(different)}"] if (different := differences(*compared)) else []
        if is_within and (changed := self.sampler.changed_versions(saved)):
            problems.append(f"was saved by {changed}")
        return replace(since, start=replace(start, unverified=start.unverified or bool(problems))), problems

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_batches": None}


@dataclass(eq=False)
class _Pass:
    """A pass over a mixture."""

    place: Place
    """Place where it begins."""
    n_steps: int
    """Number of steps of its epoch, those included that are done where it begins."""
    has_ended: bool = False
    """True if its last batch was yielded."""
    is_open: bool = True
    """True as long as its iterator is in use, also in its last step."""


class MixedLoader(IterableDataset):  # type: ignore[type-arg]  # without torch, it has no parameters
    """Loader of batches of several loaders, mixed in an order that is the same on all ranks.

    Each step takes a batch of one source, with the key ``"source"``, the name of its source. A source that has come to
    its end begins its next epoch. With ``within_batch=True``, each step takes a batch of every source, as a dict by
    their names.

    Parameters
    ----------
    loaders
        :class:`StatefulLoader` of each source by its name, or the ``DataLoader`` that its ``to_dataloader`` returns.
        Each has its own sampler, mask and genes. The mixture sets their epochs.
    weights
        Share of each source in the steps, by name and in any unit; 0 leaves it out. ``[(0, {...}), (5_000, {...})]``
        gives other weights from a step on; steps are counted over all epochs. Under ``within_batch``, the rows of each
        source in a batch, which must be the batch sizes of their samplers; None takes these.
    n_steps
        Number of steps of an epoch of the mixture.
    until
        End of an epoch in place of ``n_steps``: ``"first"``, when one of the sources has been read once, or ``"all"``,
        when each has. The next one begins with new epochs of all sources. Sources whose last weight is 0 don't count.
    within_batch
        True to take a batch of every source in each step (default False).
    seed
        Seed of the order of the sources, within ``[0, 2**63)`` (default 0).

    Raises
    ------
    TypeError
        If a source is no such loader, or an argument has the wrong type.
    ValueError
        If there are no sources, a weight is negative or not finite, all are 0, weights name other sources, or a
        sampler has ``remainder="keep"``, whose ranks may have different numbers of batches.

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
            raise ValueError("A mixture needs at least one loader, got none.")
        # sorted, so that the order in which a script names them makes no difference
        self._sources = {name: _Source(name, loaders[name]) for name in sorted(loaders)}
        if len({source.sampler for source in self._sources.values()}) < len(self._sources):
            raise ValueError("Each source of a mixture needs its own loader and its own sampler.")
        self._order = self._order_of(weights, seed, within_batch=within_batch)
        if (n_steps is None) == (until is None) or until not in (None, "first", "all"):
            raise ValueError(f"Pass n_steps, or until='first' or 'all', got n_steps={n_steps} and until={until!r}.")
        self._n_steps = None if n_steps is None else integer("n_steps", n_steps, least=1, below=BOUND)
        self._until, self._within_batch = until, within_batch
        # where the walk to later epochs begins, and the beginning of an epoch that it has led to
        self._anchor = self._known = self._first_place
        # the next place: a place, or the beginning of an epoch
        self._upcoming: Place | int = 0
        # True while the rest of a state's epoch is left, and once its epoch was set again
        self._resumes = self._is_set = False
        # the pass begun last, since an epoch was set or a state loaded
        self._pass: _Pass | None = None
        # the pass that reshard has cut, as long as the rest of it comes next
        self._cut: _Pass | None = None
        # the pass in which the open passes of the sources are, and the one at whose end they are
        self._standing: _Pass | None = None
        self._reached: _Pass | None = None
        self._steps = StepCounter()
        # a process, with its threads in which all sources read ahead
        self._readers: tuple[int, Executor] | None = None

    def _order_of(self, weights: Weights | None, seed: int, *, within_batch: bool) -> SourceOrder:
        if not within_batch:
            if weights is None:
                raise ValueError("Pass weights, the share of each source in the steps.")
            return RandomOrder(weights, self._sources, seed)
        if weights is not None:
            sizes = {name: source.sampler.batch_size for name, source in self._sources.items()}
            if not isinstance(weights, Mapping) or dict(weights) != sizes:
                raise ValueError(
                    f"Under within_batch=True, weights must be the batch sizes of the sources' samplers, {sizes}, got "
                    f"{weights}. Make the samplers with these batch sizes, or leave weights out."
                )
        return EveryStep(self._sources)

    # What the sources have

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
        """The mixture, where frameworks look for an object whose ``set_epoch`` they can call."""
        return self

    @property
    def batch_sampler(self) -> MixedLoader:
        """The mixture, where frameworks look for a batch size."""
        return self

    @property
    def batch_size(self) -> int:
        """Rows of a full batch on each rank: under ``within_batch`` of all sources, else the largest batch size."""
        sizes = [source.sampler.batch_size or 0 for source in self._sources.values()]
        return sum(sizes) if self._within_batch else max(sizes)

    @property
    def _framework_object(self) -> object:
        """The trainer that a source's ``dist_info`` names; None if none does."""
        objects = (source.sampler.framework_object for source in self._sources.values())
        return next((one for one in objects if one is not None), None)

    def _check(self) -> None:
        """Raise if the loaders are of different ranks, or one has too little to read."""
        ranks = {name: (source.sampler.rank, source.sampler.world_size) for name, source in self._sources.items()}
        if len({*ranks.values()}) > 1:
            ranks_of = ", ".join(f"{name} of rank {rank} of {world_size}" for name, (rank, world_size) in ranks.items())
            raise ValueError(f"All loaders must be of the same rank, got {ranks_of}. Give all the same dist_info.")
        for source in self._sources.values():
            source.check()

    # Epochs

    @property
    def _first_place(self) -> Place:
        return Place(dict.fromkeys(self._sources, Track()))

    @property
    def next_epoch(self) -> int:
        """The epoch to resume or begin: this one, or the next one if this one has been read to its end."""
        if self._pass is not None:
            return self._pass.place.epoch + self._pass.has_ended
        return self._upcoming if isinstance(self._upcoming, int) else self._upcoming.epoch + self._upcoming.finished

    @property
    def batches_done(self) -> int:
        """Number of steps of the epoch that are done before the next pass: 0 unless an epoch is resumed."""
        return self._next().done

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, on every rank.

        Epoch ``e`` begins at step ``e * n_steps``, whatever was read before; under ``until``, with epochs of the
        sources that no earlier epoch has begun. The epoch of a state that was loaded is resumed: if the state is of its
        end, nothing is left of it. A pass that is open stays as it is, as long as no other one is begun.

        Raises
        ------
        ValueError
            If a state of a later epoch was loaded, and no pass was begun since.
        """
        epoch = integer("epoch", epoch, least=0, below=BOUND)
        loaded = self._upcoming if self._resumes and isinstance(self._upcoming, Place) else None
        if loaded is not None and self._pass is None and epoch < loaded.epoch:
            raise ValueError(
                f"A state of epoch {loaded.epoch} was loaded, and set_epoch({epoch}) would give it up before any of it "
                "is read. Begin with loader.next_epoch."
            )
        self._is_set = True
        # frameworks set the epoch of a state that they have just loaded
        if loaded is None or epoch != loaded.epoch:
            if epoch <= self._anchor.epoch:  # again from its beginning, which those after it follow
                self._anchor = self._known = self._start_of(epoch)
            self._go_to(epoch)

    def _go_to(self, upcoming: Place | int, *, resumes: bool = False) -> None:
        """Let the next pass begin at a place, or at the beginning of an epoch."""
        self._upcoming, self._resumes, self._pass, self._cut = upcoming, resumes, None, None

    def _next(self) -> Place:
        """Return where the next pass begins."""
        upcoming = self._upcoming
        if isinstance(upcoming, Place):
            # a finished epoch that is set again has nothing left
            if not upcoming.finished or (self._resumes and self._is_set):
                return upcoming
            upcoming = upcoming.epoch + 1
        if (before := self._place_before(upcoming)) is not None:
            return self._after(before)
        start = self._start_of(upcoming)
        # of the epochs that the sources are in, it isn't known whether the batches before were read
        tracks = {
            name: Track(replace(track.start, unverified=track.start.done > 0)) for name, track in start.tracks.items()
        }
        return replace(start, tracks=tracks)

    def _place_before(self, epoch: int) -> Place | None:
        """Return the place in the epoch before, if that is known to have been read to its end; else None."""
        places = [self._anchor] if self._anchor.finished else []
        if self._reached is not None:
            places = [self._reached.place]
        return next((place for place in places if place.epoch + 1 == epoch), None)

    def _start_of(self, epoch: int) -> Place:
        """Return the beginning of an epoch, to which a walk leads from the anchor, or from the first epoch."""
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
        """Return the beginning of the epoch after the one of a place."""
        stop = place.first + self._length(place)
        tracks = {}
        for name, source in self._sources.items():
            position = source.position_after(place.tracks[name], len(self._order.steps_of(name, place.step, stop)))
            if self._until is not None and position.done:
                position = Position(position.epoch + 1)
            tracks[name] = Track(position)
        return Place(tracks, place.epoch + 1, first=stop)

    def _length(self, place: Place) -> int:
        """Return the number of steps of the epoch of a place, those that are done included."""
        if place.finished:
            return place.done
        if self._n_steps is not None:
            return max(self._n_steps, place.done)
        assert self._until is not None
        n_left = {}
        for name in self._order.lasting:
            source, track = self._sources[name], place.tracks[name]
            position = source.position_after(track)
            # none if it has been read once since the epoch began
            n_left[name] = source.n_left(position) if position.epoch == track.start.epoch else 0
        return self._order.end(place.step, n_left, self._until) - place.first

    def __len__(self) -> int:
        """Return the number of steps of the epoch, those included that were done before a resume."""
        if self._pass is not None and self._pass.is_open:
            return self._pass.n_steps
        self._check()
        return self._length(self._next())

    # Reading

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return the batches of a pass, which begins with the first: what is left of a resumed epoch, or else all.

        Without :meth:`set_epoch`, the next pass begins the next epoch. A mixture has one pass at a time: to begin
        another ends the one before. If a batch can't be read, the next pass resumes with it.

        Raises
        ------
        ValueError
            If the loaders are of different ranks, or one has too few rows.
        RuntimeError
            While iterating, if another pass was begun since.
        """
        if current_worker() is not None:
            raise RuntimeError(
                "A MixedLoader can't be read by the workers of a DataLoader. Give it as sources what "
                "loader.to_dataloader(num_workers=...) returns, and iterate over the mixture itself."
            )
        begun = None
        while begun is None or (self._cut is begun and self.next_epoch == begun.place.epoch):
            # once more each time that the ranks change
            self._check()
            steps = self._begin_steps()
            begun = self._begin()
            yield from self._batches_of(begun, steps)

    def _begin(self) -> _Pass:
        """Begin the next pass."""
        place = self._next()
        begun = self._pass = self._pass_at(place)
        if self._reached is None or self._reached.place.epoch + 1 != place.epoch:
            for name, source in self._sources.items():
                source.go_to(place.tracks[name])
        self._standing, self._reached, self._cut = begun, None, None
        # the rest of a resumed epoch stays next until it has been read to its end: a look at a batch doesn't lose it
        self._upcoming, self._resumes = (place, self._resumes) if place.done else (place.epoch + 1, False)
        return begun

    def _batches_of(self, begun: _Pass, steps: StepCounter) -> Iterator[dict[str, Any]]:
        place = begun.place
        try:
            for done in range(place.done + 1, begun.n_steps + 1):
                batch = self._take(self._order.at(place.first + done - 1))
                steps.count()  # before it is yielded: a consumer who saves a state has this batch
                if done == begun.n_steps:
                    self._end_pass(begun)
                yield batch
                del batch  # else it would be held until the next one is read
                if self._cut is begun:
                    return
                if self._standing is not begun:
                    raise RuntimeError(
                        "Another pass over this mixture was begun, which has ended this one: a mixture has one pass at "
                        "a time. For a look at batches in the middle of an epoch, make another mixture."
                    )
            if place.done == begun.n_steps:
                self._end_pass(begun)
        except BaseException as error:
            if self._standing is begun and not begun.has_ended:
                self._standing = None
                for source in self._sources.values():
                    source.close()
                # GeneratorExit comes from a loop that was left
                if self._pass is begun and not isinstance(error, GeneratorExit):
                    self._go_to(self._here(), resumes=self._resumes)
            raise
        finally:
            begun.is_open = False

    def _pass_at(self, place: Place) -> _Pass:
        return _Pass(place, self._length(place))

    def _end_pass(self, ended: _Pass) -> None:
        """Take note that a pass has come to its end, unless an epoch was set since."""
        ended.has_ended = True
        ended.is_open = not self._steps.is_training  # Lightning leaves its loop here, and asks for the next length
        if self._pass is ended:
            self._upcoming, self._resumes = ended.place.epoch + 1, False
            # under until, the next epoch begins elsewhere
            self._reached = None if self._until else ended

    def _take(self, names: list[str]) -> dict[str, Any]:
        """Return the batch of a step that takes some sources."""
        batches = {name: self._sources[name].take(self._threads()) for name in names}
        for name in names:  # once all of them are there
            self._sources[name].note_end()
        return batches if self._within_batch else {**batches[names[0]], "source": names[0]}

    def _begin_steps(self) -> StepCounter:
        """Begin to count the steps of a pass, as a training that reads it has it."""
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
        """Return the threads of this process in which all sources read ahead."""
        n_ahead = max(source.loader.read_ahead for source in self._sources.values())
        if n_ahead and (self._readers is None or self._readers[0] != os.getpid()):
            self._readers = os.getpid(), threads(n_ahead)
        return self._readers[1] if self._readers else None

    # States

    def step_done(self) -> None:
        """Say that the step of the batch that was yielded last is done: see :meth:`StatefulLoader.step_done`."""
        self._steps.done()

    def _here(self, batches_done: int | None = None) -> Place:
        """Return the place after some steps of the epoch begun last; by default, those that are done."""
        if self._pass is None and batches_done is None:
            return self._upcoming if isinstance(self._upcoming, Place) else self._next()
        last = self._pass or self._pass_at(self._next())
        place = last.place
        # before a pass is begun, it may go back to an earlier number of ranks
        least = place.before if self._pass is None else place.done
        if batches_done is None:
            batches_done = place.done + self._steps.n_done
        if not least <= batches_done <= last.n_steps:
            raise ValueError(
                f"batches_done must be at least {least}, which were done before this pass, and at most {last.n_steps}, "
                f"the steps of its epoch, got {batches_done}."
            )
        if batches_done == place.done and not last.has_ended:
            return place
        tracks, step = {}, place.first + batches_done
        for name, source in self._sources.items():
            track = place.tracks[name]
            if batches_done < place.done:
                tracks[name] = track.before(len(self._order.steps_of(name, step, place.step)))
            else:
                tracks[name] = track.after(source.segment(len(self._order.steps_of(name, place.step, step))))
        return replace(place, tracks=tracks, done=batches_done, finished=batches_done == last.n_steps)

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return how far the mixture and each of its sources are, the same on every rank.

        Parameters
        ----------
        batches_done
            Number of steps of this epoch that every rank has done. None takes the number that was yielded, or told by
            :meth:`step_done`.
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
        """Resume where a state was saved, on every rank, on any number of ranks.

        Parameters
        ----------
        state
            State that :meth:`state_dict` has returned, on any rank.
        strict
            True if the state must be of the same sources, weights, ``n_steps`` and seed (default). False takes a state
            of another mixture, and warns of what differs: each source that both have resumes where it was, and others
            begin with their first epoch.

        Raises
        ------
        TypeError, ValueError
            If the state is damaged or of a newer format, of another mixture, or the state of a source can't be resumed.
            The mixture is then as it was.
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
                    error.add_note(f"It is the state of the source {name!r}.")
                    raise
                notes += [f"The state of {name} {problem}." for problem in problems]
            tracks[name] = track
        place = replace(place, tracks=tracks)
        if changed := differences(saved, self._identity):
            place = self._taken_over(place, has_other_order=bool(differences(saved, saved | self._order.identity)))
            notes.append(
                f"The state is of another mixture: {'; '.join(changed)}. Sources of the state resume where they were; "
                "others begin with their first epoch."
            )
        if notes:
            warn(" ".join(notes))
        for source in self._sources.values():
            source.ended = []
        self._anchor = self._known = place
        self._reached, self._is_set = None, False
        self._go_to(place, resumes=True)

    def _taken_over(self, place: Place, *, has_other_order: bool) -> Place:
        """Return the place of a mixture with other settings as a place of this one."""
        here = {name: Track(self._sources[name].position_after(track)) for name, track in place.tracks.items()}
        if place.finished:  # sources resume where they were, also where each epoch of this mixture begins new ones
            return Place(here, place.epoch + 1, first=place.step)
        # steps of another order aren't known here: tracks begin after them
        return replace(place, tracks=here, before=place.done) if has_other_order else place

    def reshard(self, dist_info: DistInfo | Deferred | None = None, *, batches_done: int | None = None) -> None:
        """Change the rank and the world size within an epoch, without a restart: see :meth:`StatefulLoader.reshard`.

        Parameters
        ----------
        dist_info
            Source of the new rank and world size, for all sources. None asks those that the samplers of the sources
            have.
        batches_done
            Number of steps of this epoch that every rank has done. None takes the number of this process.

        Raises
        ------
        TypeError, ValueError
            If a source can't be resumed on this number of ranks, or ``dist_info`` is none. The mixture is then as it
            was.
        """
        state, cut = self.state_dict(batches_done=batches_done), self._pass or self._cut
        with ExitStack() as stack:
            for source in self._sources.values():
                stack.enter_context(source.resharded(dist_info))
            self._load(state, strict=True)
        self._cut = cut

    # What was read

    def _place_of(self, epoch: int | None) -> Place:
        """Return the place in an epoch; by default, in the epoch that was set, loaded or begun last."""
        place = self._upcoming if self._pass is None else self._pass.place
        if epoch is not None and integer("epoch", epoch, least=0, below=BOUND) != getattr(place, "epoch", place):
            # of the epoch of a state, it is known who has run it
            place = self._anchor if epoch == self._anchor.epoch else int(epoch)
        return self._start_of(place) if isinstance(place, int) else place

    def cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None = None,
        ranks: int | Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> pd.DataFrame:
        """Return which cells each rank has read in some steps of an epoch, or will read; nothing is read for it.

        Parameters
        ----------
        steps, ranks, epoch, columns
            As for :meth:`StatefulLoader.cells_of`; steps count within the mixture's epoch.

        Returns
        -------
        A table with the columns ``step``, ``source``, ``rank``, ``row`` (of the source's collection), ``dataset``,
        ``cell`` and the columns of ``obs``, in the order of steps, sources and ranks.

        Raises
        ------
        KeyError
            If a source of these steps has no such column of ``obs``.
        IndexError
            If the epoch has no such step.
        ValueError
            If a step was done by a mixture with another order of sources, before ``strict=False``.
        """
        self._check()
        place = self._place_of(epoch)
        n_steps = self._length(place)
        wanted = step_numbers(steps, n_steps)
        if len(wanted) and wanted[0] < place.before:
            raise ValueError(
                f"Steps up to {place.before - 1} of epoch {place.epoch} were done by a mixture with another order of "
                f"sources, which isn't known here. Ask for steps from {place.before} on."
            )
        parts = []
        for name, source in self._sources.items():
            # steps of the epoch that take this source: its batches 0, 1, ... since the tracks began
            own = self._order.steps_of(name, place.first + place.before, place.first + n_steps) - place.first
            track, n_before = place.tracks[name], 0
            for position, n_entered in source.epochs(track, len(own) - track.n_batches):
                here = own[n_before : n_before + position.done - n_entered]
                # for steps 2 5 6 of the mixture that are batches 3 4 5 of an epoch of the source, and wanted 5: batch 4
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
        if "set" in cells:  # which sources without sets lack
            cells = cells.astype({"set": "Int64", "is_control": "boolean"})
        # stable, so that rows of a batch stay in order
        return cells.sort_values(["step", "source", "rank"], kind="stable", ignore_index=True)

    def plan(self, n_steps: int | None = None) -> pd.DataFrame:
        """Return how often each source is read in the epoch.

        Parameters
        ----------
        n_steps
            Number of steps, from the beginning of the epoch; None for all.

        Returns
        -------
        A table with a line for each source: its ``share`` of the steps, its ``steps``, the ``batches`` of an epoch of
        the source on each rank, how many ``epochs`` of the source the steps make up, and the ``rows`` of such an epoch
        over all ranks. The rows of each rank are in the ``plan()`` of the source's loader.
        """
        self._check()
        place = self._place_of(None)
        stop = place.first + integer(
            "n_steps", self._length(place) if n_steps is None else n_steps, least=1, below=BOUND
        )
        lines = []
        for name, source in self._sources.items():
            first = Position(place.tracks[name].start.epoch)
            plan = source.sampler.plan_at(source.loader.n_obs, source.here(first))
            n_own = len(self._order.steps_of(name, place.first, stop))
            line = {"source": name, "share": n_own / (stop - place.first), "steps": n_own}
            lines.append(
                line | {"batches": plan.most_batches, "epochs": n_own / plan.most_batches, "rows": sum(plan.sizes)}
            )
        return pd.DataFrame(lines).set_index("source")

    # Checks

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks mix the same: see :meth:`StatefulLoader.check_ranks_agree`."""
        first = next(iter(self._sources.values()))
        checks.ranks_agree(first.sampler.agreeing, self._description, timeout=timeout, gather=gather)

    def _description(self, place: Placement) -> Description:
        self._check()
        upcoming = self._next()
        parts = {}
        for name, source in self._sources.items():
            at = source.here(source.position_after(upcoming.tracks[name]))
            parts[name] = source.sampler.describe_at(place, source.loader.n_obs, at, source.loader._collection)
        mine = {"sources": ", ".join(self._sources), **self._identity}
        return Description.joined(
            parts,
            {**mine, "epoch": upcoming.epoch, "steps done": upcoming.done},
            (upcoming.epoch, upcoming.done),
        )

    def check_epoch_read(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> str:
        """Check that all ranks together have read what was planned in the epochs of sources that have ended.

        See :meth:`StatefulLoader.check_epoch_read`. It is about the epochs that have ended since it was last called, or
        a state was loaded. A source that workers read needs ``return_index=True``.

        Returns
        -------
        A line for each epoch that a source has come to the end of.
        """
        first = next(iter(self._sources.values()))
        lines = checks.epochs_read(first.sampler.agreeing, self._readings, timeout=timeout, gather=gather)
        for source in self._sources.values():
            source.ended = []
        return "\n".join(lines) or "no source has come to the end of an epoch"

    def _readings(self, place: Placement) -> tuple[Description, dict[str, Reading]]:
        """Return what this process says of the passes of sources that have ended."""
        readings: dict[str, Reading] = {}
        for name, source in self._sources.items():
            n_obs = source.loader.n_obs
            for position, read in source.ended:
                key = f"{name}, epoch {position.epoch}"
                while key in readings:  # an epoch that was set, and read, again
                    key += " again"
                last = source.sampler.pass_at(n_obs, position)
                readings[key] = source.sampler.reading(place, n_obs, read, last)
        same = {"sources": ", ".join(self._sources)}
        return Description(place.rank.rank, place.rank.world_size, place.n_peers, same), readings

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(self.__getstate__())
        duplicate._sources = {name: copy.copy(source) for name, source in self._sources.items()}
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        # open passes and threads stay where they are: the copy's sources begin at the place of its next pass
        last = None if self._pass is None else replace(self._pass, is_open=False)
        return vars(self) | {"_pass": last, "_cut": None, "_readers": None, "_standing": None, "_reached": None}
