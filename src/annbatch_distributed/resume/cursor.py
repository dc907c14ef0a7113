"""The bookmark: where the next pass of a rank begins, for its process and for the workers of a ``DataLoader``.

Outside of workers, every pass that begins moves it. Workers are many, and each of them has a part of the same pass:
the first of them that begins an iteration says in a journal with which position, and the others begin there too. It
follows from what was set and what was begun since, as without workers: all ranks of a job decide alike, and the process
of the rank goes on from there.

Which workers are of the same iteration is told by how they were started. torch starts the workers of an iteration one
after the other, worker 0 first, so that the number of the start less that of the worker is the same for all of them and
for no others. Persistent workers count their iterations from there.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, NamedTuple

from annbatch_distributed.ranks.worker import current
from annbatch_distributed.resume.journal import Journal
from annbatch_distributed.resume.state import Begun, Position, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch_distributed.passes.run import Pass
    from annbatch_distributed.ranks.worker import Worker
    from annbatch_distributed.resume.journal import Entry


#: A thread of the process; the number of a start by it less that of the worker; how many passes the worker has begun,
#: and how many positions it has set.
type Key = tuple[int, int, int, int]


class _Iteration(NamedTuple):
    """A pass that the workers of an iteration have begun."""

    key: Key
    """What tells it from all others."""
    n_workers: int
    """How many workers there are."""
    generation: int
    """How many positions had been set."""
    n_changes: int
    """How often a mask or rng had been assigned."""
    was_loaded: bool
    """Whether each worker has a position of its own, which it has loaded."""
    position: Position
    """Where it began."""
    n_obs: int | None = None
    """Rows of the collection; None until it is known."""
    n_batches: int | None = None
    """How many batches the epoch has on the rank that has the most; None until it is known."""
    is_finished: bool = False
    """Whether the worker with the last batch has come to its end."""

    @property
    def following(self) -> Position:
        """Where the next pass begins."""
        at = self.position.without_idle_segments()
        return at if at.resumes and not self.is_finished and not self.was_loaded else at.after()


@dataclass
class _Run:
    """A pass that was begun in this process."""

    begun: Begun
    stream: weakref.ref[Pass] | None = None
    """What yields its load requests; None if that isn't here, as for the pass of workers."""
    is_finished: bool = False
    """Whether it has come to its end."""

    @property
    def is_under_way(self) -> bool:
        """Whether somebody here can go on with it."""
        stream = None if self.stream is None else self.stream()
        return stream is not None and not stream.closed and not self.is_finished

    @property
    def was_given_up(self) -> bool:
        """Whether nobody can go on with it, before it has come to its end: ``next(iter(loader))`` is gone at once."""
        return self.stream is not None and not self.is_under_way and not self.is_finished


class _Count:
    """A number that copies have in common."""

    def __init__(self) -> None:
        self.value = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Count:
        return self


#: Threads of the process of a rank take turns. A process is forked between two turns, so that it has nothing
#: half-changed.
_turn = threading.RLock()


def _in_turn[**Asked, Answer](method: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    @wraps(method)
    def taking_turns(*args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
        # a worker is asked by one thread, and hides that it is a worker in turns of its own
        with nullcontext() if current() is not None else _turn:
            return method(*args, **kwargs)

    return taking_turns


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
        self._loaded = False
        # what is set has a generation, so that what was begun before can be told from what was begun since; if an equal
        # position is set again, what was begun before may still be what is under way
        self._generation = self._equal_since = 0
        self._n_changes = 0
        # the passes that this process has begun since a position was set; the one that was taken from last is the last
        self._runs: list[_Run] = []
        self._owner = os.getpid()
        self._journal = Journal()
        self._is_shared = False
        # for each thread, how many processes it has started
        self._n_started: dict[int, int] = {}
        # the iteration that workers have begun last, and those that other workers have still to begin
        self._latest: _Iteration | None = None
        self._open: dict[Key, _Iteration] = {}
        # in a worker: the number of its start; how many passes it has begun, by any copy, so that none begins the first
        # pass again; how many positions it has set itself; the iteration that comes next, if that is decided, the one
        # that it began last, and whether it was the first to do so; what its process has set since
        self._start: tuple[int, int] = 0, 0
        self._n_begun, self._n_set_here = _Count(), 0
        self._set_here = False
        self._next: _Iteration | None = None
        self._taken: _Iteration | None = None
        self._is_first = False
        self._told: tuple[int, int, Position] | None = None
        with _turn:
            _bookmarks.add(self)

    @property
    @_in_turn
    def position(self) -> Position:
        """Where the next pass begins, as far as this process knows."""
        self._read()
        latest = self._latest
        return self._set if latest is None or latest.generation < self._generation else latest.following

    @property
    @_in_turn
    def begun(self) -> Begun | None:
        """The pass that was begun or taken from last, here or by workers; None if another position was set since."""
        by_workers = self._begun_by_workers()
        return _of_workers(by_workers) if by_workers is not None else self._runs[-1].begun if self._runs else None

    @property
    @_in_turn
    def passes(self) -> list[Begun]:
        """The passes that a state may be about, of those that were begun here."""
        return [run.begun for run in self._runs]

    @_in_turn
    def under_way(self) -> Begun | None:
        """Return the pass that a state is about; None as for :attr:`begun`.

        It is the one that was taken from last. One that was given up doesn't count if another one is under way: that
        was only looked at.

        Raises
        ------
        RuntimeError
            If it can't be told, because others may be gone on with as well.
        """
        candidates = [run.begun for run in self._runs if run.is_under_way]
        if (by_workers := self._begun_by_workers()) is not None:
            candidates.append(_of_workers(by_workers))
        elif self._runs and not self._runs[-1].is_under_way:
            last, was_given_up = self._runs[-1].begun, self._runs[-1].was_given_up
            of_workers = [run.begun for run in self._runs[:-1] if was_given_up and not run.begun.is_here]
            if of_workers or not (was_given_up and candidates):
                candidates += [*of_workers, last]
        if len(candidates) > 1:
            msg = (
                f"{len(candidates)} passes were begun since the epoch was set, and more than one of them may still go "
                "on, so that it can't be told which of them the state is to be about. Read a pass to its end or close "
                "its iterator before another one begins, and call set_epoch before each epoch."
            )
            raise RuntimeError(msg)
        return candidates[0] if candidates else None

    @_in_turn
    def set(self, position: Position, *, loaded: bool = False, changed: bool = False) -> None:
        """Let the next pass begin at a position, whatever came before it, and perhaps with other settings."""
        n_changes = self._n_changes + changed
        if current() is None:
            self._move(position, n_changes)
        else:
            self._set, self._set_here, self._next = position, True, None
            self._n_set_here += 1
        self._runs, self._loaded, self._n_changes = [], loaded, n_changes

    @_in_turn
    def set_epoch(self, epoch: int) -> bool:
        """Let the next pass be the first of an epoch; return whether it isn't already that of a state of this epoch."""
        # frameworks set the epoch again that they have just loaded
        position = self.position
        if epoch == position.epoch and ((self._loaded and position == self._set) or position.resumes):
            return False
        self.set(Position(epoch))
        return True

    @_in_turn
    def next(self, world_size: int) -> Position:
        """Return where the next pass begins, the last segment being the one that it goes on with, on so many ranks."""
        worker = current()
        if worker is None:
            return self.position.going_on(world_size, 1)
        if self._next is None:
            self._next = self._decide(worker, world_size)
        # a worker that has loaded a state has a part of its own
        return self._set.going_on(world_size, self._n_workers(worker)) if self._set_here else self._next.position

    @_in_turn
    def take(self, world_size: int) -> Position:
        """Return the same, and go on to the pass after it, if this is a worker: whatever happens to this one."""
        if current() is None:
            return self.next(world_size)
        try:
            return self.next(world_size)
        finally:
            self._taken, self._next, self._set_here = self._next, None, False
            self._n_begun.value += 1

    @_in_turn
    def begin(self, begun: Begun, stream: Pass) -> None:
        """Note that the pass that was taken is begun."""
        by_workers = self._begun_by_workers()
        runs = [run for run in self._runs if run.is_under_way or not run.begun.is_here]
        runs += [] if by_workers is None else [_Run(_of_workers(by_workers))]
        if current() is None:
            # what is left of an epoch is left until it has been read to its end
            self._move(self.position if begun.position.resumes else begun.position.after(), self._n_changes)
            self._equal_since = self._generation
        self._runs = [*runs, _Run(begun, weakref.ref(stream))]
        self._loaded = False
        if current() is not None and self._taken is not None and self._is_first:
            self._write({"about": self._taken.key, "n_obs": begun.n_obs, "n_batches": begun.n_batches})

    @_in_turn
    def taken(self, begun: Begun, is_end: bool) -> None:
        """Note that a load request of a pass was taken, or that it has come to its end.

        What was left of a resumed epoch is done then.
        """
        if self._runs and self._runs[-1].begun is not begun:
            self._runs = sorted(self._runs, key=lambda run: run.begun is begun)
        if not (is_end and self._runs and self._runs[-1].begun is begun and not self._runs[-1].is_finished):
            return
        self._runs[-1].is_finished = True
        if current() is None:
            if self._set.resumes:
                self._move(self._set.after(), self._n_changes)
        elif begun.ends and self._taken is not None:
            self._write({"end": self._taken.key})

    def _begun_by_workers(self) -> _Iteration | None:
        """What workers have begun last, if this is their process, and nothing else was set or begun since."""
        if current() is not None:
            return None
        self._read()
        latest = self._latest
        if latest is None or latest.generation < self._equal_since:
            return None
        is_equal = latest.position.without_idle_segments() == self._set.without_idle_segments()
        return latest if latest.generation == self._generation or is_equal else None

    # the process of a rank

    def _move(self, position: Position, n_changes: int) -> None:
        self.own()
        generation = self._generation + 1
        if self._is_shared:  # first: if that fails, nothing is changed
            self._write({"set": _to_json(position), "generation": generation, "n_changes": n_changes})
        self._generation = generation
        if position != self._set:
            self._equal_since = generation
        self._set = position

    @_in_turn
    def own(self) -> None:
        """Let go of what a process shares that has started this one."""
        if not self._is_own:
            self._set = self.position
            self._owner, self._journal, self._is_shared, self._latest = os.getpid(), Journal(), False, None
            self._generation = self._equal_since = 0
            self._n_started, self._open = {}, {}

    @property
    def _is_own(self) -> bool:
        """Whether the journal is that of this process, rather than of one that has started it."""
        return self._owner == os.getpid()

    @_in_turn
    def started(self) -> tuple[int, int]:
        """Number a process that this thread is about to start, which may be a worker."""
        self.own()
        self._read()
        self._open = {key: iteration for key, iteration in self._open.items() if self._is_open(iteration)}
        thread = threading.get_ident()
        self._n_started[thread] = self._n_started.get(thread, 0) + 1
        if not self._is_shared:
            self._journal.open()
            self._is_shared = True
        return thread, self._n_started[thread]

    def _is_open(self, iteration: _Iteration) -> bool:
        """Whether there are workers that have still to begin it: in a worker, whether it may be one of them."""
        thread, first, *_ = iteration.key
        if (worker := current()) is not None:
            return self._start == (thread, first + worker.id)
        return self._n_started.get(thread, 0) < first + iteration.n_workers - 1

    # a worker

    def _n_workers(self, worker: Worker) -> int:
        return 1 if self.keeps_order else worker.n_workers

    def _decide(self, worker: Worker, world_size: int) -> _Iteration:
        """Return the iteration that comes next: begin it, unless another worker has."""
        thread, start = self._start
        key = thread, start - worker.id, self._n_begun.value, self._n_set_here
        self._read()
        n_changes = self._n_changes
        # what was set since the worker was started is not for its first pass, which was begun by then
        if self._told is not None and self._n_begun.value and not self._set_here:
            self._generation, n_changes, self._set = self._told
        self._is_first = False
        while True:
            at = (self._set if self._set_here else self.position).going_on(world_size, self._n_workers(worker))
            # the position is read before this is looked at: whoever writes next has seen all that was written
            if (found := self._open.pop(key, None)) is not None:
                break
            entry = {
                "begin": key,
                "n_workers": worker.n_workers,
                "generation": self._generation,
                "n_changes": n_changes,
                "was_loaded": self._set_here,
                "position": _to_json(at),
            }
            self._is_first = self._write_first(entry)
        if found.n_changes != self._n_changes:
            msg = (
                "The mask or rng of a sampler was assigned after persistent workers of a DataLoader were started, "
                "which can't be told. Make a new DataLoader."
            )
            raise RuntimeError(msg)
        self._generation = found.generation
        return found

    # the journal

    def _write(self, entry: Entry) -> None:
        while not self._write_first(entry):
            pass

    def _write_first(self, entry: Entry) -> bool:
        """Write an entry, unless others have written meanwhile: then read that, and return False."""
        # a worker that has made the loader itself shares nothing
        is_written = (current() is not None and self._is_own) or self._journal.write(entry)
        if is_written:
            self._note(entry)
        else:
            self._read()
        return is_written

    def _read(self) -> None:
        """Read what others wrote: the workers of this process; or in a worker, its process and the other workers."""
        if self._is_shared and self._is_own == (current() is None):
            for entry in self._journal.read():
                self._note(entry)

    def _note(self, entry: Entry) -> None:
        match entry:
            case {"set": position, "generation": generation, "n_changes": n_changes}:
                self._told = generation, n_changes, _of_json(position)
            case {"begin": numbers, "position": position, **others}:
                key: Any = tuple(numbers)
                found = _Iteration(key, position=_of_json(position), **others)
                if self._latest is None or found.generation >= self._latest.generation:
                    self._latest = found  # others were started before the last position was set
                if self._is_open(found):
                    self._open[key] = found
            case {"about": numbers, **others} if self._latest is not None and self._latest.key == tuple(numbers):
                self._latest = self._latest._replace(**others)
            case {"end": numbers} if self._latest is not None and self._latest.key == tuple(numbers):
                self._latest = self._latest._replace(is_finished=True)

    # copies, and processes that are started

    @_in_turn
    def __getstate__(self) -> dict[str, Any]:
        if current() is not None:
            return vars(self) | {"_runs": self._given_up()}
        if get_spawning_popen() is not None:  # which may be a worker
            start = self.started()
            # it is pickled when others may have their turn
            own = {
                "_journal": copy.copy(self._journal),
                "_open": self._open.copy(),
                "_n_started": self._n_started.copy(),
            }
            return vars(self) | own | {"_runs": self._given_up(), "_start": start}
        # a copy knows what was begun, and has its own from then on
        duplicate = Bookmark(keeps_order=self.keeps_order)
        known = {"_set": self.position, "_loaded": self._loaded, "_n_changes": self._n_changes}
        return vars(duplicate) | known | {"_runs": self._given_up()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with _turn:
            _bookmarks.add(self)

    def _given_up(self) -> list[_Run]:
        """The pass that was begun last, as those know it who can't go on with it."""
        begun = self.begun
        return [] if begun is None else [_Run(begun)]

    def be_started(self) -> None:
        """In a process that was forked, begin as what it may be: a worker."""
        thread = threading.get_ident()
        self._start = thread, self._n_started.get(thread, 0)
        self._runs = [_Run(run.begun) for run in self._runs[-1:]]


def _of_workers(iteration: _Iteration) -> Begun:
    return Begun(
        iteration.position,
        iteration.n_obs,
        iteration.n_batches,
        n_due=0,
        was_loaded=iteration.was_loaded,
        is_here=False,
    )


def _to_json(position: Position) -> list[Any]:
    return [position.epoch, position.passes, position.segments]


def _of_json(position: list[Any]) -> Position:
    epoch, passes, segments = position
    return Position(epoch, passes, tuple(Segment(*segment) for segment in segments))


_bookmarks: weakref.WeakSet[Bookmark] = weakref.WeakSet()


def _before_fork() -> None:
    if current() is None:
        _turn.acquire()
        for bookmark in list(_bookmarks):
            with suppress(OSError):  # a worker without a journal says that there is none
                bookmark.started()


def _after_fork_here() -> None:
    if current() is None:
        _turn.release()


def _after_fork_there() -> None:
    if current() is None:
        for bookmark in list(_bookmarks):
            bookmark.be_started()
        _turn.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_here, after_in_child=_after_fork_there)
