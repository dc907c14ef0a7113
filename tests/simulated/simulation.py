"""A job that runs: its ranks, the model of what they must read, and what happens to both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from annbatch_distributed import Rank, Shuffled
from tests.meeting import agreement, verdict
from tests.simulated.disk import Away, Faults, Files
from tests.simulated.jobs import DRAWING
from tests.simulated.timelines import LoaderTimeline, MixtureTimeline, Place, Ranks, check_rows, units_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.simulated.jobs import Job
    from tests.simulated.timelines import Taken

#: More steps than any epoch has.
ALL = 10**6
#: How often a rank tries a read that fails.
_TRIES = 3
#: Reasons for which some ranks can't run a job, or resume a state.
_REFUSALS = "Can't resume", "can't be divided", "too few", "requires the same number"


class Died(Exception):
    """The job has died."""


@dataclass(frozen=True)
class Checkpoint:
    """A state in storage, and where the job was when it was saved."""

    text: str
    is_whole: bool
    place: Place
    ranks: Ranks
    log: list[list[Taken]]


class Simulation:
    """A job that runs, and its model.

    `start` and `take` are its training loop; other public methods happen to it.
    """

    def __init__(self, job: Job, tell: Callable[[str], object]) -> None:
        self.job, self.tell, self.faults = job, tell, Faults()
        self.timeline = (MixtureTimeline if job.is_mixture else LoaderTimeline)(job)
        self.checkpoints: list[Checkpoint] = []
        self.n_starts, self.has_read = 0, False
        # a rank that has resumed alone doesn't know in which earlier epoch ranks have changed
        self.has_resumed_alone = False

    # Starts

    def start(self, which: int) -> None:
        """Start the job, from its last whole state if there is one, on one of its numbers of ranks."""
        job = self.job
        while self.checkpoints and not self.checkpoints[-1].is_whole:
            self._check_torn_is_refused(self.checkpoints.pop().text)
        before = self.checkpoints[-1] if self.checkpoints else None
        n_workers = job.n_workers[self.n_starts % len(job.n_workers)]
        first = which % len(job.world_sizes)
        options = [Ranks(n, n_workers) for n in (*job.world_sizes[first:], *job.world_sizes)]
        # the ranks that have saved a state can load it
        for ranks in (*options, *([] if before is None else [before.ranks])):
            loaders = [job.loader(Rank(rank, ranks.n), ranks.n_workers) for rank in range(ranks.n)]
            states = [None if before is None else json.loads(before.text) for _ in loaders]
            refused = one(map(_refusal_to_start, loaders, states))
            if not refused:
                break
            self.tell(f"{ranks.n} ranks can't run: {refused}")
            assert any(text in refused for text in _REFUSALS), refused
        else:
            raise Died(f"no number of ranks can run: {refused}")
        self.loaders, self.ranks, self.n_starts = loaders, ranks, self.n_starts + 1
        self.faults.left.clear()
        place: Place = Place()
        log: list[list[Taken]] = []
        if before is not None:
            place, log = self.timeline.loaded(before.place, before.ranks, ranks), list(before.log)
        self.tell(f"{ranks.n} ranks start at step {self.timeline.done(place)} of epoch {place.epoch}")
        self._go_to(place, log, is_loaded=before is not None)
        self.uses_step_done, self.is_new, self.has_resumed_alone = False, True, False

    def _go_to(self, place: Place, log: list[list[Taken]], *, is_loaded: bool = False) -> None:
        """Note that the next pass begins at a place, and which steps of its epoch this job has read."""
        self.place, self.log, self.is_loaded = place, log, is_loaded
        self.iterators: list[Iterator[Any]] | None = None
        self.steps: list[list[Taken]] = []
        self.n_taken = self.n_done = 0
        # the epoch of a finished place was set again; the last batch was taken, but its step isn't done; the state of
        # a rank is of a pass that the job has left
        self.is_set_again = self.is_within = self.has_peeked = False

    # The loop of the ranks

    def _begin(self) -> None:
        """Begin a pass on all ranks."""
        loaders, timeline = self.loaders, self.timeline
        if self.place.finished and not self.is_set_again:
            self._go_to(timeline.after(self.place), [])
        epoch = self.place.epoch + self.place.finished
        assert {loader.next_epoch for loader in loaders} == {epoch}, "ranks begin another epoch"
        self._open([iter(loader) for loader in loaders])
        if self.is_new:
            assert not (said := self._say(agreement)), f"ranks that agree complain: {said}"
        n_done = timeline.done(self.place)
        assert {loader.batches_done for loader in loaders} == {n_done}, "other numbers of done steps"
        lengths = [n_done + sum(step[rank] is not None for step in self.steps) for rank in range(self.ranks.n)]
        assert list(map(len, loaders)) == lengths, f"lengths are {list(map(len, loaders))} instead of {lengths}"
        self.is_loaded = self.is_set_again = self.has_peeked = self.is_new = False

    def _open(self, iterators: list[Iterator[Any]]) -> None:
        """Note that these are the loops of the ranks."""
        if refused := self._refusal():
            raise Died(f"{self.ranks.n} ranks can't run: {refused}")
        self.steps, self.iterators = self.timeline.steps(self.place, self.ranks), iterators
        self.n_taken = self.n_done = 0
        # a rank that has resumed alone would begin where it has resumed, if all left their loops
        self.is_within = self.are_apart = False
        # the step of this pass at which each rank has begun
        self.begins = [0] * self.ranks.n

    def take(self, n_steps: int, *, stays_within: bool = False) -> None:
        """Take some steps on all ranks; the last of them may not be done at the end."""
        self._finish_step()
        if self.iterators is None:
            self._begin()
        n_steps = min(n_steps, len(self.steps) - self.n_taken)
        self.is_loaded = self.is_loaded and not n_steps  # a loop that stayed open goes on with its next batch
        for number in range(n_steps):
            self.log.append([self._next_of(rank) for rank in range(self.ranks.n)])
            self.n_taken += 1
            self.is_within = self.has_read = True
            if not (stays_within and number == n_steps - 1):
                self._finish_step()
            if self.job.saves_every and not self.n_taken % self.job.saves_every:
                self.save("whole")
        self.tell(f"{n_steps} steps of epoch {self.place.epoch}, {self.n_taken} of {len(self.steps)}")
        if self.n_taken == len(self.steps) and not self.is_within:
            self._end()

    def _finish_step(self) -> None:
        """Finish the step whose batch was taken."""
        if self.is_within and self.job.calls_step_done:
            for loader in self.loaders:
                loader.step_done()
            self.uses_step_done = True
        self.is_within = False
        self.n_done = self.n_taken

    def _next_of(self, rank: int) -> Taken:
        """Take the next batch of a rank, which resumes if a read fails, and compare it with the model."""
        assert self.iterators is not None
        for _ in range(_TRIES):
            try:
                batch = next(self.iterators[rank], None)
                break
            except OSError as error:
                # what was damaged is repaired once it was reported
                if not isinstance(error, Away) and not self._repair():
                    raise
                self.tell(f"rank {rank} reads again after {type(error).__name__}: {error}")
                loader = self.loaders[rank]
                loader.load_state_dict(loader.state_dict())
                self.iterators[rank], self.are_apart, self.has_resumed_alone = iter(loader), True, True
                self.begins[rank] = self._n_in_state
        else:
            raise Died(f"rank {rank} can't read")
        taken = None if batch is None else self._taken(batch)
        due = self.steps[self.n_taken][rank]
        assert taken == due, f"rank {rank} of {self.ranks.n} has read {taken} instead of {due}"
        return taken

    def _taken(self, batch: dict[str, Any]) -> Taken:
        """What a rank has read, after a comparison of its values with the collections."""
        disks = {source.name: source.disk for source in self.job.sources}
        first = self.job.sources[0].name
        match self.job.kind:
            case "aligned":
                disks[first].check(batch["rna"])
                disks[first].other.check(batch["protein"])
                (units,) = {units_of(store) for store in batch.values()}
                return ((first, units),)
            case "mixture of batches":
                parts = sorted(batch.items())
            case _:
                parts = [(batch.get("source", first), batch)]
        for name, part in parts:
            disks[name].check(part)
        return tuple((name, units_of(part)) for name, part in parts)

    def _end(self) -> None:
        """End the epoch on all ranks."""
        assert self.iterators is not None
        left = [next(iterator, None) for iterator in self.iterators]
        assert left == [None] * self.ranks.n, "a rank has one more batch"
        self.place = self.timeline.at(self.place, self.ranks, len(self.steps), len(self.steps))
        assert {loader.next_epoch for loader in self.loaders} == {self.place.epoch + 1}, "the epoch hasn't ended"
        said = self._say(verdict)
        for line in said.splitlines():
            assert any(text in line for text in (", as planned", "not checked", "no epoch of a source")), said
        if not self.job.is_mixture:
            if "not checked" not in said:
                assert len({*self.begins}) == 1, f"ranks that have begun apart claim {said}"
                self._check_claim(said)
            if self.timeline.done(self.place) == len(self.log):
                self._check_log()
        self.iterators, self.is_set_again = None, False
        if self.job.saves_every:
            self.save("whole")

    def _check_claim(self, said: str) -> None:
        """Check what the ranks say of the rows of an epoch."""
        (source,) = self.job.sources
        if source.kind not in DRAWING and source.unit == "row" and source.remainder != "drop":
            assert f"ach of the {len(source.selected):,} row" in said, said
            assert " was read once" in said, said

    def _check_log(self) -> None:
        """Check that the steps of an epoch, on whatever ranks they ran, have each row as often as they must."""
        (source,) = self.job.sources
        batches = [batch for step in self.log for taken in step if taken is not None for _, batch in taken]
        numbers = self.ranks.n, *self.job.world_sizes, *(part.ranks.n for part in self.place.parts)
        most = max(*numbers, source.virtual_ranks or 1)
        # "drop" loses less than a batch of each rank when the epoch begins, and whenever ranks change
        check_rows(source, batches, n_lost=(len(self.place.parts) + 1) * most * source.batch_size - 1)

    def _settle(self) -> None:
        """Finish the step, and the epoch if it was the last one."""
        self._finish_step()
        if self.iterators is not None and self.n_taken == len(self.steps):
            self._end()

    def _say(self, ask: Callable[..., list[str]]) -> str:
        """What the first and the last rank say after hearing all ranks, which must be the same."""
        # the ranks of a mixture note which epochs were checked
        return one(ask(self.loaders, listening=None if self.job.is_mixture else {0, self.ranks.n - 1}))

    def _refusal(self) -> str:
        """Why the ranks can't run the next pass; empty if they can."""
        return one(error_of(len, loader) for loader in self.loaders)

    def _states(self) -> list[str]:
        return [json.dumps(loader.state_dict()) for loader in self.loaders]

    # What happens: states and ranks

    @property
    def _n_in_state(self) -> int:
        """Number of steps of the pass that a state counts."""
        return self.n_done if self.uses_step_done else self.n_taken

    @property
    def _saved_place(self) -> Place:
        """The place of a state that is saved now."""
        if self.iterators is None or not self._n_in_state:  # none that no rank has begun has ended
            return self.place
        return self.timeline.at(self.place, self.ranks, self._n_in_state, len(self.steps))

    @property
    def _saved_log(self) -> list[list[Taken]]:
        return self.log[: len(self.log) - (self.n_taken - self._n_in_state)]

    @property
    def _has_common_state(self) -> bool:
        """False after a peek, and if a rank has left its loop, and can't know of a step that others are within."""
        return not self.has_peeked and not (self.is_within and None in self.log[-1])

    def save(self, fate: str) -> None:
        """Save a state, which may be torn or lost."""
        if not self._has_common_state:
            return
        text, place = one(self._states()), self._saved_place
        self.tell(f"a state of step {self.timeline.done(place)} of epoch {place.epoch} is saved; it is {fate}")
        if fate != "lost":
            is_whole = fate == "whole"
            text = text if is_whole else text[: len(text) * 2 // 3]
            self.checkpoints.append(Checkpoint(text, is_whole, place, self.ranks, self._saved_log))

    def _check_torn_is_refused(self, text: str) -> None:
        """Check that a torn state is refused, also if what is left of it can be parsed."""
        assert error_of(json.loads, text)
        loader = self.loaders[0]
        before = loader.state_dict()
        for torn in ({}, {**before, "version": None}, {name: part for name, part in before.items() if name != "epoch"}):
            assert error_of(loader.load_state_dict, torn), "a torn state was loaded"
        assert loader.state_dict() == before

    def die(self, which: int, n_ahead: int, *, is_older: bool, then: str) -> None:
        """Let all ranks die, some of which have taken one batch more, and start them again.

        Before their loop, frameworks look at a batch, and set the epoch of the state that they have loaded.
        """
        if self.iterators is not None and self.n_taken < len(self.steps):
            self._finish_step()
            for rank in range(min(n_ahead, self.ranks.n)):
                self._next_of(rank)
        if is_older and self.checkpoints:
            self.checkpoints.pop()
        self.tell(f"the job dies; {n_ahead} ranks were ahead")
        self.iterators = None
        self.start(which)
        self._prepare_loop(then)

    def _prepare_loop(self, then: str) -> None:
        if "look" in then:
            self.peek(ALL)
        if "set" in then:
            self.set_epoch(-1 if "earlier" in then else 0, drains=False)

    def reshard(self, which: int, first: int, times: int, *, stays_open: bool, then: str) -> None:
        """Continue on another number of ranks, maybe twice in a row: some survive, others die or join."""
        if not self._has_common_state:
            return
        before, place, log, loops = self.ranks, self._saved_place, self._saved_log, self.iterators
        ranks = before._replace(n=self.job.world_sizes[which % len(self.job.world_sizes)])
        # of 4 ranks, 3 survive: from first=2 on, ranks 2, 3 and 0
        survivors = [(first + number) % before.n for number in range(min(before.n, ranks.n))]
        own = [self.loaders[survivor] for survivor in survivors]
        joiners = [self.job.loader(Rank(number, ranks.n), ranks.n_workers) for number in range(len(own), ranks.n)]
        state = one(self._states())
        errors = [error_of(loader.reshard, Rank(number, ranks.n)) for number, loader in enumerate(own)]
        errors += [error_of(loader.load_state_dict, json.loads(state)) for loader in joiners]
        if any(errors):
            self.tell(f"{ranks.n} ranks can't continue: {errors[0]}")
            assert all(errors), f"some ranks continue, and others can't: {errors}"
            assert one(self._states()) == state, "ranks that can't continue have changed"
            return
        self.tell(f"ranks {survivors} of {before.n} continue; of {ranks.n} ranks, {len(joiners)} are new")
        for loader in joiners if self.uses_step_done else ():
            loader.step_done()
        self.loaders, self.ranks, self.is_new, self.has_resumed_alone = [*own, *joiners], ranks, True, False
        self._go_to(self.timeline.loaded(place, before, ranks), log, is_loaded=True)
        one(self._states())
        if loops is None or not stays_open:
            if times == 1:
                self._prepare_loop(then)
            else:
                self.reshard(which + 1, first, times - 1, stays_open=False, then=then)
            return
        own_loops = [loops[survivor] for survivor in survivors]
        if self.place.finished:
            assert [next(loop, None) for loop in own_loops] == [None] * len(own_loops)
            return
        self._open([*own_loops, *map(iter, joiners)])
        if times > 1:
            self.reshard(which + 1, first, times - 1, stays_open=True, then=then)
        elif not self.steps:
            self._end()

    # What happens: reads

    def fail(self, rank: int, times: int) -> None:
        """Let the next reads of a rank fail."""
        rank %= self.ranks.n
        self.tell(f"the next {times} reads of rank {rank} fail")
        self.faults.left[rank] = times

    def damage(self, how: str, which: int) -> None:
        """Damage a file, until a rank has reported it, and read on."""
        disk = self.job.sources[0].disk
        if isinstance(disk, Files):
            self.tell(f"{disk.damage(how, which)} is {how}")
            self.take(2)

    def _repair(self) -> bool:
        """Repair damaged files; False if there are none."""
        disk = self.job.sources[0].disk
        return isinstance(disk, Files) and disk.repair()

    # What happens: use and misuse

    def read_again(self, by: int, then: int) -> None:
        """Read an epoch to its end, and set the one in which ranks have changed, or the one before it; then another."""
        self.take(ALL)
        self.set_epoch(self.place.anchor[0] - self.place.epoch + by, drains=False)
        self.set_epoch(then, drains=False)

    def set_epoch(self, by: int, *, drains: bool) -> None:
        """Set an earlier epoch on all ranks, this one or a later one; loops that are open may end, which moves none."""
        self._settle()
        here, finished = self.place.epoch, self.place.finished
        epoch = max(0, here + by)
        if epoch == here and self.iterators is not None and self.are_apart:
            return
        # ranks would begin at different steps, and check_ranks_agree says so
        if self.has_resumed_alone and self.place.anchor[1] and epoch <= self.place.anchor[0]:
            return
        refused = one(error_of(loader.set_epoch, epoch) for loader in self.loaders)
        self.tell(f"epoch {epoch} is set{refused and f', and refused: {refused}'}")
        if self.is_loaded and epoch < here:
            assert "would discard the loaded state" in refused
            return
        assert not refused, refused
        if epoch == here and (self.is_loaded or not finished):
            self._leave()
            self.is_set_again = finished
            return
        if drains and self.iterators is not None and not self.is_loaded:
            self._drain()
        is_next = finished and epoch == here + 1
        self._go_to(self.timeline.after(self.place) if is_next else self.timeline.start_of(self.place, epoch), [])

    def _drain(self) -> None:
        """Take what is left of the open loops, though the place is in another epoch."""
        assert self.iterators is not None
        self._repair()
        with self.faults.paused():
            for rank, iterator in enumerate(self.iterators):
                left = [self._taken(batch) for batch in iterator]
                due = [step[rank] for step in self.steps[self.n_taken :] if step[rank] is not None]
                assert left == due, f"the open loop of rank {rank} has read {left} instead of {due}"

    def leave(self) -> None:
        """Leave the loop on all ranks; the next pass begins where this one has."""
        self._settle()
        if self.iterators is not None and not self.are_apart:
            self.tell("all ranks leave their loops")
            self._leave()

    def _leave(self) -> None:
        if self.iterators is not None:
            self._go_to(self.place, self.log[: len(self.log) - self.n_taken])
            self.has_peeked = True  # a state still counts what was taken

    def peek(self, n_ranks: int, times: int = 1) -> None:
        """Let some ranks, or all, look at a batch before the loop, maybe more than once."""
        self._settle()
        if self.iterators is not None or self._refusal():
            return
        place = self.timeline.after(self.place) if self.place.finished and not self.is_set_again else self.place
        if len(self.timeline.steps(place, self.ranks)) < 2:  # looking at the only batch ends the epoch
            return
        n_ranks = min(n_ranks, self.ranks.n)
        self.tell(f"{n_ranks} of {self.ranks.n} ranks look at a batch")
        self._repair()
        with self.faults.paused():
            for loader in self.loaders[:n_ranks] * times:
                looked = next(iter(loader), None)
                assert looked is None or self._taken(looked)
        self._go_to(place, self.log if place is self.place else [])
        self.has_peeked = True
        if n_ranks < self.ranks.n:  # the others don't know, and begin at the same place
            self.take(1)

    def ask(self, by: int) -> None:
        """Compare the cells that the last rank lists for an epoch with those that were and will be read."""
        self._settle()
        if self.has_peeked or self.is_set_again or self._refusal():
            return
        place, log, steps = self.place, self.log, self.steps[self.n_taken :]
        by = max(by, -place.epoch)
        if by:
            place, log = self.timeline.start_of(place, place.epoch + by), []
        elif len(log) != self.timeline.done(place) + self.n_taken:  # this job hasn't read the steps before
            return
        if by or self.iterators is None:
            steps = self.timeline.steps(place, self.ranks)
        first = self.timeline.first_known(place)
        steps = steps if by else [*log, *steps][first:]
        self.tell(f"rank {self.ranks.n - 1} lists the cells of {len(steps)} steps of epoch {place.epoch}")
        listed = self.loaders[-1].cells_of(slice(first, None), epoch=place.epoch)
        assert {*listed["step"]} == {*range(first, first + len(steps))}, "other steps are listed"
        is_virtual = self.job.sources[0].virtual_ranks is not None
        for (step, own), taken in zip(listed.groupby("step"), steps, strict=True):
            due = [[row for _, batch in rows or () for unit in batch for row, _ in unit] for rows in taken]
            of_ranks = [own["row"][own["rank"] == rank].tolist() for rank in range(len(due))]
            if is_virtual:  # the batches of virtual ranks are listed for the ranks that read them now
                due, of_ranks = [sorted(chain(*due))], [sorted(own["row"])]
            assert of_ranks == due, f"step {step} is listed with {of_ranks} instead of {due}"
            if "set" in own and not self.job.is_mixture and len(taken) == self.ranks.n:
                batches = [batch for rows in taken for _, batch in rows or ()]
                numbers = [number for batch in batches for number, unit in enumerate(batch) for _ in unit]
                assert own["set"].tolist() == numbers, f"the sets of step {step} have other numbers"

    def misuse(self, how: str, rank: int) -> None:
        """Put another loader in the place of a rank, which all ranks must notice."""
        self._settle()
        is_between = self.iterators is None and not self.has_peeked and not self.is_set_again
        if not is_between or self.ranks.n < 2 or self._refusal():
            return
        rank %= self.ranks.n
        first, epoch = self.job.sources[0], self.loaders[0].next_epoch
        options = first.options
        if how == "mask" and (first.unit != "row" or "mask" in options):
            return
        changes: dict[str, dict[str, Any]] = {
            "seed": {"seed": options["seed"] + 1},
            "remainder": {"remainder": "exact" if options["remainder"] == "drop" else "drop"},
            "sharding": {"sharding": Shuffled(3) if options["sharding"] == "contiguous" else "contiguous"},
            "mask": {"mask": slice(1, None)},
            "epoch": {},
        }
        wrong = self.job.loader(Rank(rank, self.ranks.n), self.ranks.n_workers, **changes[how])
        ahead = 1 if rank % 2 or not epoch else -1
        wrong.set_epoch(epoch + ahead * (how == "epoch"))  # the rank has missed a call, or is one ahead
        loaders = [*self.loaders[:rank], wrong, *self.loaders[rank + 1 :]]
        said = one(agreement(loaders, listening={0, rank}))
        self.tell(f"rank {rank} has another {how}: {said}")
        assert said, f"no rank has noticed that rank {rank} has another {how}"

    def refuse(self, how: str) -> None:
        """Load the state of another job, or with another collection, which all ranks must refuse."""
        self._settle()
        if self.has_peeked or self._refusal():
            return
        before, is_within = self._states(), self.timeline.done(self._saved_place) and not self._saved_place.finished
        if how == "collection":
            if not self.job.is_mixture and is_within:
                refused = error_of(self._load_into_another_collection, json.loads(before[0]))
                self.tell(f"a state of another collection is refused: {refused}")
                assert refused, "the state of another collection was loaded"
            return
        seed = self.job.sources[0].options["seed"] + 1
        other = self.job.loader(Rank(0, self.ranks.n), self.ranks.n_workers, seed=seed)
        if error_of(len, other):
            return
        self._repair()
        with self.faults.paused():
            next(iter(other))
        refused = one(error_of(loader.load_state_dict, other.state_dict()) for loader in self.loaders)
        self.tell(f"a state of another job is refused: {refused}")
        assert "seed" in refused, f"ranks have loaded the state of another job: {refused!r}"
        assert self._states() == before, "ranks that have refused a state have changed"

    def _load_into_another_collection(self, state: dict[str, Any]) -> None:
        other = self.job.of_another_collection().loader(Rank(0, self.ranks.n), self.ranks.n_workers)
        other.load_state_dict(state)


def _refusal_to_start(loader: Any, state: dict[str, Any] | None) -> str:
    """Why a rank can't start from a state; empty if it can."""
    if state is not None:
        before = loader.next_epoch, loader.batches_done
        if refused := error_of(loader.load_state_dict, state):
            assert (loader.next_epoch, loader.batches_done) == before, "a refused state has moved a rank"
            return refused
    return error_of(len, loader)


def one(answers: Iterable[str]) -> str:
    """The answer of all ranks, which must be the same."""
    different = {*answers}
    assert len(different) == 1, f"ranks say different things: {different}"
    return different.pop()


def error_of(call: Callable[..., object], *arguments: object) -> str:
    """The message of a call's error; empty without one."""
    try:
        call(*arguments)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""
