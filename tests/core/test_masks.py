"""The rows that masks select, compared with enumerating them, and the forms of masks."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank, Rows
from annbatch_distributed.core.masks import open_ended, resolve_mask
from tests.strategies import masks, selected

N_OBS = 100


@given(masks(N_OBS).filter(lambda mask: mask is not None))
def test_mask_selects_like_an_array_index(mask: Any) -> None:
    """A mask selects the same rows of a collection as of an array."""
    resolved = resolve_mask(mask)
    window = resolved.selected(N_OBS)
    assert list(window) == selected(mask, N_OBS)
    assert window == Rows.from_indices(selected(mask, N_OBS))
    assert resolve_mask(resolved.to_argument()).selected(N_OBS) == window


@given(st.lists(st.booleans(), min_size=60, max_size=60), st.lists(st.booleans(), min_size=60, max_size=60))
def test_masks_of_equal_rows_are_equal_json(one: list[bool], other: list[bool]) -> None:
    """Masks of any form are equal as JSON if and only if they select the same rows."""
    texts = []
    for flags in (one, other):
        rows = [row for row, flag in enumerate(flags) if flag]
        if not rows:
            return
        bounds = [[row for row, _ in run] for flag, run in groupby(enumerate(flags), key=lambda pair: pair[1]) if flag]
        forms: list[Any] = [
            np.array(flags),
            pd.Series(flags),
            pd.Series(flags, dtype="boolean"),
            np.array(rows[::-1]),
            Rows.from_indices(rows[::-1]),
            [slice(run[0], run[-1] + 1) for run in bounds],
        ]
        (text,) = {json.dumps(resolve_mask(form).to_json()) for form in forms}
        texts.append(text)
    assert (texts[0] == texts[1]) == (one == other)


def test_mask_as_json_lists_ranges_or_digests_many() -> None:
    """A mask lists up to 16 ranges or has their digest; an open end is the end of the collection, known or not."""
    assert resolve_mask([slice(50, None), slice(0, 10)]).to_json() == {"ranges": [[0, 10], [50, None]]}
    numbers = np.arange(0, 34, 2)
    assert resolve_mask(numbers[:16]).to_json()["ranges"][-1] == [30, 31]
    digest = resolve_mask(numbers).to_json()
    assert digest.keys() == {"n_ranges", "digest", "stop"}
    assert (digest["n_ranges"], digest["stop"]) == (17, 33)
    assert digest["digest"] == "dbfc709d0a6d65865206f084fe2ce149"  # states of earlier versions have it
    for others in (numbers + 1, np.append(numbers, 33), np.append(numbers[:-1], 31)):
        assert resolve_mask(others).to_json() != digest
    for ranges in ([slice(0, 10)], [slice(row, row + 1) for row in numbers]):
        closed, is_open = (resolve_mask([*ranges, slice(50, end)]).to_json() for end in (100, None))
        assert open_ended(closed, 100) == open_ended(is_open, 100) == is_open != closed
        assert open_ended(closed, 101) == closed


@pytest.mark.parametrize(
    ("mask", "argument", "rows"),
    [
        (slice(None), slice(0, None), "0:100"),
        (slice(0, None, 1), slice(0, None), "0:100"),
        (slice(30), slice(0, 30), "0:30"),
        (slice(30, 100, 1), slice(30, 100), "30:100"),
        (slice(np.int32(3), np.int64(9)), slice(3, 9), "3:9"),
        ([slice(50, None), slice(0, 10)], [slice(0, 10), slice(50, None)], "0:10, 50:100"),
        ((slice(0, 10), slice(10, 20)), slice(0, 20), "0:20"),
        ([slice(5, 7)], slice(5, 7), "5:7"),
        (np.array([7, 3, 4]), Rows((range(3, 5), range(7, 8))), "3:5, 7:8"),
        (Rows((range(7, 9), range(2))), Rows((range(2), range(7, 9))), "0:2, 7:9"),
    ],
)
def test_mask_is_returned_in_normal_form(mask: Any, argument: Any, rows: str) -> None:
    """A mask is returned as slices or `Rows`, with an open start as 0."""
    resolved = resolve_mask(mask)
    assert resolved.to_argument() == argument
    assert str(resolved.selected(N_OBS)) == rows
    assert resolved.is_open == (str(resolved.selected(2 * N_OBS)) != rows)


@given(masks(N_OBS), masks(N_OBS), st.booleans())
def test_mask_must_lie_within_the_outer_mask(wider: Any, mask: Any, within: bool) -> None:
    """A mask may narrow down the outer mask; the error names a range beyond it."""
    allowed = selected(wider, N_OBS)
    wanted = [row for row in selected(mask, N_OBS) if row in allowed or not within]
    beyond = [row for row in wanted if row not in allowed]
    outer = resolve_mask(slice(None) if wider is None else wider)
    for own in (Rows.from_indices(wanted), np.array(wanted, dtype=np.int64), [slice(row, row + 1) for row in wanted]):
        if wanted and not beyond:
            assert list(resolve_mask(own, within=outer).selected(N_OBS)) == wanted
        elif wanted:
            with pytest.raises(ValueError, match="the mask of the wrapped sampler") as raised:
                resolve_mask(own, within=outer)
            match = re.search(r"also selects \[(\d+), (\d+)\)", str(raised.value))
            assert match
            assert int(match[1]) <= beyond[0] < int(match[2])


def test_open_mask_is_limited_by_the_outer_mask() -> None:
    """An open mask becomes the outer mask, and an open end stops at the end of the outer mask."""
    within = resolve_mask([slice(0, 20), slice(40, None)])
    for everything in (slice(None), slice(0, None), [slice(None, None, 1)], slice(np.int64(0), None)):
        assert resolve_mask(everything, within=within) is within
    assert resolve_mask(slice(50, None), within=within).to_argument() == slice(50, None)
    narrow = resolve_mask(slice(10, 60))
    assert [resolve_mask(part, within=narrow).to_argument() for part in (slice(30), slice(30, None))] == [
        slice(10, 30),
        slice(30, 60),
    ]
    with pytest.raises(ValueError, match=re.escape("[0, 20), [40, end), got [10, end)")):
        resolve_mask(slice(10, None), within=within)


def test_mask_of_empty_collection_raises() -> None:
    with pytest.raises(ValueError, match="Add datasets"):
        resolve_mask(slice(None)).selected(0)


def test_list_of_integers_selects_rows() -> None:
    """A list of integers is row indices, and a list with other values is refused."""
    assert resolve_mask([5, 3, np.int64(4)]).rows == Rows.from_indices([3, 4, 5])
    for wrong in ([5, 3.0], [5, True], [5, slice(0, 2)]):
        with pytest.raises(TypeError, match="mask must be a slice"):
            resolve_mask(wrong)


def test_mask_can_be_reset_to_all_rows() -> None:
    """None, the default of the argument, selects all rows again."""
    sampler = DistributedSampler(RandomSampler(2, 2, 2, mask=slice(2, 18)), dist_info=Rank(0, 1), mask=[5, 3], seed=0)
    assert list(sampler.plan(20).selected) == [3, 5]
    sampler.mask = None
    assert sampler.plan(20).selected == Rows((range(2, 18),))


def test_mask_that_changes_after_an_epoch_applies_to_the_next() -> None:
    """The epoch has ended, so the next one is read, and not its first part again."""
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), seed=0)
    assert len([*sampler.sample(48)]) == 6
    sampler.mask = slice(0, 24)
    assert (sampler.next_epoch, sampler.plan(48).epoch) == (1, 1)
    assert len([*sampler.sample(48)]) == 3
