"""Anything that can happen to a job, one thing after the other: all of its ranks, in one process."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
from hypothesis import Phase, assume, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from annbatch_distributed import StatefulLoader
from tests.samplers import batches, job, repeats
from tests.strategies import PASSING, REPLACING, Job, jobs
from tests.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch_distributed import DistributedSampler

#: A batch: its rows, and for each of them whether it is a repeat.
type Batch = tuple[list[int], list[bool]]

world_sizes = st.integers(1, 5)
pytestmark = pytest.mark.usefixtures("small_blocks")

#: More batches than there are.
TO_THE_END = 10**6


def can_be_resized(drawn: Job) -> bool:
    """Whether the job reads all of its rows, or makes a number of draws that it was told, and not in a few steps."""
    if getattr(drawn.sampler, "_drop_last", False) or len(drawn.window()) < 6 * drawn.batch_size:
        return False
    return drawn.kind in PASSING or (drawn.independent and getattr(drawn.sampler, "_num_samples", None) is not None)


def unmarked(batch: Batch) -> list[int]:
    """The rows of a batch that are no repeats."""
    return [row for row, repeated in zip(*batch, strict=True) if not repeated]


class Consumer:
    """One rank, in a process of its own for all that it knows; whoever asks it for batches counts them."""

    def __init__(self, sampler: DistributedSampler, n_obs: int) -> None:
        self.sampler, self.n_obs = sampler, n_obs
        self.resumable: Any = sampler
        """What is told the epoch, and loads a state."""

    def begin(self, n_workers: int = 0) -> Iterator[Batch]:
        """Begin a pass, in this process or in so many workers."""
        return iter(Workers(self.resumable, n_workers, read=self.read) if n_workers else self.read(self.resumable))

    def read(self, sampler: Any) -> Iterator[Batch]:
        for request in sampler.sample(self.n_obs):
            rows = batches([request])
            yield from zip(rows, repeats([request]) if "repeated" in request else map(_no_repeats, rows), strict=True)

    def state(self, done: int) -> dict[str, Any]:
        return self.sampler.state_dict(batches_done=done)


class CountingConsumer(Consumer):
    """The same with a loader, which counts by itself what its workers don't take."""

    def __init__(self, sampler: DistributedSampler, n_obs: int) -> None:
        super().__init__(sampler, n_obs)
        self.resumable = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
        self.resumable.add_adata(collection(n_obs))

    def read(self, loader: Any) -> Iterator[Batch]:
        for batch in loader:
            rows = batch["index"].tolist()
            assert batch["X"][:, 0].tolist() == rows
            yield rows, batch["repeated"].tolist() if "repeated" in batch else _no_repeats(rows)

    def state(self, done: int) -> dict[str, Any]:
        last = self.sampler._cursor.last(None)
        done_by_workers = {"batches_done": done} if last is not None and last.is_by_workers else {}
        state: dict[str, Any] = self.resumable.state_dict(**done_by_workers)
        return state


@cache
def collection(n_obs: int) -> ad.AnnData:
    """A collection in which each row holds its own number."""
    return ad.AnnData(np.arange(float(n_obs)).reshape(n_obs, 1))


def _no_repeats(rows: list[int]) -> list[bool]:
    return [False] * len(rows)


@dataclass(frozen=True)
class Checkpoint:
    """What was saved, and what must come of it."""

    state: str
    world_size: int
    n_workers: int
    epoch: int
    read: tuple[int, ...]
    """The rows of the epoch that were read until then, repeats left out."""
    left: tuple[tuple[Batch, ...], ...] | None
    """For each rank, the batches that were to come; None where nobody has looked."""


class Sequences(RuleBasedStateMachine):
    """Run, save, set the epoch, and load any checkpoint into a job of any size."""

    consumer = Consumer
    kinds = (*PASSING, *REPLACING)

    @initialize(drawn=jobs(kinds=kinds).filter(can_be_resized), data=st.data())
    def start(self, drawn: Job, data: st.DataObject) -> None:
        self.drawn = drawn
        self.remainder = drawn.options["remainder"]
        # without a seed in common, every process would be another job
        self.options = drawn.options | {"seed": drawn.options["seed"] or 0}
        self.possible = [size for size in range(1, 6) if not self.refused(self.samplers(size)[:1])]
        assume(self.possible)
        self.ranks = self.made(data.draw(st.sampled_from(self.possible), label="world size"))
        self.checkpoints: list[Checkpoint] = []
        self.n_workers = self.n_running = 0
        self.begin_epoch(0)

    def samplers(self, world_size: int) -> list[DistributedSampler]:
        return job(copy.deepcopy(self.drawn.sampler), world_size, **self.options)

    def made(self, world_size: int) -> list[Consumer]:
        """Every rank of a job that begins."""
        return [self.consumer(sampler, self.drawn.n_obs) for sampler in self.samplers(world_size)]

    def refused(self, samplers: list[DistributedSampler]) -> bool:
        """Whether a job can't run on what is left for it, and says so on every rank alike."""
        messages = set()
        for sampler in samplers:
            try:
                sampler.validate(self.drawn.n_obs)
                messages.add("")
            except ValueError as error:
                messages.add(str(error))
        assert len(messages) == 1
        return messages != {""}

    def begin_epoch(self, epoch: int) -> None:
        """Nothing of it has been read."""
        self.epoch, self.done = epoch, 0
        self.read: list[int] = []
        self.left: list[list[Batch]] | None = None
        self.streams: list[Iterator[Batch]] | None = None

    def begin_pass(self) -> list[Iterator[Batch]]:
        """Begin what comes next on every rank, having looked up in the end of it by other means."""
        first, self.n_running = self.ranks[0], self.n_workers
        self.done, self.plan = first.sampler.batches_done, first.sampler.plan(first.n_obs)
        if self.left is None:
            twins = [self.consumer(copy.deepcopy(rank.sampler), rank.n_obs) for rank in self.ranks]
            self.left = [list(twin.begin(self.n_workers)) for twin in twins]
        assert [rank.sampler.n_batches(rank.n_obs) for rank in self.ranks] == list(map(len, self.left))
        assert self.remainder == "keep" or len(set(map(len, self.left))) == 1
        return [rank.begin(self.n_workers) for rank in self.ranks]

    @rule(n_batches=st.sampled_from([1, 2, 3, TO_THE_END]))
    def run(self, n_batches: int) -> None:
        if self.streams is None:
            self.streams = self.begin_pass()
        assert self.left is not None
        if n_batches >= min(map(len, self.left)):  # a rank that has come to its end alone is in another epoch
            n_batches = max(map(len, self.left))
        for stream, left in zip(self.streams, self.left, strict=True):
            for _ in range(min(n_batches, len(left))):  # under "keep", some have one less
                batch = next(stream)
                assert batch == left.pop(0)
                self.read += batch[0] if self.drawn.independent else unmarked(batch)
        self.done += n_batches
        if not any(self.left):
            self.end_pass()

    def end_pass(self) -> None:
        """No rank has another batch, and the epoch was whole."""
        assert self.streams is not None
        assert all(next(stream, None) is None for stream in self.streams)
        event(f"{self.drawn.kind}, {self.remainder}, {self.plan.segment} changes of the world size")
        if self.drawn.independent:
            self.check_draws()
        else:
            lost = list(self.plan.lost)
            assert sorted(self.read + lost) == self.drawn.window()
            assert self.remainder == "drop" or not lost
        self.read, self.left, self.streams = [], None, None
        if self.n_running:  # the next order would be each rank's own
            self.set_epoch(self.epoch + 1)

    def check_draws(self) -> None:
        """As many were drawn as one sampler alone draws, but for what full batches on every rank take or leave."""
        alone: int = self.drawn.sampler._num_samples  # type: ignore[attr-defined]  # only samplers that can be resized have it
        odd = self.plan.world_size * self.drawn.batch_size
        match self.remainder:
            case "drop":
                assert alone - odd < len(self.read) <= alone
            case "pad":
                assert alone <= len(self.read) < alone + odd
            case _:
                assert len(self.read) == alone
        assert set(self.read) <= set(self.drawn.window())

    @rule()
    def save(self) -> None:
        states = [json.dumps(rank.state(self.done)) for rank in self.ranks]
        assert len(set(states)) == 1
        left = None if self.left is None else tuple(map(tuple, self.left))
        n_workers = self.n_workers if self.streams is None else self.n_running
        self.checkpoints.append(Checkpoint(states[0], len(self.ranks), n_workers, self.epoch, tuple(self.read), left))

    @precondition(lambda self: self.checkpoints)
    @rule(world_size=world_sizes, data=st.data())
    def load(self, world_size: int, data: st.DataObject) -> None:
        """Load a checkpoint, which need not be the last one: what was done since then is forgotten."""
        which = data.draw(st.integers(0, min(3, len(self.checkpoints) - 1)), label="checkpoints before the last")
        self.go_on(self.checkpoints[-1 - which], world_size)

    @rule(n_batches=st.integers(0, 3), world_size=world_sizes)
    def change_the_world_size(self, n_batches: int, world_size: int) -> None:
        if n_batches:
            self.run(n_batches)
        self.save()
        self.go_on(self.checkpoints[-1], world_size)

    @rule(n_workers=st.integers(0, 3))
    def change_the_number_of_workers(self, n_workers: int) -> None:
        """A pass that is open goes on as it was."""
        if self.streams is None and n_workers != self.n_workers:
            self.left = None
        self.n_workers = n_workers

    def go_on(self, checkpoint: Checkpoint, world_size: int) -> None:
        ranks = self.made(world_size)
        messages = {self.load_into(rank, checkpoint.state) for rank in ranks}
        assert len(messages) == 1
        if messages != {""} or self.refused([rank.sampler for rank in ranks]) or world_size not in self.possible:
            return  # there are too few rows, in what is left or in a whole epoch: the job that there was goes on
        self.ranks = ranks
        self.begin_epoch(checkpoint.epoch)
        self.done = ranks[0].sampler.batches_done
        self.read += checkpoint.read
        as_it_was = (world_size, self.n_workers) == (checkpoint.world_size, checkpoint.n_workers)
        if as_it_was and checkpoint.left is not None:
            self.left = list(map(list, checkpoint.left))
        assert [rank.sampler.epoch for rank in ranks] == [checkpoint.epoch] * world_size

    def load_into(self, rank: Consumer, state: str) -> str:
        """Load a state, and return why it is refused."""
        try:
            rank.resumable.load_state_dict(json.loads(state))
        except ValueError as error:
            return str(error)
        return ""

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch: int) -> None:
        if epoch == self.epoch and self.streams is not None:
            return  # it begins anew, or goes on if it was resumed
        for rank in self.ranks:
            rank.resumable.set_epoch(epoch)
        if epoch != self.epoch:
            self.begin_epoch(epoch)
        self.done = self.ranks[0].sampler.batches_done

    def teardown(self) -> None:
        """However it was left, the epoch comes to its end."""
        if hasattr(self, "ranks"):
            self.run(TO_THE_END)


class LoadedSequences(Sequences):
    consumer = CountingConsumer


# without shrinking, which takes longer than a test may; a sequence is short enough to read as it is
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


def test_every_row_of_an_epoch_is_read_once_whatever_happens_in_it() -> None:
    run_state_machine_as_test(Sequences, settings=settings(stateful_step_count=20, phases=PHASES))


def test_a_loader_counts_right_whatever_happens() -> None:
    run_state_machine_as_test(
        LoadedSequences, settings=settings(max_examples=10, stateful_step_count=20, phases=PHASES)
    )
