"""The bookmark: where the next pass of a rank begins, for its process and for the workers of a ``DataLoader``.

Outside of workers, every pass that begins moves it. Workers are many, and each of them has a part of the same pass, so
that one of them decides: worker 0 announces the position in memory that they share, and the others begin there too. It
follows from what was set and what was begun since, as without workers: all ranks of a job decide alike, and the process
of the rank goes on from there.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, NamedTuple

from annbatch_distributed.progress import Begun, Position, Segment
from annbatch_distributed.shared_memory import SharedMemory
from annbatch_distributed.workers import current

if TYPE_CHECKING:
    from annbatch_distributed.workers import Worker

#: For how many seconds a worker waits for worker 0, which was started before it.
PATIENCE = 300.0


class _Told(NamedTuple):
    """What a process tells its workers, and worker 0 the others."""

    generation: int
    """How many positions had been set."""
    n_changes: int
    """How often a mask or rng had been assigned."""
    was_loaded: bool
    """Whether each worker has a position of its own, which it has loaded."""
    position: Position

    def to_text(self) -> str:
        at = self.position
        return json.dumps([self.generation, self.n_changes, self.was_loaded, at.epoch, at.passes, at.segments])

    @classmethod
    def of_text(cls, text: str) -> _Told:
        generation, n_changes, was_loaded, epoch, passes, segments = json.loads(text)
        position = Position(epoch, passes, tuple(Segment(*segment) for segment in segments))
        return cls(generation, n_changes, was_loaded, position)


class Bookmark:
    """Where the next pass begins, and which one was begun last.

    Parameters
    ----------
    keeps_order
        Whether the batches of a pass stay in their order, however many workers there are.
    """

    def __init__(self, *, keeps_order: bool) -> None:
        self.keeps_order = keeps_order
        self._set = Position(0)
        self._begun: Begun | None = None
        self._loaded = False
        self._shared = SharedMemory()
        # what is set has a generation, so that what was begun before can be told from what was begun since; if an equal
        # position is set again, what was begun before may still be what is under way
        self._generation = self._equal_since = 0
        self._n_changes = 0
        # in a worker: its seed, and the iteration that it began last; what it knows of the next one, with its version;
        # and whether it has set a position itself
        self._seed = self._iteration = -1
        self._decided: tuple[int, int, Position] | None = None
        self._set_here = False
        _bookmarks.add(self)

    @property
    def position(self) -> Position:
        """Where the next pass begins, as far as this process knows."""
        since = self._begun_by_workers(self._generation)
        if since is None:
            return self._set
        told, is_finished = since
        at = told.position.without_idle_segments()
        return at if at.resumes and not is_finished and not told.was_loaded else at.after()

    @property
    def begun(self) -> Begun | None:
        """The pass that was begun last, here or by workers; None if another position was set since."""
        by_workers = None if current() is not None else self._begun_by_workers(self._equal_since)
        if by_workers is None:
            return self._begun
        told, _ = by_workers
        is_equal = told.position.without_idle_segments() == self._set.without_idle_segments()
        if told.generation != self._generation and not is_equal:
            return self._begun
        latest = self._shared.latest
        assert latest is not None
        return Begun(told.position, latest.n_obs, latest.n_batches, n_due=0, was_loaded=told.was_loaded, is_here=False)

    def set(self, position: Position, *, loaded: bool = False, changed: bool = False) -> None:
        """Let the next pass begin at a position, whatever came before it, and perhaps with other settings."""
        self._n_changes += changed
        self._begun, self._loaded = None, loaded
        if current() is None:
            self._move(position)
        else:
            self._set, self._set_here, self._decided = position, True, None

    def set_epoch(self, epoch: int) -> bool:
        """Let the next pass be the first of an epoch; return whether it isn't already that of a state of this epoch."""
        # frameworks set the epoch again that they have just loaded
        position = self.position
        if epoch == position.epoch and ((self._loaded and position == self._set) or position.resumes):
            return False
        self.set(Position(epoch))
        return True

    def next(self, world_size: int) -> Position:
        """Return where the next pass begins, the last segment being the one that it goes on with, on so many ranks."""
        worker = current()
        if worker is None:
            return self.position.going_on(world_size, 1)
        if self._decided is None or self._decided[0] != self._next_iteration(worker):
            self._decided = self._decide(worker, world_size)
        return self._decided[2]

    def take(self, world_size: int) -> Position:
        """Return the same, and go on to the pass after it, if this is a worker: whatever happens to this one."""
        worker = current()
        if worker is None:
            return self.next(world_size)
        iteration = self._next_iteration(worker)
        try:
            return self.next(world_size)
        finally:
            self._seed, self._iteration, self._set_here = worker.seed, iteration, False

    def begin(self, begun: Begun) -> None:
        """Note that the pass that was taken is begun."""
        self._begun, self._loaded = begun, False
        worker = current()
        if worker is None:
            # what is left of an epoch is left until it has been read to its end
            self._move(self.position if begun.position.resumes else begun.position.after())
            self._equal_since = self._generation
        elif not worker.id or self._shared.is_own:
            assert begun.n_obs is not None
            assert begun.n_batches is not None
            self._shared.describe(self._iteration, n_obs=begun.n_obs, n_batches=begun.n_batches)

    def end(self, begun: Begun) -> None:
        """Note that a pass has come to its end: what was left of a resumed epoch is done then."""
        if self._begun is not begun:
            return
        if current() is None:
            if self._set.resumes:
                self._move(self._set.after())
        elif begun.ends and self._decided is not None and self._decided[0] == self._iteration:
            self._shared.finish(*self._decided[:2])

    # the process of a rank

    def _move(self, position: Position) -> None:
        self.own()
        self._generation += 1
        if position != self._set:
            self._equal_since = self._generation
        self._set = position
        self._shared.write(_Told(self._generation, self._n_changes, False, position).to_text())

    def own(self) -> None:
        """Let go of what a process shares that has started this one."""
        if not self._shared.is_own:
            self._shared = SharedMemory()
            self._generation = self._equal_since = 0

    def _begun_by_workers(self, since: int) -> tuple[_Told, bool] | None:
        """What workers have begun last, and whether it is finished, if they did so since a generation."""
        worker = current()
        if (worker is None and not self._shared.is_own) or (latest := self._shared.latest) is None:
            return None
        told = _Told.of_text(latest.text)
        return (told, latest.is_finished) if told.generation >= since else None

    # a worker

    def _next_iteration(self, worker: Worker) -> int:
        """Tell iterations apart, of all workers alike: by torch's seed, and those of persistent workers by number."""
        return worker.seed if self._seed != worker.seed else self._iteration + 1

    def _decide(self, worker: Worker, world_size: int) -> tuple[int, int, Position]:
        """Return the iteration that comes next, the version of what was announced of it, and where its pass begins."""
        iteration = self._next_iteration(worker)
        n_workers = 1 if self.keeps_order else worker.n_workers
        # a worker that has made the loader itself shares nothing, and decides what all others decide
        decides = not worker.id or self._shared.is_own
        if decides:
            n_changes = self._n_changes
            if iteration != worker.seed and not self._set_here:
                n_changes = self._adopt()
            at = self._set if self._set_here else self.position
            at = at.going_on(world_size, n_workers)
            told = _Told(self._generation, n_changes, self._set_here, at)
            version = self._shared.announce(iteration, told.to_text())
        elif self._set_here:
            return iteration, 0, self._set.going_on(world_size, n_workers)
        else:
            version, told = self._hear(iteration, worker)
            self._generation = told.generation
        if told.n_changes != self._n_changes:
            msg = (
                "The mask or rng of a sampler was assigned after persistent workers of a DataLoader were started, "
                "which can't be told. Make a new DataLoader."
            )
            raise RuntimeError(msg)
        return iteration, version, at if decides else told.position

    def _adopt(self) -> int:
        """Take over what was set since this worker has begun its last pass; return how many settings were."""
        text = self._shared.read()
        if not text:
            return self._n_changes
        told = _Told.of_text(text)
        if told.generation > self._generation:
            self._generation, self._set = told.generation, told.position
        return told.n_changes

    def _hear(self, iteration: int, worker: Worker) -> tuple[int, _Told]:
        """Wait for what worker 0 decides."""
        deadline = time.monotonic() + PATIENCE
        while (heard := self._shared.heard(iteration, worker.id)) is None:
            if time.monotonic() > deadline:
                msg = (
                    f"Worker {worker.id} of a DataLoader has waited {PATIENCE:.0f} seconds for worker 0 to begin its "
                    "pass. Don't begin two iterations over the same loader at once, with the same seed of torch."
                )
                raise RuntimeError(msg)
            time.sleep(0.001)
        version, text = heard
        return version, _Told.of_text(text)

    def __getstate__(self) -> dict[str, Any]:
        if current() is None:
            self.own()  # before workers are told what is whose
            if get_spawning_popen() is None:  # a copy knows what was begun, and has its own from then on
                known = {"_set": self.position, "_begun": self.begun, "_shared": SharedMemory()}
                return vars(self) | known | {"_generation": 0, "_equal_since": 0}
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _bookmarks.add(self)


_bookmarks: weakref.WeakSet[Bookmark] = weakref.WeakSet()


def _own_all() -> None:
    """Before a process is forked, which may be a worker: what it inherits must be this one's."""
    if current() is None:
        for bookmark in list(_bookmarks):
            bookmark.own()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_own_all)
