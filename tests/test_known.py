"""What is known of samplers: of annbatch's own by private names, of users' by what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.rows import Rows
from annbatch_distributed.wrapped import (
    SETTINGS,
    chunk_size,
    fingerprint,
    is_annbatchs_own,
    localize,
    n_draws,
    needs_global_rows,
    settings,
)
from tests.samplers import MaskBlind, batches, flat, job, request_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

LABELS = pd.Categorical.from_codes(np.repeat([0, 1, 0, 2], 25), categories=["B", "NK", "T"])


def made(kind: Any) -> Any:
    if issubclass(kind, ClassSampler):
        return kind(5, 2, 5, classes=LABELS, num_samples=50, class_weights=np.array([1.0, 2.0, 3.0]))
    return kind(5, 2, 5)


class Own(RandomSampler):
    """A user's."""


#: As states of 0.3.1's samplers have them.
FINGERPRINTS = {
    RandomSampler: "RandomSampler(batch_size=5, chunk_size=5, drop_last=False, in_memory_size=10, num_samples=None, "
    "preload_nchunks=2, replacement=False, shuffle=True)",
    SequentialSampler: "SequentialSampler(batch_size=5, chunk_size=5, drop_last=False, in_memory_size=10, "
    "num_samples=None, preload_nchunks=2, replacement=False, shuffle=False)",
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_annbatch_still_keeps_its_settings_under_the_names_that_are_used_here(kind: type[Sampler]) -> None:
    """If this fails, annbatch has renamed, dropped or added what this package looks at or sets."""
    sampler = made(kind)
    others = {"_rle_manager", "_num_open_passes"} if isinstance(sampler, ClassSampler) else {"_mask"}
    assert set(vars(sampler)) == {*SETTINGS[kind], *others, "_rng"}
    assert sampler._chunk_size == 5
    if not isinstance(sampler, ClassSampler):
        assert sampler._num_samples is None
        assert not sampler._replacement
        return
    assert (sampler._num_samples, sampler._n_obs, sampler._num_open_passes) == (50, 100, 0)
    assert sampler._rle_manager._classes is LABELS
    assert sampler._rle_manager._weights.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_attribute_that_a_later_annbatch_adds_leaves_the_fingerprint_as_it_is(kind: type[Sampler]) -> None:
    before, later = made(kind), made(kind)
    later._added = 7
    assert fingerprint(later) == fingerprint(before) == FINGERPRINTS.get(kind, fingerprint(before))
    saved = DistributedSampler(before, dist_info=Rank(0, 2), seed=0).state_dict(batches_done=1)
    again = DistributedSampler(later, dist_info=Rank(0, 2), seed=0)
    again.load_state_dict(saved)
    assert again.batches_done == 1


def test_an_attribute_of_a_users_subclass_is_another_fingerprint() -> None:
    one, other = Own(5, 2, 5), Own(5, 2, 5)
    other.added = 7  # type: ignore[attr-defined]  # an attribute that the test adds
    assert fingerprint(one) != fingerprint(other)
    assert not is_annbatchs_own(one)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in SETTINGS for name in SETTINGS[kind]])
def test_another_value_of_any_setting_is_another_fingerprint(kind: type[Sampler], name: str) -> None:
    one, other = made(kind), made(kind)
    setattr(other, name, 1 - getattr(one, name) if isinstance(getattr(one, name), bool) else 17)
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("kind", [ClassSampler, WeightedClassSampler])
def test_other_labels_or_weights_are_another_fingerprint(kind: type[ClassSampler]) -> None:
    relabelled = LABELS.rename_categories(["X", "NK", "T"])
    others = [
        kind(5, 2, 5, classes=relabelled, num_samples=50, class_weights=np.array([1.0, 2.0, 3.0])),
        kind(5, 2, 5, classes=LABELS, num_samples=50, class_weights=np.array([1.0, 2.0, 4.0])),
        kind(5, 2, 5, classes=LABELS, num_samples=50),
    ]
    assert len({*map(fingerprint, others), fingerprint(made(kind))}) == 4


def class_sampler(cls: type[ClassSampler] = ClassSampler, **kwargs: object) -> ClassSampler:
    return cls(5, 2, 5, classes=LABELS, num_samples=500, rng=np.random.default_rng(0), **kwargs)


def test_class_weights_are_those_of_the_classes_in_its_rows() -> None:
    weights = np.array([0.0, 1.0, 3.0])
    rows = Rows((range(25, 100),))
    local = class_sampler(class_weights=weights)
    localize(local, rows, 100)
    drawn = np.array(flat(request_rows(request) for request in local.sample(len(rows))))
    counts = pd.Series(LABELS[rows.to_global(drawn)]).value_counts()
    assert counts["B"] == 0
    # 100 groups of a class each: 25 of NK expected, with a standard deviation of 4.3
    assert 5 * 8 < counts["NK"] < 5 * 47


def test_a_mask_that_cannot_be_assigned_is_an_error_that_names_the_sampler() -> None:
    class Fixed(MaskBlind):
        mask = property(lambda self: slice(0, 8))

    for rank in range(2):
        with pytest.raises(TypeError, match=r"Fixed has the mask slice\(0, 8, None\), which can't be assigned"):
            DistributedSampler(Fixed(2), dist_info=Rank(rank, 2)).n_batches(20)


def test_a_sampler_without_a_mask_reads_everything() -> None:
    class Maskless(MaskBlind):
        mask = None  # type: ignore[assignment]  # no mask, as users may have it

    assert str(DistributedSampler(Maskless(2), dist_info=Rank(0, 2)).plan(20).window) == "0:20"


def test_a_class_sampler_that_is_being_iterated_can_be_shared_out() -> None:
    sampler = class_sampler()
    open_pass = iter(sampler.sample(100))
    next(open_pass)
    for mask in (slice(0, 50), [slice(0, 25), slice(75, 100)]):
        wrapped = DistributedSampler(sampler, dist_info=Rank(0, 1), mask=mask)
        assert wrapped.n_batches(100) == len(batches(wrapped.sample(100)))


class Weighted(MaskBlind):
    """A user's sampler with a weight for each row of the collection: it reads the rows with a positive one."""

    def __init__(self, weights: np.ndarray) -> None:
        super().__init__(batch_size=1)
        self.weights = weights

    def n_batches(self, n_obs: int) -> int:
        return int((self.weights > 0).sum())

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        for row in np.flatnonzero(self.weights > 0):
            yield {"requests": [slice(int(row), int(row) + 1)], "splits": [np.arange(1)]}


class Localized(Weighted):
    """Says how it is narrowed down."""

    def localize(self, rows: Rows, n_obs: int) -> None:
        assert len(self.weights) == n_obs
        self.weights = rows.take(self.weights)


def test_a_users_sampler_that_needs_global_rows_runs_once_it_says_how_it_is_narrowed_down() -> None:
    ranks = job(Weighted(np.arange(8) % 2), 2)
    with pytest.raises(RuntimeError, match=r"Weighted was given the rows \[0, 4\) and asked for rows from \[5, 6\)"):
        list(ranks[0].sample(8))
    sampler = Localized(np.arange(8) % 2)
    assert needs_global_rows(sampler)
    assert [flat(map(request_rows, rank.sample(8))) for rank in job(sampler, 2)] == [[1, 3], [5, 7]]
    masked = job(sampler, 1, mask=np.arange(8) > 2)
    assert [flat(map(request_rows, masked[0].sample(8))) for _ in range(2)] == [[3, 5, 7]] * 2
    assert len(sampler.weights) == 8


class Saying(RandomSampler):
    """Says of itself what this package asks for; annbatch's answers are others."""

    chunk_size = 5

    def n_draws(self, n_rows: int) -> int:
        return 3 * n_rows

    def settings(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size}


def test_what_a_sampler_says_of_itself_is_taken_before_what_is_known_of_its_type() -> None:
    sampler = Saying(4, 2, 8)
    assert (chunk_size(sampler), n_draws(sampler, 7), settings(sampler)) == (5, 21, {"batch_size": 8})
    sampler.added = 7  # type: ignore[attr-defined]  # an attribute that the test adds
    assert fingerprint(sampler) == fingerprint(Saying(4, 2, 8)) != fingerprint(Saying(4, 2, 4))


def test_attributes_of_these_names_that_are_something_else_are_passed_over() -> None:
    sampler = MaskBlind(4)
    for name in ("n_draws", "set_draws", "localize", "settings"):
        setattr(sampler, name, 3)
    assert sorted(flat(flat(batches(rank.sample(8))) for rank in job(sampler, 2))) == list(range(8))


def test_class_samplers_draw_the_rows_of_their_classes_that_a_mask_selects() -> None:
    labels = pd.Categorical.from_codes(np.repeat([0, 1, 0, 1], 250), categories=["B", "T"])
    chosen = np.arange(1000) % 10 > 0
    sampler = ClassSampler(10, 4, 20, classes=labels, num_samples=400, rng=np.random.default_rng(0))
    for options in ({"sharding": "independent"}, {"sharding": "contiguous"}):
        for rank in range(2):
            distributed = DistributedSampler(sampler, dist_info=Rank(rank, 2), mask=chosen, seed=0, **options)
            drawn = [batch for _ in range(2) for batch in batches(distributed.sample(1000))]
            rows = np.array(flat(drawn))
            assert chosen[rows].all()
            assert {*labels[rows]} == {"B", "T"}
            assert all(len(set(labels[batch])) == 1 for batch in drawn)
