"""Mixtures: which source each step takes, what each source reads, and how it all goes on."""

from __future__ import annotations

import gc
import json
import threading
from collections import Counter, defaultdict
from itertools import chain, islice
from typing import Any

import anndata as ad
import numpy as np
import pytest
from annbatch.samplers import RandomSampler
from hypothesis import given, reject
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, MixedLoader, Rank, StatefulLoader, deferred
from annbatch_distributed.loader.mixed import source_order
from tests.meeting import agreement, verdict

#: Rows and genes of the sources; on two ranks an epoch has 12, 5 and 30 batches.
SIZES = {"tahoe": (96, 3), "census": (40, 2), "own": (240, 1)}


def loaders(
    rank: int = 0, world_size: int = 2, *names: str, read_ahead: int = 0, **options: Any
) -> dict[str, StatefulLoader]:
    """A rank's loader of each source, whose rows hold their numbers."""
    made = {}
    for name in names or SIZES:
        n_rows, n_genes = SIZES[name]
        given = {"dist_info": Rank(rank, world_size), "seed": 0, "remainder": "exact"} | options
        sampler = DistributedSampler(RandomSampler(4, 2, 4), **given)
        loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False, read_ahead=read_ahead)
        made[name] = loader.add_adata(ad.AnnData(np.repeat(np.arange(float(n_rows))[:, None], n_genes, axis=1)))
    return made


WEIGHTS = {"tahoe": 3.0, "census": 1.0, "own": 0.5}


def mixed(
    rank: int = 0, world_size: int = 2, *, read_ahead: int = 0, virtual_ranks: int | None = None, **options: Any
) -> MixedLoader:
    given: dict[str, Any] = {"weights": WEIGHTS, "seed": 1} | options
    if "until" not in given:
        given.setdefault("n_steps", 60)
    return MixedLoader(loaders(rank, world_size, read_ahead=read_ahead, virtual_ranks=virtual_ranks), **given)


def read(mixture: MixedLoader, n_steps: int | None = None) -> list[tuple[str, list[int]]]:
    """The source and the rows of each step."""
    return [(batch["source"], batch["index"].tolist()) for batch in islice(mixture, n_steps)]


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[int, np.ndarray]]:
    """Shares of up to six sources, some of them 0, with the step from which on they are."""
    n_sources = draw(st.integers(1, 6))
    shares = st.lists(st.just(0.0) | st.floats(0.001, 1), min_size=n_sources, max_size=n_sources).filter(any)
    starts = np.cumsum([0, *draw(st.lists(st.integers(1, 300), max_size=3))]).tolist()
    return [(start, np.array(own) / sum(own)) for start in starts for own in [draw(shares)]]


@given(schedules(), st.integers(0, 3))
def test_each_source_has_its_share_to_within_less_than_two_batches_after_any_step(
    weights: list[tuple[int, np.ndarray]], seed: int
) -> None:
    order = source_order(weights, 1000, seed)
    # the shares of each step, (steps, sources)
    shares = np.array([next(own for first, own in reversed(weights) if first <= step) for step in range(1000)])
    taken = np.cumsum(order[:, None] == np.arange(shares.shape[1]), axis=0)
    assert abs(taken - np.cumsum(shares, axis=0)).max() < 2
    assert (shares[np.arange(1000), order] > 0).all()  # a source of weight 0 is never taken
    for n_steps in (0, 1, 300, 999):
        assert (source_order(weights, n_steps, seed) == order[:n_steps]).all()


@pytest.mark.parametrize("n_sources", [4, 20, 50])
def test_shares_of_many_sources_are_kept_next_to_a_large_one(n_sources: int) -> None:
    shares = np.append(0.5, np.full(n_sources - 1, 0.5 / (n_sources - 1)))
    for seed in range(3):
        order = source_order([(0, shares)], 3000, seed)
        taken = np.cumsum(order[:, None] == np.arange(n_sources), axis=0)
        assert abs(taken - np.arange(1, 3001)[:, None] * shares).max() < 2


def test_shares_are_kept_over_many_changes_of_weights() -> None:
    """What a source lacks when weights change is made up for afterwards."""
    shares = np.linspace([0.6, 0.4], [0.7, 0.3], 500)
    order = source_order([(3 * number, own) for number, own in enumerate(shares)], 1500, 0)
    taken = np.cumsum(order[:, None] == np.arange(2), axis=0)
    assert abs(taken - np.cumsum(np.repeat(shares, 3, axis=0), axis=0)).max() < 2


def test_the_order_is_random_by_the_seed() -> None:
    weights = [(0, np.array([0.5, 0.3, 0.2]))]
    orders = np.array([source_order(weights, 2000, seed) for seed in range(8)])
    assert (orders[0] == source_order(weights, 2000, 0)).all()
    for place in range(1, 8):
        # as often the same as two orders that know nothing of each other
        assert abs((orders[0] == orders[place]).mean() - (0.25 + 0.09 + 0.04)) < 0.1
    for lag in range(1, 20):
        assert (orders[:, lag:] == orders[:, :-lag]).mean() < 0.5


def epochs_of(name: str, rank: int, n_epochs: int, world_size: int = 2, **options: Any) -> list[list[list[int]]]:
    """The batches of each of some epochs of a source that is read by itself."""
    (made,) = loaders(rank, world_size, name, **options).values()
    found = []
    for epoch in range(n_epochs):
        made.set_epoch(epoch)
        found.append([batch["index"].tolist() for batch in made])
    return found


def test_each_source_has_its_own_epochs_one_after_the_other_and_all_ranks_the_same_source() -> None:
    ranks = [read(mixed(rank)) for rank in range(2)]
    assert len(ranks[0]) == len(mixed()) == 60
    assert [name for name, _ in ranks[0]] == [name for name, _ in ranks[1]]
    counts = Counter(name for name, _ in ranks[0])
    assert {name: round(60 * weight / 4.5) for name, weight in WEIGHTS.items()} == pytest.approx(counts, abs=1)
    for rank, steps in enumerate(ranks):
        for name in SIZES:
            own = [rows for source, rows in steps if source == name]
            assert own == list(chain(*epochs_of(name, rank, 4)))[: len(own)]
    (first, *_) = mixed()
    assert first["X"].shape[1] == SIZES[first["source"]][1]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 25)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 1),
)
def test_batches_and_the_order_of_sources_are_those_of_the_uninterrupted_run(
    parts: list[tuple[int, int]], has_virtual_ranks: bool, read_ahead: int
) -> None:
    options: dict[str, Any] = {"read_ahead": read_ahead, "virtual_ranks": 6 if has_virtual_ranks else None}
    state, names = None, []
    # of each epoch of a source: on how many ranks it began, and the batches that were read
    began: dict[tuple[str, int], int] = {}
    found: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    for world_size, n_here in parts:
        ranks = [mixed(rank, world_size, n_steps=80, **options) for rank in range(world_size)]
        for mixture in ranks:
            try:
                mixture.load_state_dict(mixture.state_dict() if state is None else state)
            except ValueError as error:  # three ranks can't share a last batch of two rows
                if "can't have equally many" not in str(error):
                    raise
                reject()
        for batches in islice(zip(*ranks, strict=True), n_here):
            (name,) = {batch["source"] for batch in batches}
            names.append(name)
            epoch = ranks[0].state_dict()["sources"][name]["epoch"]
            began.setdefault((name, epoch), world_size)
            found[name, epoch] += [batch["index"].tolist() for batch in batches]
        (text,) = {json.dumps(mixture.state_dict()) for mixture in ranks}
        state = json.loads(text)
        assert state["step"] == len(names)
    assert names == [name for name, _ in read(mixed(n_steps=80), len(names))]
    for (name, epoch), taken in found.items():
        n_ranks = began[name, epoch]
        whole = [epochs_of(name, rank, epoch + 1, n_ranks, **options)[epoch] for rank in range(n_ranks)]
        batch_of = {row: batch for own in whole for batch in map(tuple, own) for row in batch}
        read_rows = Counter(row for batch in taken for row in batch)
        if (name, epoch + 1) in found:  # it has come to its end
            assert read_rows == Counter(range(SIZES[name][0]))
        assert max(read_rows.values()) == 1
        if not has_virtual_ranks:  # which join batches
            for batch in taken:  # or a part of one, in the last step that all ranks share
                assert set(batch) <= set(batch_of[batch[0]])
        if len({world_size for world_size, _ in parts}) == 1 and not has_virtual_ranks:
            assert Counter(map(tuple, taken)) <= Counter(batch for own in whole for batch in map(tuple, own))


@pytest.mark.parametrize("until", ["first", "all"])
def test_a_mixture_ends_when_the_first_or_every_source_has_been_read_once(until: str) -> None:
    n_batches = {"tahoe": 12, "census": 5, "own": 30}
    mixture = mixed(until=until)
    n_steps = len(mixture)
    names = []
    for batch in mixture:
        names.append(batch["source"])
        assert len(mixture) == n_steps  # however far it is
    assert len(names) == n_steps
    enough = all if until == "all" else any
    for n_read, has_ended in ((n_steps, True), (n_steps - 1, False)):
        assert enough(names[:n_read].count(name) >= n for name, n in n_batches.items()) is has_ended
    again = mixed(until=until)
    first = read(again, n_steps // 2)
    after = mixed(until=until)
    after.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert len(after) == n_steps
    assert [name for name, _ in first + read(after)] == names
    with pytest.raises(RuntimeError, match=f"have been read, until='{until}': there is no other pass"):
        read(after)


def test_after_a_pass_comes_the_next_with_the_steps_that_follow() -> None:
    whole = read(mixed(n_steps=60))
    mixture = mixed(n_steps=20)
    assert [len(read(mixture)), len(read(mixture, 5))] == [20, 5]
    after = mixed(n_steps=20)
    after.load_state_dict(mixture.state_dict())
    for which in (mixture, after):
        assert [read(which), read(which)] == [whole[25:40], whole[40:60]]


def test_once_steps_are_told_states_count_those_that_are_done() -> None:
    mixture, done = mixed(), 1  # nobody has said anything in the first step
    for number, _ in enumerate(islice(mixture, 8)):
        within = mixture.state_dict()
        assert within["step"] == done
        if number != 5:
            mixture.step_done()
            done = number + 1
            assert mixture.state_dict()["step"] == done
    mixture.load_state_dict(within)
    assert mixture.state_dict() == within
    assert read(mixture) == read(mixed())[7:]


def test_sources_share_the_threads_in_which_they_read_ahead() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if "annbatch-distributed" in thread.name}

    before = threads()
    mixture = mixed(read_ahead=1)
    own = [len(threads() - before) for _ in mixture]
    assert len(own) == 60
    assert max(own) == 1


def test_ranks_may_be_known_later() -> None:
    known: list[Rank] = []
    mixture = MixedLoader(loaders(dist_info=deferred(lambda: known[0])), weights=WEIGHTS, n_steps=60, seed=1)
    known.append(Rank(1, 2))
    assert read(mixture) == read(mixed(1))


def test_a_source_of_which_more_ranks_have_nothing_left_begins_its_next_epoch() -> None:
    options: dict[str, Any] = {"weights": {"census": 1}, "n_steps": 8}
    before = MixedLoader(loaders(0, 2, "census", remainder="drop"), **options)
    read(before, 4)  # one batch is left on each of two ranks
    ranks = [MixedLoader(loaders(rank, 3, "census", remainder="drop"), **options) for rank in range(3)]
    for mixture in ranks:
        mixture.load_state_dict(before.state_dict())
    whole = [epochs_of("census", rank, 2, 3, remainder="drop")[1] for rank in range(3)]
    assert [[rows for _, rows in read(mixture, 3)] for mixture in ranks] == whole
    ending = MixedLoader(loaders(0, 3, "census", remainder="drop"), weights={"census": 1}, until="first")
    ending.load_state_dict(before.state_dict())
    assert read(ending) == []


def test_weights_change_and_0_leaves_a_source_out() -> None:
    later = {"tahoe": 0, "census": 2, "own": 2}
    mixture = mixed(weights=[(0, WEIGHTS), (40, later)], n_steps=100)
    names = [name for name, _ in read(mixture)]
    assert Counter(names[:40])["tahoe"] == pytest.approx(40 * 3 / 4.5, abs=1)
    assert set(names[42:]) == {"census", "own"}  # what was due before comes a step later at most
    assert Counter(names)["own"] == pytest.approx(40 / 9 + 30, abs=1)


def test_a_plan_says_how_often_each_source_is_read() -> None:
    plan = mixed(n_steps=90).plan()
    assert plan["steps"].to_dict() == Counter(name for name, _ in read(mixed(n_steps=90)))
    assert plan["batches"].to_dict() == {"tahoe": 12, "census": 5, "own": 30}
    assert plan["rows"].to_dict() == {name: n_rows for name, (n_rows, _) in SIZES.items()}
    assert plan["epochs"].to_dict() == pytest.approx({"tahoe": 5, "census": 4, "own": 1 / 3}, abs=0.4)
    assert mixed().plan(10)["steps"].sum() == 10


def test_ranks_agree_unless_they_mix_otherwise() -> None:
    ranks = [MixedLoader(loaders(rank, 2, "own"), weights={"own": 1}, n_steps=9 + rank) for rank in range(2)]
    (message,) = set(agreement(ranks))
    assert "steps: 9 on rank 0; 10 on rank 1" in message
    ranks = [MixedLoader(loaders(rank, 2, "own"), weights={"own": 1}, n_steps=9, seed=0) for rank in range(2)]
    assert agreement(ranks) == ["", ""]


@pytest.mark.parametrize("n_workers", [None, 2])
def test_the_epochs_that_were_read_are_checked(n_workers: int | None) -> None:
    ranks = []
    for rank in range(2):
        (own,) = loaders(rank, 2, "own").values()
        options: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": False}
        source = own if n_workers is None else own.to_dataloader(num_workers=n_workers, **options)
        ranks.append(MixedLoader({"own": source}, weights={"own": 1}, n_steps=35))
    assert [len(read(mixture, 3)) for mixture in ranks] == [3, 3]
    assert [mixture.check_epoch_read() for mixture in ranks] == ["no source has come to the end of an epoch"] * 2
    steps = [read(mixture) for mixture in ranks]
    assert [len(own) for own in steps] == [32, 32]
    (text,) = set(verdict(ranks))
    assert (
        text == "own, epoch 0: 2 ranks have read 240 rows in 60 batches, as planned. Each of the 240 rows was read once"
    )


def test_what_cannot_be_mixed_is_an_error() -> None:
    both = loaders(0, 2, "own") | loaders(1, 2, "census")
    few = loaders(0, 2, "own") | loaders(0, 2, "census", mask=slice(0, 3), remainder="drop")
    for sources, message in (
        (both, "must be of the same rank, got own of rank 0 of 2, census of rank 1 of 2. Give all the same dist_info"),
        (few, "The source census: The window has 3 rows, too few for one full batch on every rank"),
    ):
        mixture = MixedLoader(sources, weights=dict.fromkeys(sources, 1), n_steps=3)
        for ask in (mixture.__iter__, mixture.plan):
            with pytest.raises(ValueError, match=message):
                next(iter(ask()))
        right = MixedLoader(loaders(1, 2, *sources), weights=dict.fromkeys(sources, 1), n_steps=3)
        (said,) = set(agreement([mixture, right]))
        assert message in said


def test_a_state_of_another_mixture_is_refused_and_leaves_all_as_it_was() -> None:
    mixture = mixed()
    read(mixture, 7)
    state = mixture.state_dict()
    other = MixedLoader(loaders(0, 2, "own"), weights={"own": 1}, n_steps=9).state_dict()
    later = mixed()
    read(later, 11)
    others = later.state_dict()["sources"]
    damaged = state | {"sources": others | {"own": others["tahoe"]}}  # the first of which can be loaded
    for wrong, message in (
        (other, "The state is of another mixture"),
        ({}, "no state of a mixture"),
        (damaged, "n_obs"),
    ):
        with pytest.raises(ValueError, match=message):
            mixture.load_state_dict(wrong)
    assert mixture.state_dict() == state
    after = mixed()
    after.load_state_dict(state)
    assert read(mixture) == read(after)


def test_threads_of_a_mixture_end_with_it() -> None:
    """Threads that sources share to prefetch end when the mixture is gone, also in the middle of a pass."""
    before = {*threading.enumerate()}
    mixture = mixed(read_ahead=1)
    batches = iter(mixture)
    next(batches)
    started = {*threading.enumerate()} - before
    assert started
    del mixture, batches
    gc.collect()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()
