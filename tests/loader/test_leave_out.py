"""Rows that are left out of what is left of an epoch."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import anndata as ad
import numpy as np
import pytest
from annbatch.samplers import RandomSampler
from hypothesis import assume, event, given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from tests.loaders import numbered
from tests.loaders import rows as read_rows
from tests.meeting import agreement, verdict
from tests.samplers import flat, job
from tests.strategies import Job, jobs

N_OBS = 96


def loaders(drawn: Job, world_size: int) -> list[StatefulLoader]:
    """The ranks of a job with their cells."""
    samplers = job(drawn.sampler, world_size, **drawn.options | {"seed": drawn.options["seed"] or 0})
    return [numbered(sampler, drawn.n_obs) for sampler in samplers]


@given(jobs(), st.integers(0, 3), st.integers(1, 4), st.data())
def test_batches_are_as_before_without_the_rows_that_are_left_out(
    drawn: Job, n_done: int, world_size: int, data: st.DataObject
) -> None:
    ranks, others = loaders(drawn, drawn.world_size), loaders(drawn, drawn.world_size)
    try:
        n_batches = [loader.sampler.n_batches(drawn.n_obs) for loader in ranks]
    except ValueError:
        assume(False)
    assume(n_done < min(n_batches))
    window = drawn.window()
    rows = data.draw(st.lists(st.sampled_from(window), min_size=1, max_size=5, unique=True), label="rows")
    before = [[batch["index"].tolist() for batch in islice(loader, n_done)] for loader in ranks]
    states, messages = [loader.state_dict() for loader in ranks], set()
    for loader in ranks:
        try:
            loader.leave_out(np.array(rows))
            messages.add("")
        except ValueError as error:
            messages.add(str(error))
    (message,) = messages
    if message:
        assert [loader.state_dict() for loader in ranks] == states  # as they were
        for loader, state in zip(others, states, strict=True):
            loader.load_state_dict(state)
        assert any({*batch["index"].tolist()} <= {*rows} for loader in others for batch in loader)
        return
    event(f"left out: {drawn.kind}, {drawn.options['remainder']}")
    (text,) = {json.dumps(loader.state_dict()) for loader in ranks}
    ranks, others = loaders(drawn, world_size), loaders(drawn, world_size)
    try:
        for loader in others:
            loader.load_state_dict(states[0])
        for loader in ranks:
            loader.load_state_dict(json.loads(text))
        expected, read = ([read_rows(loader) for loader in made] for made in (others, ranks))
    except ValueError:
        return  # so many ranks can't go on
    assert read == [[[row for row in batch if row not in rows] for batch in batches] for batches in expected]
    assert all("as planned" in text for text in verdict(ranks))
    told = ranks[0].cells_of(slice(n_done, None), [])
    found = {key: part.tolist() for key, part in told.groupby(["step", "rank"])["row"]}
    assert found == {(n_done + step, rank): batch for rank, own in enumerate(read) for step, batch in enumerate(own)}
    if n_done:
        told = ranks[0].cells_of(slice(n_done), [])
        found = {key: part.tolist() for key, part in told.groupby(["step", "rank"])["row"]}
        assert found == {(step, rank): batch for rank, own in enumerate(before) for step, batch in enumerate(own)}


def loader(rank: int = 0, **options: Any) -> StatefulLoader:
    """A rank of two, whose epoch has 12 batches of 4 rows."""
    sampler = DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(rank, 2), seed=0, **options)
    return numbered(sampler, N_OBS)


@pytest.mark.parametrize("n_workers", [None, 0, 2])
def test_a_pass_under_way_ends_and_the_next_one_is_what_is_left(n_workers: int | None) -> None:
    whole, made = read_rows(loader()), loader()
    source: Any = made
    if n_workers is not None:
        options = {"multiprocessing_context": "fork", "persistent_workers": False} if n_workers else {}
        source = made.to_dataloader(num_workers=n_workers, **options)
        whole = read_rows(loader().to_dataloader(num_workers=n_workers, **options))
    begun = iter(source)
    assert [next(begun)["index"].tolist() for _ in range(3)] == whole[:3]
    rows = [whole[1][0], whole[4][0], whole[4][2], whole[11][3]]
    source.leave_out(rows)
    with pytest.raises(RuntimeError, match="or leave_out called" if n_workers in (None, 0) else "this one has ended"):
        next(begun)
    assert [done for *_, done in source.state_dict()["segments"] if done] == [3]
    assert read_rows(source) == [[row for row in batch if row not in rows] for batch in whole[3:]]
    assert [part[0] for part in source.state_dict()["left_out"]] == [3] * len(rows)


def test_what_is_left_out_can_be_added_to() -> None:
    made, whole = loader(), read_rows(loader())
    made.leave_out([whole[2][0], whole[5][0]])
    for _ in zip(range(4), made, strict=False):
        pass
    made.leave_out(np.array([whole[2][1], whole[5][0], whole[5][1]]))
    assert read_rows(made) == [[row for row in batch if row not in whole[5][:2]] for batch in whole[4:]]
    told = made.cells_of(slice(None), [], ranks=0)
    steps = [rows.tolist() for _, rows in told.groupby("step")["row"]]
    assert steps[2] == whole[2][1:]
    assert steps[5] == whole[5][2:]
    assert steps[6:] == whole[6:]


def test_ranks_that_leave_out_other_rows_do_not_agree() -> None:
    ranks = [loader(rank) for rank in range(2)]
    for rank, made in enumerate(ranks):
        made.leave_out([5 + rank])
    (message,) = set(agreement(ranks))
    assert "left out: 5:6 from step 0 on on rank 0; 6:7 from step 0 on on rank 1" in message


def test_a_plan_and_the_verdict_say_what_is_left_out() -> None:
    ranks = [loader(rank) for rank in range(2)]
    for made in ranks:
        made.leave_out([5, 6, 90])
        assert "left out: 3 rows (5:7, 90:91)" in str(made.plan())
        read_rows(made)
    assert verdict(ranks)[0].endswith(
        "read 93 rows in 24 batches, as planned. Each of the 96 rows was read once, but for "
        "those of 5:7, 90:91 that were left out"
    )


def test_the_rows_come_again_with_a_warning_unless_a_mask_leaves_them_out() -> None:
    for mask in (None, np.setdiff1d(np.arange(N_OBS), [5])):
        made = loader()
        made.leave_out([5])
        assert 5 not in flat(read_rows(made))
        at_its_end = made.state_dict()
        made.set_epoch(1)
        assert "left_out" not in made.state_dict()
        if mask is None:
            with pytest.warns(UserWarning, match=r"Rows that were left out of an epoch \(1\) come again"):
                assert 5 in flat(read_rows(made))
            after = loader()
            after.load_state_dict(at_its_end)
            assert 5 not in after.cells_of(slice(None), [])["row"].tolist()
            assert 5 in flat(read_rows(after))
        else:
            made.sampler.mask = mask
            assert 5 not in flat(read_rows(made))


def test_what_cannot_be_left_out_is_an_error_and_leaves_the_loader_as_it_was() -> None:
    made, whole = loader(), read_rows(loader())
    begun = iter(made)
    next(begun)
    state = made.state_dict()
    for rows, message in (
        (whole[7], "In step 7 of epoch 0, a batch would have no row left"),
        ([N_OBS], "must lie within"),
    ):
        with pytest.raises(ValueError, match=message):
            made.leave_out(rows)
    assert made.state_dict() == state
    assert [batch["index"].tolist() for batch in begun] == whole[1:]
    with pytest.raises(ValueError, match="Epoch 0 has been read to its end"):
        made.leave_out([3])
    large = StatefulLoader(
        batch_sampler=DistributedSampler(RandomSampler(16, 4, 16), dist_info=Rank(0, 2), seed=0), preload_to_gpu=False
    ).add_adata(ad.AnnData(np.zeros((4004, 1))))
    with pytest.raises(ValueError, match="The rows are 1001 ranges of consecutive ones, and 1000 can be left out"):
        large.leave_out(np.arange(0, 4004, 4))
    large.leave_out(np.arange(0, 4000, 4))
    again = loader()
    again.leave_out([5])
    damaged = again.state_dict() | {"left_out": [[0, 1]]}
    with pytest.raises(ValueError, match="The state is damaged"):
        loader().load_state_dict(damaged)
