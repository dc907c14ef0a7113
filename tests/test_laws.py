"""The laws of sharding, for every kind of sampler, mask and policy. Expected values are enumerated."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from tests.samplers import batches, flat, repeats
from tests.strategies import BROKEN, DRAWING, PASSING, Job, jobs

if TYPE_CHECKING:
    from annbatch_distributed import DistributedSampler

epochs = st.integers(0, 5)


def runnable(drawn: Job, epoch: int = 0) -> list[DistributedSampler]:
    """The ranks of a job in an epoch; jobs that can't run are skipped."""
    ranks = drawn.ranks()
    for sampler in ranks:
        sampler.set_epoch(epoch)
    try:
        ranks[0].validate(drawn.n_obs)
    except ValueError:
        assume(False)
    event(f"{drawn.kind}, {drawn.options['remainder']}, {drawn.options['sharding'].__class__.__name__}")
    return ranks


def drops_rows(drawn: Job) -> bool:
    """Return True if the wrapped sampler drops rows that don't fill a batch."""
    return bool(getattr(drawn.sampler, "_drop_last", False))


@given(jobs(), epochs)
def test_shards_and_dropped_rows_partition_the_window(drawn: Job, epoch: int) -> None:
    """Shards and dropped rows partition the window; independent ranks each have the whole window."""
    sampler, *_ = runnable(drawn, epoch)
    plan = sampler.plan(drawn.n_obs)
    shards = [plan.shard(rank) for rank in range(drawn.world_size)]
    if drawn.independent:
        assert [list(shard.rows) for shard in shards] == [drawn.window()] * drawn.world_size
        assert (plan.n_dropped, plan.n_repeated, len(plan.dropped)) == (0, 0, 0)
        return
    own = flat(list(shard.rows)[: shard.n_own] for shard in shards)
    assert sorted(own + list(plan.dropped)) == drawn.window()
    assert len(plan.dropped) == plan.n_dropped
    repeated = flat(shard.repeated for shard in shards)
    assert set(repeated) <= set(drawn.window())
    assert len(repeated) == plan.n_repeated
    assert drawn.options["remainder"] == "pad" or not repeated
    assert drawn.options["remainder"] == "drop" or not plan.n_dropped


@given(jobs(), epochs)
def test_n_batches_is_true_and_equal_on_ranks(drawn: Job, epoch: int) -> None:
    """`n_batches` is the number of batches yielded, and equal on all ranks under every policy but `keep`."""
    ranks = runnable(drawn, epoch)
    counts = [sampler.n_batches(drawn.n_obs) for sampler in ranks]
    yielded = [batches(sampler.sample(drawn.n_obs)) for sampler in ranks]
    assert [len(rank) for rank in yielded] == counts
    assert counts == [ranks[0].plan(drawn.n_obs).n_batches(rank) for rank in range(drawn.world_size)]
    sizes = [len(batch) for rank in yielded for batch in rank]
    assert all(1 <= size <= drawn.batch_size for size in sizes)
    if drawn.options["remainder"] == "keep":
        assert max(counts) - min(counts) <= 1
    else:
        assert len(set(counts)) == 1
    if drawn.options["remainder"] in ("drop", "pad") and drawn.kind in PASSING:
        assert set(sizes) <= {drawn.batch_size}


@given(jobs(kinds=PASSING), epochs)
def test_rows_read_are_the_planned_rows(drawn: Job, epoch: int) -> None:
    """Each rank reads exactly the rows of its planned shard."""
    ranks = runnable(drawn, epoch)
    plan = ranks[0].plan(drawn.n_obs)
    assume(drawn.options["remainder"] != "keep" or not drops_rows(drawn))
    for rank, sampler in enumerate(ranks):
        assert sorted(flat(batches(sampler.sample(drawn.n_obs)))) == sorted(plan.shard(rank).rows)


@given(jobs())
def test_rank_reads_only_its_own_shard(drawn: Job) -> None:
    """A rank reads no row outside its shard, and no shard has a row outside the window."""
    ranks = runnable(drawn)
    plan = ranks[0].plan(drawn.n_obs)
    for rank, sampler in enumerate(ranks):
        assert set(flat(batches(sampler.sample(drawn.n_obs)))) <= set(plan.shard(rank).rows) <= set(drawn.window())


@given(jobs(kinds=PASSING, policies=("exact",)))
def test_exact_reads_every_row_once(drawn: Job) -> None:
    """`exact` reads every row once, in the fewest batches that can be equal on all ranks."""
    ranks = runnable(drawn)
    read = [batches(sampler.sample(drawn.n_obs)) for sampler in ranks]
    assert sorted(flat(flat(read))) == drawn.window()
    fewest = next(n for n in range(1, 301) if n * drawn.batch_size * drawn.world_size >= len(drawn.window()))
    assert {len(rank) for rank in read} == {fewest}


@given(jobs(kinds=("random", "sequential"), policies=("exact",)), epochs)
def test_exact_avoids_batches_of_one_row(drawn: Job, epoch: int) -> None:
    """`exact` has no batch of a single row if a batch of the same load request can spare one."""
    for sampler in runnable(drawn, epoch):
        *requests, last = (list(request["splits"]) for request in sampler.sample(drawn.n_obs))
        assert all(len(split) > 1 for splits in requests for split in splits) or drawn.batch_size == 1
        sizes = list(map(len, last))
        assert min(sizes) > 1 or max(sizes) <= 2 or sizes.count(1) > 1


@given(jobs(kinds=PASSING, policies=("pad",)))
def test_pad_marks_every_repeated_row(drawn: Job) -> None:
    """`pad` marks repeated rows, and the unmarked rows are the window."""
    ranks = runnable(drawn)
    n_repeated = 0
    first_times: list[int] = []
    for sampler in ranks:
        requests = list(sampler.sample(drawn.n_obs))
        rows, marks = flat(batches(requests)), flat(repeats(requests))
        n_repeated += sum(marks)
        first_times += [row for row, repeated in zip(rows, marks, strict=True) if not repeated]
    assert sorted(first_times) == drawn.window()
    assert n_repeated == ranks[0].plan(drawn.n_obs).n_repeated


@given(jobs(kinds=(*PASSING, "random-num-samples"), policies=("drop",)), epochs)
def test_drop_excludes_no_row_in_consecutive_epochs(drawn: Job, epoch: int) -> None:
    """Under `drop`, two consecutive epochs have no dropped row in common."""
    sampler, *_ = runnable(drawn)
    dropped = []
    for e in (epoch, epoch + 1):
        sampler.set_epoch(e)
        dropped.append(set(sampler.plan(drawn.n_obs).dropped))
    assert not dropped[0] & dropped[1]


@given(jobs(kinds=PASSING, policies=("drop",)))
def test_drop_excludes_every_row_equally_often(drawn: Job) -> None:
    """If the number of epochs equals the number of rows, `drop` drops every row equally often."""
    sampler, *_ = runnable(drawn)
    counts = Counter(dict.fromkeys(drawn.window(), 0))
    for epoch in range(len(drawn.window())):
        sampler.set_epoch(epoch)
        counts.update(sampler.plan(drawn.n_obs).dropped)
    assert len(set(counts.values())) == 1


@given(jobs(), st.integers(1, 4))
def test_peeks_change_nothing(drawn: Job, n_peeks: int) -> None:
    """However often a rank has peeked at its first load request, its next pass is the same."""
    fresh, *_ = runnable(drawn)
    used, *_ = drawn.ranks()
    # a peek at the only load request takes the last batch, which ends the epoch, as a peek at none does
    assume(len([*drawn.ranks()[0].sample(drawn.n_obs)]) > 1)
    for _ in range(n_peeks):
        next(iter(used.sample(drawn.n_obs)), None)
    used.n_batches(drawn.n_obs)
    plans = [sampler.plan(drawn.n_obs) for sampler in (fresh, used)]
    assert plans[0] == plans[1]
    assert batches(used.sample(drawn.n_obs)) == batches(fresh.sample(drawn.n_obs))


@given(jobs())
def test_global_random_state_has_no_effect(drawn: Job) -> None:
    """NumPy's global random state doesn't change the batches."""
    ranks = runnable(drawn)
    read = []
    for global_seed in (1, 2):
        np.random.seed(global_seed)  # noqa: NPY002 this test is about the global state
        read.append([batches(sampler.sample(drawn.n_obs)) for sampler in drawn.ranks()])
    assert read[0] == read[1] == [batches(sampler.sample(drawn.n_obs)) for sampler in ranks]


@settings(max_examples=3 * settings().max_examples)
@given(jobs(kinds=PASSING + DRAWING + 4 * BROKEN))
def test_wrong_job_raises_same_error_on_all_ranks(drawn: Job) -> None:
    """A configuration that is invalid on one rank raises the same error on every rank, before any row is read."""
    outcomes = set()
    for rank in range(drawn.world_size):
        for name in ("n_batches", "sample", "validate", "plan"):
            try:
                getattr(drawn.rank(rank), name)(drawn.n_obs)
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                outcomes.add(repr(error))
            else:
                outcomes.add("")
    event(f"{drawn.kind} {'cannot run' if '' not in outcomes else 'runs'}")
    assert len(outcomes) == 1


@given(jobs(kinds=("random", "sequential", *DRAWING)))
def test_form_of_arguments_changes_nothing(drawn: Job) -> None:
    """NumPy's integers, and the mask as an index array, give the same plan, state and rows as plain arguments."""
    assert drawn.plain is not None
    same_rows = np.array(drawn.window())
    for rank in range(len(runnable(drawn.plain))):
        one = drawn.rank(rank, virtual_ranks=drawn.integer(drawn.world_size), mask=same_rows)
        expected = drawn.plain.rank(rank, virtual_ranks=drawn.world_size)
        assert str(one.plan(drawn.n_obs)) == str(expected.plan(drawn.n_obs))
        assert batches(one.sample(drawn.n_obs)) == batches(expected.sample(drawn.n_obs))
        done = min(1, one.n_batches(drawn.n_obs))
        state = json.loads(json.dumps(one.state_dict(batches_done=drawn.integer(done))))
        assert state == expected.state_dict(batches_done=done)
        expected.load_state_dict(state)


@given(jobs(), st.data())
def test_copied_pass_continues_where_it_was(drawn: Job, data: st.DataObject) -> None:
    """A pass that is copied or pickled in the middle yields the remaining batches."""
    sampler, *_ = runnable(drawn)
    whole = batches(sampler.sample(drawn.n_obs))
    sampler.set_epoch(0)
    original = sampler.sample(drawn.n_obs)
    n_requests = data.draw(st.integers(0, 5), label="number of requests")
    first = list(islice(original, n_requests))
    duplicates = [copy.deepcopy(original), copy.copy(original), pickle.loads(pickle.dumps(original))]
    for open_pass in (*duplicates, original):
        assert batches(first) + batches(open_pass) == whole


@given(jobs())
def test_interleaved_passes_are_independent(drawn: Job) -> None:
    """Two interleaved passes yield the same batches as a pass alone."""
    sampler, *_ = runnable(drawn)
    alone = batches(sampler.sample(drawn.n_obs))
    sampler.set_epoch(0)
    open_passes = [sampler.sample(drawn.n_obs) for _ in range(2)]
    read: list[list[list[int]]] = [[], []]
    running = True
    while running:
        running = False
        for which, open_pass in enumerate(open_passes):
            for request in open_pass:
                read[which] += batches([request])
                running = True
                break
            assert sampler.n_batches(drawn.n_obs) == len(alone)
    assert read == [alone, alone]


@given(jobs())
def test_wrapped_sampler_stays_unchanged(drawn: Job) -> None:
    """Sampling, and assigning a mask or a generator, doesn't change the wrapped sampler."""
    before = _state(drawn)
    for sampler in runnable(drawn):
        batches(sampler.sample(drawn.n_obs))
        sampler.mask = slice(0, drawn.n_obs)
        sampler.rng = np.random.default_rng(9)
    assert _state(drawn) == before


def _state(drawn: Job) -> tuple[object, ...]:
    rng = drawn.sampler.rng
    return drawn.sampler.mask, None if rng is None else str(rng.bit_generator.state)
