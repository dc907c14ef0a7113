"""A job: what its ranks read, as one of them knows it, from its arguments to the passes that were begun.

What the sampler documents, this does: it puts arguments, plans, lanes and progress together, and says what goes into
states and to other ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import annbatch
import numpy as np

from annbatch_distributed.checks import Description, Reading, Tally
from annbatch_distributed.config import Arguments, open_ended
from annbatch_distributed.lanes import Lane, Worker
from annbatch_distributed.masks import AnyMask, check_names, resolve_mask
from annbatch_distributed.plan import Classes, EpochPlan
from annbatch_distributed.planner import Planner, StepSelection, check_segments, rows_at
from annbatch_distributed.progress import Begun, Progress
from annbatch_distributed.ranks import Deferred, Membership, deferred
from annbatch_distributed.ranks.rank import MOST_RANKS
from annbatch_distributed.ranks.worker import current_worker, worker_info_hidden
from annbatch_distributed.rows import BOUND, Rows, integer, integers, names_of
from annbatch_distributed.state import (
    MOST_LEFT_OUT,
    Identity,
    LeftOut,
    Position,
    check_identity,
    check_worker,
    from_state,
    to_state,
)
from annbatch_distributed.stream import Pass, bounds_of

if TYPE_CHECKING:
    import pandas as pd


#: Warnings point at the code that called this package, directly or by annbatch's Loader.
_PACKAGES = str(Path(__file__).parent), str(Path(annbatch.__file__).parent)


def warn(message: str) -> None:
    """Warn whoever has called this package."""
    warnings.warn(message, UserWarning, skip_file_prefixes=_PACKAGES)


class Job:
    """A job, as one rank of it knows it."""

    def __init__(
        self, arguments: Arguments, member: Membership | Deferred, *, virtual_ranks: object, read_through: int
    ) -> None:
        self.arguments = arguments
        self.read_through = read_through
        self.virtual_ranks = (
            None if virtual_ranks is None else integer("virtual_ranks", virtual_ranks, least=1, below=MOST_RANKS + 1)
        )
        self._member = member
        self._trained_by: Deferred | None = None
        if not isinstance(member, Deferred):
            _ = self.own_lanes  # raises if they can't be run by as many
        self.progress = Progress(shuffles=arguments.sampler.shuffle)
        #: Which cells the values of the mask are of, until a loader has compared their names with its own.
        self.mask_names: pd.Index[Any] | None = None
        # which collection a state that was loaded is of, as far as it says
        self._of_state: Identity = {}
        # the plan of which warnings were given, and those
        self._last_plan: EpochPlan | None = None
        self._warned: set[str] = set()
        # what was left out of the last pass that left rows out
        self._left_out: tuple[LeftOut, ...] = ()
        self._planner = Planner(arguments)

    def take_names(self, mask: object) -> None:
        """Take the names of cells that a mask was given for, if it was given for each of them."""
        self.mask_names = None if self.arguments.mask.n_obs is None else names_of("mask", mask)

    def check_names(self, cells: tuple[pd.Index[Any], ...] | None) -> None:
        """Raise if the mask was given for the cells of data sets in another order, once their names are known."""
        if self.mask_names is not None and cells is not None:
            check_names("mask", self.mask_names, cells)
            self.mask_names = None

    def begin_anew(self, arguments: Arguments) -> None:
        """Read other rows, or in another order, from the next pass on, which is the first of its epoch."""
        self.arguments, self._planner = arguments, Planner(arguments)
        self.progress.go_to(Position(self.progress.position.epoch))
        self.progress.n_changes += 1
        self._of_state, self._last_plan, self._left_out = {}, None, ()

    @property
    def is_known(self) -> bool:
        """Whether it is known which rank this process is."""
        return not isinstance(self._member, Deferred) or self._member.is_known

    @property
    def trainer(self) -> Any:  # noqa: ANN401 Lightning's, which isn't imported
        """Lightning's ``Trainer`` that the job is trained by, if it is known; else None."""
        known = self._member if self._trained_by is None else self._trained_by
        thing = known.framework_object if isinstance(known, Deferred) else None
        # its count of steps is not that of a worker
        return thing if hasattr(thing, "fit_loop") and current_worker() is None else None

    def train_by(self, trainer: Any) -> None:  # noqa: ANN401 whatever is given
        """Take a ``Trainer`` of Lightning that isn't asked which rank this process is."""
        if not hasattr(trainer, "fit_loop"):
            raise TypeError(f"trainer must be Lightning's Trainer, got {trainer!r}.")
        self._trained_by = deferred(trainer)  # which keeps it from being copied, or sent elsewhere

    @property
    def membership(self) -> Membership:
        """Which rank this process is."""
        return self._member.membership() if isinstance(self._member, Deferred) else self._member

    @property
    def own_lanes(self) -> range:
        """Which lanes this rank reads."""
        rank, world_size = self.membership.rank.rank, self.membership.rank.world_size
        if self.virtual_ranks is None:
            return range(rank, rank + 1)
        n_own, left = divmod(self.virtual_ranks, world_size)
        if left:
            fitting = [number for number in range(1, self.virtual_ranks + 1) if self.virtual_ranks % number == 0]
            raise ValueError(
                f"virtual_ranks={self.virtual_ranks} must be a multiple of the world size, which is {world_size}. Run "
                f"it on {', '.join(map(str, fitting[:-1]))} or {fitting[-1]} ranks."
            )
        return range(rank * n_own, (rank + 1) * n_own)

    @property
    def n_lanes(self) -> int:
        """How many lanes the job has: one for each rank, or each virtual rank."""
        return len(self.own_lanes) * self.membership.rank.world_size

    def _samplers_hidden(self, worker: Worker | None) -> AbstractContextManager[None]:
        """Hide a worker from samplers, once all ranks are known: a worker has them from its process."""
        _ = self.membership
        return worker_info_hidden(worker)

    def _plan(self, n_obs: int, position: Position) -> EpochPlan:
        if position.resumes and self._of_state.get("n_obs") not in (None, n_obs):
            raise ValueError(
                f"The state is of a collection of {self._of_state['n_obs']} rows, and this one has {n_obs}. Load a "
                "state of this collection."
            )
        plan = self._planner.plan(n_obs, position.epoch, position.n_streams(self.n_lanes))
        if plan is not self._last_plan:
            if warning := _other_classes(type(self.arguments.sampler).__name__, self._planner.classes):
                self._warn_once(warning)
            self._last_plan = plan
        return replace(plan, left_out=_rows(position.leaves_out)) if position.leaves_out else plan

    def plan(self, n_obs: int) -> EpochPlan:
        """Return the plan of the epoch that comes next, with how much of it each lane has left."""
        n_obs, worker = integer("n_obs", n_obs, least=0), current_worker()
        position = self.progress.position
        with self._samplers_hidden(worker):
            plan = self._plan(n_obs, position)
            if position.resumes:
                left, done = self._n_left(n_obs, position), sum(part.n_lanes * part.done for part in position.segments)
                n_over = plan.first_number(plan.world_size) - done - sum(left) if plan.remainder == "drop" else 0
                plan = replace(plan, left=tuple(left), n_left_over=n_over)
        return replace(plan, n_processes=None if self.virtual_ranks is None else self.membership.rank.world_size)

    def _n_left(self, n_obs: int, position: Position) -> list[int]:
        """How many batches each lane has left from a position on."""
        position = position.run_by(self.n_lanes, 1)
        return list(map(len, self.progress.left(self._planner.lanes(n_obs, position), None, position)))

    def n_batches(self, n_obs: int) -> int:
        """Return how many batches this rank yields in the next pass."""
        n_obs, worker = integer("n_obs", n_obs, least=0), current_worker()
        with self._samplers_hidden(worker):
            self._plan(n_obs, self.progress.position)
            n_left = self._n_left(n_obs, self.progress.position)
        return max(n_left[lane] for lane in self.own_lanes)

    def begin(self, n_obs: int) -> Pass:
        """Begin a pass of this rank, or of this worker of it."""
        n_obs, worker = integer("n_obs", n_obs, least=0), current_worker()
        position = self.progress.next_position(worker, self.n_lanes)
        with self._samplers_hidden(worker):
            plan, lanes = self._plan(n_obs, position), self._planner.lanes(n_obs, position)
            if is_first := worker is None or not worker.number:
                self._check_left_out(plan, lanes, position)
        if is_first:  # workers don't know that another one has warned
            self._warn_of_rows(plan, position)
        own = self.progress.left([lanes[lane] for lane in self.own_lanes], worker, position)
        requests = self._pass(plan, own, position)
        begun = self.progress.begin(n_obs, position, lanes, worker)
        begun.n_due = requests.n_batches
        requests.on_end = partial(self.progress.end, begun)
        return requests

    def _pass(self, plan: EpochPlan, lanes: list[Any], position: Position) -> Pass:
        arguments = self.arguments
        return Pass(arguments.sampler, plan, lanes, arguments.root_seed, position.passes, self.read_through)

    def begin_by_workers(self, n_obs: int, n_workers: int) -> Begun:
        """Begin the next pass in this process, for workers that are told its position."""
        position = self.progress.position.run_by(self.n_lanes, n_workers if self.arguments.sampler.shuffle else 1)
        plan, lanes = self._plan(n_obs, position), self._planner.lanes(n_obs, position)
        self._warn_of_rows(plan, position)
        self._check_left_out(plan, lanes, position)
        begun = self.progress.begin(n_obs, position, lanes)
        begun.n_due = max(len(lanes[lane]) for lane in self.own_lanes) - position.segments[-1].done
        begun.is_by_workers = True
        return begun

    def _warn_of_rows(self, plan: EpochPlan, position: Position) -> None:
        """Warn where rows that were left out come again, and where they would be others after set_epoch."""
        before, self._left_out = self._left_out, position.leaves_out or self._left_out
        if not position.leaves_out and (again := sum(map(len, (plan.window.within(*rows[1:]) for rows in before)))):
            self._warn_once(
                f"Rows that were left out of an epoch ({again:,}) come again, since leave_out holds for one epoch. To "
                "leave them out of all that follow, assign a mask without them, on every rank: sampler.mask = ..."
            )
        if position.passes and not position.resumes and not self._planner.is_same_next_epoch(plan):
            self._warn_once(
                "A second pass without set_epoch: every rank reads the rows that it had last time, in another order, "
                "although other epochs have the rows dealt anew or lose other ones. Call set_epoch(epoch) on every "
                "rank before each epoch. (A torch DataLoader hides set_epoch from Lightning; what "
                "loader.to_dataloader(num_workers=...) returns doesn't.)"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            warn(message)
            self._warned.add(message)  # not before: a filter may have made an error of it

    def leave_out(self, rows: AnyMask | Sequence[int], n_obs: int, position: Position) -> None:
        """Leave rows out of what is left of an epoch from a position on, where the next pass begins."""
        if position.ended:
            raise ValueError(
                f"Epoch {position.epoch} has been read to its end, so that nothing can be left out of it. Call "
                "set_epoch before leave_out, or assign a mask without the rows: sampler.mask = ..."
            )
        is_numbers = isinstance(rows, list | tuple | range) and not any(isinstance(part, slice) for part in rows)
        mask: Any = integers("rows", rows) if is_numbers else rows
        given = resolve_mask(mask).window(n_obs).to_array()
        given = given[~_rows(position.left_out).contains(given)]
        ranges = zip(*(bounds.tolist() for bounds in bounds_of(given)), strict=True)
        left_out = [*position.left_out, *(LeftOut(position.done, *bounds) for bounds in ranges)]
        if len(left_out) > MOST_LEFT_OUT:
            raise ValueError(
                f"The rows are {len(left_out)} ranges of consecutive ones, and {MOST_LEFT_OUT} can be left out of an "
                "epoch. Assign a mask without them for the epochs that follow: sampler.mask = ..."
            )
        position = replace(position, left_out=tuple(sorted(left_out, key=lambda rows: rows.start)))
        at = position.run_by(self.n_lanes, 1)
        with self._samplers_hidden(None):
            self._check_left_out(self._plan(n_obs, at), self._planner.lanes(n_obs, at), at)
        self.progress.go_to(position, was_loaded=True)

    def _check_left_out(self, plan: EpochPlan, lanes: list[Lane], position: Position) -> None:
        """Raise if nothing would be left of a batch: the same on every rank, which goes through all lanes."""
        if not len(plan.left_out):
            return
        for lane in self.progress.left(lanes, None, position):
            for place, rows in enumerate(self._pass(plan, [lane], position).batches()):
                if not len(rows):
                    raise ValueError(
                        f"In step {position.done + place} of epoch {position.epoch}, a batch would have no row left "
                        f"without the rows {plan.left_out.in_short(3)}. Leave fewer of them out; or begin the next "
                        "epoch, with a mask without them."
                    )

    def rows_of(
        self, n_obs: int, steps: StepSelection, ranks: int | Sequence[int] | None, epoch: int | None
    ) -> pd.DataFrame:
        """Return which rows each rank has read, or will read, in some steps of an epoch."""
        import pandas as pd

        n_obs, position = integer("n_obs", n_obs, least=0), self._position_of(epoch)
        wanted = None if ranks is None else integers("ranks", np.atleast_1d(ranks), below=MOST_RANKS)
        own, world_size = self.own_lanes, self.membership.rank.world_size
        places, rows = list[tuple[int, int]](), [np.arange(0)]
        with self._samplers_hidden(current_worker()):
            plan = self._plan(n_obs, replace(position, left_out=()))
            segments = self._planner.segments(n_obs, position)
            for read in rows_at(steps, segments, lambda lane: self._pass(plan, [lane], position).batches()):
                rank = read.lane // len(own) if read.n_lanes == world_size * len(own) else read.lane
                if wanted is None or rank in wanted:
                    left_out = _rows(part for part in position.left_out if part.since <= read.step)
                    places.append((read.step, rank))
                    rows.append(read.rows[~left_out.contains(read.rows)])
        of_rows = np.repeat(np.array(places, dtype=np.int64).reshape(-1, 2), list(map(len, rows[1:])) or 0, axis=0)
        return pd.DataFrame({"step": of_rows[:, 0], "rank": of_rows[:, 1], "row": np.concatenate(rows)})

    def _position_of(self, epoch: int | None) -> Position:
        """Return the position of an epoch whose rows are asked for, with what it is, or will be, run by."""
        begun = self.progress.begun
        if epoch is None and begun is None:
            self.progress.check_workers_known()
        position = (self.progress.position if begun is None else begun.position).before_end
        n_workers = position.segments[-1].n_workers if position.segments else 1
        if epoch is not None and epoch != position.epoch:
            position = Position(integer("epoch", epoch, least=0, below=BOUND))
        return position.run_by(self.n_lanes, n_workers)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be the first of an epoch, unless that is the epoch of a state."""
        if self.progress.set_epoch(epoch):
            self._of_state = {}

    def state(self, position: Position) -> dict[str, Any]:
        """Return a position as a state."""
        return to_state(position, self.arguments.identity(self._n_obs))

    @property
    def _n_obs(self) -> Any:  # noqa: ANN401 a state may have anything
        """The number of rows of the collection, as far as it is known from a pass or a state."""
        begun = self.progress.begun
        return self._of_state.get("n_obs") if begun is None else begun.n_obs

    def load(
        self, state: Mapping[str, Any], *, strict: bool, n_obs: int | None = None, data_sets: str | None = None
    ) -> None:
        """Load a state for a collection of which the number of rows is known, or also its data sets."""
        worker = current_worker()
        position, saved = from_state(state)
        position = position.without_idle_segments()
        check_worker(position, worker)
        check_segments(position.run_by(self.n_lanes, 1))
        if strict:
            self._check_identity(saved, position, n_obs, data_sets)
        of_state = {name: saved.get(name) for name in ("n_obs", "data sets")} if strict else {}
        planner = copy.copy(self._planner)  # so that nothing is lost if it raises
        n_planned: Any = of_state.get("n_obs") if n_obs is None else n_obs  # a state may have anything
        if position.resumes and n_planned is not None:
            with self._samplers_hidden(worker):
                try:
                    planner.lanes(n_planned, position.run_by(self.n_lanes, 1))
                except ValueError as error:
                    raise ValueError(
                        f"The state can't be resumed here. {error} To give up the rest of epoch {position.epoch}, call "
                        f"set_epoch({position.epoch + 1}) instead."
                    ) from error
        self.progress.go_to(position, was_loaded=True)
        self._of_state, self._planner = of_state, planner

    def _check_identity(self, saved: Identity, position: Position, n_obs: int | None, data_sets: str | None) -> None:
        """Raise if a state is of other arguments, or of another collection."""
        n_saved, saved_mask = saved.get("n_obs"), saved.get("mask")
        n_known = n_saved if isinstance(n_saved, int) else n_obs
        own = self.arguments.identity(n_known) | {"n_obs": self._n_obs}
        if isinstance(saved_mask, str):
            saved = saved | {"mask": open_ended(saved_mask, n_known)}
        if position.resumes:
            own |= {"data sets": data_sets} | ({} if n_obs is None else {"n_obs": n_obs})
        else:  # there is no order to bring back
            own |= {"data sets": None, "root": saved.get("root")}
        check_identity(saved, own)

    def check_data_sets(self, data_sets: str | None) -> None:
        """Raise if the next pass resumes the state of other data sets, or of those in another order."""
        of_state = self._of_state.get("data sets")
        if self.progress.position.resumes and None not in (of_state, data_sets) and of_state != data_sets:
            raise ValueError(
                f"The state is of the data sets {of_state}, and these are {data_sets} (rows x columns of each). Add "
                "the state's data sets in the same order, and load it after that."
            )

    def agreeing(self) -> Membership:
        """Return the place of this process, with the source only where other processes have the same."""
        own = self.membership
        return own if own.framework is not None else replace(own, source="")

    def description(self, place: Membership, n_obs: int, more: Mapping[str, int | str]) -> Description:
        """Return what this process says of its next pass, and what more must be the same in all processes."""
        position = self.progress.position
        return self._described(place, n_obs, position, {"passes since set_epoch": position.passes, **more})

    def _described(self, place: Membership, n_obs: int, at: Position, more: Mapping[str, int | str]) -> Description:
        n_obs = integer("n_obs", n_obs, least=0)
        plan, identity = self._plan(n_obs, at), self.arguments.identity(n_obs)
        if self.virtual_ranks is not None:
            more = {"virtual ranks": self.virtual_ranks, **more}
        return Description.of(place, identity, at, plan, more)

    def reading(self, place: Membership, n_obs: int, read: Tally) -> Reading:
        """Return what this process says of its last pass."""
        last = self.progress.begun
        if last is None and self.progress.workers_may_read:  # this process doesn't know more of them
            last = Begun(self.progress.position.run_by(self.n_lanes, 1), n_obs, 0)
        position = self.progress.position if last is None else last.position
        description, plan = self._described(place, n_obs, position, {}), self._plan(n_obs, position)
        position = position.run_by(self.n_lanes, 1) if not position.segments else position
        lanes = self.progress.left(self._planner.lanes(n_obs, position), None, position)
        plan = replace(plan, left=tuple(map(len, lanes))) if position.resumes else plan
        return Reading.of(
            *(description, last, read, plan),
            sampler=self.arguments.sampler,
            lanes=lanes,
            own=self.own_lanes,
            root_seed=self.arguments.root_seed,
        )

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self), progress=copy.deepcopy(self.progress), _planner=copy.copy(self._planner))
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # arguments and plans are frozen, the wrapped sampler is never run, and all that changes is copied
        duplicate = copy.copy(self)
        duplicate._member = copy.deepcopy(self._member, memo)
        duplicate._warned = set(self._warned)
        return duplicate


def _rows(left_out: Iterable[LeftOut]) -> Rows:
    """Return the rows that are left out, ascending."""
    bounds = np.array([(start, stop) for _, start, stop in left_out], dtype=np.int64).reshape(-1, 2)
    return Rows.of_bounds(bounds[:, 0].copy(), bounds[:, 1].copy())


def _other_classes(name: str, classes: tuple[Classes, ...]) -> str | None:
    """Return the warning that the classes of ranks differ; None if they don't."""
    everywhere = frozenset[str]().union(*(own for _, own in classes))
    lacking = [(rank, sorted(everywhere - own)) for rank, own in classes if own != everywhere]
    if not lacking:
        return None
    rank, missing = lacking[0]
    return (
        f"The ranks of {name} can't all draw the same classes: there are {len(everywhere)}, and the rows of rank "
        f"{rank} lack {len(missing)} of them ({', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}). Each "
        "rank weighs the classes that it has, so that the job as a whole doesn't draw by the weights that were given. "
        "With sharding='independent' every rank draws from all rows."
    )
