"""The cursor of a sampler: where its next pass begins, and the pass that began last.

It is the only part of a sampler that changes:

1. ``position`` is where the next pass begins. It moves when an epoch is set, a state is loaded, or a pass begins.
2. ``last`` is the last pass since then. A state is the position of that pass, after the batches that its consumer has
   done. A loader has one pass at a time, so a new one ends the one before.
3. ``rank_source`` and ``epochs`` are replaced when the rank changes, and ``epochs`` also when the mask or the generator
   does.
4. Flags record what led there, such as a loaded state, and what was already warned of.

Everything that follows from a position is computed by :class:`Epochs`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import annbatch

from annbatch_distributed.core.config import Config
from annbatch_distributed.core.epochs import Epochs
from annbatch_distributed.core.masks import check_names
from annbatch_distributed.core.plan import Classes, Plan
from annbatch_distributed.core.state import Identity, Position, check_identity, from_state, to_state
from annbatch_distributed.core.stream import Pass
from annbatch_distributed.core.values import BOUND, few, plural
from annbatch_distributed.core.worker import SharedFlag, base_seed, current_worker
from annbatch_distributed.ranks import DistInfo, Placement, RankSource

if TYPE_CHECKING:
    import pandas as pd


#: Names of the cells that arguments were made for, by argument.
type Names = Mapping[str, pd.Index[Any]]


class Cursor:
    """Position of the next pass of a rank, and its last pass."""

    def __init__(self, epochs: Epochs, rank_source: RankSource, names: Names) -> None:
        #: Every epoch of this rank, as functions of a position.
        self.epochs = epochs
        #: Source of the rank of this process.
        self.rank_source = rank_source
        #: Names to compare with the ``obs_names`` of the collection.
        self.names = names
        #: Position of the next pass, or the end of the last one.
        self.position = Position()
        #: Last pass; None if no pass has begun since an epoch was set or a state loaded.
        self.last: Pass | None = None
        #: Number of changes of the mask, the generator or the rank. Persistent workers don't see such a change.
        self.n_changes = 0
        # the pass that reshard has cut, as long as its remaining batches come next
        self._cut: Pass | None = None
        # True until a pass begins after a state was loaded; True once an epoch was set, which workers rely on
        self._is_loaded = self._is_set = False
        # the number of rows, the datasets and the cells of the loaded state, for a loader to compare with its own
        self._saved: Identity = {}
        # set by the workers of a DataLoader, since this process can't see otherwise that they have begun to read
        self._workers_have_read = SharedFlag()
        self._warned: set[str] = set()

    # The next pass

    @property
    def begins_at(self) -> Position:
        """Position of the next pass; the end of the epoch, if a finished epoch was loaded and is set again."""
        is_set_again = self._is_loaded and self._is_set
        return self.position.after() if self.position.finished and not is_set_again else self.position

    def next(self, n_workers: int = 1) -> Position:
        """Return the position of the next pass, in a last segment of this job's lanes."""
        return self.epochs.here(self.begins_at, n_workers)

    def of_epoch(self, epoch: int | None, n_workers: int | None = None) -> Position:
        """Return the position of an epoch; by default of the last one that has begun, or else of the next one.

        ``n_workers`` will read the next pass; None stands for the workers that have read the last segment.
        """
        if self.last is None and epoch is None:
            self.check_workers_have_not_read()
        position = self.position if self.last is None else self.last.position
        if n_workers is None or self.last is not None:
            n_workers = position.segments[-1].n_workers if position.segments else 1
        if epoch is not None and epoch != position.epoch:
            position = Position(epoch)
        return self.epochs.here(position, n_workers)

    def go_to(self, position: Position, *, is_loaded: bool = False) -> None:
        """Make the next pass begin at a position, and forget earlier passes."""
        self.position, self.last, self._cut, self._is_loaded = position, None, None, is_loaded
        if not is_loaded:
            self._saved = {}
        if current_worker() is None:
            self._workers_have_read.clear()

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass begin at the start of an epoch, or resume this epoch if its state was loaded."""
        position = self.position
        if self._is_loaded and epoch < position.epoch:
            raise ValueError(
                f"set_epoch({epoch}) would discard the loaded state of epoch {position.epoch}. Start at "
                "loader.next_epoch. (The loader that Fabric.setup_dataloaders returns counts epochs from 0: iterate "
                "over the original loader instead.)"
            )
        self._is_set = True
        # frameworks set the epoch of a state that they have just loaded
        if epoch != position.epoch or not (self._is_loaded or position.done):
            self.go_to(Position(epoch))

    def reconfigure(self, config: Config) -> None:
        """Replace the configuration. The next pass is the first of its epoch.

        An equal one changes nothing, so that a loop which assigns the weights of each epoch can resume within one.
        """
        if config.identity(None) == self.epochs.config.identity(None):
            return
        if self.position.done and not self.position.finished:
            warn(
                f"Epoch {self.position.epoch} begins again, because its mask, weights or generator changed: the "
                f"{plural(self.position.done, 'batch')} that each rank had done before the resume will be read again. "
                "To finish this epoch first, change them before the next set_epoch()."
            )
        self.epochs = self.epochs.reconfigured(config)
        self.n_changes += 1
        self.go_to(Position(self.position.epoch))

    # The pass

    def begin(self, n_obs: int, position: Position | None = None) -> Pass:
        """Begin a pass of this rank, or of a worker's part of it, at a position (default: the next one)."""
        worker, position = current_worker(), position or self.next()
        plan = self.check(n_obs, position)
        if worker is None or not worker.number:  # one warning is enough
            self._warn_of_second_pass(plan, position)
            self._warn_of_small_batches(plan)
        new = self.epochs.pass_at(n_obs, position, worker)
        self.last, self._cut, self._is_loaded = new, None, False
        # the remaining batches of a resumed epoch stay next until all are read, so peeking at a batch skips none
        self.position = position if position.done else position.after()
        return new

    def begin_sampling(self, n_obs: int) -> Pass:
        """Begin the next pass for annbatch's ``Loader``, maybe in a worker of a plain ``DataLoader``."""
        position = self.next()
        if current_worker() is not None:
            self._workers_have_read.set()
            position = self._position_in_worker(position)
        new = self.begin(n_obs, position)
        new.on_next, new.on_end = partial(self.check_rank, new.placement), partial(self.end, new)
        return new

    def begin_by_workers(self, n_obs: int, n_workers: int) -> Pass:
        """Begin the next pass in this process, for workers that receive its position."""
        new = self.begin(n_obs, self.next(n_workers))
        new.is_by_workers = True
        return new

    def end(self, ended: Pass) -> None:
        """Record that a pass has ended."""
        ended.has_ended = True
        if ended is self.last:
            self.position = replace(ended.position, segments=(), finished=True)

    def _position_in_worker(self, position: Position) -> Position:
        """Return the position of a pass in a worker of a ``DataLoader`` that doesn't pass it on."""
        if position.done or (self._is_set and position.passes):
            raise RuntimeError(
                "The workers of a DataLoader can't know the position in the epoch, since a state was loaded or an "
                "iteration has started since set_epoch. Create the DataLoader with "
                "loader.to_dataloader(num_workers=...) of a StatefulLoader; or call set_epoch(epoch) before each "
                "epoch, and pass persistent_workers=False."
            )
        # if set_epoch isn't used, PyTorch's seed for all workers of an iteration gives each iteration its own order
        return position if self._is_set else replace(position, passes=base_seed() + position.passes)

    # States

    def state(
        self,
        batches_done: int | None,
        collection: Mapping[str, Any],
        n_obs: int | None = None,
        n_workers: int = 1,
    ) -> dict[str, Any]:
        """Return the state after some batches of the epoch, with a loader's description of its collection.

        None stands for the batches that are already done, and is allowed before a pass begins. That pass will be read
        by ``n_workers``.
        """
        if self.last is None and (batches_done is None or (self.position.finished and not batches_done)):
            return self._state(self.epochs.here(self.position, n_workers), collection)
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
        return self._state(position.at(batches_done, n_batches), collection)

    def _state(self, position: Position, collection: Mapping[str, Any]) -> dict[str, Any]:
        return to_state(position, self.epochs.config.identity(self._n_obs) | dict(collection))

    @property
    def _n_obs(self) -> Any:  # noqa: ANN401 a state may have anything
        """Number of rows of the collection according to the last pass or the loaded state; None if unknown."""
        return self._saved.get("n_obs") if self.last is None else self.last.plan.n_obs

    def resume(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool,
        n_obs: int | None = None,
        collection: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a state. A loader also passes the number of rows, the datasets and the cells of its collection."""
        epochs = copy.copy(self.epochs)  # so that nothing is lost if it raises
        position, saved = from_state(state)
        position = position.trimmed()
        is_within = position.done > 0 and not position.finished
        changed = ""
        if strict:
            known = {"n_obs": n_obs if is_within and n_obs is not None else self._n_obs, **(collection or {})}
            check_identity(*epochs.config.compared(saved, known, n_obs=n_obs, is_within=is_within))
            changed = epochs.config.changed_versions(saved) if is_within else ""
            saved = {name: saved.get(name) for name in ("n_obs", "datasets", "cells")}
            is_unverified = position.unverified or bool(changed)
        else:
            saved, is_unverified = {}, position.done > 0
        n_planned: Any = saved.get("n_obs") if n_obs is None else n_obs  # a state may have anything
        if is_within:
            try:
                here = position.with_lanes(epochs.n_lanes)
                if n_planned is not None:
                    epochs.lanes(n_planned, here)
            except ValueError as error:
                raise ValueError(
                    f"Can't resume this state here. {error} To skip the rest of epoch {position.epoch}, call "
                    f"set_epoch({position.epoch + 1}) instead."
                ) from error
        if changed:
            warn(
                f"The state was saved by different versions: {changed}. The remaining batches of epoch "
                f"{position.epoch} may therefore differ from the batches of the interrupted job. check_epoch_read will "
                "only check the remaining batches."
            )
        self.go_to(replace(position, unverified=is_unverified), is_loaded=True)
        self.epochs, self._saved, self._is_set = epochs, saved, False

    @contextmanager
    def resharded(self, dist_info: DistInfo | None) -> Iterator[None]:
        """Change the rank, and resume in this context; if that raises, restore the rank."""
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

    def reshard(self, state: Mapping[str, Any], dist_info: DistInfo | None) -> None:
        """Change the rank, and resume at a state of this sampler."""
        cut = self.last or self._cut
        saved = self._saved  # what a loader still has to compare with its collection
        with self.resharded(dist_info):
            self.resume(state, strict=True)
        self._cut = cut
        self._saved |= {name: part for name, part in saved.items() if part is not None}

    def has_cut(self, interrupted: Pass) -> bool:
        """Return True if the ranks have changed within a pass, and no other epoch was set since."""
        return interrupted is self._cut

    def has_left(self, interrupted: Pass) -> bool:
        """Return True if the ranks have changed within a pass, and its remaining batches come next."""
        return self.has_cut(interrupted) and not self.position.finished

    # Checks

    def check(self, n_obs: int, position: Position) -> Plan:
        """Return the plan of a position; raise if the loaded state has a different number of rows.

        It warns if ranks sample from different classes.
        """
        n_saved = self._saved.get("n_obs")
        if position.done and n_saved not in (None, n_obs):
            raise ValueError(
                f"The loaded state was saved for a collection of {n_saved} rows, but this collection has {n_obs}. Load "
                "a state of this collection."
            )
        plan = self.epochs.plan(n_obs, position)
        if warning := _differing_classes(type(self.epochs.config.sampler).__name__, self.epochs.classes):
            self._warn_once(warning)
        return plan

    def check_cells(self, names: tuple[pd.Index[Any], ...] | None, collection: Mapping[str, Any] | None = None) -> None:
        """Raise if the mask was made for cells in a different order, or a loaded state for different cells.

        ``names`` are the ``obs_names`` of each dataset, None if they aren't known; ``collection`` identifies the
        datasets and cells.
        """
        if collection is not None and self.position.done and not self.position.finished:
            saved = {name: self._saved.get(name) for name in ("datasets", "cells")}
            check_identity(saved, dict(collection))
        if names is not None:
            for what, own in self.names.items():
                check_names(what, own, names)
            self.names = {}

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

    def _warn_of_second_pass(self, plan: Plan, position: Position) -> None:
        if position.passes and not position.done and not self.epochs.is_same_next_epoch(plan):
            self._warn_once(
                "set_epoch() was not called since the last iteration, so every rank reads the same rows again, in a "
                "different order. Call set_epoch(epoch) on every rank before each epoch. (Lightning calls it on a "
                "StatefulLoader or its to_dataloader(num_workers=...), but not on a plain PyTorch DataLoader.)"
            )

    def _warn_of_small_batches(self, plan: Plan) -> None:
        # 100 rows on 64 ranks in batches of 4 fill less than half of a batch on each rank
        if plan.most_batches == 1 and 2 * plan.n_shared < plan.n_streams * (plan.config.batch_size or 1):
            kind = "rank" if self.epochs.virtual_ranks is None else "virtual rank"
            most = plural(-(-plan.n_shared // plan.n_streams), plan.noun)
            self._warn_once(
                f"Each of the {plan.n_streams} {kind}s has a single batch in an epoch, with at most {most} of its own, "
                f"although batch_size is {plan.config.batch_size}. Use fewer {kind}s or a smaller batch_size."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            warn(message)
            self._warned.add(message)  # not before: a filter may turn the warning into an error

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cut": None}

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self), _workers_have_read=SharedFlag(), epochs=copy.copy(self.epochs))
        duplicate._warned = set(self._warned)
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = memo[id(self)] = copy.copy(self)
        # the pass becomes the same object as in the copy of its loader
        duplicate.last, duplicate._cut = copy.deepcopy((self.last, self._cut), memo)
        return duplicate


_PACKAGES = str(Path(__file__).parent), str(Path(annbatch.__file__).parent)


def warn(message: str) -> None:
    """Warn at the line that called this package, directly or through annbatch's Loader."""
    warnings.warn(message, UserWarning, skip_file_prefixes=_PACKAGES)


def _differing_classes(name: str, classes: tuple[Classes, ...]) -> str | None:
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
