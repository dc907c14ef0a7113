"""The bookmark: where the next pass of a rank begins, for its process and for the workers of a ``DataLoader``.

Outside of workers, every pass that begins moves it. Workers are many, and each of them has a part of the same pass, so
that none of them can move it. Their passes are told apart by iterations instead, for each of which torch draws a seed:

- The first iteration since an epoch was set has the order of that epoch, as a pass without workers would.
- Later ones have an order of their own, which follows from torch's seed. It is this rank's alone, and a state says so.

Which iteration was the first, workers find in memory that they share. The process finds there what they have begun.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from annbatch_distributed.progress import Begun, Position, Segment
from annbatch_distributed.shared_memory import Report, SharedMemory
from annbatch_distributed.workers import current

if TYPE_CHECKING:
    from annbatch_distributed.workers import Worker


class Bookmark:
    """Where the next pass begins, and which one was begun last.

    Parameters
    ----------
    rank, world_size
        Whose bookmark it is.
    keeps_order
        Whether the batches of a pass stay in their order, however many workers there are.
    """

    def __init__(self, rank: int, world_size: int, *, keeps_order: bool) -> None:
        self._rank = rank
        self._world_size = world_size
        self._keeps_order = keeps_order
        self._set = Position(0)
        self._begun: Begun | None = None
        self._loaded = False
        self._shared = SharedMemory()
        # positions have generations, so that workers notice a new one; reports of older ones may be of an equal one
        self._generation = self._valid_since = 0
        self._n_changes = 0
        # in a worker: the iteration that it has begun last, since which seed, and whether it has set a position itself
        self._iteration = self._seed = -1
        self._set_here = self._is_first = False

    @property
    def position(self) -> Position:
        """Where the next pass begins."""
        return self._set.after() if self._set.resumes and self._report_since.finished >= 0 else self._set

    @property
    def begun(self) -> Begun | None:
        """The pass that was begun last, here or by workers; None if something was set since."""
        return self._reported or self._begun

    @property
    def is_with_workers(self) -> bool:
        """Whether this is not a worker, and the pass that was begun last is that of workers."""
        return self._reported is not None

    def set(self, position: Position, *, loaded: bool = False, changed: bool = False) -> None:
        """Let the next pass begin at a position, whatever came before it, and perhaps with other settings."""
        self._n_changes += changed
        self._begun, self._loaded = None, loaded
        if current() is None:
            self._move(position)
        else:
            self._set, self._set_here = position, True

    def next(self) -> Position:
        """Return where the next pass begins, the last segment being the one that it goes on with."""
        worker = current()
        if worker is not None:
            position = self._next_of(worker)
            return position.going_on(self._world_size, 1 if self._keeps_order else worker.n_workers)
        has_moved = self._report_since.generation >= 0 and not self._set.resumes
        return (self._set.after() if has_moved else self.position).going_on(self._world_size, 1)

    def begin(self, begun: Begun) -> None:
        """Note that a pass is begun."""
        worker = current()
        if worker is not None:
            self._begin_in(worker, begun)
        else:
            # what is left of an epoch is left until it has been read to its end
            self._move(self._set if begun.position.resumes else begun.position.after())
            self._valid_since = self._generation
        self._begun, self._loaded = begun, False

    def end(self, begun: Begun) -> None:
        """Note that a pass has come to its end: what was left of a resumed epoch is done then."""
        if self._begun is not begun:
            return
        if current() is None:
            if self._set.resumes:
                self._move(self._set.after())
            return
        report = self._shared.reported
        if self._is_first and report.generation == self._generation and report.first != self._iteration:
            msg = (
                "Two iterations over DataLoaders of the same loader were begun at once, and both took themselves for "
                "the first of the epoch. Begin one after the other, or give each a loader of its own."
            )
            raise RuntimeError(msg)
        if begun.ends and begun.position.resumes and report.finished < 0:
            self._shared.report(finished=self._iteration)

    def set_epoch(self, epoch: int) -> bool:
        """Let the next pass be the first of an epoch; return whether it isn't already that of a state of this epoch."""
        # frameworks set the epoch again that they have just loaded
        is_loaded = self._loaded and self._report_since.generation < 0
        if epoch == self.position.epoch and (is_loaded or self.position.resumes):
            return False
        self.set(Position(epoch))
        return True

    # the process of a rank

    def _move(self, position: Position) -> None:
        self._own()
        self._generation += 1
        if position != self._set:
            self._valid_since = self._generation
        self._set = position
        text = json.dumps([self._n_changes, position.epoch, position.passes, position.segments])
        self._shared.write(self._generation, text)

    def _own(self) -> None:
        """Let go of what a process shares that has started this one."""
        if not self._shared.is_own:
            self._shared = SharedMemory()
            self._generation = self._valid_since = 0

    @property
    def _report(self) -> Report:
        return self._shared.reported if current() is None and self._shared.is_own else Report()

    @property
    def _report_since(self) -> Report:
        """What workers have begun since a position was set."""
        report = self._report
        return report if report.generation == self._generation else Report()

    @property
    def _reported(self) -> Begun | None:
        """The pass that workers have begun last, if nothing else was set or begun since."""
        report = self._report
        if report.generation < max(0, self._valid_since):
            return None
        position = self._set
        if report.iteration != report.first:
            if report.generation != self._generation:
                return None
            position = self._of_iteration(report.iteration)
        position = position.going_on(self._world_size, 1 if self._keeps_order else report.n_workers)
        return Begun(position, report.n_obs, report.n_batches, n_due=0, was_loaded=bool(report.was_loaded))

    # a worker

    def _next_of(self, worker: Worker) -> Position:
        iteration = self._next_iteration(worker)
        if iteration != worker.seed and not self._set_here:
            self._adopt()
        report = self._shared.reported
        is_first = report.generation != self._generation or report.first == iteration
        if is_first or self._set_here or (self._set.resumes and report.finished in {-1, iteration}):
            return self._set
        return self._of_iteration(iteration)

    def _next_iteration(self, worker: Worker) -> int:
        """Tell iterations apart, of all workers alike: by torch's seed, and those of persistent workers by number."""
        return worker.seed if self._seed != worker.seed else self._iteration + 1

    def _adopt(self) -> None:
        """Take over what was set since this worker has begun its last pass."""
        generation, text = self._shared.read()
        if generation > self._generation:
            n_changes, epoch, passes, segments = json.loads(text)
            if n_changes != self._n_changes:
                msg = (
                    "The mask or rng of a sampler was assigned after persistent workers of a DataLoader were started, "
                    "which can't be told. Make a new DataLoader."
                )
                raise RuntimeError(msg)
            self._generation = generation
            self._set = Position(epoch, passes, tuple(Segment(*segment) for segment in segments))

    def _begin_in(self, worker: Worker, begun: Begun) -> None:
        iteration = self._next_iteration(worker)
        report = self._shared.reported
        if report.iteration == iteration and report.generation != self._generation:
            msg = (
                "The epoch was set while the workers of a DataLoader were beginning a pass, so that they don't agree "
                "on one. Call set_epoch or load_state_dict before iterating over the DataLoader."
            )
            raise RuntimeError(msg)
        self._is_first = report.generation != self._generation or report.first == iteration
        if report.generation != self._generation:
            self._shared.report(first=iteration, finished=-1)
        self._shared.report(
            was_loaded=self._set_here,
            n_workers=worker.n_workers,
            n_obs=begun.n_obs,
            n_batches=begun.n_batches,
            iteration=iteration,
            generation=self._generation,
        )
        self._seed, self._iteration, self._set_here = worker.seed, iteration, False

    def _of_iteration(self, iteration: int) -> Position:
        return Position(self._set.epoch, passes=iteration, rank=self._rank)

    def __getstate__(self) -> dict[str, Any]:
        if current() is None:
            self._own()  # before workers are told what is whose
        return vars(self)
