"""The cursor: where the next pass of a rank begins, for its process and for the workers of a ``DataLoader``.

Outside of workers, every pass that begins moves it. Workers are many, and each of them has a part of the same pass:
the first of them that begins an iteration says in a journal with which position, and the others begin there too. It
follows from the position that was set and from the passes begun since, as without workers: all ranks of a job decide
alike, and the process of the rank goes on from there.

Which workers are of the same iteration is seen from how they were started. torch starts the workers of an iteration one
after the other, worker 0 first, so that the number of the start less that of the worker is the same for all of them and
for no others. Persistent workers count their iterations from there.

===========================  ==========================  ==================  =======================================
event                        where                       the next position   what others read in the journal
===========================  ==========================  ==================  =======================================
a position is set            process of the rank         that position       "set"; persistent workers begin there next
a position is set            a worker                    there, that one     nothing: each worker sets its own
a whole pass begins          process of the rank         the pass after it   "set"
a whole pass begins          workers                     the pass after it   "begin", by the first of the workers
the rest of an epoch begins  process of the rank         the same            "set"
the rest of an epoch begins  workers                     the same            "begin", by the first of the workers
such a rest comes to an end  process of the rank         the pass after it   "set"
such a rest comes to an end  worker with the last batch  the pass after it   "about": that it is finished
a pass has been planned      the first of the workers    the same            "about": how many rows and batches it has
a whole pass has been read   worker with the last batch  the same            "about": that it is finished
===========================  ==========================  ==================  =======================================

There is a journal as soon as a process was started that may be a worker.

Every position that the process sets or goes on to is a *generation*: what workers began in an earlier one is no longer
current, unless the position is the same. A worker decides which iteration is next (``next``) and claims it (``claim``)
before it is planned, so that one that can't be planned isn't begun again; ``begin`` then says what it is "about".
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, NamedTuple

from annbatch_distributed.ranks.worker import current_worker
from annbatch_distributed.resume.journal import Journal
from annbatch_distributed.resume.state import Position
from annbatch_distributed.sharding.batches import Worker, batches_left, batches_of_worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch_distributed.passes.run import Pass
    from annbatch_distributed.resume.journal import Entry

__all__ = ["Cursor", "PassRecord"]

#: A thread of the process; the number of a start by it less that of the worker; how many passes the worker has begun,
#: and how many positions it has set.
type _Key = tuple[int, int, int, int]


@dataclass(eq=False)
class PassRecord:
    """A pass that was begun, as it is known after it is gone; two of them are never equal, whatever they hold."""

    position: Position
    """Where it began; the pass belongs to the last segment."""
    n_obs: int | None = None
    """Rows of the collection, if that is known."""
    n_batches: int | None = None
    """How many batches the epoch has on the rank that has the most, if that is known."""
    n_due: int = 0
    """How many batches it yields here."""
    worker: Worker | None = None
    """Whose part of the rank's pass it is, in a ``DataLoader`` worker."""
    has_last_batch: bool = True
    """Whether the last batch of the rank's pass is in that part."""
    is_by_workers: bool = False
    """Whether the workers of this process have begun it."""
    was_loaded: bool = False
    """Whether workers have loaded the position, so that their process doesn't know it."""
    is_finished: bool = False
    """Whether it has come to its end here."""
    pass_: weakref.ref[Pass] | None = field(default=None, repr=False)
    """What yields its load requests; None if that isn't here, as for the pass of workers, and in copies."""

    @property
    def is_under_way(self) -> bool:
        """Whether somebody here can go on with it."""
        pass_ = None if self.pass_ is None else self.pass_()
        return pass_ is not None and not pass_.closed and not self.is_finished

    @property
    def was_given_up(self) -> bool:
        """Whether nobody can go on with it, before it has come to its end: ``next(iter(loader))`` is gone at once."""
        return self.pass_ is not None and not self.is_under_way and not self.is_finished

    def position_after(self, n_yielded: int) -> Position:
        """Return the position after ``n_yielded`` batches here, with those that other workers have yielded by then."""
        segment = self.position.segments[-1]
        if self.worker is None:
            if n_yielded == self.n_due:
                return self.position.after().going_on(segment.world_size, 1)
            return self.position.moved_to(segment.done + n_yielded)
        number, n_workers = self.worker
        n_own = len(range(number, segment.done, n_workers)) + n_yielded
        done = (n_own - 1) * n_workers + number + 1 if n_yielded else segment.done
        return replace(self.position.moved_to(done), worker=self.worker)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pass_": None}


class _Iteration(NamedTuple):
    """A pass that the workers of an iteration have begun."""

    key: _Key
    """What tells it from all others."""
    n_workers: int
    """How many workers there are."""
    generation: int
    """How many positions had been set."""
    n_changes: int
    """How often a mask or rng had been assigned."""
    record: PassRecord
    """The pass, as the process of the workers knows it."""

    @property
    def following(self) -> Position:
        """Where the next pass begins."""
        at = self.record.position.without_idle_segments()
        is_left = at.resumes and not self.record.is_finished and not self.record.was_loaded
        return at if is_left else at.after()


class _Count:
    """A number that copies have in common."""

    def __init__(self) -> None:
        self.value = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Count:
        return self


#: Threads take turns. A process is forked between two turns, so that it has nothing half-changed. Nobody asks in a turn
#: which worker this is: another thread may hide that until it has had a turn.
_turn = threading.RLock()


def _in_turn[**Asked, Answer](method: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    @wraps(method)
    def taking_turns(*args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
        with _turn:
            return method(*args, **kwargs)

    return taking_turns


class Cursor:
    """Where the next pass begins, and which passes were begun.

    Its methods are given the worker of a ``DataLoader`` that calls them, or None: a process becomes a worker after
    it was started, with a copy of the cursor that it has from its parent.

    ``keeps_order`` says whether the batches of a pass stay in their order, however many workers there are.
    """

    def __init__(self, *, keeps_order: bool) -> None:
        self._keeps_order = keeps_order
        self._set = Position(0)
        self._was_loaded = False
        # positions that are set have a generation, which tells passes begun before from passes begun since; if an equal
        # position is set again, a pass begun before may still be under way
        self._generation = self._equal_since = 0
        self._n_changes = 0
        # the passes that this process has begun since a position was set; the one that was taken from last is the last
        self._records: list[PassRecord] = []
        # which process the journal is of
        self._owner = os.getpid()
        self._journal = Journal()
        # for each thread, how many processes it has started
        self._n_started: dict[int, int] = {}
        # the iteration that workers have begun last, and those that other workers may have still to begin
        self._latest: _Iteration | None = None
        self._open: dict[_Key, _Iteration] = {}
        # in a worker: the thread and the number of its start; how many passes it has begun, by any copy, so that none
        # begins the first pass again; how many positions it has set itself, and whether one since the last pass; what
        # its process has set last: generation, number of changes, position
        self._start: tuple[int, int] = 0, 0
        self._n_begun, self._n_set_here = _Count(), 0
        self._is_set_here = False
        self._set_by_process: tuple[int, int, Position] | None = None
        # in a worker: the iteration that comes next, if that is decided, the one that it has claimed last, and whether
        # it was the first to begin the one decided last
        self._next: _Iteration | None = None
        self._claimed: _Iteration | None = None
        self._is_first = False
        with _turn:
            _cursors.add(self)

    @_in_turn
    def position(self, worker: Worker | None) -> Position:
        """Return where the next pass begins, as far as this process knows."""
        self._sync(worker)
        latest = self._latest
        return self._set if latest is None or latest.generation < self._generation else latest.following

    @_in_turn
    def last(self, worker: Worker | None) -> PassRecord | None:
        """Return the pass that was begun or taken from last, here or by workers; None if a position was set since."""
        by_workers = self._begun_by_workers(worker)
        return by_workers or (self._records[-1] if self._records else None)

    def knows(self, record: object) -> bool:
        """Whether a record is that of a pass that a state may be about."""
        return any(known is record for known in self._records)

    @_in_turn
    def under_way(self, worker: Worker | None) -> PassRecord | None:
        """Return the pass that a state is about; None as for :meth:`last`.

        It is the one that was taken from last. One that was given up doesn't count if another one is under way: that
        was only looked at. If others may be gone on with as well, it is a RuntimeError.
        """
        candidates = [record for record in self._records if record.is_under_way]
        if (by_workers := self._begun_by_workers(worker)) is not None:
            candidates.append(by_workers)
        elif self._records and not self._records[-1].is_under_way:
            last = self._records[-1]
            of_workers = [one for one in self._records[:-1] if last.was_given_up and one.is_by_workers]
            if of_workers or not (last.was_given_up and candidates):
                candidates += [*of_workers, last]
        if len(candidates) > 1:
            raise RuntimeError(
                f"{len(candidates)} passes were begun since the epoch was set, and more than one of them may still go "
                "on, so that it isn't known which of them the state is to be about. Read a pass to its end or close "
                "its iterator before another one begins, and call set_epoch before each epoch."
            )
        return candidates[0] if candidates else None

    @_in_turn
    def position_at(self, worker: Worker | None, batches_done: int, world_size: int) -> Position:
        """Return the position when every rank has done a number of batches of the epoch, before resumes included."""
        record = self.under_way(worker) or PassRecord(self.next(worker, world_size))
        if record.was_loaded:
            raise RuntimeError(
                "The workers of a DataLoader have loaded a state each, which this process doesn't know. Save the "
                "DataLoader's own state_dict()."
            )
        position, n_batches = record.position, record.n_batches
        before = sum(segment.done for segment in position.segments[:-1])
        if batches_done < before:
            raise ValueError(
                f"batches_done must be at least {before}, which were done before this pass, got {batches_done}."
            )
        if n_batches is not None and batches_done > n_batches:
            raise ValueError(f"batches_done must be at most {n_batches}, the batches of this pass, got {batches_done}.")
        if batches_done == n_batches:
            return position.after().going_on(world_size, 1)
        return position.moved_to(batches_done - before)

    @_in_turn
    def set(
        self, worker: Worker | None, position: Position, *, was_loaded: bool = False, has_changes: bool = False
    ) -> None:
        """Let the next pass begin at a position, whatever came before it, and perhaps with another mask or rng."""
        n_changes = self._n_changes + has_changes
        if worker is None:
            self._move(position, n_changes)
        else:
            self._set, self._is_set_here, self._next = position, True, None
            self._n_set_here += 1
        self._records, self._was_loaded, self._n_changes = [], was_loaded, n_changes

    @_in_turn
    def set_epoch(self, worker: Worker | None, epoch: int) -> bool:
        """Let the next pass be the first of an epoch; return whether it isn't already that of a state of this epoch."""
        # frameworks set the epoch again that they have just loaded
        position = self.position(worker)
        if epoch == position.epoch and ((self._was_loaded and position == self._set) or position.resumes):
            return False
        self.set(worker, Position(epoch))
        return True

    @_in_turn
    def next(self, worker: Worker | None, world_size: int) -> Position:
        """Return where the next pass begins; its last segment, of this world size, is that of the pass."""
        if worker is None:
            return self.position(worker).going_on(world_size, 1)
        if self._next is None:
            self._next = self._decide(worker, world_size)
        if self._is_set_here:  # a worker that has loaded a state has a part of its own
            return self._set.going_on(world_size, self._n_workers(worker))
        return self._next.record.position

    @_in_turn
    def claim(self, worker: Worker | None, world_size: int) -> Position:
        """Return the same, and in a worker go on to the pass after it, whatever happens to this one."""
        if worker is None:
            return self.next(worker, world_size)
        try:
            return self.next(worker, world_size)
        finally:
            self._claimed, self._next, self._is_set_here = self._next, None, False
            self._n_begun.value += 1

    def part(self, worker: Worker | None, position: Position) -> Worker | None:
        """Return which part of a pass from a position a worker has; None without workers."""
        if worker is None or position.worker is not None:
            return None if worker is None else position.worker
        # torch begins to collect from worker 0, whosoever's turn it was
        number, n_workers = worker
        return Worker((number + position.segments[-1].done) % n_workers, n_workers)

    @_in_turn
    def begin(self, worker: Worker | None, position: Position, pass_: Pass) -> Pass:
        """Begin the pass from a position that was claimed: let it yield what is left here, and say how far it is."""
        plan, part = pass_.plan, self.part(worker, position)
        number, n_workers = own = part or Worker(0, 1)
        collected, counts = position.collected(plan.world_size), list(map(plan.n_batches, pass_.ranks))
        # virtual ranks divide their batches among workers as if each were a rank
        due = tuple(batches_of_worker(count, collected, own, keeps_order=self._keeps_order) for count in counts)
        n_in_segment = max(sum(map(len, batches_left(count, collected[:-1]))) for count in counts)
        record = PassRecord(
            position,
            plan.n_obs,
            n_batches=sum(segment.done for segment in position.before(plan.world_size)) + plan.most_batches,
            n_due=max(sum(map(len, batches.own)) for batches in due),
            worker=part,
            has_last_batch=number == (n_in_segment - 1) % n_workers,
            pass_=weakref.ref(pass_),
        )
        if record.n_due < pass_.n_batches:
            pass_.batches = due
        pass_.record, pass_.on_request = record, partial(self.note_request, record=record)

        by_workers = self._begun_by_workers(worker)
        records = [one for one in self._records if one.is_under_way or one.is_by_workers]
        records += [] if by_workers is None else [by_workers]
        if worker is None:
            # what is left of an epoch is left until it has been read to its end
            self._move(self.position(worker) if position.resumes else position.after(), self._n_changes)
            self._equal_since = self._generation
        self._records, self._was_loaded = [*records, record], False
        if worker is not None and self._claimed is not None and self._is_first:
            self._write(worker, {"about": self._claimed.key, "n_obs": record.n_obs, "n_batches": record.n_batches})
        return pass_

    @_in_turn
    def note_request(self, worker: Worker | None, is_end: bool, *, record: PassRecord) -> None:
        """Note that a load request of a pass was taken, or that it has come to its end.

        What was left of a resumed epoch is done then.
        """
        if self._records and self._records[-1] is not record:
            self._records = sorted(self._records, key=lambda one: one is record)
        if not (is_end and self._records and self._records[-1] is record and not record.is_finished):
            return
        record.is_finished = True
        if worker is None:
            if self._set.resumes:
                self._move(self._set.after(), self._n_changes)
        elif record.has_last_batch and self._claimed is not None:
            self._write(worker, {"about": self._claimed.key, "is_finished": True})

    def _begun_by_workers(self, worker: Worker | None) -> PassRecord | None:
        """What workers have begun last, if this is their process, and nothing else was set or begun since."""
        if worker is not None:
            return None
        self._sync(worker)
        latest = self._latest
        if latest is None or latest.generation < self._equal_since:
            return None
        is_equal = latest.record.position.without_idle_segments() == self._set.without_idle_segments()
        return latest.record if latest.generation == self._generation or is_equal else None

    # the process of a rank

    def _move(self, position: Position, n_changes: int) -> None:
        self._detach()
        generation = self._generation + 1
        if self._journal.is_open:  # first: if that fails, nothing is changed
            self._write(None, {"set": position.to_json(), "generation": generation, "n_changes": n_changes})
        self._generation = generation
        if position != self._set:
            self._equal_since = generation
        self._set = position

    def _detach(self) -> None:
        """Let go of what the process that has started this one shares with its workers."""
        if not self._is_owner:
            self._set = self.position(None)
            self._owner, self._journal, self._latest = os.getpid(), Journal(), None
            self._generation = self._equal_since = 0
            self._n_started, self._open = {}, {}

    @property
    def _is_owner(self) -> bool:
        """Whether the journal is that of this process, rather than of one that has started it."""
        return self._owner == os.getpid()

    @_in_turn
    def _count_start(self) -> tuple[int, int]:
        """Return the thread and the number of the start of a process that may be a worker."""
        self._detach()
        self._sync(None)
        self._open = {key: one for key, one in self._open.items() if self._is_open(None, one)}
        thread = threading.get_ident()
        self._n_started[thread] = self._n_started.get(thread, 0) + 1
        if not self._journal.is_open:
            self._journal.open()
        return thread, self._n_started[thread]

    def _is_open(self, worker: Worker | None, iteration: _Iteration) -> bool:
        """Whether workers have still to begin an iteration: for a worker, whether it may be one of them."""
        thread, first, *_ = iteration.key
        if worker is not None:
            return self._start == (thread, first + worker.number)
        return self._n_started.get(thread, 0) < first + iteration.n_workers - 1

    # a worker

    def _n_workers(self, worker: Worker) -> int:
        return 1 if self._keeps_order else worker.n_workers

    def _decide(self, worker: Worker, world_size: int) -> _Iteration:
        """Return the iteration that comes next: begin it, unless another worker has."""
        thread, start = self._start
        key = thread, start - worker.number, self._n_begun.value, self._n_set_here
        self._sync(worker)
        n_changes = self._n_changes
        # what was set since the worker was started is not for its first pass, which was begun by then
        if self._set_by_process is not None and self._n_begun.value and not self._is_set_here:
            self._generation, n_changes, self._set = self._set_by_process
        self._is_first = False
        while True:
            at = (self._set if self._is_set_here else self.position(worker)).going_on(
                world_size, self._n_workers(worker)
            )
            # the position is read before this is looked at: whoever writes next has seen all that was written
            if (found := self._open.pop(key, None)) is not None:
                break
            entry = {
                "begin": key,
                "n_workers": worker.n_workers,
                "generation": self._generation,
                "n_changes": n_changes,
                "was_loaded": self._is_set_here,
                "position": replace(at, worker=None).to_json(),
            }
            self._is_first = self._try_to_write(worker, entry)
        if found.n_changes != self._n_changes:
            raise RuntimeError(
                "The mask or rng of a sampler was assigned after persistent workers of a DataLoader were started, "
                "which can't learn of it. Make a new DataLoader."
            )
        self._generation = found.generation
        return found

    # the journal

    def _write(self, worker: Worker | None, entry: Entry) -> None:
        while not self._try_to_write(worker, entry):
            pass

    def _try_to_write(self, worker: Worker | None, entry: Entry) -> bool:
        """Write an entry, unless others have written meanwhile: then read that, and return False."""
        # a worker that has made the loader itself shares nothing
        is_written = (worker is not None and self._is_owner) or self._journal.write(entry)
        if is_written:
            self._note(worker, entry)
        else:
            self._sync(worker)
        return is_written

    def _sync(self, worker: Worker | None) -> None:
        """Read what others wrote: the workers of this process; or in a worker, its process and the other workers."""
        if self._is_owner == (worker is None):
            for entry in self._journal.read():
                self._note(worker, entry)

    def _note(self, worker: Worker | None, entry: Entry) -> None:
        match entry:
            case {"set": position, "generation": generation, "n_changes": n_changes}:
                self._set_by_process = generation, n_changes, Position.from_json(position)
            case {"begin": key, "position": position, "was_loaded": was_loaded, **others}:
                record = PassRecord(Position.from_json(position), is_by_workers=True, was_loaded=was_loaded)
                found = _Iteration(tuple(key), record=record, **others)
                if self._latest is None or found.generation >= self._latest.generation:
                    self._latest = found  # others were started before the last position was set
                if self._is_open(worker, found):
                    self._open[found.key] = found
            case {"about": key, **what} if self._latest is not None and self._latest.key == tuple(key):
                self._latest = self._latest._replace(record=replace(self._latest.record, **what))

    # copies, and processes that are started

    def __getstate__(self) -> dict[str, Any]:
        worker = current_worker()
        with _turn:
            known: dict[str, Any] = {}
            if worker is None and get_spawning_popen() is not None:  # which may start a worker
                known["_start"] = self._count_start()
            last = self.last(worker)
            known["_records"] = [] if last is None else [last]
            if "_start" in known:
                # it is pickled when others may have their turn
                known |= {name: copy.copy(vars(self)[name]) for name in ("_journal", "_open", "_n_started")}
            elif worker is None:  # a copy knows the passes that were begun, and has its own from then on
                known |= {"_set": self.position(worker), "_was_loaded": self._was_loaded, "_n_changes": self._n_changes}
                return vars(Cursor(keeps_order=self._keeps_order)) | known
            return vars(self) | known

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with _turn:
            _cursors.add(self)

    def _become_child(self) -> None:
        """In a process that was forked, begin as what it may be: a worker."""
        thread = threading.get_ident()
        self._start = thread, self._n_started.get(thread, 0)
        self._records = self._records[-1:]
        for record in self._records:
            record.pass_ = None


_cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()


def _before_fork() -> None:
    worker = current_worker()
    _turn.acquire()
    if worker is None:
        for cursor in list(_cursors):
            with suppress(OSError):  # a worker without a journal says that there is none
                cursor._count_start()


def _after_fork_there() -> None:
    if current_worker() is None:
        for cursor in list(_cursors):
            cursor._become_child()
    _turn.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_turn.release, after_in_child=_after_fork_there)
