"""Shardings in a job, and the samplers that they accept."""

# mypy ignores some lines: annbatch's LoadRequest doesn't declare the keys that samplers may add to it.

from __future__ import annotations

import math
import warnings
from itertools import groupby, permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rows, Shuffled
from annbatch_distributed.core.sharding import Contiguous, Independent
from tests.samplers import MaskBlind, batches, flat, job, repeats, request_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

#: Labels sorted by class; the last class has three times the rows of all others together.
LABELS = pd.Categorical(np.repeat(["B", "DC", "NK", "T"], [100, 60, 40, 600]))
N_OBS = len(LABELS)


def classes(cls: type[ClassSampler] = ClassSampler, **kwargs: Any) -> ClassSampler:
    options = {"num_samples": 400, "rng": np.random.default_rng(0)} | kwargs
    return cls(4, 4, 8, classes=LABELS, **options)


# shuffled


@st.composite
def windows(draw: st.DrawFn) -> Rows:
    """Rows of a mask, in long contiguous ranges or scattered."""
    flags = np.random.default_rng(draw(st.integers(0, 9))).random(90) < draw(st.sampled_from([0.2, 0.7, 1.0]))
    flags[draw(st.integers(0, 89)) :] = draw(st.booleans())
    return Rows.from_mask(flags)


def blocks(rows: Iterable[int], block_size: int) -> list[tuple[int, ...]]:
    """Rows in their order, grouped by block; blocks end at the multiples of their size."""
    return [tuple(block) for _, block in groupby(rows, key=lambda row: row // block_size)]


@given(windows(), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_shuffled_order_has_each_block_once(window: Rows, block_size: int, epoch: int, seed: int) -> None:
    """A shuffled order has each block once, with the rows of the block that are in the window."""
    order = Shuffled(block_size)(window, epoch=epoch, seed=seed)
    assert sorted(order) == list(window)
    assert sorted(blocks(order, block_size)) == blocks(window, block_size)
    assert Shuffled(block_size)(window, epoch=epoch, seed=seed) == order


def test_blocks_are_shuffled_by_epoch_and_seed() -> None:
    """Blocks come in every order, and each epoch and seed has a different order."""
    orders = [tuple(Shuffled(2)(Rows((range(5),)), epoch=epoch, seed=0)) for epoch in range(100)]
    parts = [(0, 1), (2, 3), (4,)]
    assert {*orders} == {tuple(flat(order)) for order in permutations(parts)}
    keys = [(epoch, seed) for epoch in range(5) for seed in range(5)]
    assert len({tuple(Shuffled(10)(Rows((range(1000),)), epoch=epoch, seed=seed)) for epoch, seed in keys}) == 25


def test_shuffled_order_is_stable() -> None:
    """A shuffled order is the same in every process and version."""
    rows = Rows((range(12),))
    assert [blocks(Shuffled(2)(rows, epoch=epoch, seed=0), 2) for epoch in range(2)] == [
        [(0, 1), (2, 3), (10, 11), (4, 5), (6, 7), (8, 9)],
        [(6, 7), (2, 3), (8, 9), (4, 5), (0, 1), (10, 11)],
    ]


def test_only_shuffled_requires_seed_and_block_size() -> None:
    """Only `Shuffled` requires a seed and a block size."""
    rows = Rows((range(4),))
    assert Contiguous()(rows, epoch=3, seed=None) == Independent()(rows, epoch=3, seed=None) == rows
    with pytest.raises(ValueError, match="requires a seed"):
        Shuffled(2)(rows, epoch=0, seed=None)
    with pytest.raises(ValueError, match="block_size must be set"):
        Shuffled()(rows, epoch=0, seed=0)
    assert repr(Shuffled(np.int64(64))) == "Shuffled(block_size=64)"


def test_shuffled_requires_a_known_chunk_size() -> None:
    """`Shuffled` requires a block size, or a sampler with a known chunk size."""

    class Chunked(MaskBlind):
        pass

    with pytest.raises(ValueError, match=r"unknown for Chunked. Pass Shuffled\(block_size=\.\.\.\)"):
        job(Chunked(4), 2, sharding="shuffled", seed=0)

    class Known(Chunked):
        chunk_size = 16

    for sharding in ("shuffled", Shuffled()):
        rank, _ = job(Known(4), 2, sharding=sharding, seed=0)
        assert rank.plan(100).sharding == Shuffled(16)
        assert "sharding=Shuffled(block_size=16)" in repr(rank)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("sizes", [(4, 2, 8), (4, 4, 16), (8, 4, 8), (16, 2, 32)])
def test_whole_chunks_are_contiguous_reads(sizes: tuple[int, int, int], remainder: Any) -> None:
    """If batches are whole chunks, almost every chunk is one contiguous read."""
    chunk, mask = sizes[0], [slice(3, 397), slice(402, 797)]
    options: Any = {"sharding": "shuffled", "seed": 0, "mask": mask, "remainder": remainder, "max_gap": 0}
    for rank in job(RandomSampler(*sizes), 3, **options):
        rank.set_epoch(3)
        pieces = [part for request in rank.sample(N_OBS) for part in request["requests"]]
        # ragged ends, repeated rows and the two blocks at the bounds of this shard are in a few chunks
        n_chunks = len(rank.plan(N_OBS).shard(rank.rank)) / chunk
        assert sum(part.stop - part.start == chunk for part in pieces) >= n_chunks - 10
        assert max(part.stop - part.start for part in pieces) == chunk


def test_generator_reorders_the_same_blocks() -> None:
    """A different generator gives a different order of the same blocks."""
    ranks = job(RandomSampler(4, 2, 8), 2, sharding="shuffled", seed=0)
    before = [flat(batches(rank.sample(N_OBS))) for rank in ranks]
    for rank in ranks:
        rank.set_epoch(0)
        rank.rng = np.random.default_rng(5)
    after = [flat(batches(rank.sample(N_OBS))) for rank in ranks]
    assert before != after
    assert [sorted(rows) for rows in before] == [sorted(rows) for rows in after]


# independent


@pytest.mark.parametrize(
    "sampler",
    [
        classes(),
        classes(WeightedClassSampler),
        classes(num_samples=397),
        RandomSampler(4, 4, 8, replacement=True),
        RandomSampler(4, 4, 8, replacement=True, num_samples=303),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_independent_job_keeps_the_number_of_samples(sampler: Sampler, world_size: int) -> None:
    """A job samples the wrapped sampler's number of rows, rounded to global batches under `drop` and `pad`."""
    alone = len(flat(batches(sampler.sample(N_OBS))))
    for remainder in ("drop", "keep", "exact", "pad"):
        ranks = job(sampler, world_size, sharding="independent", remainder=remainder)
        read = [batches(rank.sample(N_OBS)) for rank in ranks]
        counts = [len(batched) for batched in read]
        assert counts == [rank.n_batches(N_OBS) for rank in ranks]
        n_samples = sum(len(batch) for rank in read for batch in rank)
        sizes = {len(batch) for rank in read for batch in rank}
        match remainder:
            case "drop":
                assert n_samples == alone // (8 * world_size) * 8 * world_size
                assert sizes == {8}
            case "pad":
                assert n_samples == math.ceil(alone / (8 * world_size)) * 8 * world_size
                assert sizes == {8}
                assert not any(any(flat(repeats(rank.sample(N_OBS)))) for rank in ranks)  # no sample is repeated
            case _:
                assert n_samples == alone
        assert max(counts) - min(counts) <= (1 if remainder == "keep" else 0)
        if remainder == "exact":
            assert counts[0] == math.ceil(alone / (8 * world_size))
        assert f"without sharding: {alone} samples" in str(ranks[0].plan(N_OBS))


def test_drop_last_reduces_the_number_of_samples() -> None:
    """Samples that `drop_last` drops without sharding aren't assigned to any rank."""
    (rank, _) = job(classes(num_samples=389, drop_last=True), 2, sharding="independent")
    assert "without sharding: 384 samples" in str(rank.plan(N_OBS))


@pytest.mark.parametrize("cls", [ClassSampler, WeightedClassSampler])
def test_class_weights_hold_for_the_whole_job(cls: type[ClassSampler]) -> None:
    """The fraction of each class equals its weight, on each rank and in the whole job.

    Classes are sampled independently, so the count of a class is a sum of independent samples. By Hoeffding's
    inequality, the fraction of a class in n samples differs from its weight by more than t with a probability below
    ``2 * exp(-2 * n * t**2)``. Here n is at least 4,000 groups of chunks and t is 0.05, for 4 classes on 4 ranks and
    2 samplers: below 2e-7 in total. Contiguous shards, which renormalize the weights of their own classes, differ by
    more than 0.05.
    """
    weights = np.array([0.4, 0.1, 0.2, 0.3])
    sampler = classes(cls, num_samples=8 * 4000 * 4, class_weights=weights)

    def fractions(**options: Any) -> np.ndarray:
        counts = np.zeros((4, 4))
        for rank in job(sampler, 4, **options):
            rows = np.concatenate([request_rows(request) for request in rank.sample(N_OBS)])
            counts[rank.rank] = np.bincount(LABELS.codes[rows], minlength=4)
        assert options["sharding"] == "contiguous" or counts.sum() == 8 * 4000 * 4
        return np.vstack([counts, counts.sum(axis=0)]) / np.append(counts.sum(axis=1), counts.sum())[:, None]

    # on every rank, and in the whole job
    assert (abs(fractions(sharding="independent") - weights) < 0.05).all()
    with pytest.warns(UserWarning, match=r"rank \d lacks"):
        assert (abs(fractions(sharding="contiguous")[-1] - weights) > 0.05).any()


class Bootstrap(MaskBlind):
    """A custom sampler that samples single rows with replacement."""

    def __init__(self, batch_size: int, n_samples: int) -> None:
        super().__init__(batch_size)
        self.n_samples, self._rng = n_samples, np.random.default_rng(0)

    def n_batches(self, n_obs: int) -> int:
        return math.ceil(self.n_samples / self.batch_size)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        assert self.rng is not None
        for start in range(0, self.n_samples, self.batch_size):
            yield {"requests": self.rng.integers(n_obs, size=min(self.batch_size, self.n_samples - start))}


def test_custom_sampler_with_replacement_needs_two_methods() -> None:
    """A custom sampler that samples with replacement must have the methods `n_draws` and `set_draws`."""
    with pytest.raises(ValueError, match="Bootstrap isn't known to"):
        job(Bootstrap(4, 50), 3, sharding="independent")

    class Known(Bootstrap):
        def n_draws(self, n_rows: int) -> int:
            return self.n_samples

    with pytest.raises(ValueError, match=r"give it the methods n_draws\(n_rows\), .* and set_draws\(n_draws\)"):
        job(Known(4, 50), 3, sharding="independent")

    class Settable(Known):
        def set_draws(self, n_draws: int) -> None:
            self.n_samples = n_draws

    ranks = job(Settable(4, 50), 3, sharding="independent", remainder="exact")
    read = [batches(rank.sample(N_OBS)) for rank in ranks]
    assert [len(rank) for rank in read] == [5, 5, 5]
    assert [len(flat(rank)) for rank in read] == [16, 17, 17]
    assert len({tuple(flat(rank)) for rank in read}) == 3


# class samplers on shards


def epochs_of(rank: DistributedSampler) -> None:
    for epoch in range(3):
        rank.set_epoch(epoch)
        rank.validate(N_OBS)
        list(rank.sample(N_OBS))


def test_shards_with_different_classes_warn_once() -> None:
    """Shards with different classes warn once, and the warning suggests `sharding='independent'`."""
    for rank in job(classes(), 2):
        with pytest.warns(UserWarning, match=r"rank 1 lacks 3 of the 4 classes .* \(B, DC, NK\)") as warned:
            epochs_of(rank)
        assert len(warned) == 1
        assert warned[0].filename == __file__
        assert "sharding='independent'" in str(warned[0].message)


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        (classes(), {"sharding": "independent"}),
        (classes(), {"mask": slice(200, None)}),
        (classes(class_weights=np.array([0.0, 0.0, 0.0, 1.0])), {"mask": slice(100, None)}),
    ],
)
def test_shards_with_the_same_classes_do_not_warn(sampler: Sampler, options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rank in job(sampler, 2, **options):
            rank.n_batches(N_OBS)


def test_warning_as_an_error_is_repeated() -> None:
    """A warning that a filter turns into an error is raised by every call."""
    (rank, _) = job(classes(), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match=r"rank \d lacks"):
                rank.n_batches(N_OBS)


# custom shardings


def rotation(rows: Rows, *, epoch: int, seed: int | None) -> Rows:
    return rows.cyclic(epoch, len(rows))


def backwards(rows: Rows, *, epoch: int, seed: int | None) -> Rows:
    return Rows.from_indices(rows.to_array()[::-1])


@pytest.mark.parametrize("mask", [None, [slice(1, 4), slice(6, 29)]])
@pytest.mark.parametrize("remainder", ["drop", "keep", "exact", "pad"])
@pytest.mark.parametrize("order", [rotation, backwards])
def test_function_orders_the_rows_to_shard(order: Any, remainder: Any, mask: Any) -> None:
    """A function returns the order of the rows, which is cut into contiguous ranges."""
    for epoch in range(3):
        ranks = job(SequentialSampler(2, 1, 2), 2, sharding=order, remainder=remainder, mask=mask)
        for rank in ranks:
            rank.set_epoch(epoch)
        plan = ranks[0].plan(29)
        remaining = Rows.from_indices(sorted(set(plan.selected) - set(plan.dropped)))
        read = [flat(batches(rank.sample(29))) for rank in ranks]
        own = [rows[: plan.shard(rank).n_own] for rank, rows in enumerate(read)]
        expected = list(order(plan.selected if not plan.dropped else remaining, epoch=epoch, seed=None))
        # under drop, the function orders only the rows that are remaining, which continue at the front of the window
        assert sorted(flat(own)) == sorted(expected)
        if not plan.dropped:
            assert flat(own) == expected
        assert f"sharding={order.__name__}" in str(plan)


def test_function_receives_epoch_and_seed() -> None:
    """A sharding function is called with the epoch and the seed."""
    calls = []

    def order(rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        calls.append((epoch, seed))
        return rows

    (rank,) = job(SequentialSampler(2, 1, 2), 1, sharding=order, seed=7)
    rank.set_epoch(3)
    rank.sample(12)
    assert set(calls) == {(3, 7)}
