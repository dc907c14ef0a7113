"""Cells that are drawn by weights: how often each comes, on any number of ranks and after any resume."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import CellSets, DistributedSampler, MixedLoader, Rank, StatefulLoader
from annbatch_distributed import weights as module
from annbatch_distributed.weights import Sums
from tests.loaders import numbered

if TYPE_CHECKING:
    from annbatch.abc import Sampler

pytestmark = pytest.mark.filterwarnings("ignore:About .* of the draws of a batch are copies")

SIZES = 4, 4, 4
RNG = np.random.default_rng(0)
#: Weights of 120 cells, a third of which are left out.
WEIGHTS = RNG.lognormal(0, 1.5, 120) * (RNG.random(120) < 0.67)


def sampler(
    rank: int = 0, world_size: int = 1, *, wrapped: Sampler | None = None, weights: Any = WEIGHTS, **options: Any
) -> DistributedSampler:
    options = {"seed": 0, "remainder": "exact", "num_samples": 200} | options
    wrapped = RandomSampler(*SIZES) if wrapped is None else wrapped
    return DistributedSampler(wrapped, dist_info=Rank(rank, world_size), weights=weights, **options)


def drawn(sampler: DistributedSampler, n_obs: int = 120) -> list[int]:
    """The rows of all ranks in an epoch, ascending."""
    rows: list[int] = sampler.rows_of(n_obs, slice(None))["row"].tolist()
    return sorted(rows)


def check_counts(rows: list[int], weights: Any, n_samples: int, rounds: int = 1) -> None:
    """Each row comes as often as its weight says, rounded up or down in each round."""
    counts = np.bincount(rows, minlength=len(weights))
    expected = n_samples / rounds * np.asarray(weights, dtype=float) / np.sum(weights)
    assert len(rows) == n_samples
    assert (counts >= rounds * np.floor(expected - 1e-9)).all()
    assert (counts <= rounds * np.ceil(expected + 1e-9)).all()


@st.composite
def weighted(draw: Any) -> Any:
    n_cells = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 1_000)))
    values = rng.lognormal(0, draw(st.sampled_from([0.1, 1, 3])), n_cells) * (rng.random(n_cells) < 0.7)
    values[int(rng.integers(n_cells))] = 1
    return values.astype(draw(st.sampled_from(["float32", "float64"])))


@given(weighted(), st.integers(1, 200), st.integers(1, 4), st.integers(0, 9))
def test_each_cell_comes_as_often_as_its_weight_says(values: Any, n_samples: int, world_size: int, epoch: int) -> None:
    ranks = [sampler(rank, world_size, weights=values, num_samples=n_samples + 3) for rank in range(world_size)]
    for one in ranks:
        one.set_epoch(epoch)
    rows = drawn(ranks[0], len(values))
    check_counts(rows, values, n_samples + 3)
    assert len({one.n_batches(len(values)) for one in ranks}) == 1


def test_mean_over_epochs_is_the_weight() -> None:
    units = sampler(num_samples=80)._config.units
    counts = np.zeros(120)
    for epoch in range(4_000):
        draws = units.in_epoch(120, epoch, 0)
        counts += np.bincount(draws.rows_of(np.arange(80)).rows, minlength=120)
    np.testing.assert_allclose(counts / 4_000, 80 * WEIGHTS / WEIGHTS.sum(), atol=0.05)


@pytest.mark.parametrize("block", [1, 4, 1_024])
def test_sums_of_blocks_find_the_rows_of_all_sums(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of blocks find the same rows as the sum of every cell, also at the borders between rows."""
    monkeypatch.setattr(module, "_BLOCK", block)
    monkeypatch.setattr(module, "_BLOCKS", 3)
    for case in range(50):
        rng = np.random.default_rng(case)
        # multiples of 1 / 8 are added up without rounding, also as parts of 1 / 2
        values = rng.integers(0, 5, int(rng.integers(1, 40))) / 8
        values[0] = 1 / 2
        sums = np.cumsum(values) / values[0]
        points = rng.permutation(np.arange(0, sums[-1], 1 / 16))
        np.testing.assert_array_equal(Sums.of(values).rows_at(points), np.searchsorted(sums, points, side="right"))
    assert Sums.of(np.array([1.0, 2.0, 0.0])).rows_at(np.array([1.5])).tolist() == [1]


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e300, 1e308])
def test_size_of_all_weights_has_no_effect(scale: float) -> None:
    """Draws depend on ratios of weights only, from the smallest to the largest floats."""
    ones = np.ones(120)
    assert drawn(sampler(weights=scale * ones)) == drawn(sampler(weights=ones))
    assert drawn(sampler(weights=scale * (np.arange(120) == 3))) == [3] * 200


def test_epochs_and_seeds_have_different_draws() -> None:
    draws = []
    for seed in (0, 1):
        for epoch in (0, 1):
            one = sampler(seed=seed)
            one.set_epoch(epoch)
            draws.append(tuple(drawn(one)))
    assert len(set(draws)) == 4


@pytest.mark.parametrize("sharding", ["contiguous", "shuffled"])
def test_any_number_of_ranks_draws_the_same_cells(sharding: Any) -> None:
    expected = drawn(sampler(sharding=sharding))
    for world_size in (2, 3, 5):
        assert drawn(sampler(world_size=world_size, sharding=sharding)) == expected
    assert drawn(sampler(world_size=2, virtual_ranks=4, sharding=sharding)) == expected


def test_copies_of_a_sampler_have_the_same_draws() -> None:
    one = sampler(mask=slice(9, 100))
    expected = drawn(one)
    for other in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert drawn(other) == expected


def test_default_is_as_many_draws_as_cells_with_a_weight() -> None:
    assert len(drawn(sampler(num_samples=None))) == np.count_nonzero(WEIGHTS)
    mask = np.arange(120) < 50
    assert len(drawn(sampler(num_samples=None, mask=mask))) == np.count_nonzero(WEIGHTS[:50])


@pytest.mark.parametrize("mask", [slice(20, 70), [slice(0, 9), slice(30, 120)], np.arange(120) % 3 == 0, [5, 7, 8]])
def test_mask_leaves_cells_out(mask: Any) -> None:
    """Only cells that the mask selects are drawn, by their own weights."""
    weights = WEIGHTS + 0.1
    flags = np.zeros(120, dtype=bool)
    for part in mask if isinstance(mask, list) else [mask]:
        flags[part] = True
    one = sampler(weights=weights, mask=mask)
    check_counts(drawn(one), weights * flags, 200)
    one.mask = slice(0, 60)
    check_counts(drawn(one), weights * (np.arange(120) < 60), 200)
    # a mask of the wrapped sampler
    wrapped = RandomSampler(*SIZES, mask=slice(10, 50))
    check_counts(drawn(sampler(weights=weights, wrapped=wrapped)), weights * flags_of(10, 50), 200)


def flags_of(start: int, stop: int) -> Any:
    return (np.arange(120) >= start) & (np.arange(120) < stop)


@pytest.mark.parametrize("rounds", [2, 3])
def test_rounds_move_copies_apart(rounds: int) -> None:
    """Each pass draws from all cells, so copies of a cell are not all close to each other."""
    one = sampler(rounds=rounds, wrapped=SequentialSampler(*SIZES))
    rows = one.rows_of(120, slice(None))["row"].tolist()
    check_counts(rows, WEIGHTS, 200, rounds)
    bounds = np.arange(rounds + 1) * 200 // rounds
    for first, end in pairwise(bounds.tolist()):
        assert rows[first:end] == sorted(rows[first:end])
        check_counts(rows[first:end], WEIGHTS, end - first)
    # each round begins at a point of its own
    many = sampler(rounds=2, num_samples=400, wrapped=SequentialSampler(*SIZES)).rows_of(120, slice(None))["row"]
    assert many[:200].tolist() != many[200:].tolist()


def test_each_round_can_have_a_single_draw() -> None:
    one = sampler(num_samples=4, rounds=4, wrapped=SequentialSampler(1, 4, 4))
    assert len(drawn(one)) == 4


def test_copies_in_a_batch_warn_the_caller() -> None:
    """A sampler warns if many draws of a batch are copies, when it is made and when it gets new weights."""
    # 4 copies of each cell in a load request of 4 batches: 4 - 4 (1 - (3/4)^4) = 1.27 of 4 meet another one
    ones = np.ones(120)
    with pytest.warns(UserWarning, match="32% of the draws .* up to 4 times .* 4 batches") as caught:
        sampler(weights=ones, num_samples=480)
    assert caught[0].filename == __file__
    few = ones.copy()
    few[:3] = 30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler(weights=ones, num_samples=480, rounds=4)
        one = sampler(weights=ones, num_samples=120)
        one.weights = 2 * ones
    with pytest.warns(UserWarning, match="of the draws of a batch are copies") as caught:
        one.weights = few
    assert caught[0].filename == __file__
    assert one.weights is not None
    assert one.weights.tolist() == few.tolist()


# Reading


def loader(rank: int = 0, world_size: int = 1, *, prefetch: int = 0, **options: Any) -> StatefulLoader:
    return numbered(sampler(rank, world_size, **options), 120, prefetch=prefetch)


def rows_in(batches: Any) -> list[list[int]]:
    found = []
    for batch in batches:
        assert np.asarray(batch["X"])[:, 0].astype(int).tolist() == batch["index"].tolist()
        found.append(batch["index"].tolist())
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_batches_are_those_that_rows_of_tells(prefetch: int, workers: int) -> None:
    for rank in range(2):
        one = loader(rank, 2, prefetch=prefetch)
        reader: Any = one.to_dataloader(num_workers=workers, multiprocessing_context="fork") if workers else one
        read = rows_in(reader)
        table = one.sampler.rows_of(120, slice(None), ranks=rank)
        assert read == [part["row"].tolist() for _, part in table.groupby("step")]
        assert one.cells_of(0)["row"].tolist()[:4] == one.sampler.rows_of(120, 0)["row"].tolist()[:4]


@pytest.mark.parametrize("remainder", ["exact", "drop", "pad", "keep"])
def test_policies_count_draws(remainder: Any) -> None:
    """Draws are dropped, repeated and kept as rows are."""
    ranks = [loader(rank, 3, remainder=remainder, num_samples=190) for rank in range(3)]
    read = [batch for one in ranks for batch in one]
    rows = [row for batch in read for row in batch["index"].tolist()]
    expected = {"exact": 190, "keep": 190, "drop": 180, "pad": 192}[remainder]
    assert len(rows) == expected
    repeated = sum(int(batch["repeated"].sum()) for batch in read if "repeated" in batch)
    assert repeated == (2 if remainder == "pad" else 0)


@pytest.mark.parametrize("resumed", [1, 2, 3])
def test_resume_on_any_number_of_ranks_draws_each_draw_once(resumed: int) -> None:
    expected = drawn(sampler())
    before, states = [], []
    for rank in range(2):
        one = loader(rank, 2)
        for number, batch in enumerate(one, 1):
            before += batch["index"].tolist()
            if number == 7:
                states.append(one.state_dict())
                break
    assert states[0] == states[1]
    after = []
    for rank in range(resumed):
        one = loader(rank, resumed)
        one.load_state_dict(states[0])
        after += [row for batch in rows_in(one) for row in batch]
    assert Counter(before + after) == Counter(expected)


def test_check_epoch_read_says_what_the_counts_are() -> None:
    one = loader()
    list(one)
    text = one.check_epoch_read()
    assert text.startswith("epoch 0: 1 rank has read 200 rows in 50 batches, as planned")
    assert text.endswith(
        "Each of the 200 draws was read once, so each cell was read as often as its weight says, rounded up or down"
    )
    one = loader(rounds=4)  # a cell of 1.2 draws in each round comes 4 to 8 times
    list(one)
    assert one.check_epoch_read().endswith("rounded up or down in each of 4 rounds")
    one = loader(remainder="drop", num_samples=201)
    list(one)
    assert "as often as" not in one.check_epoch_read()


def test_mixture_has_a_weighted_source() -> None:
    mixture = MixedLoader(
        {"a": loader(), "b": loader(weights=WEIGHTS[::-1].copy())}, weights={"a": 1, "b": 1}, n_steps=100
    )
    read: dict[str, list[int]] = {"a": [], "b": []}
    for batch in mixture:
        read[batch["source"]] += batch["index"].tolist()
    check_counts(read["a"], WEIGHTS, 200)
    check_counts(read["b"], WEIGHTS[::-1], 200)


# Changes of the weights


def test_new_weights_begin_with_the_next_iteration() -> None:
    one = loader()
    next(iter(one))
    new = np.where(np.arange(120) < 10, 1.0, 0.0)
    one.sampler.weights = new
    one.set_epoch(1)
    check_counts([row for batch in rows_in(one) for row in batch], new, 200)
    np.testing.assert_array_equal(one.sampler.weights, new)
    with pytest.raises(ValueError, match="read-only"):
        one.sampler.weights[0] = 1
    plain = DistributedSampler(RandomSampler(*SIZES), dist_info=Rank(0, 1))
    assert plain.weights is None
    with pytest.raises(ValueError, match=r"has no weights. Pass weights=\.\.\. when you make it"):
        plain.weights = new


def test_curriculum_resumes_within_an_epoch() -> None:
    """A loop that assigns the weights of each epoch resumes within one: equal weights and masks change nothing."""

    def weights_of(epoch: int) -> Any:
        return WEIGHTS + epoch

    def run(epochs: range, reader: StatefulLoader, stop: tuple[int, int] | None = None) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for epoch in epochs:
            reader.sampler.weights = weights_of(epoch)
            reader.sampler.mask = slice(0, 100)
            reader.set_epoch(epoch)
            for step, batch in enumerate(reader, start=reader.batches_done):
                assert (epoch, step) not in rows
                rows[epoch, step] = batch["index"].tolist()
                if (epoch, step) == stop:
                    return reader.state_dict()
        return state

    rows: dict[tuple[int, int], list[int]] = {}
    run(range(3), loader(weights=weights_of(0), mask=slice(0, 100)))
    whole, rows = rows, {}
    for stop in ((1, 5), (1, max(step for epoch, step in whole if epoch == 1))):
        rows = {}
        state = run(range(3), loader(weights=weights_of(0), mask=slice(0, 100)), stop)
        resumed = loader(weights=weights_of(0), mask=slice(0, 100))
        resumed.sampler.weights = weights_of(state["epoch"])
        resumed.load_state_dict(state)
        n_before = len(rows)
        run(range(resumed.next_epoch, 3), resumed)
        assert rows == whole
        assert len(rows) > n_before


def test_new_weights_within_a_resumed_epoch_warn() -> None:
    """New weights or a new mask begin a resumed epoch again, with a warning."""
    one = loader()
    one.load_state_dict(one.state_dict(batches_done=7))
    with pytest.warns(UserWarning, match="Epoch 0 begins again.* 7 batches"):
        one.sampler.mask = slice(0, 100)
    assert one.batches_done == 0
    one.load_state_dict(one.state_dict(batches_done=len(one)))
    with warnings.catch_warnings(action="error"):  # between epochs, there is nothing to read again
        warnings.filterwarnings("ignore", "About .* of the draws of a batch are copies")
        one.sampler.mask = slice(0, 90)


def test_other_weights_are_another_job_within_an_epoch() -> None:
    one, other = loader(), loader(weights=WEIGHTS + 1)
    batches = iter(one)
    next(batches)
    with pytest.raises(ValueError, match="weights"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match=r"weights\.rounds is 1 in the state and 2 here"):
        loader(rounds=2).load_state_dict(one.state_dict())
    list(batches)
    with pytest.raises(ValueError, match="weights"):
        other.load_state_dict(one.state_dict())
    other.load_state_dict(one.state_dict(), strict=False)
    assert other.next_epoch == 1
    # the same weights in another form
    loader(weights=pd.Series(WEIGHTS)).load_state_dict(one.state_dict())


def test_epochs_without_set_epoch_have_new_draws() -> None:
    one = loader()
    epochs = [[row for batch in one for row in batch["index"].tolist()] for _ in range(2)]
    assert sorted(epochs[0]) != sorted(epochs[1])


def test_repr_of_a_loader_counts_draws() -> None:
    assert "batches: 4 draws each" in repr(loader())


def test_names_of_weights_are_those_of_the_cells() -> None:
    names = [f"cell {number}" for number in range(120)]
    cells = ad.AnnData(np.arange(120.0)[:, None], obs=pd.DataFrame({"type": ["B"] * 120}, index=names))
    series = pd.Series(WEIGHTS, index=names)
    mask = pd.Series(np.arange(120) < 80, index=names)

    def of(weights: Any, mask: Any = None) -> StatefulLoader:
        made = StatefulLoader(
            batch_sampler=sampler(weights=weights, mask=mask), preload_to_gpu=False, return_index=True
        )
        return made.add_adata(cells)

    check_counts([row for batch in rows_in(of(series, mask)) for row in batch], WEIGHTS * (np.arange(120) < 80), 200)
    for wrong in ({"weights": series[::-1]}, {"weights": series, "mask": mask[::-1]}):
        with pytest.raises(ValueError, match="The index of"):
            next(iter(of(**wrong)))
    one = of(series)
    one.sampler.weights = series[::-1]
    with pytest.raises(ValueError, match="The index of weights"):
        next(iter(one))


# What can't be combined


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (-WEIGHTS, ValueError, r"weights must be finite and at least 0, got \d+ values that are negative"),
        ([1, np.nan, np.inf], ValueError, "got 2 values that are NaN or infinite, such as nan at position 1"),
        (np.zeros(120), ValueError, "weights must be above 0 for some of the cells"),
        ([], ValueError, "weights must be above 0 for some of the cells"),
        (np.ma.array([1, 1], mask=[0, 1]), ValueError, "weights must have a value for each cell, got a masked array"),
        (np.ones((120, 1)), TypeError, r"weights must be a number for each cell, .* of shape \(n_obs,\)"),
        (["a", "b"], TypeError, "weights must be a number for each cell"),
        ({"B": 2}, TypeError, "weights must be a number for each cell"),
        (3, TypeError, "weights must be a number for each cell"),
    ],
)
def test_invalid_weights_are_refused(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sampler(weights=weights)


def test_arguments_that_contradict_weights_are_refused() -> None:
    labels = pd.Categorical(["B"] * 120)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"wrapped": ClassSampler(*SIZES, classes=labels, num_samples=40)},
            "ClassSampler, which holds a value for each row",
        ),
        ({"wrapped": RandomSampler(*SIZES, replacement=True)}, "RandomSampler, which samples with replacement"),
        ({"wrapped": RandomSampler(*SIZES, num_samples=80)}, "num_samples of RandomSampler. Pass num_samples to"),
        ({"sets": CellSets.from_obs(pd.DataFrame({"type": labels}), by="type", set_size=4)}, "combined with sets"),
        ({"seed": None}, "weights require a seed"),
        ({"weights": None}, "num_samples and rounds are for weights, got num_samples=200"),
        ({"weights": None, "num_samples": None, "rounds": 2}, "num_samples and rounds are for weights"),
        ({"rounds": 201}, "rounds must be at most the number of draws of an epoch, 200, got 201"),
        ({"rounds": 0}, "rounds must be"),
        ({"num_samples": 0}, "num_samples must be"),
        ({"mask": np.flatnonzero(WEIGHTS == 0)}, "must be above 0 for some of the cells that the mask selects"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            sampler(**options)
    with pytest.raises(ValueError, match=r"one value for each of the 100 cells of the collection, got 120 values"):
        sampler().plan(100)
