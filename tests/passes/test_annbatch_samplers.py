"""What is known of annbatch's own samplers, and the private names that it is known by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.passes.annbatch_samplers import SETTINGS, is_annbatchs_own, is_restricted, restrict_by_mask
from annbatch_distributed.passes.fingerprint import fingerprint
from annbatch_distributed.rows import Rows
from tests.samplers import MaskBlind

if TYPE_CHECKING:
    from annbatch.abc import Sampler

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


@pytest.mark.parametrize("kind", [ClassSampler, WeightedClassSampler])
def test_only_annbatchs_own_class_samplers_are_trusted_to_stay_within_a_mask(kind: type[ClassSampler]) -> None:
    stretch, stretches = Rows((range(20, 40),)), Rows((range(20, 40), range(60, 80)))
    sampler = made(kind)
    assert [is_restricted(sampler, rows) for rows in (stretch, stretches)] == [True, False]
    restrict_by_mask(sampler, stretch)
    assert sampler.mask == slice(20, 40)
    for other in (made(type("Own", (kind,), {})), RandomSampler(5, 2, 5), MaskBlind(2)):
        assert not is_restricted(other, stretch)


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
