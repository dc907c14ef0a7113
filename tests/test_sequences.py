"""Sequences of everything that can happen to the loaders of a job, whose ranks all run in this process."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, assume, event, given, settings
from hypothesis import strategies as st

from annbatch_distributed import Rank
from tests.loaders import numbered
from tests.meeting import agreement, verdict
from tests.samplers import job
from tests.strategies import PASSING, Job, jobs
from tests.test_laws import drops_rows
from tests.test_resume import Batch, check_same_batches, read_by, rows_by_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch_distributed import StatefulLoader
    from annbatch_distributed.loader.workers import WorkerDataLoader

#: More steps than any epoch has.
TO_THE_END = 10**6

#: The batch of each step and rank.
type Steps = dict[tuple[int, int], Batch]


@dataclass(frozen=True)
class Checkpoint:
    """A state, and the finished part of its epoch."""

    state: str
    epoch: int
    n_streams: int | None
    """Number of streams of the pass; None if no batch of it is done."""
    steps: Steps
    """Finished batches."""
    n_ranks: int
    """Number of ranks that saved it."""
    is_finished: bool
    """True if the previous pass is finished and no pass has started since."""


class History:
    """All ranks of a job, and the batches they have read."""

    def __init__(self, drawn: Job, which: int, *, is_virtual: bool, is_uneven: bool, kind: int) -> None:
        self.drawn, self.kind = drawn, kind
        # without a common seed, each process would be its own job
        self.options = drawn.options | {"seed": drawn.options["seed"] or 0}
        self.sizes = [1, 2, 3, 4]
        if is_virtual:
            self.options["virtual_ranks"] = drawn.world_size
            self.sizes = [size for size in range(1, 7) if drawn.world_size % size == 0]
        if self.options["remainder"] == "keep" and is_uneven:  # one rank has one batch more than the others
            n_each = drawn.batch_size * (drawn.world_size if is_virtual else self.sizes[which])
            self.options["mask"] = slice(0, (drawn.n_obs - 1) // n_each * n_each + 1)
        self.ranks = self.make_ranks(which)
        try:
            assume(min(self.counts()) > 2)
        except ValueError:
            assume(False)
        self.checkpoints: list[Checkpoint] = []
        self.has_step_done = False
        self.begin(0)

    def make_ranks(self, which: int) -> list[StatefulLoader | WorkerDataLoader]:
        """Return new loaders for one of the job's possible numbers of ranks."""
        samplers = job(copy.deepcopy(self.drawn.sampler), self.sizes[which % len(self.sizes)], **self.options)
        loaders = [numbered(sampler, self.drawn.n_obs, prefetch=self.kind % 2) for sampler in samplers]
        return [loader.to_dataloader() for loader in loaders] if self.kind == 2 else [*loaders]

    def begin(self, epoch: int, steps: Steps | None = None, n_streams: int | None = None) -> None:
        """Record that a pass starts next, of which some steps are done."""
        self.epoch, self.steps = epoch, dict(steps or {})
        self.done = self.steps
        self.n_streams = n_streams if steps else None
        self.iterators: list[Iterator[Any]] | None = None
        self.still_open: dict[int, Iterator[Any]] = {}
        self.n_left: list[int] = []
        self.is_loaded = self.has_looked = self.is_finished = False

    def counts(self) -> list[int]:
        counts = [loader.sampler.n_batches(self.drawn.n_obs) for loader in self.ranks]
        assert self.options["remainder"] == "keep" or len(set(counts)) == 1
        return counts

    def take(self, n_steps: int, calls_step_done: bool = False) -> None:
        """Take the batches of some steps, and call `step_done` after each if `calls_step_done`."""
        if self.iterators is None:
            self.begin_pass()
        assert self.iterators is not None
        counts = list(self.n_left)
        n_steps = min(n_steps, max(counts))
        first = len({step for step, _ in self.steps})
        for number in range(n_steps):
            if number and calls_step_done:
                self.step_done()
            for rank, iterator in enumerate(self.iterators):
                if number < counts[rank]:
                    self.steps = self.steps | {(first + number, rank): self.to_batch(next(iterator))}
        self.n_left = [max(0, count - n_steps) for count in counts]
        if max(self.n_left) > 0:
            if calls_step_done:
                self.step_done()
            return
        if self.has_step_done:
            self.save()  # within the last step
        if self.has_step_done or calls_step_done:
            self.step_done()
        for count, iterator in zip(counts, self.iterators, strict=True):
            # a loop that knows the number of batches requests no more, if it was in the last step
            if not (calls_step_done and count and count == max(counts)):
                assert next(iterator, None) is None
        self.check_read()
        # until the next pass begins, the place is the end of this epoch
        self.begin(self.epoch)
        self.is_finished = True
        self.save()

    def begin_pass(self) -> None:
        assert {loader.next_epoch for loader in self.ranks} == {self.epoch + self.is_finished}
        if self.is_finished:
            self.begin(self.epoch + 1)
        self.n_left, self.has_looked, self.is_loaded = self.counts(), False, False
        n_done = len({step for step, _ in self.steps})
        assert [len(loader) for loader in self.ranks] == [n_done + n_left for n_left in self.n_left]
        samplers = [loader.sampler for loader in self.ranks]
        assert {*(agreement(samplers, self.drawn.n_obs) if self.kind == 2 else agreement(self.ranks))} == {""}
        # a loop that was open while the ranks changed continues
        self.iterators = [self.still_open.get(rank) or iter(loader) for rank, loader in enumerate(self.ranks)]
        self.n_streams = self.n_streams or len(self.ranks)

    def to_batch(self, batch: Any) -> Batch:
        rows = batch["index"].tolist()
        assert batch["X"][:, 0].tolist() == rows
        assert ("repeated" in batch) == (self.options["remainder"] == "pad")
        return tuple(rows), tuple(batch["repeated"].tolist()) if "repeated" in batch else (False,) * len(rows)

    def joint_batches(self, steps: Steps) -> list[Batch]:
        """Return the batches of each step, with virtual ranks joined as on one rank."""
        if "virtual_ranks" not in self.options:
            return [batch for _, batch in sorted(steps.items())]
        parts: dict[int, list[Batch]] = {}
        for (step, _), batch in sorted(steps.items()):
            parts.setdefault(step, []).append(batch)
        return [(sum((rows for rows, _ in own), ()), sum((marks for _, marks in own), ())) for own in parts.values()]

    def check_read(self) -> None:
        """Check that the pass had the batches of an uninterrupted pass, also by `rows_of` and the verdict."""
        assert self.n_streams is not None
        is_virtual, whole = "virtual_ranks" in self.options, list[Batch]()
        for sampler in job(self.drawn.sampler, 1 if is_virtual else self.n_streams, **self.options):
            sampler.set_epoch(self.epoch)
            whole += read_by(sampler, self.drawn.n_obs)
        read, policy = self.joint_batches(self.steps), self.options["remainder"]
        event(f"{self.drawn.kind}, {policy}, virtual={is_virtual}, {self.n_streams} to {len(self.ranks)} ranks")
        if is_virtual:
            assert read == whole
        check_same_batches(Counter(whole), Counter(read), policy, len(self.ranks))
        self.check_rows_of(self.steps)
        (verdict_text,) = set(verdict(self.ranks))
        assert ", as planned" in verdict_text
        if self.drawn.kind in PASSING and policy != "drop" and not drops_rows(self.drawn):
            n_rows = len({row for rows, _ in whole for row in rows})
            assert f"ach of the {n_rows} row" in verdict_text
            assert " was read once" in verdict_text

    def check_rows_of(self, steps: Steps) -> None:
        """Check that every rank reports the rows that were read in some steps."""
        for loader in (self.ranks[0], self.ranks[-1]):
            reported = rows_by_step(loader.sampler, self.drawn.n_obs)
            if "virtual_ranks" in self.options:  # lanes don't change, and belong to the ranks that run them now
                assert {rank for _, rank in reported} == set(range(len(self.ranks)))
            else:
                assert reported.keys() >= steps.keys()
            n_steps = len({step for step, _ in steps})
            selected = {
                key: (rows, steps[key][1] if key in steps else ()) for key, rows in reported.items() if key[0] < n_steps
            }
            assert [rows for rows, _ in self.joint_batches(selected)] == [rows for rows, _ in self.joint_batches(steps)]

    def step_done(self) -> None:
        """Call `step_done` on every rank: states count no later steps until the next call."""
        if self.iterators is None:
            return
        for loader in self.ranks:
            loader.step_done()
        self.has_step_done, self.done = True, self.steps

    def ask_rows(self, epoch: int) -> None:
        """Compare `rows_of` with the rows read so far, or with the rows of a different epoch."""
        if epoch == self.epoch and self.steps:
            self.check_rows_of(self.steps)
        elif epoch != self.epoch:
            (fresh, *_), used = job(self.drawn.sampler, len(self.ranks), **self.options), self.ranks[-1].sampler
            fresh.set_epoch(epoch)
            assert rows_by_step(used, self.drawn.n_obs, epoch=epoch) == rows_by_step(fresh, self.drawn.n_obs)

    def save(self) -> None:
        """Save a state, the same on every rank."""
        if self.has_looked:  # a state describes the pass that started last, also if a peek started it
            return
        (state,) = {json.dumps(loader.state_dict()) for loader in self.ranks}
        steps = self.done if self.has_step_done else self.steps
        position = self.epoch, self.n_streams, steps
        self.checkpoints.append(Checkpoint(state, *position, len(self.ranks), self.is_finished))

    def load(self, which: int, before_the_last: int, then: str) -> None:
        """Load a state that is saved now, or an earlier state, and forget all later steps."""
        if not before_the_last:
            self.save()
        if not self.checkpoints:
            return
        checkpoint = self.checkpoints[-1 - min(before_the_last, len(self.checkpoints) - 1)]
        ranks, messages = self.make_ranks(which), set()
        for loader in ranks:
            try:
                loader.sampler.validate(self.drawn.n_obs)  # the next epoch can run on this number of ranks, too
                loader.load_state_dict(json.loads(checkpoint.state))
                loader.sampler.validate(self.drawn.n_obs)
                messages.add("")
            except ValueError as error:
                messages.add(str(error))
        assert len(messages) == 1
        if messages != {""}:
            return
        self.ranks, self.has_step_done = ranks, False
        self.begin(checkpoint.epoch, checkpoint.steps, checkpoint.n_streams)
        self.is_loaded, self.is_finished = True, checkpoint.is_finished
        if then == "set_epoch":  # as frameworks do with the epoch that they have just loaded
            self.set_epoch(self.epoch)
        if len(ranks) == checkpoint.n_ranks and (then != "set_epoch" or self.steps):
            assert {json.dumps(loader.state_dict()) for loader in ranks} == {checkpoint.state}
        if then == "look":
            self.look()

    def reshard(self, which: int, is_open: bool) -> None:
        """Change the number of ranks; surviving ranks continue in the open loop or in a new one."""
        if self.has_looked:  # a state describes the pass that started last
            return
        ranks, messages, states = (
            self.make_ranks(which),
            set(),
            {json.dumps(loader.state_dict()) for loader in self.ranks},
        )
        try:
            ranks[0].sampler.validate(self.drawn.n_obs)  # the next epoch can run on this number of ranks, too
        except ValueError:
            return
        (state,) = states
        survivors = [*zip(self.ranks, ranks, strict=False)]
        for number, fresh in enumerate(ranks):
            try:
                if number < len(survivors):
                    survivors[number][0].reshard(Rank(number, len(ranks)))
                else:
                    fresh.load_state_dict(json.loads(state))
                messages.add("")
            except ValueError as error:
                messages.add(str(error))
        assert len(messages) == 1
        if messages != {""}:
            assert {json.dumps(loader.state_dict()) for loader in self.ranks} == states
            return
        self.ranks = [old for old, _ in survivors] + ranks[len(survivors) :]
        if self.has_step_done:
            for loader in ranks[len(survivors) :]:
                loader.step_done()
        iterators, steps = self.iterators or [], self.done if self.has_step_done else self.steps
        is_finished = self.is_finished
        self.begin(self.epoch, steps, self.n_streams)
        self.is_loaded, self.is_finished = True, is_finished
        assert len({json.dumps(loader.state_dict()) for loader in self.ranks}) == 1
        if is_open:
            self.still_open = dict(enumerate(iterators[: len(survivors)]))

    def set_epoch(self, epoch: int) -> None:
        """Set an epoch, which changes nothing if the place is in this epoch."""
        if self.is_loaded and epoch < self.epoch:
            for loader in self.ranks:
                with pytest.raises(ValueError, match=r"set_epoch\(\d\) would discard"):
                    loader.set_epoch(epoch)
            return
        for loader in self.ranks:
            loader.set_epoch(epoch)
        if epoch == self.epoch and self.is_finished and self.is_loaded:
            assert not any(self.counts())
            assert [batch for loader in self.ranks for batch in loader] == []
            self.begin(epoch)
            self.is_finished = True
        elif epoch != self.epoch or self.is_finished:
            self.begin(epoch)

    def look(self) -> None:
        """Peek at a batch, after which the next pass begins where it would have."""
        # peeking at the last batch of all would read it
        if self.iterators is not None or min(self.counts()) < 2:
            return
        if self.is_finished:
            self.begin(self.epoch + 1)
        self.still_open = {}
        for loader in self.ranks:
            next(iter(loader), None)
        self.has_looked, self.is_loaded = True, False


#: The next action, with its arguments.
ACTIONS = st.one_of(
    st.tuples(st.just("take"), st.sampled_from([1, 2, 3, TO_THE_END]), st.booleans()),
    st.tuples(st.just("load"), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["", "set_epoch", "look"])),
    st.tuples(st.just("reshard"), st.integers(0, 3), st.booleans()),
    st.tuples(st.sampled_from(["set_epoch", "ask_rows"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["save", "step_done", "look"])),
)


# without shrinking, which takes longer than a test's timeout; a history is short enough to read
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=4 * settings().max_examples)
@given(
    jobs(),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
    st.lists(ACTIONS, min_size=10, max_size=20),
)
def test_epoch_has_same_batches_whatever_happens(
    drawn: Job, which: int, is_virtual: bool, is_uneven: bool, kind: int, actions: list[tuple[Any, ...]]
) -> None:
    """An epoch has the batches of an uninterrupted epoch, whatever its ranks do, in any order."""
    history = History(drawn, which, is_virtual=is_virtual, is_uneven=is_uneven, kind=kind)
    for name, *arguments in actions:
        getattr(history, name)(*arguments)
    history.take(TO_THE_END)
