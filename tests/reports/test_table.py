"""Plans as text, in notebooks and as pandas tables, compared with the plan's answers for each rank."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, EpochPlan, Rank
from tests.samplers import MaskBlind, batches, job
from tests.strategies import POLICIES


def plan(n_obs: int, world_size: int, **kwargs: object) -> EpochPlan:
    sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=8)
    return DistributedSampler(sampler, dist_info=Rank(0, world_size), seed=0, **kwargs).plan(n_obs)


def test_text_lists_shards_and_dropped_rows() -> None:
    """A plan as text lists the shard of each rank, and the dropped rows."""
    assert str(plan(100, 3, mask=[slice(0, 40), slice(50, 90)])).splitlines() == [
        'epoch 0: 3 ranks share 80 of 100 rows (remainder="drop", batch size 8)',
        "rank  batches  rows  repeated  global rows",
        "   0        3    24         0  0:24",
        "   1        3    24         0  24:40, 50:58",
        "   2        3    24         0  58:82",
        "dropped in this epoch: 8 rows, 10% (82:90)",
        'to drop none: remainder="exact"',
    ]


def test_text_counts_repeated_rows() -> None:
    """A plan as text counts repeated rows, for each rank and in total."""
    assert str(plan(10, 2, remainder="pad")).splitlines()[2:] == [
        "   0        1     8         3  0:8",
        "   1        1     8         3  5:10, 0:3",
        "dropped in this epoch: 0 rows; repeated: 6",
        "in memory: up to 8 rows on each rank",
    ]


def test_text_of_many_ranks_is_shortened() -> None:
    """The text lists up to 16 ranks, or else the first 15 and the last."""
    for world_size in (16, 17, 1024):
        lines = [line.split() for line in str(plan(10**9 + 1, world_size)).splitlines()[2:-3]]
        if world_size > 16:
            assert lines.pop(15) == ["..."] * 5
        assert [line[0] for line in lines] == list(map(str, [*range(15), world_size - 1]))
        size = 10**9 // world_size // 8 * 8
        assert [line[-1] for line in lines] == [f"{int(line[0]) * size}:{(int(line[0]) + 1) * size}" for line in lines]


def test_resumed_plan_counts_remaining_and_dropped_batches() -> None:
    """The plan of a resumed epoch counts the batches that ranks read, and the batches that no rank reads."""
    sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=8)
    before, after = (job(sampler, world_size, seed=0, remainder="drop") for world_size in (3, 2))
    whole = [batches(rank.sample(130)) for rank in before]
    for rank in after:
        rank.load_state_dict(before[0].state_dict(batches_done=2))
    resumed = after[0].plan(130)
    remaining = [batches(rank.sample(130)) for rank in after]
    assert resumed.remaining == tuple(map(len, remaining)) == (4, 4)
    n_read = sum(len(own[:2]) for own in whole) + sum(map(len, remaining))
    assert resumed.n_dropped_batches == sum(map(len, whole)) - n_read == 1
    # a resumed epoch keeps its remainder, so the plan doesn't advise another one
    assert str(resumed).splitlines()[5:] == [
        "remaining: 4 batches on each of 2 ranks; dropped: 1",
        "dropped in this epoch: 10 rows, 7.7% (120:130)",
        "in memory: up to 8 rows on each rank",
    ]


@pytest.mark.parametrize("mask", [np.arange(40_000) % 3 > 0, [slice(0, 900), slice(1_000, 5_000)], None])
def test_memory_is_unknown_for_gaps_or_custom_samplers(mask: Any) -> None:
    """The rows in memory are unknown if the window has gaps or the sampler is a custom one."""
    sampler = MaskBlind(batch_size=8) if mask is None else RandomSampler(4, 2, 8)
    gapped = DistributedSampler(sampler, dist_info=Rank(0, 2), mask=mask).plan(40_000)
    assert gapped.rows_in_memory is None
    assert "in memory" not in str(gapped)


def html(shown: EpochPlan) -> ET.Element:
    """The HTML of a plan in a notebook, which must be well-formed."""
    return ET.fromstring(f"<div>{shown._repr_html_()}</div>")


@pytest.mark.parametrize("policy", POLICIES)
def test_frame_has_a_row_for_each_rank(policy: str) -> None:
    """The frame has one row for each rank, with the plan's numbers."""
    epoch_plan = plan(965, 20, remainder=policy)  # ranks have 48 or 49 rows: under "keep", 6 or 7 batches
    frame = epoch_plan.to_frame()
    assert list(frame.index) == list(range(20))
    assert list(frame["batches"]) == [epoch_plan.n_batches(rank) for rank in range(20)]
    assert list(frame["rows"]) == [len(list(epoch_plan.shard(rank).rows)) for rank in range(20)]
    assert frame["repeated"].sum() == epoch_plan.n_repeated
    assert frame["global rows"][0].split(":")[0] == str(next(iter(epoch_plan.shard(0).rows)))


def test_frame_names_virtual_ranks_and_counts_samples() -> None:
    """A frame names each virtual rank and its rank, and counts samples instead of rows with replacement."""
    frame = plan(200, 2, virtual_ranks=4).to_frame()
    assert frame.index.names == ["rank", "virtual rank"]
    assert list(frame.index) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    sampler = RandomSampler(4, 2, 8, replacement=True, num_samples=80)
    independent = DistributedSampler(sampler, dist_info=Rank(0, 2), sharding="independent").plan(100)
    assert list(independent.to_frame()["samples"]) == [40, 40]


def test_notebook_shows_title_table_and_notes() -> None:
    """A notebook shows the title of a plan, its table of ranks and its notes."""
    epoch_plan = plan(100, 3, mask=[slice(0, 40), slice(50, 90)])
    title, table, notes = html(epoch_plan)
    assert title.text == 'epoch 0: 3 ranks share 80 of 100 rows (remainder="drop", batch size 8)'
    lines = [[cell.text for cell in line] for line in table.findall("./tbody/tr")]
    assert lines == [
        ["0", "3", "24", "0", "0:24"],
        ["1", "3", "24", "0", "24:40, 50:58"],
        ["2", "3", "24", "0", "58:82"],
    ]
    assert list(notes.itertext()) == [
        "dropped in this epoch: 8 rows, 10% (82:90)",
        'to drop none: remainder="exact"',
    ]


def test_notebook_escapes_the_name_of_a_sharding() -> None:
    """The name of a sharding is escaped in HTML."""
    (title, *_) = html(plan(100, 2, sharding=lambda rows, *, epoch, seed: rows))
    assert title.text is not None
    assert "sharding=<lambda>" in title.text


@pytest.mark.parametrize("world_size", [16, 17, 256])
def test_notebook_shortens_many_ranks(world_size: int) -> None:
    """A notebook shows up to 16 ranks, or else the first 8 and the last 8."""
    flags = np.random.default_rng(0).random(100_000) < 0.9
    epoch_plan = plan(100_000, world_size, mask=flags, sharding="shuffled")
    ranks = [line[0].text for line in html(epoch_plan).findall(".//tbody/tr")]
    between = ["..."] * (world_size > 16)
    assert ranks == [*map(str, range(8)), *between, *map(str, range(world_size - 8, world_size))]
    assert len(repr(epoch_plan)) < 200
