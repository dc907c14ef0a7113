"""The cursor of a sampler: the clock of a rank, and all of a job that can change.

1. ``clock`` is where the next iteration begins, and the one that has begun last. A state is the position of that
   iteration, after the batches that its consumer has done.
2. ``rank_source`` and ``epochs`` are replaced when the rank changes, and ``epochs`` also when the mask or the generator
   does.

Everything that follows from a position is computed by :class:`Epochs`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from annbatch_distributed.core.clock import Clock
from annbatch_distributed.core.config import Config
from annbatch_distributed.core.epochs import Epochs
from annbatch_distributed.core.plan import Classes, Plan
from annbatch_distributed.core.state import Identity, Position, check_identity, from_state, to_state
from annbatch_distributed.core.stream import Pass
from annbatch_distributed.core.values import BOUND, few, plural
from annbatch_distributed.core.warning import warn
from annbatch_distributed.core.worker import SharedFlag, current_worker
from annbatch_distributed.ranks import DistInfo, Placement, RankSource

if TYPE_CHECKING:
    import pandas as pd


class Cursor:
    """What can change of a sampler: its rank, its configuration and its clock."""

    def __init__(self, epochs: Epochs, rank_source: RankSource) -> None:
        #: Every epoch of this rank, as functions of a position.
        self.epochs = epochs
        #: Source of the rank of this process.
        self.rank_source = rank_source
        #: Names of the cells that arguments were made for, by argument, to compare with those of the collection.
        self.names: dict[str, pd.Index[Any]] = {}
        #: Where the next iteration begins.
        self.clock = Clock(Position())
        #: Number of changes of the mask, the generator or the rank. Persistent workers don't see such a change.
        self.n_changes = 0
        #: The number of rows, the datasets and the cells of the loaded state, for a loader to compare with its own.
        self.saved: Identity = {}
        # True if an epoch was set since a state was loaded, which the workers of a plain DataLoader rely on
        self._is_set = False
        # set by the workers of a DataLoader, since this process can't see otherwise that they have begun to read
        self._workers_have_read = SharedFlag()
        self._warned: set[str] = set()

    def note_names(self, what: str, names: pd.Index[Any] | None) -> None:
        """Note the names of the cells that an argument was made for; None if they aren't known."""
        others = {name: index for name, index in self.names.items() if name != what}
        self.names = others if names is None else others | {what: names}

    # Positions

    @property
    def last(self) -> Pass | None:
        """Pass that has begun last; None if an epoch was set or a state was loaded since."""
        last: Pass | None = self.clock.last
        return last

    def next(self, n_workers: int = 1) -> Position:
        """Return the position of the next pass, in a last segment of this job's lanes."""
        return self.epochs.here(self.clock.next, n_workers)

    def of_epoch(self, epoch: int | None, n_workers: int | None = None) -> Position:
        """Return the position of an epoch; by default of the last one that has begun, or else of the next one.

        ``n_workers`` will read the next pass; None stands for the workers that have read the last segment.
        """
        if self.last is None and epoch is None:
            self.check_workers_have_not_read()
        position = self.clock.place if self.last is None else self.last.position
        if n_workers is None or self.last is not None:
            n_workers = position.segments[-1].n_workers if position.segments else 1
        if epoch is not None and epoch != position.epoch:
            position = position.start_of(epoch)
        return self.epochs.here(position, n_workers)

    def go_to(self, position: Position, *, is_loaded: bool = False) -> None:
        """Make the next pass begin at a position."""
        self.clock.go_to(position, is_loaded=is_loaded)
        self._note_moved()

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass begin at the start of an epoch, unless the position is in this epoch."""
        before = self.clock.place
        self.clock.set_epoch(epoch)
        self._is_set = True
        if self.clock.place is not before:
            self.saved = {}
        self._note_moved()

    def _note_moved(self) -> None:
        if current_worker() is None:
            self._workers_have_read.clear()

    def reconfigure(self, config: Config) -> None:
        """Replace the configuration. The next pass is the first of its epoch.

        An equal one changes nothing, so that a loop which assigns the weights of each epoch can resume within one.
        """
        if config.identity(None) == self.epochs.config.identity(None):
            return
        place = self.clock.place
        if place.done and not place.finished:
            warn(
                f"Epoch {place.epoch} begins again, because its mask, weights or generator changed: the "
                f"{plural(place.done, 'batch')} that each rank had done before the resume will be read again. "
                "To finish this epoch first, change them before the next set_epoch()."
            )
        self.epochs = self.epochs.reconfigured(config)
        self.n_changes += 1
        self.saved = {}
        self.go_to(place.after() if place.finished else place.start_of(place.epoch))

    # The pass

    def begin(self, n_obs: int, position: Position | None = None) -> Pass:
        """Begin a pass of this rank, or of a worker's part of it, at a position (default: the next one)."""
        worker, position = current_worker(), position or self.next()
        plan = self.planned(n_obs, position)
        if worker is None or not worker.number:  # one warning is enough
            self._warn_once(_about_small_batches(plan, self.epochs.virtual_ranks))
        new = self.epochs.pass_at(n_obs, position, worker)
        self.clock.begin(new, position)
        return new

    def begin_sampling(self, n_obs: int) -> Pass:
        """Begin the next pass for annbatch's ``Loader``, maybe in a worker of a plain ``DataLoader``."""
        worker, position = current_worker(), self.next()
        if worker is None:
            new = self.begin(n_obs, position)
            new.on_end = partial(self.end, new)
        else:
            self._workers_have_read.set()
            self._check_worker(worker.number, position)
            self.clock.go_to(position)
            new = self.begin(n_obs, position)
        new.on_next = partial(self.check_rank, new.placement)
        return new

    def end(self, ended: Pass) -> None:
        """Record that the last batch of a pass was taken."""
        ended.has_ended = True
        self.clock.end(ended, replace(ended.position, segments=(), finished=True))

    def _check_worker(self, number: int, position: Position) -> None:
        """Raise, or warn, if a worker of a plain ``DataLoader`` can't know the epoch to read.

        It has a copy of this object, of the time at which it was started. Its own iterations don't move the epoch,
        since workers end at different times.
        """
        if position.done or (self._is_set and self.last is not None):
            raise RuntimeError(
                "The workers of a DataLoader can't know the position in the epoch, since a state was loaded or an "
                "iteration has started since set_epoch. Create the DataLoader with "
                "loader.to_dataloader(num_workers=...) of a StatefulLoader; or call set_epoch(epoch) before each "
                "epoch, and pass persistent_workers=False."
            )
        if not self._is_set and not number:
            self._warn_once(
                f"set_epoch() was not called, so the workers of a DataLoader read epoch {position.epoch} in every "
                "iteration, in the same order. Call set_epoch(epoch) on every rank before each epoch. (Lightning calls "
                "it on a StatefulLoader or its to_dataloader(num_workers=...), but not on a plain PyTorch DataLoader.)"
            )

    # States

    def position_after(self, batches_done: int | None, n_obs: int | None = None, n_workers: int = 1) -> Position:
        """Return the position after some batches of the epoch.

        None stands for the batches that are already done, and is allowed before a pass begins. That pass will be read
        by ``n_workers``.
        """
        place = self.clock.place
        if self.last is None and (batches_done is None or (place.finished and not batches_done)):
            return self.epochs.here(place, n_workers)
        assert batches_done is not None  # a loader that has begun a pass counts its batches
        if self.last is not None:
            position, least, n_batches = self.last.position, self.last.position.done_before, self.last.n_batches
        else:
            # before a pass begins, the position may go back to a segment with another number of ranks
            position, least, n_batches = self.next(n_workers), 0, BOUND
            n_known = n_obs or self._n_obs
            if batches_done > position.done:
                self.check_workers_have_not_read()
                if isinstance(n_known, int):
                    n_batches = position.done + self.epochs.n_left(n_known, position)
        if not least <= batches_done <= n_batches:
            before = " (done before the number of ranks or workers changed)" if least else ""
            raise ValueError(
                f"batches_done must be from {least}{before} to {n_batches} (the batches of the epoch), got "
                f"{batches_done}. Count the batches that every rank has trained on."
            )
        return position.at(batches_done, n_batches)

    def state(self, position: Position, collection: Mapping[str, Any]) -> dict[str, Any]:
        """Return a position as a state, with a loader's description of its collection."""
        return to_state(position, self.epochs.config.identity(self._n_obs) | dict(collection))

    @property
    def _n_obs(self) -> Any:  # noqa: ANN401 a state may have anything
        """Number of rows of the collection according to the last pass or the loaded state; None if unknown."""
        return self.saved.get("n_obs") if self.last is None else self.last.plan.n_obs

    def resume(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool,
        n_obs: int | None = None,
        collection: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a state. A loader also passes the number of rows, the datasets and the cells of its collection."""
        position, saved = from_state(state)
        position, config = position.trimmed(), self.epochs.config
        is_within = position.done > 0 and not position.finished
        changed = ""
        if strict:
            known = {"n_obs": n_obs if is_within and n_obs is not None else self._n_obs, **(collection or {})}
            check_identity(*config.compared(saved, known, n_obs=n_obs, is_within=is_within))
            changed = config.changed_versions(saved) if is_within else ""
            saved = {name: saved.get(name) for name in ("n_obs", "datasets", "cells")}
            is_unverified = position.unverified or bool(changed)
        else:
            saved, is_unverified = {}, position.done > 0
        self._check_fits(position, saved.get("n_obs") if n_obs is None else n_obs)
        if changed:
            warn(
                f"The state was saved by different versions: {changed}. The remaining batches of epoch "
                f"{position.epoch} may therefore differ from the batches of the interrupted job. check_epoch_read will "
                "only check the remaining batches."
            )
        self.go_to(replace(position, unverified=is_unverified), is_loaded=True)
        self.saved, self._is_set = saved, False

    def _check_fits(self, position: Position, n_obs: Any) -> None:  # noqa: ANN401 a state may have anything
        """Raise a ValueError if this number of ranks can't resume within an epoch."""
        if not position.done or position.finished:
            return
        try:
            here = position.with_lanes(self.epochs.n_lanes)
            if n_obs is not None:
                self.epochs.lanes(n_obs, here)
        except ValueError as error:
            raise ValueError(
                f"Can't resume this state here. {error} To skip the rest of epoch {position.epoch}, call "
                f"set_epoch({position.epoch + 1}) instead."
            ) from error

    @contextmanager
    def resharded(self, dist_info: DistInfo | None) -> Iterator[None]:
        """Change the rank for good, unless this context raises; then restore the old rank."""
        before = self.rank_source, self.epochs
        source = self.rank_source if dist_info is None else dist_info
        try:
            # a deferred source may have the answer of an earlier job
            self.rank_source = source.again() if isinstance(source, RankSource) else RankSource.of(source)
            self.epochs = self.epochs.moved(self.rank_source)
            yield
        except BaseException:
            self.rank_source, self.epochs = before
            raise
        self.n_changes += 1

    def reshard(
        self, position: Position, dist_info: DistInfo | None, collection: Mapping[str, Any] | None = None
    ) -> None:
        """Change the rank, and continue at a position of this epoch."""
        n_obs, position = self._n_obs, position.trimmed()
        with self.resharded(dist_info):
            self._check_fits(position, n_obs)
        known = {name: part for name, part in self.saved.items() if part is not None}
        self.saved = {"n_obs": n_obs, **(collection or {}), **known}
        self.clock.continue_at(position)
        self._note_moved()

    # Checks

    def planned(self, n_obs: int, position: Position) -> Plan:
        """Return the plan of a position; raise if the loaded state has a different number of rows.

        It warns if ranks sample from different classes.
        """
        n_saved = self.saved.get("n_obs")
        if position.done and n_saved not in (None, n_obs):
            raise ValueError(
                f"The loaded state was saved for a collection of {n_saved} rows, but this collection has {n_obs}. Load "
                "a state of this collection."
            )
        plan = self.epochs.plan(n_obs, position)
        kind = type(self.epochs.config.sampler).__name__
        self._warn_once(_about_classes(kind, self.epochs.classes(n_obs, position)))
        return plan

    def check_is_last(self, current: Pass) -> None:
        """Raise a RuntimeError if a later pass than this one has begun, or the rank has changed."""
        if current.placement != self.epochs.placement:
            self.check_rank(current.placement)
        if self.last not in (None, current):  # None after set_epoch, which leaves open passes as they are
            raise RuntimeError(
                "This iterator has ended, because a new iteration over the same loader or its to_dataloader() has "
                "started. To look at batches in the middle of an epoch, create a second loader with its own sampler."
            )

    def check_rank(self, before: Placement) -> None:
        """Raise a RuntimeError if the ranks have changed since a pass began on a rank."""
        here, remedy = self.epochs.placement, "Iterate over the loader again."
        if before == here and current_worker() is None:
            here = self.rank_source.current_placement()
            remedy = "Call loader.reshard() in every process after the same step."
        if before != here:
            raise RuntimeError(
                f"The ranks have changed since this iteration started: this process was {before}, and is now {here}. "
                f"{remedy}"
            )

    def check_workers_have_not_read(self) -> None:
        """Raise a RuntimeError if workers of a plain ``DataLoader`` may have begun to read."""
        if self._workers_have_read.is_set:
            raise RuntimeError(
                "The workers of a DataLoader may have started to read, so their position in the epoch is unknown here. "
                "Create the DataLoader with loader.to_dataloader(num_workers=...) of a StatefulLoader, and call "
                "state_dict() on it."
            )

    # Warnings

    def _warn_once(self, message: str | None) -> None:
        if message is not None and message not in self._warned:
            warn(message)
            self._warned.add(message)  # not before: a filter may turn the warning into an error

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(
            vars(self), _workers_have_read=SharedFlag(), epochs=copy.copy(self.epochs), clock=copy.copy(self.clock)
        )
        duplicate._warned = set(self._warned)
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = memo[id(self)] = copy.copy(self)
        # the pass becomes the same object as in the copy of its loader
        duplicate.clock = copy.deepcopy(self.clock, memo)
        return duplicate


def _about_small_batches(plan: Plan, virtual_ranks: int | None) -> str | None:
    """Return a warning if each rank has a single batch of few rows; else None."""
    # 100 rows on 64 ranks in batches of 4 fill less than half of a batch on each rank
    if plan.most_batches != 1 or 2 * plan.n_shared >= plan.n_streams * (plan.config.batch_size or 1):
        return None
    kind = "rank" if virtual_ranks is None else "virtual rank"
    most = plural(-(-plan.n_shared // plan.n_streams), plan.noun)
    return (
        f"Each of the {plan.n_streams} {kind}s has a single batch in an epoch, with at most {most} of its own, "
        f"although batch_size is {plan.config.batch_size}. Use fewer {kind}s or a smaller batch_size."
    )


def _about_classes(name: str, classes: tuple[Classes, ...]) -> str | None:
    """Return a warning if ranks sample from different classes; else None."""
    everywhere = frozenset[str]().union(*(own for _, own in classes))
    lacking = [(rank, sorted(everywhere - own)) for rank, own in classes if own != everywhere]
    if not lacking:
        return None
    rank, missing = lacking[0]
    return (
        f"The shard of rank {rank} lacks {len(missing)} of the {len(everywhere)} classes of {name} "
        f"({few(missing, 5)}). Each rank applies the class weights to its "
        "own classes, so the job as a whole doesn't sample by these weights. Pass sharding='independent' to sample "
        "from all rows on every rank."
    )
