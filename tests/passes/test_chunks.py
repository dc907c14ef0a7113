"""The load requests of annbatch's chunk samplers are annbatch's, bit for bit."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler
from hypothesis import assume, given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.passes import requests as requests_module
from annbatch_distributed.passes.chunks import Chunks, chunk_requests, is_as_annbatch, known_chunks
from annbatch_distributed.passes.requests import Slices, rows_of, translate_chunks
from annbatch_distributed.sharding import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest

    type Listed = tuple[list[slice], list[list[int]]]


@st.composite
def samplers(draw: st.DrawFn) -> RandomSampler | SequentialSampler:
    batch_size, n_splits = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    preload = draw(st.sampled_from([n for n in range(1, 10) if batch_size * n_splits % n == 0]))
    sizes = batch_size * n_splits // preload, preload, batch_size
    options: dict[str, Any] = {"drop_last": draw(st.booleans())}
    options["num_samples"] = draw(st.none() | st.integers(1, 300))
    if draw(st.booleans()):
        options.pop("num_samples")
        return SequentialSampler(*sizes, **options)
    return RandomSampler(*sizes, **options, replacement=draw(st.booleans()))


def listed(requests: Iterator[LoadRequest]) -> Iterator[Listed]:
    """List load requests as they come, since their memory may be used again."""
    for request in requests:
        rows: Any = request["requests"]
        slices = list(map(slice, *rows.bounds())) if isinstance(rows, Chunks) else list(rows)
        yield slices, [split.tolist() for split in request["splits"]]


@given(samplers(), st.integers(1, 400), st.integers(0, 3), st.booleans())
def test_chunks_and_splits_are_annbatchs_and_so_is_what_the_generator_draws_next(
    sampler: RandomSampler | SequentialSampler, n_rows: int, seed: int, copy: bool
) -> None:
    try:
        sampler.validate(n_rows)
    except ValueError:
        assume(False)
    own, rng = np.random.default_rng(seed), np.random.default_rng(seed)
    sampler.rng = own
    settings = known_chunks(sampler)
    assert settings is not None
    try:
        theirs = list(listed(sampler._sample(n_rows)))
    except RuntimeError:  # annbatch's own: drawn chunks that are fewer than its batches, without the last one
        assume(False)
    assert list(listed(chunk_requests(settings, n_rows, rng, copy=copy))) == theirs
    assert own.integers(1 << 60) == rng.integers(1 << 60)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([RandomSampler, SequentialSampler]), st.integers(1, 400))
def test_the_incomplete_chunk_can_have_the_last_rows_and_all_others_begin_at_multiples(
    size: int, preload_nchunks: int, kind: Any, n_rows: int
) -> None:
    settings = known_chunks(kind(size, preload_nchunks, size))
    assert settings is not None
    ours, ragged_last = (
        list(listed(chunk_requests(settings, n_rows, np.random.default_rng(0), is_ragged_last=is_last)))
        for is_last in (False, True)
    )
    slices = [part for own, _ in ragged_last for part in own]
    assert all(part.start % size == 0 for part in slices)
    assert slices[-1].stop == n_rows or not n_rows % size
    assert sorted(row for part in slices for row in range(part.start, part.stop)) == list(range(n_rows))
    assert [splits for _, splits in ours] == [splits for _, splits in ragged_last]
    if not n_rows % size:
        assert ours == ragged_last


def test_splits_of_earlier_load_requests_stay_as_they_are_unless_that_is_waived() -> None:
    settings = known_chunks(RandomSampler(4, 4, 8))
    assert settings is not None
    kept, reused = (list(chunk_requests(settings, 96, np.random.default_rng(0), copy=copy)) for copy in (True, False))
    read = list(listed(chunk_requests(settings, 96, np.random.default_rng(0))))
    assert list(listed(iter(kept))) == read
    assert list(listed(iter(reused))) != read


def test_other_samplers_and_subclasses_run_themselves() -> None:
    class Own(RandomSampler):
        """A user's."""

    labels = pd.Categorical(["B"] * 40)
    assert known_chunks(Own(4, 2, 4)) is None
    assert known_chunks(ClassSampler(4, 2, 4, classes=labels, num_samples=8)) is None
    assert known_chunks(RandomSampler(4, 2, 4)) == (4, 2, 4, False, False, None, True)


@pytest.mark.parametrize(
    "change", ["_compute_slices_without_replacement", "_compute_slices_with_replacement", "_iter_from_slices_base"]
)
def test_samplers_run_themselves_under_an_annbatch_that_draws_otherwise(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = RandomSampler.__mro__[1]
    theirs = getattr(kind, change)

    def otherwise(self: Any, *arguments: Any) -> Any:
        self._rng.random()
        return theirs(self, *arguments)

    def chunks_of(n_ranks: int) -> list[Listed]:
        replacement = change == "_compute_slices_with_replacement"
        sampler = RandomSampler(4, 4, 8, replacement=replacement, rng=np.random.default_rng(0))
        return list(listed(DistributedSampler(sampler, dist_info=Rank(0, n_ranks), seed=0).sample(96)))

    before = chunks_of(1)
    monkeypatch.setattr(kind, change, otherwise)
    is_as_annbatch.cache_clear()
    try:
        assert not is_as_annbatch()
        assert chunks_of(1) != before
    finally:
        monkeypatch.undo()
        is_as_annbatch.cache_clear()
    assert is_as_annbatch()
    assert chunks_of(1) == before


@given(samplers(), st.integers(1, 300), st.integers(1, 40), st.integers(0, 8), st.sampled_from([1, 4, 7, 2048]))
def test_global_rows_are_those_of_the_chunks_however_many_are_looked_up_at_once(
    sampler: RandomSampler | SequentialSampler, n_rows: int, length: int, longest_hole: int, at_once: int
) -> None:
    try:
        sampler.validate(n_rows)
    except ValueError:
        assume(False)
    settings = known_chunks(sampler)
    assert settings is not None
    rows = Rows(tuple(range(start * 2, start * 2 + min(length, n_rows - start)) for start in range(0, n_rows, length)))
    try:
        local = list(chunk_requests(settings, n_rows, np.random.default_rng(0)))
    except RuntimeError:  # as annbatch's own, see above
        assume(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests_module, "_SLICES_AT_ONCE", at_once)
        translated = list(translate_chunks(local, rows, longest_hole=longest_hole))
    for ours, found in zip(local, translated, strict=True):
        slices = found["requests"]
        if isinstance(slices, Slices):
            assert slices.n_rows == sum(part.stop - part.start for part in slices)
        for before, after in zip(ours["splits"], found["splits"], strict=True):
            assert rows_of(slices)[after].tolist() == rows.to_global(rows_of(ours["requests"])[before]).tolist()


def test_a_pass_over_a_billion_rows_begins_without_a_slice_for_each_chunk() -> None:
    """What is held is four bytes for each chunk; a slice and its bounds would be 120."""
    sampler = DistributedSampler(RandomSampler(64, 512, 4096), dist_info=Rank(3, 8), seed=0)
    sampler.plan(10**9)
    tracemalloc.start()
    try:
        request = next(sampler.sample(10**9))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(cast("list[slice]", request["requests"])) == 512
    n_chunks = 10**9 // 8 // 64
    assert peak < 4 * n_chunks + 4_000_000
