"""Anything that can happen to a job's loaders, one thing after the other: all of its ranks, in one process."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import Phase, assume, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.loaders import numbered
from tests.samplers import job
from tests.strategies import Job, jobs
from tests.test_resume import Batch, check_same_batches, read_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch_distributed import StatefulLoader

#: More batches than there are.
TO_THE_END = 10**6


@dataclass(frozen=True)
class Checkpoint:
    """What was saved, and what must come of it."""

    state: str
    epoch: int
    passes: int
    n_streams: int | None
    """How many streams the pass has that was begun; None if none was."""
    read: Counter[Batch]
    """What was read of it."""
    has_ended: bool
    """Whether the pass before it has just come to its end."""


class Sequences(RuleBasedStateMachine):
    """Read, look, save, set the epoch, and load any checkpoint into a job of any size."""

    @initialize(drawn=jobs(), world_size=st.integers(1, 4), read_ahead=st.integers(0, 1))
    def start(self, drawn: Job, world_size: int, read_ahead: int) -> None:
        assume(drawn.batch_size * 4 < drawn.n_obs)
        self.drawn, self.read_ahead = drawn, read_ahead
        # without a seed in common, every process would be another job
        self.options = drawn.options | {"seed": drawn.options["seed"] or 0}
        self.ranks = self.made(world_size)
        try:
            self.ranks[0].sampler.validate(drawn.n_obs)
        except ValueError:
            assume(False)
        self.checkpoints: list[Checkpoint] = []
        self.begin(0, 0)

    def made(self, world_size: int) -> list[StatefulLoader]:
        samplers = job(copy.deepcopy(self.drawn.sampler), world_size, **self.options)
        return [numbered(sampler, self.drawn.n_obs, read_ahead=self.read_ahead) for sampler in samplers]

    def begin(self, epoch: int, passes: int) -> None:
        """Nothing of a pass has been read."""
        self.epoch, self.passes, self.read = epoch, passes, Counter[Batch]()
        self.n_streams: int | None = None
        self.iterators: list[Iterator[Any]] | None = None
        self.is_loaded = self.has_looked = self.has_ended = False

    def left(self) -> list[int]:
        counts = [loader.sampler.n_batches(self.drawn.n_obs) for loader in self.ranks]
        assert self.options["remainder"] == "keep" or len(set(counts)) == 1
        return counts

    @rule(n_batches=st.sampled_from([1, 2, 3, TO_THE_END]))
    def take(self, n_batches: int) -> None:
        if self.iterators is None:
            self.n_left, self.has_looked, self.has_ended = self.left(), False, False
            self.iterators = [iter(loader) for loader in self.ranks]
            self.n_streams = self.n_streams or len(self.ranks)
            self.is_loaded = self.is_loaded and bool(self.read)  # the beginning of an epoch is nothing to resume
        if n_batches >= min(self.n_left):  # under keep, a rank that has come to its end alone is in another epoch
            n_batches = max(self.n_left)
        for number, iterator in enumerate(self.iterators):
            for _ in range(min(n_batches, self.n_left[number])):
                batch = next(iterator)
                rows = tuple(batch["index"].tolist())
                assert batch["X"][:, 0].tolist() == list(rows)
                self.read[rows, tuple(batch["repeated"].tolist()) if "repeated" in batch else (False,) * len(rows)] += 1
                self.n_left[number] -= 1
        if not any(self.n_left):
            assert all(next(iterator, None) is None for iterator in self.iterators)
            self.check_read()
            self.begin(self.epoch, self.passes + 1)
            self.has_ended = True

    def check_read(self) -> None:
        assert self.n_streams is not None
        whole: Counter[Batch] = Counter()
        for sampler in job(self.drawn.sampler, self.n_streams, **self.options):
            sampler.set_epoch(self.epoch)
            for _ in range(self.passes):
                sampler.sample(self.drawn.n_obs)
            whole.update(read_by(sampler, self.drawn.n_obs))
        event(f"{self.drawn.kind}, {self.options['remainder']}, {self.n_streams} to {len(self.ranks)} ranks")
        check_same_batches(whole, self.read, self.options["remainder"], len(self.ranks))

    @precondition(lambda self: not self.has_looked)  # a state is that of the pass begun last, also if that was a look
    @rule()
    def save(self) -> None:
        states = {json.dumps(loader.state_dict()) for loader in self.ranks}
        assert len(states) == 1
        held = self.epoch, self.passes, self.n_streams, self.read.copy(), self.has_ended
        checkpoint = Checkpoint(states.pop(), *held)
        self.checkpoints.append(checkpoint)

    @precondition(lambda self: self.checkpoints)
    @rule(world_size=st.integers(1, 4), before_the_last=st.integers(0, 3), sets_epoch=st.booleans())
    def load(self, world_size: int, before_the_last: int, *, sets_epoch: bool) -> None:
        """Load a checkpoint, which need not be the last one: what was done since then is forgotten."""
        checkpoint = self.checkpoints[-1 - min(before_the_last, len(self.checkpoints) - 1)]
        ranks, messages = self.made(world_size), set()
        for loader in ranks:
            try:
                loader.sampler.validate(self.drawn.n_obs)  # so many ranks can have the epoch after it, too
                loader.load_state_dict(json.loads(checkpoint.state))
                loader.sampler.validate(self.drawn.n_obs)
                messages.add("")
            except ValueError as error:
                messages.add(str(error))
        assert len(messages) == 1
        if messages == {""}:
            self.ranks = ranks
            self.begin(checkpoint.epoch, checkpoint.passes)
            self.read, self.n_streams = checkpoint.read.copy(), checkpoint.n_streams if checkpoint.read else None
            self.is_loaded, self.has_ended = True, checkpoint.has_ended
            if sets_epoch and self.read:  # as frameworks do, of the epoch that they have just loaded
                self.set_epoch(self.epoch)

    @rule(epoch=st.integers(0, 2))
    def set_epoch(self, epoch: int) -> None:
        """An epoch that was loaded goes on until it has been read, or another one is set that comes after it."""
        epoch = max(epoch, self.epoch) if self.is_loaded else epoch
        goes_on = epoch == self.epoch and (self.is_loaded or any(loader.sampler.batches_done for loader in self.ranks))
        for loader in self.ranks:
            loader.set_epoch(epoch)
        if goes_on and self.is_loaded and self.has_ended:
            assert not any(self.left())
            assert [batch for loader in self.ranks for batch in loader] == []
            self.begin(epoch, self.passes)
            self.has_ended = True
        elif not goes_on:
            self.begin(epoch, 0)

    @precondition(lambda self: self.iterators is None)
    @rule()
    def look(self) -> None:
        """What is left of an epoch that was loaded is still left then; else the next pass has another order."""
        assume(not self.read or min(self.left()) > 1)  # who looks at the last batch of all has read it
        for loader in self.ranks:
            next(iter(loader), None)
        self.has_looked, self.has_ended = True, False
        if not self.read:
            self.is_loaded = False
            self.passes += 1

    def teardown(self) -> None:
        """However it was left, the epoch comes to its end."""
        if hasattr(self, "ranks") and hasattr(self, "checkpoints"):
            self.take(TO_THE_END)


def test_the_batches_of_an_epoch_are_the_same_whatever_happens_in_it() -> None:
    # without shrinking, which takes longer than a test may; a sequence is short enough to read as it is
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    run_state_machine_as_test(Sequences, settings=settings(stateful_step_count=20, phases=phases))
