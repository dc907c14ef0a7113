"""Progress: where the next pass of a rank begins, and the pass that was begun last.

A position moves when an epoch is set, when a state is loaded, and when a pass begins. What is left of a resumed epoch
stays next until it has been read to its end, so that a look at a batch doesn't lose it.

A worker of a ``DataLoader`` has the progress that its process had when the worker was started. What it can't have heard
of since then is an error.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from annbatch_distributed.lanes import Lane, Worker
from annbatch_distributed.ranks.worker import base_seed, current_worker, n_started, note_started
from annbatch_distributed.state import Position


@dataclass(eq=False)
class Begun:
    """A pass that was begun, as it is known after it is gone."""

    position: Position
    """Where it began, in the last segment."""
    n_obs: int
    """Rows of the collection."""
    n_batches: int
    """How many batches the epoch has in the lane that has the most, those included that were done before."""
    n_due: int = 0
    """How many batches it yields here."""
    worker: Worker | None = None
    """Whose part it is, in a ``DataLoader`` worker."""
    is_by_workers: bool = False
    """Whether the workers of this process read it."""

    @property
    def next_position(self) -> Position:
        """Where the pass after it begins."""
        *before, last = self.position.segments
        end = self.position.at(self.n_batches - sum(segment.done for segment in before))
        after = replace(self.position.after(), ended=end.segments, left_out=end.left_out)
        return after.run_by(last.n_lanes, 1)

    def position_after(self, n_done: int) -> Position:
        """Return the position after ``n_done`` batches here, with those that other workers have yielded by then."""
        done = self.position.segments[-1].done
        if self.worker is None:
            return self.next_position if n_done == self.n_due else self.position.at(done + n_done)
        number, n_workers = self.worker
        n_own = len(range(number, done, n_workers)) + n_done
        if n_done:
            done = (n_own - 1) * n_workers + number + 1
        return replace(self.position.at(done), worker=self.worker)


@dataclass(eq=False)
class Progress:
    """How far one sampler is."""

    shuffles: bool
    """Whether the order of batches depends on the number of workers."""
    position: Position = field(default_factory=lambda: Position(0))
    """Where the next pass begins."""
    begun: Begun | None = None
    """The pass that was begun last since a position was set."""
    was_loaded: bool = False
    """Whether the position is that of a state, and no pass was begun since."""
    is_set: bool = False
    """Whether an epoch was set since a state was loaded."""
    n_changes: int = 0
    """How often a position was set together with other rows or another generator."""
    _n_started: int = field(default_factory=n_started)
    """How many processes had been started when the position was set."""
    _n_begun_here: tuple[int, int] = (0, 0)
    """A process, and how many passes it has begun since."""

    def go_to(self, position: Position, *, was_loaded: bool = False) -> None:
        """Let the next pass begin at a position, whatever came before it."""
        self.position, self.begun, self.was_loaded = position, None, was_loaded
        self.is_set = self.is_set and not was_loaded
        self._n_started, self._n_begun_here = n_started(), (0, 0)

    def set_epoch(self, epoch: int) -> bool:
        """Let the next pass be the first of an epoch; return whether it isn't already that of a state of this epoch."""
        if self.was_loaded and self.position.resumes and epoch < self.position.epoch:
            raise ValueError(
                f"A state of epoch {self.position.epoch} was loaded, and set_epoch({epoch}) would give it up before "
                "anything of it is read. Begin with loader.next_epoch. (Fabric's setup_dataloaders counts epochs from "
                "0: iterate over the loader itself.)"
            )
        self.is_set = True
        if self.position.ended and epoch == self.position.epoch:  # it is not over for who sets it once more
            self.position = self.position.before_end
        # frameworks set the epoch again that they have just loaded
        if epoch == self.position.epoch and (self.was_loaded or self.position.resumes):
            return False
        self.go_to(Position(epoch))
        return True

    def next_position(self, worker: Worker | None, n_lanes: int) -> Position:
        """Return where the next pass begins here; its last segment, of so many lanes, is the one that it runs in."""
        position, (process, n_begun) = self.position, self._n_begun_here
        if worker is not None and position.worker is None:
            if (self.is_set and n_begun and process == os.getpid()) or (position.resumes and not self.is_set):
                raise RuntimeError(_NOT_TOLD)
            if not self.is_set:  # so that every iteration has an order of its own
                position = replace(position, passes=base_seed() + position.passes)
        return position.run_by(n_lanes, self._n_workers(worker))

    def _n_workers(self, worker: Worker | None) -> int:
        """Return how many workers make a difference to who reads what."""
        return 1 if worker is None or not self.shuffles else worker.n_workers

    def part(self, worker: Worker | None, position: Position) -> Worker | None:
        """Return which part of a pass from a position a worker has; None without workers."""
        if worker is None or position.worker is not None:
            return None if worker is None else position.worker
        # torch begins to collect from worker 0, whosoever's turn it was
        number, n_workers = worker
        return Worker((number + position.segments[-1].done) % n_workers, n_workers)

    def left(self, lanes: Iterable[Lane], worker: Worker | None, position: Position) -> list[Lane]:
        """Return what is left here of lanes from a position on, in whose last segment they begin."""
        *_, (_, n_workers, done) = position.segments
        part = self.part(worker, position)
        if part is None:
            return [lane.after(n_workers, done) for lane in lanes]
        n_done = len(range(part.number, done, part.n_workers))
        return [lane.of_worker(part, keeps_order=not self.shuffles).after(1, n_done) for lane in lanes]

    def begin(self, n_obs: int, position: Position, lanes: Sequence[Lane], worker: Worker | None = None) -> Begun:
        """Begin a pass from a position, in whose last segment all lanes of the job have so much to read."""
        n_before = position.done - position.segments[-1].done
        begun = Begun(position, n_obs, n_before + max(map(len, lanes)), worker=self.part(worker, position))
        self.begun, self.was_loaded = begun, False
        self.position = position if position.resumes else self.position.after()
        process, n_begun = self._n_begun_here
        self._n_begun_here = os.getpid(), 1 + (n_begun if process == os.getpid() else 0)
        return begun

    def end(self, begun: Begun) -> None:
        """Note that a pass has come to its end."""
        if begun is self.begun and begun.position.resumes:
            self.position = begun.position.after()

    def position_at(self, batches_done: int, n_lanes: int) -> Position:
        """Return the position when every lane has done a number of batches of the epoch, those before resumes too."""
        begun = self.begun
        if begun is None and batches_done > self.position.done:
            self.check_workers_known()
        position = self.position.run_by(n_lanes, 1) if begun is None else begun.position
        before = position.done - position.segments[-1].done
        if batches_done < before:
            raise ValueError(
                f"batches_done must be at least {before}, which were done before this pass, got {batches_done}."
            )
        if begun is None:
            return position.at(batches_done - before)
        if batches_done > begun.n_batches:
            raise ValueError(
                f"batches_done must be at most {begun.n_batches}, the batches of this pass, got {batches_done}."
            )
        return begun.next_position if batches_done == begun.n_batches else position.at(batches_done - before)

    def check_workers_known(self) -> None:
        """Raise if workers may have begun a pass, on whose number the order of batches depends."""
        if self.shuffles and self.workers_may_read:
            raise RuntimeError(
                "The workers of a DataLoader may have begun a pass, and how many there are isn't known here. Make it "
                "with loader.to_dataloader(num_workers=...), whose state_dict() knows."
            )

    @property
    def workers_may_read(self) -> bool:
        """Whether processes were started since a position was set, which may have begun to read from there."""
        return current_worker() is None and n_started() > self._n_started

    def know_workers(self) -> None:
        """Note that none of the processes that were started since a position was set has begun to read from there."""
        self._n_started = n_started()

    def __getstate__(self) -> dict[str, Any]:
        note_started()
        return vars(self) | {"_n_begun_here": (0, 0)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = copy.copy(self)
        duplicate.begun = copy.copy(self.begun)
        return duplicate


_NOT_TOLD = (
    "The workers of a DataLoader can't know where this pass begins: they have read one before, or a state was loaded "
    "and no epoch was set since then. Make the DataLoader with loader.to_dataloader(num_workers=...), which tells "
    "them; or call set_epoch(epoch) on the loader before each epoch, and pass persistent_workers=False."
)
