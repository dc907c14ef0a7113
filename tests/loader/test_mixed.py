"""Mixtures: the source of each step, the rows of each source, and resuming."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
from collections import Counter
from itertools import chain, islice
from typing import Any
from weakref import WeakSet

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from annbatch_distributed import CellSets, DistributedSampler, MixedLoader, Rank, StatefulLoader, deferred
from annbatch_distributed.core.config import Config
from annbatch_distributed.core.plan import Plan
from annbatch_distributed.mixtures.order import RandomOrder
from tests.loaders import numbered, rows
from tests.meeting import agreement, met_in_threads, verdict
from tests.samplers import Irregular

#: Rows and genes of the sources; on two ranks an epoch has 12, 5 and 30 batches.
SIZES = {"tahoe": (96, 3), "census": (40, 2), "own": (240, 1), "new": (48, 1)}
WEIGHTS = {"tahoe": 3.0, "census": 1.0, "own": 0.5}


def loaders(
    rank: int = 0, world_size: int = 2, *names: str, prefetch: int = 0, **options: Any
) -> dict[str, StatefulLoader]:
    """Create a rank's loader of each source, in which each value is the number of its row."""
    sources = {}
    for name in names or WEIGHTS:
        n_rows, n_genes = SIZES[name]
        arguments = {"dist_info": Rank(rank, world_size), "seed": 0, "remainder": "exact"} | options
        sampler = DistributedSampler(RandomSampler(4, 2, 4), **arguments)
        loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False, prefetch=prefetch)
        sources[name] = loader.add_adata(ad.AnnData(np.repeat(np.arange(float(n_rows))[:, None], n_genes, axis=1)))
    return sources


def mixed(rank: int = 0, world_size: int = 2, *, prefetch: int = 0, **options: Any) -> MixedLoader:
    arguments: dict[str, Any] = {"weights": WEIGHTS, "seed": 1} | options
    if "stopping_strategy" not in arguments:
        arguments.setdefault("n_steps", 60)
    return MixedLoader(loaders(rank, world_size, prefetch=prefetch), **arguments)


def read(mixture: MixedLoader, n_steps: int | None = None) -> list[tuple[str, list[int]]]:
    """Return the source and the rows of each step."""
    return [(batch["source"], batch["index"].tolist()) for batch in islice(mixture, n_steps)]


def source_order(weights: list[tuple[int, np.ndarray]], n_steps: int, seed: int) -> np.ndarray:
    """Return the number of the source of each of the first steps."""
    names = [f"{number:03}" for number in range(len(weights[0][1]))]
    order = RandomOrder([(first, dict(zip(names, own, strict=True))) for first, own in weights], names, seed)
    return np.fromiter((names.index(name) for (name,) in order.at(0, n_steps)), int, n_steps)


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[int, np.ndarray]]:
    """Generate shares of up to six sources, some of them 0, each with the step at which they begin."""
    n_sources = draw(st.integers(1, 6))
    shares = st.lists(st.just(0.0) | st.floats(0.001, 1), min_size=n_sources, max_size=n_sources).filter(any)
    starts = np.cumsum([0, *draw(st.lists(st.integers(1, 300), max_size=3))]).tolist()
    return [(start, np.array(own) / sum(own)) for start in starts for own in [draw(shares)]]


def n_off(weights: list[tuple[int, np.ndarray]], order: np.ndarray) -> float:
    """Return how many batches a source of an order is off its shares, at most."""
    starts = [first for first, _ in weights]
    # the shares of each step, (steps, sources)
    shares = np.array([own for _, own in weights])[np.searchsorted(starts, np.arange(len(order)), "right") - 1]
    assert (shares[np.arange(len(order)), order] > 0).all()  # a source of weight 0 is never taken
    taken = np.cumsum(order[:, None] == np.arange(shares.shape[1]), axis=0)
    return float(abs(taken - np.cumsum(shares, axis=0)).max())


@given(schedules(), st.integers(0, 3))
def test_sources_stay_near_their_weights(weights: list[tuple[int, np.ndarray]], seed: int) -> None:
    """After any step, each source is within two batches of its weight."""
    order = source_order(weights, 1000, seed)
    assert n_off(weights, order) < 2
    for n_steps in (0, 1, 300, 999):
        assert (source_order(weights, n_steps, seed) == order[:n_steps]).all()


@pytest.mark.parametrize(
    "weights",
    [
        # many small sources next to a large one
        *([(0, np.append(0.5, np.full(n - 1, 0.5 / (n - 1))))] for n in (4, 20, 50)),
        [(3 * number, own) for number, own in enumerate(np.linspace([0.6, 0.4], [0.7, 0.3], 500))],
    ],
    ids=["4 sources", "20 sources", "50 sources", "500 changes"],
)
def test_weights_hold_for_many_sources_and_many_changes(weights: list[tuple[int, np.ndarray]]) -> None:
    for seed in range(3):
        assert n_off(weights, source_order(weights, 3000, seed)) < 2


@given(schedules(), st.integers(0, 3), st.integers(0, 900), st.integers(1, 100))
def test_order_is_known_from_any_step(
    weights: list[tuple[int, np.ndarray]], seed: int, start: int, n_steps: int
) -> None:
    """From any step on, the sources and their numbers of batches equal a walk through all steps."""
    whole = source_order(weights, start + n_steps, seed)
    names = [f"{number:03}" for number in range(len(weights[0][1]))]
    order = RandomOrder([(first, dict(zip(names, own, strict=True))) for first, own in weights], names, seed)
    assert [name for (name,) in order.at(start, start + n_steps)] == [names[source] for source in whole[start:]]
    for source, name in enumerate(names):
        steps = start + np.flatnonzero(whole[start:] == source)
        assert order.count(name, start, start + n_steps) == len(steps)
        if len(steps):
            assert order.end(start, {name: len(steps)}, "all_exhausted") == steps[-1] + 1


def test_far_steps_take_no_walk() -> None:
    """A step of 10**9 is known at once, and its sources have their shares of the steps before."""
    order = RandomOrder({"a": 5, "b": 3, "c": 1}, {"a", "b", "c"}, seed=0)
    assert [order.count(name, 0, 9 * 10**9) for name in "abc"] == pytest.approx([5e9, 3e9, 1e9], abs=2)
    names = [name for (name,) in order.at(9 * 10**9, 9 * 10**9 + 900)]
    assert [names.count(name) for name in "abc"] == pytest.approx([500, 300, 100], abs=3)
    assert order.end(9 * 10**9, {"a": 5000, "b": 3000}, "all_exhausted") == pytest.approx(9 * 10**9 + 9000, abs=20)


def test_the_order_is_random_by_the_seed() -> None:
    weights = [(0, np.array([0.5, 0.3, 0.2]))]
    orders = np.array([source_order(weights, 2000, seed) for seed in range(8)])
    assert (orders[0] == source_order(weights, 2000, 0)).all()
    for place in range(1, 8):
        # the orders of two seeds are equal as often as independent ones: in 0.5² + 0.3² + 0.2² of the steps
        assert abs((orders[0] == orders[place]).mean() - (0.25 + 0.09 + 0.04)) < 0.1
    for lag in range(1, 20):
        assert (orders[:, lag:] == orders[:, :-lag]).mean() < 0.5


def test_parts_of_a_schedule_have_orders_of_their_own() -> None:
    """Two parts of a schedule with the same weights have different orders."""
    half = np.array([0.5, 0.5])
    order = source_order([(0, half), (100, half)], 200, 0)
    assert (order[:100] != order[100:]).any()


def epochs_of(name: str, rank: int, n_epochs: int, world_size: int = 2, **options: Any) -> list[list[list[int]]]:
    """Return the batches of each epoch of a source that is read without a mixture."""
    (loader,) = loaders(rank, world_size, name, **options).values()
    epochs = []
    for epoch in range(n_epochs):
        loader.set_epoch(epoch)
        epochs.append([batch["index"].tolist() for batch in loader])
    return epochs


by_strategy = pytest.mark.parametrize("stopping_strategy", ["first_exhausted", "all_exhausted"])


@by_strategy
def test_mixture_ends_when_sources_were_read(stopping_strategy: str) -> None:
    """An epoch ends when the first source, or every source, was read once. The next one begins new epochs."""
    n_batches = {"tahoe": 12, "census": 5, "own": 30}
    mixture, enough = mixed(stopping_strategy=stopping_strategy), all if stopping_strategy == "all_exhausted" else any
    earlier, lengths = set[tuple[str, int]](), set[int]()
    for epoch in range(4):
        mixture.set_epoch(epoch)
        n_steps, names, epochs = len(mixture), list[str](), set[tuple[str, int]]()
        next(iter(mixture))
        assert len(mixture) == n_steps  # after a loop was left
        for batch in mixture:
            names.append(batch["source"])
            epochs.add((batch["source"], mixture._sources[batch["source"]].loader.sampler.epoch))
            assert len(names) == n_steps or len(mixture) == n_steps  # in every step
        assert len(names) == n_steps
        for n_read, has_ended in ((n_steps, True), (n_steps - 1, False)):
            assert enough(names[:n_read].count(name) >= n for name, n in n_batches.items()) is has_ended
        assert not epochs & earlier
        earlier |= epochs
        lengths.add(n_steps)
    assert len(lengths) > 1
    assert [name for name, _ in earlier].count("census") > 3 or stopping_strategy == "first_exhausted"


@by_strategy
def test_mixture_until_sources_end_resumes(stopping_strategy: str) -> None:
    """A resumed epoch ends where it would have, even if some sources were already read once."""
    whole, cut = mixed(stopping_strategy=stopping_strategy), mixed(stopping_strategy=stopping_strategy)
    steps = [read(whole) for _ in range(3)]
    n_steps = len(steps[1])
    cut.set_epoch(1)
    states = [cut.state_dict(), *(cut.state_dict() for _ in cut)]
    for n_done in (0, 4, *range(max(5, n_steps - 30), n_steps + 1)):
        after = mixed(stopping_strategy=stopping_strategy)
        after.load_state_dict(json.loads(json.dumps(states[n_done])))
        if n_done < n_steps:
            assert (after.batches_done, len(after)) == (n_done, n_steps)
        if n_done in (0, 4, n_steps):
            rest = []
            for epoch in range(after.next_epoch, 3):
                after.set_epoch(epoch)
                assert len(after) == len(steps[epoch])
                rest += read(after)
            assert rest == steps[1][n_done:] + steps[2]


def test_epochs_follow_from_that_of_a_loaded_state() -> None:
    """A state with another `n_steps` was loaded: its epoch, set again, begins where the state was saved."""
    before, after = mixed(n_steps=20), mixed(n_steps=14)
    before.set_epoch(3)
    read(before)
    with pytest.warns(UserWarning, match="n_steps is 20"):
        after.load_state_dict(before.state_dict(), strict=False)
    first = after.next_epoch
    # (epoch, its first step): epochs follow from the loaded one, unless an earlier one is set
    for epoch, step in [(first + 1, 94), (first, 80), (first + 1, 94)]:
        after.set_epoch(epoch)
        assert after.state_dict()["step"] == step
    after.set_epoch(first)
    whole = [read(after) for _ in range(3)]
    after.set_epoch(first)
    assert after.state_dict()["step"] == 80
    assert read(after) == whole[0]
    after.set_epoch(first - 1)
    start = after.state_dict()["step"]
    after.set_epoch(first)
    assert after.state_dict()["step"] == start + 14


def test_source_left_out_of_an_epoch_begins_later() -> None:
    """Under `stopping_strategy`, a source that yields no batch in an epoch drops none of its cells."""
    mixture = MixedLoader(
        loaders(0, 2, "census", "new"), weights={"census": 99, "new": 1}, stopping_strategy="first_exhausted"
    )
    names = [[name for name, _ in read(mixture)] for _ in range(25)]
    assert "new" not in names[0]
    (first, *_) = (epoch for epoch, own in enumerate(names) if "new" in own)
    mixture.set_epoch(first)
    assert [rows for name, rows in read(mixture) if name == "new"] == epochs_of("new", 0, 1)[0][:1]


def test_cells_of_no_steps_is_an_empty_table() -> None:
    """An empty selection of steps has no cells, but the columns of a table of cells."""
    table = mixed().cells_of(slice(3, 3))
    assert table.empty
    assert [*table] == ["step", "source", "rank", "row", "dataset", "cell"]


def test_cells_of_earlier_epoch_changes_nothing() -> None:
    """cells_of an earlier epoch does not change the position of the mixture."""
    before, (after, other) = mixed(n_steps=20), (mixed(0, 3, n_steps=20) for _ in range(2))
    before.set_epoch(2)
    read(before, 5)
    for mixture in (after, other):
        mixture.load_state_dict(before.state_dict())
    for epoch in (0, 1, 2, 4):
        first = 5 if epoch == 2 else 0  # two ranks have done the steps before
        assert {*after.cells_of([first, 19], epoch=epoch)["step"]} == {first, 19}
    for epoch in (2, 4, 3):
        for mixture in (after, other):
            mixture.set_epoch(epoch)
        assert read(after) == read(other)


class Failing(StatefulLoader):
    """A loader that raises `error`, if it is set, instead of reading the next load request."""

    error: BaseException | None = None

    def _read_request(self, request: Any) -> Any:
        if Failing.error is not None:
            error, Failing.error = Failing.error, None
            raise error
        yield from super()._read_request(request)


def test_open_pass_stays_when_a_state_is_loaded() -> None:
    """A loop continues after it loads a state, and raises once a newer iteration has started."""
    whole, mixture = read(mixed(n_steps=120)), mixed()
    batches = iter(mixture)
    steps = read(batches, 5)
    state = mixture.state_dict()
    steps += read(batches, 1)
    mixture.load_state_dict(state)
    assert mixture.state_dict() == state
    assert steps + read(batches, 3) == whole[:9]
    assert read(mixture, 2) == whole[5:7]
    with pytest.raises(RuntimeError, match="A mixture has one iterator"):
        next(batches)


def test_shallow_copy_of_a_mixture_ends_its_pass() -> None:
    """Iterating a shallow copy ends the iterator of the original, because both have the same loaders."""
    mixture = mixed()
    batches = iter(mixture)
    read(batches, 3)
    assert len(read(copy.copy(mixture))) == 60
    with pytest.raises(RuntimeError, match="iterator has ended"):
        read(batches)


def test_copy_of_a_mixture_reports_its_own_epochs() -> None:
    """A copy doesn't check the epochs that its original has read since."""
    mixture = mixed(0, 1)
    duplicate = copy.copy(mixture)
    read(mixture)
    assert duplicate.check_epoch_read() == "no epoch of a source has ended since the last check"


def test_read_source_ends_the_pass_of_its_mixture() -> None:
    """Reading a source outside of its mixture ends the iterator, and the next one begins where it has."""
    sources, whole = loaders(), read(mixed())
    mixture = MixedLoader(sources, weights=WEIGHTS, n_steps=60, seed=1)
    batches = iter(mixture)
    read(batches, 5)
    sources["census"].set_epoch(1)
    with pytest.raises(RuntimeError, match="outside of the mixture"):
        read(batches)
    assert read(mixture) == whole
    for wrong in (
        {"a": sources["own"], "b": sources["own"]},
        {"a": sources["own"], "b": sources["own"].to_dataloader()},
    ):
        with pytest.raises(ValueError, match="its own loader and its own sampler"):
            MixedLoader(wrong, weights=dict.fromkeys("ab", 1), n_steps=3)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_changed_source_ends_its_mixture(is_loaded: bool) -> None:
    sources = loaders()
    mixture = MixedLoader(sources, weights=WEIGHTS, n_steps=60)
    if is_loaded:
        mixture.load_state_dict(mixture.state_dict())
    else:
        read(mixture, 1)
    sources["own"].sampler.mask = slice(0, 80)
    with pytest.raises(RuntimeError, match="source 'own' have changed"):
        read(mixture)


def test_check_reports_partial_epochs() -> None:
    """Of epochs that a failed read split on one rank, the rest is checked, and no rank is left waiting."""
    ranks = []
    for rank in range(2):
        sources = loaders(rank, 2, "census", "tahoe")
        sources["tahoe"] = Failing.from_loader(sources["tahoe"])
        ranks.append(MixedLoader(sources, n_steps=14, within_batch=True))
    assert len(list(ranks[1])) == 14
    steps = 0
    while steps < 14:
        try:
            for _ in ranks[0]:
                steps += 1
                if steps == 4:  # the source census, which is read first, ends an epoch in the next step
                    Failing.error = OSError()
        except OSError:
            assert steps == 4
            ranks[0].load_state_dict(ranks[0].state_dict())
    texts = met_in_threads([mixture.check_epoch_read for mixture in ranks])
    assert texts[0] == texts[1]
    census, later, tahoe = texts[0].splitlines()
    assert census == (
        "census, rest of epoch 0: 2 ranks have read 24 rows in 6 batches, as planned. Earlier batches were not checked"
    )
    assert later.startswith("census, epoch 1: 2 ranks have read 40 rows")
    assert later.endswith("Each of the 40 rows was read once")
    assert tahoe.startswith("tahoe, rest of epoch 0: 2 ranks have read ")


def test_check_names_epochs_that_few_ranks_ended() -> None:
    ranks = [MixedLoader(loaders(rank, 2, "census", "tahoe"), n_steps=7, within_batch=True) for rank in range(2)]
    assert [len([*islice(mixture, n)]) for mixture, n in zip(ranks, (3, 7), strict=True)] == [3, 7]
    (text,) = set(met_in_threads([mixture.check_epoch_read for mixture in ranks]))
    assert text == "census, epoch 0: not checked, since the ranks have read it in different parts"


def test_state_of_an_epochs_end_is_kept() -> None:
    """Loading and saving a state leaves it unchanged, and batches before it count as read."""
    options: dict[str, Any] = {"weights": {"tahoe": 1}, "n_steps": 8}
    before, *ranks = (MixedLoader(loaders(rank, 2, "tahoe"), **options) for rank in (0, 0, 1))
    read(before)
    state = before.state_dict()
    for mixture in ranks:
        mixture.load_state_dict(state)
        assert mixture.state_dict() == state
        mixture.set_epoch(1)
        read(mixture)
    (text,) = set(met_in_threads([mixture.check_epoch_read for mixture in ranks]))
    assert text.startswith("tahoe, rest of epoch 0: ")
    assert text.endswith("each of the 96 rows was read once")


def test_changed_until_keeps_positions_of_sources() -> None:
    """If `stopping_strategy` replaces `n_steps`, sources resume at their positions."""
    before, after = mixed(n_steps=20), mixed(stopping_strategy="all_exhausted")
    steps = read(before)
    with pytest.warns(UserWarning, match="n_steps is 20 in the state and None here"):
        after.load_state_dict(before.state_dict(), strict=False)
    steps += read(after)
    for name in WEIGHTS:
        own = [rows for source, rows in steps if source == name]
        assert own == list(chain(*epochs_of(name, 0, 20)))[: len(own)]


def test_first_source_ends_a_mixture_early() -> None:
    """Under "first_exhausted", the length doesn't need the order up to the end of much larger sources."""
    big = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0, mask=slice(0, 10**6))
    (own,) = loaders(0, 2, "own").values()
    other = StatefulLoader(batch_sampler=big, preload_to_gpu=False)
    other.add_adata(ad.AnnData(sp.csr_matrix((10**6, 1), dtype="float32")))
    mixture = MixedLoader(
        {"own": own, "big": other}, weights={"own": 1, "big": 0.05}, stopping_strategy="first_exhausted"
    )
    assert len(mixture) == pytest.approx(31.5, abs=1.5)


def test_mixture_in_a_worker_raises() -> None:
    batches = DataLoader(mixed(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="can't iterate over a MixedLoader"):
        next(iter(batches))


def test_abandoned_loop_releases_sources() -> None:
    """annbatch refuses datasets while a loop is open, and accepts them after a break."""
    sources = loaders()
    more = ad.AnnData(np.zeros((4, SIZES["tahoe"][1])))
    mixture = MixedLoader(sources, weights=WEIGHTS, n_steps=60, seed=1)
    for number, _ in enumerate(mixture):
        if number == 4:
            with pytest.raises(RuntimeError, match="iterat"):
                sources["tahoe"].add_adata(more)
            break
    sources["tahoe"].add_adata(more)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda mixture: pickle.loads(pickle.dumps(mixture))])
def test_copy_at_epoch_end_reads_next_epoch(duplicate: Any) -> None:
    """A copy made at the end of an epoch reads the next one, with new iterations of its sources."""
    mixture, whole = mixed(), mixed()
    expected = [read(whole), read(whole)][1]
    read(mixture)
    assert read(duplicate(mixture)) == expected


def test_state_grows_by_changes_of_ranks_alone() -> None:
    """A state has the same size, however often the same ranks resume."""
    state = mixed().state_dict()
    for _ in range(3):
        mixture = mixed()
        mixture.load_state_dict(state)
        read(mixture, 5)
        state = mixture.state_dict()
    assert [len(source["segments"]) for source in state["sources"].values()] == [1, 1, 1]
    assert (state["start"], sum(source["since"] for source in state["sources"].values())) == (0, 15)


def test_state_that_more_ranks_cannot_resume_is_refused() -> None:
    """A source with one remaining row can't be resumed by two ranks."""
    alone, pair = (
        MixedLoader(
            {"tahoe": numbered(sampler_of(rank), 4), **loaders(rank.rank, rank.world_size, "census")},
            weights={"tahoe": 1, "census": 0.001},
            n_steps=10,
        )
        for rank in (Rank(0, 1), Rank(0, 2))
    )
    read(alone, 3)
    before = pair.state_dict()
    with pytest.raises(ValueError, match="can't be divided evenly among 2 ranks") as raised:
        pair.load_state_dict(alone.state_dict())
    (note,) = raised.value.__notes__
    assert note.startswith("This is the state of the source 'tahoe'.")
    assert "call set_epoch(1) of the mixture" in note
    assert pair.state_dict() == before


def sampler_of(rank: Rank) -> DistributedSampler:
    return DistributedSampler(RandomSampler(1, 4, 1), dist_info=rank, seed=0, remainder="exact")


def test_step_of_mixture_digests_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and step_done() compute no digest; a state computes one for each source."""
    mixture = mixed()
    digests: list[object] = []
    identity = Config.identity

    def counting(*arguments: Any) -> Any:
        digests.append(arguments)
        return identity(*arguments)

    monkeypatch.setattr(Config, "identity", counting)
    for _ in mixture:
        mixture.step_done()
    assert not digests
    mixture.state_dict()
    assert len(digests) == len(WEIGHTS)


def test_mixture_keeps_no_plan_of_finished_epochs() -> None:
    mixture = mixed(n_steps=200)
    plans = WeakSet[Plan]()
    for batch in mixture:
        plans.add(mixture._sources[batch["source"]].cursor.last.plan)
    gc.collect()
    assert len(plans) <= 2 * len(WEIGHTS)  # the plan of the open iteration, and the latest plan


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": {"tahoe": 1, "census": 1, "own": 1}},
        {"weights": {"tahoe": 1, "new": 1}, "names": ["tahoe", "new"]},
        {"n_steps": 30},
        {"n_steps": 4},
        {"seed": 7},
    ],
)
def test_changed_mixture_resumes_known_sources(changed: dict[str, Any]) -> None:
    """With strict=False, known sources resume, new ones begin, and a warning lists the differences."""
    before = mixed(n_steps=20)
    options: dict[str, Any] = {"weights": WEIGHTS, "n_steps": 20, "seed": 1} | changed
    steps = read(before) + read(before, 9)
    names = options.pop("names", list(WEIGHTS))
    after = MixedLoader(loaders(0, 2, *names), **options)
    with pytest.raises(ValueError, match="different settings") as error:
        after.load_state_dict(before.state_dict())
    assert "strict=False" in error.value.__notes__[0]
    with pytest.warns(UserWarning, match="a different mixture") as warned:
        after.load_state_dict(before.state_dict(), strict=False)
    assert len(warned) == 1
    assert after.next_epoch == 1
    again = copy.deepcopy(after)
    again.load_state_dict(json.loads(json.dumps(after.state_dict())))
    rest, n_rest = read(after), max(0, options["n_steps"] - 9)
    assert len(rest) == n_rest
    assert read(again) == rest
    rest += read(after)
    assert len(rest) == n_rest + options["n_steps"]
    for name in names:
        own, later = ([rows for source, rows in part if source == name] for part in (steps, rest))
        assert own + later == list(chain(*epochs_of(name, 0, 9)))[: len(own + later)]
    order = [source for source, _ in read(MixedLoader(loaders(0, 2, *names), **options | {"n_steps": 90}))]
    assert [source for source, _ in rest] == order[29 : 29 + len(rest)]
    if "n_steps" in changed:
        assert again.cells_of(3, ranks=0, epoch=1)["row"].tolist() == steps[23][1]  # the order is the same
        return
    with pytest.raises(ValueError, match="The steps up to 8 of epoch 1 were done by"):
        again.cells_of(3, epoch=1)
    after.set_epoch(1)  # the order has the later steps of this epoch
    assert read(after) == rest[:n_rest]


def test_mixture_of_other_versions_resumes_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches before a state that different versions saved are not checked."""
    ranks = [MixedLoader(loaders(rank, 2, "census"), weights={"census": 1}, n_steps=5) for rank in range(2)]
    read(ranks[0], 2)
    state = json.loads(json.dumps(ranks[0].state_dict()))
    state["sources"]["census"]["identity"]["versions"]["numpy"] = "0.1"
    for mixture in ranks:
        with pytest.warns(UserWarning, match="The state of census was saved by .*numpy 0.1"):
            mixture.load_state_dict(state)
        mixture.load_state_dict(mixture.state_dict())  # its own state has the same gap, also on other ranks
        ranks_state = mixture.state_dict()
        read(mixture)
    (text,) = set(verdict(ranks))
    assert text.endswith("Earlier batches were not checked")
    one = MixedLoader(loaders(0, 1, "census"), weights={"census": 1}, n_steps=5)
    one.load_state_dict(ranks_state)
    read(one)
    read(one)
    assert one.check_epoch_read().endswith("Earlier batches were not checked")


@pytest.mark.parametrize("opens", [False, True])
def test_reshard_refuses_ranks_without_batches(opens: bool) -> None:
    """Ranks on which a source can't begin an epoch are refused by reshard, which then changes nothing."""

    def make(rank: int, world_size: int) -> MixedLoader:
        sources = {
            name: numbered(
                DistributedSampler(RandomSampler(4, 4, 16), dist_info=Rank(rank, world_size), seed=0, remainder="drop"),
                n_rows,
            )
            for name, n_rows in (("big", 4000), ("small", 40))
        }
        return MixedLoader(sources, weights={"big": 1, "small": 1}, n_steps=30)

    mixture, whole = make(0, 2), read(make(0, 2))
    batches = iter(mixture)
    first = [next(batches)["index"].tolist() for _ in range(4 * opens)]
    state = mixture.state_dict()
    with pytest.raises(ValueError, match="too few for one full batch on every rank: 3 ranks") as error:
        mixture.reshard(Rank(0, 3))
    assert "small" in str(error.value) + "".join(getattr(error.value, "__notes__", ()))
    assert "set_epoch" not in str(error.value)
    assert mixture.state_dict() == state
    rest = [batch["index"].tolist() for batch in batches]
    assert first + rest == [rows for _, rows in whole]
    with pytest.raises(ValueError, match="too few"):
        make(2, 3).load_state_dict(state)


@pytest.mark.parametrize("column", ["step", "source", "rank", "row", "set", "is_control", "dataset", "cell"])
def test_column_named_as_the_tables_is_renamed(column: str) -> None:
    """A column of obs with the name of a column of the table gets a suffix, in every kind of table."""
    obs = pd.DataFrame({column: [f"value {row}" for row in range(40)], "drug": 20 * ["a"] + 20 * ["b"]})
    obs.index = obs.index.astype(str)

    def source(seed: int, **options: Any) -> StatefulLoader:
        sampler = DistributedSampler(
            RandomSampler(2, 2, 2), dist_info=Rank(0, 1), seed=seed, remainder="exact", **options
        )
        empty = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        return empty.add_adata(ad.AnnData(np.zeros((40, 1), "float32"), obs=obs))

    sets = CellSets.from_obs(obs, by="drug", set_size=2, seed=0)
    of_sets = source(2, sets=sets, sharding="shuffled")
    mixture = MixedLoader({"rows": source(0), "sets": of_sets}, weights={"rows": 1, "sets": 1}, n_steps=6)
    for loader in (source(1), of_sets, mixture):
        table = loader.cells_of(slice(6), column)
        assert table[f"{column}_obs"].tolist() == [f"value {row}" for row in table["row"]]
        assert table.columns.is_unique
    assert mixture.cells_of(slice(6))["set"].notna().any()


def test_set_epoch_keeps_open_passes_of_sources() -> None:
    """A source that is already where a set epoch begins goes on, and all its rows are checked."""
    ranks = [MixedLoader(loaders(rank, 2, "census"), weights={"census": 1}, n_steps=2) for rank in range(2)]
    for mixture in ranks:
        read(mixture)  # two of the five batches of census
        mixture.set_epoch(0)
        mixture.set_epoch(1)
        read(mixture)
        read(mixture)
    (text,) = set(verdict(ranks))
    assert text.endswith("Each of the 40 rows was read once")


def test_mixture_counts_batches_of_each_epoch() -> None:
    """Epochs of a source may have different numbers of batches."""

    def source() -> StatefulLoader:
        return numbered(DistributedSampler(Irregular(8), dist_info=Rank(0, 2), seed=0, remainder="exact"), 36)

    alone, expected = source(), []
    for epoch in range(4):
        alone.set_epoch(epoch)
        expected.append(rows(alone))
    assert [*map(len, expected)] == [3, 4, 3, 4]
    mixture = MixedLoader({"irregular": source()}, weights={"irregular": 1}, n_steps=7)
    assert [own for _, own in read(mixture) + read(mixture)] == list(chain(*expected))
    far = MixedLoader({"irregular": source()}, weights={"irregular": 1}, n_steps=7)
    far.set_epoch(1)
    assert [own for _, own in read(far)] == list(chain(*expected[2:]))


def test_weights_of_a_state_make_the_same_mixture() -> None:
    """Only ratios of weights count, and normalized weights in a state are exact."""
    assert RandomOrder({"a": 3, "b": 1}, "ab", 0).identity == RandomOrder({"a": 0.3, "b": 0.1}, "ab", 0).identity
    for weights in ({"tahoe": 7, "census": 4}, {"tahoe": 1e308, "census": 1e308}, {"tahoe": 0.1, "census": 0.7}):
        shares = RandomOrder(weights, weights, 0).identity["weights"]
        again = {name: share for name, [(_, share)] in shares.items()}
        assert RandomOrder(again, weights, 0).identity["weights"] == shares
        assert sum(again.values()) == pytest.approx(1)


def test_sources_share_prefetching_threads() -> None:
    """All sources prefetch in the same threads."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if "annbatch-distributed" in thread.name}

    before = threads()
    mixture = mixed(prefetch=1)
    own = [len(threads() - before) for _ in mixture]
    assert len(own) == 60
    assert max(own) == 1


def test_ranks_may_be_known_later() -> None:
    known: list[Rank] = []
    mixture = MixedLoader(loaders(dist_info=deferred(lambda: known[0])), weights=WEIGHTS, n_steps=60, seed=1)
    known.append(Rank(1, 2))
    assert read(mixture) == read(mixed(1))


def test_exhausted_source_ends_a_mixture_on_more_ranks() -> None:
    """A source with no batches left for more ranks has ended its epoch."""
    options: dict[str, Any] = {"weights": {"census": 1}, "stopping_strategy": "first_exhausted"}
    before, after = (MixedLoader(loaders(0, n, "census", remainder="drop"), **options) for n in (2, 3))
    read(before, 4)  # one batch is left on each of two ranks
    after.load_state_dict(before.state_dict())
    assert read(after) == []


def test_weights_change_and_0_leaves_a_source_out() -> None:
    later = {"tahoe": 0, "census": 2, "own": 2}
    names = []
    for batch in mixed(weights=[(0, WEIGHTS), (40, later)], n_steps=100):
        names.append(batch["source"])
        assert batch["X"].shape[1] == SIZES[batch["source"]][1]  # the genes of its source
    assert Counter(names[:40])["tahoe"] == pytest.approx(40 * 3 / 4.5, abs=1)
    assert set(names[42:]) == {"census", "own"}  # a batch that is due at the change may come in the steps after it
    assert Counter(names)["own"] == pytest.approx(40 / 9 + 30, abs=1)


def test_plan_counts_epochs_of_sources() -> None:
    """The plan has the number of epochs of each source."""
    plan = mixed(n_steps=90).plan()
    assert plan["steps"].to_dict() == Counter(name for name, _ in read(mixed(n_steps=90)))
    assert plan["batches"].to_dict() == {"tahoe": 12, "census": 5, "own": 30}
    assert plan["rows"].to_dict() == {name: n_rows for name, (n_rows, _) in SIZES.items() if name in WEIGHTS}
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
        ranks.append(MixedLoader({"own": source}, weights={"own": 1}, n_steps=20))
    assert [len(read(mixture)) for mixture in ranks] == [20, 20]
    nothing = met_in_threads([mixture.check_epoch_read for mixture in ranks])
    assert nothing == ["no epoch of a source has ended since the last check"] * 2
    assert [len(read(mixture)) for mixture in ranks] == [20, 20]
    (text,) = set(verdict(ranks))
    assert (
        text == "own, epoch 0: 2 ranks have read 240 rows in 60 batches, as planned. Each of the 240 rows was read once"
    )


def test_check_after_jump_covers_later_batches_only() -> None:
    """After a jump into an epoch of a source, its earlier batches are not checked; later epochs are, completely."""

    def ranks(name: str = "tahoe") -> list[MixedLoader]:
        return [MixedLoader(loaders(rank, 2, name), weights={name: 1}, n_steps=8) for rank in range(2)]

    def verdicts(own: list[MixedLoader]) -> list[str]:
        (text,) = set(met_in_threads([mixture.check_epoch_read for mixture in own]))
        return str(text).splitlines()

    jumped = ranks()
    for mixture in jumped:
        mixture.set_epoch(1)  # in the middle of the source's epoch 0, of 12 batches
        assert len(read(mixture) + read(mixture)) == 16
    first, second = verdicts(jumped)
    assert first.startswith("tahoe, rest of epoch 0: 2 ranks have read 32 rows in 8 batches, as planned. Earlier")
    assert first.endswith("Earlier batches were not checked")
    assert "was read once" not in first
    assert second.startswith("tahoe, epoch 1: 2 ranks have read 96 rows in 24 batches, as planned. Each of the 96 rows")
    # after a resume, earlier epochs are not reported, and of the current one only the rest
    cut = ranks()
    for mixture in cut:
        mixture.set_epoch(1)
        read(mixture, 6)  # 4 to the end of epoch 0, 2 of epoch 1
    resumed = ranks()
    for mixture in resumed:
        mixture.load_state_dict(cut[0].state_dict())
        assert len(read(mixture) + read(mixture)) == 10
    (only,) = verdicts(resumed)  # the job before has read this epoch from its beginning
    assert only.startswith("tahoe, rest of epoch 1: ")
    assert only.endswith("Including earlier batches, each of the 96 rows was read once")
    # the same for a state of a later epoch of the mixture, if the source is still in the epoch of the jump
    jumped, later = ranks("own"), ranks("own")
    for mixture in jumped:
        mixture.set_epoch(1)
        read(mixture)
        read(mixture, 2)
    for mixture in later:
        mixture.load_state_dict(jumped[0].state_dict())
        for _ in range(3):
            read(mixture)
    (text,) = verdicts(later)
    assert text.startswith("own, rest of epoch 0: ")
    assert "was read once" not in text
    # consecutive epochs are checked completely
    whole = ranks()
    for mixture in whole:
        assert len(read(mixture) + read(mixture)) == 16
    (text,) = verdicts(whole)
    assert "epoch 0: 2 ranks have read 96 rows in 24 batches, as planned. Each of the 96 rows was read once" in text


@pytest.mark.parametrize("weight", [10**400, -1, np.inf, np.nan])
def test_weights_must_be_finite(weight: float) -> None:
    with pytest.raises(ValueError, match="Weights must be finite and not negative"):
        MixedLoader(loaders(0, 2, "tahoe", "census"), weights={"tahoe": weight, "census": 1}, n_steps=3)


def test_unsuitable_sources_raise() -> None:
    both = loaders(0, 2, "own") | loaders(1, 2, "census")
    few = loaders(0, 2, "own") | loaders(0, 2, "census", mask=slice(0, 3), remainder="drop")
    for sources, message in (
        (
            both,
            "got census of rank 1 of 2, own of rank 0 of 2",
        ),
        (few, "The source census: The mask selects 3 rows"),
    ):
        mixture = MixedLoader(sources, weights=dict.fromkeys(sources, 1), n_steps=3)
        for ask in (mixture.__iter__, mixture.plan):
            with pytest.raises(ValueError, match=message):
                next(iter(ask()))
        right = MixedLoader(loaders(1, 2, *sources), weights=dict.fromkeys(sources, 1), n_steps=3)
        (text,) = set(agreement([mixture, right]))
        assert message in text


def test_state_of_different_mixture_raises() -> None:
    """A state of a different mixture raises, and changes nothing."""
    mixture = mixed()
    read(mixture, 7)
    state = mixture.state_dict()
    other = MixedLoader(loaders(0, 2, "own"), weights={"own": 1}, n_steps=9).state_dict()
    later = mixed()
    read(later, 11)
    others = later.state_dict()["sources"]
    damaged = state | {"sources": others | {"own": others["tahoe"]}}  # the first source of this state can be loaded
    for wrong, message in (
        (other, "n_steps is 9 in the state and 60 here"),
        ({}, "must be the state of a loader, got a dict with no keys"),
        (loaders()["own"].state_dict(), "must be of a mixture"),
        (state | {"version": 10**6}, "got 1000000"),
        (state | {"done": 8, "step": 7}, "damaged: the step where the epoch began"),
        (state | {"start": state["done"] + 1}, "damaged: start must be"),
        (damaged, "n_obs"),
    ):
        with pytest.raises(ValueError, match=message):
            mixture.load_state_dict(wrong)
    assert mixture.state_dict() == state


def test_threads_of_a_mixture_end_with_it() -> None:
    """The prefetching threads of all sources end when the mixture is deleted, even in mid-epoch."""
    before = {*threading.enumerate()}
    mixture = mixed(prefetch=1)
    batches = iter(mixture)
    next(batches)
    started = {thread for thread in {*threading.enumerate()} - before if "annbatch-distributed" in thread.name}
    assert started
    del mixture, batches
    gc.collect()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()
