"""The laws of sharding, for every kind of sampler, mask and policy. Expected values are enumerated."""

from __future__ import annotations

import copy
import json
import math
import pickle
from itertools import islice, pairwise
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


@settings(max_examples=4 * settings().max_examples)
@given(jobs(), epochs)
def test_ranks_read_the_window_as_planned(drawn: Job, epoch: int) -> None:
    """Ranks read their planned shards, which partition the window, in as many batches as they say."""
    ranks, policy, window = runnable(drawn, epoch), drawn.options["remainder"], drawn.window()
    plan, counts = ranks[0].plan(drawn.n_obs), [sampler.n_batches(drawn.n_obs) for sampler in ranks]
    shards = [plan.shard(rank) for rank in range(drawn.world_size)]
    if drawn.independent:
        assert [list(shard.rows) for shard in shards] == [window] * drawn.world_size
        assert (plan.n_dropped, plan.n_repeated, len(plan.dropped)) == (0, 0, 0)
    else:
        own = flat(list(shard.rows)[: shard.n_own] for shard in shards)
        repeated = flat(shard.repeated for shard in shards)
        assert sorted(own + list(plan.dropped)) == window
        assert set(repeated) <= set(window)
        assert (len(plan.dropped), len(repeated)) == (plan.n_dropped, plan.n_repeated)
        assert policy == "drop" or not plan.n_dropped
        assert policy == "pad" or not repeated

    requests = [list(sampler.sample(drawn.n_obs)) for sampler in ranks]
    read = list(map(batches, requests))
    assert list(map(len, read)) == counts == [plan.n_batches(rank) for rank in range(drawn.world_size)]
    assert max(counts) - min(counts) <= (policy == "keep")
    sizes = {len(batch) for rank in read for batch in rank}
    assert sizes <= set(range(1, drawn.batch_size + 1))
    passes = drawn.kind in PASSING
    for batched, shard in zip(read, shards, strict=True):
        if passes and not (policy == "keep" and drops_rows(drawn)):
            assert sorted(flat(batched)) == sorted(shard.rows)
        assert set(flat(batched)) <= set(shard.rows) <= set(window)
    if passes and policy in ("drop", "pad"):
        assert sizes <= {drawn.batch_size}
    if passes and policy == "exact":  # the fewest batches that can be equal on all ranks
        assert counts[0] == math.ceil(len(window) / drawn.world_size / drawn.batch_size)
    if passes and policy == "pad":
        marks = flat(flat(map(repeats, requests)))
        assert sorted(row for row, again in zip(flat(flat(read)), marks, strict=True) if not again) == window


@given(jobs(kinds=(*PASSING, "random-num-samples"), policies=("drop",)))
def test_drop_excludes_every_row_equally_often(drawn: Job) -> None:
    """If the number of epochs equals the number of rows, `drop` drops every row equally often, and none twice in a row.

    Samplers with a number of samples are no different.
    """
    sampler, *_ = runnable(drawn)
    dropped = []
    for epoch in range(len(drawn.window())):
        sampler.set_epoch(epoch)
        dropped.append(set(sampler.plan(drawn.n_obs).dropped))
    assert not any(before & after for before, after in pairwise(dropped))
    assert len({sum(row in rows for rows in dropped) for row in drawn.window()}) == 1


@given(jobs(kinds=("random", "sequential"), policies=("exact",)), epochs)
def test_exact_avoids_batches_of_one_row(drawn: Job, epoch: int) -> None:
    """`exact` has no batch of a single row if a batch of the same load request can spare one."""
    for sampler in runnable(drawn, epoch):
        *requests, last = (list(request["splits"]) for request in sampler.sample(drawn.n_obs))
        assert all(len(split) > 1 for splits in requests for split in splits) or drawn.batch_size == 1
        sizes = list(map(len, last))
        assert min(sizes) > 1 or max(sizes) <= 2 or sizes.count(1) > 1


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
