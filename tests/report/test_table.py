"""Plans in notebooks and as tables of pandas', against what the plan answers rank by rank."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, EpochPlan, Rank
from tests.strategies import POLICIES


def plan(n_obs: int, world_size: int, **kwargs: object) -> EpochPlan:
    sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=8)
    return DistributedSampler(sampler, dist_info=Rank(0, world_size), seed=0, **kwargs).plan(n_obs)


def html(made: EpochPlan) -> ET.Element:
    """What a notebook shows, which must be well-formed."""
    return ET.fromstring(made._repr_html_().replace("&hellip;", "..."))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_frame_has_a_line_for_each_rank(policy: str) -> None:
    made = plan(965, 20, remainder=policy)  # of which ranks have 48 or 49: under "keep", 6 or 7 batches
    frame = made.to_frame()
    assert list(frame.index) == list(range(20))
    assert list(frame["batches"]) == [made.n_batches(rank) for rank in range(20)]
    assert list(frame["rows"]) == [len(list(made.shard(rank).rows)) for rank in range(20)]
    assert frame["repeated"].sum() == made.n_repeated
    assert frame["global rows"][0].split(":")[0] == str(next(iter(made.shard(0).rows)))


def test_a_frame_of_virtual_ranks_says_who_runs_them() -> None:
    frame = plan(200, 2, virtual_ranks=4).to_frame()
    assert list(frame.index) == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_a_frame_of_draws_counts_samples() -> None:
    sampler = RandomSampler(4, 2, 8, replacement=True, num_samples=80)
    made = DistributedSampler(sampler, dist_info=Rank(0, 2), sharding="independent").plan(100)
    assert list(made.to_frame()["samples"]) == [40, 40]


def test_a_notebook_shows_a_line_and_a_bar_for_each_rank() -> None:
    made = plan(100, 3, mask=[slice(0, 40), slice(50, 90)])
    lines = html(made).findall(".//tbody/tr")
    assert [[cell.text for cell in line[:4]] for line in lines[:3]] == [
        [str(rank), "3", "24", "0"] for rank in range(3)
    ]
    assert [line.find(".//title").text for line in lines] == ["0:24", "24:40, 50:58", "58:82", "82:90"]
    # a bar has a unit for each of few rows
    assert {line.find(".//svg").get("viewBox") for line in lines} == {"0 0 100 12"}
    spans = [[(int(r.get("x")), int(r.get("width"))) for r in line.iter("rect")] for line in lines]
    assert spans == [[(0, 24)], [(24, 16), (50, 8)], [(58, 24)], [(82, 8)]]


def test_a_bar_of_many_rows_has_240_parts() -> None:
    *_, lost = html(plan(100_004, 2)).findall(".//tbody/tr")
    assert lost.find(".//svg").get("viewBox") == "0 0 240 12"
    assert [(r.get("x"), r.get("width")) for r in lost.iter("rect")] == [("239", "1")]


@pytest.mark.parametrize("world_size", [2, 256])
def test_what_a_notebook_shows_is_short_whatever_the_mask_and_the_number_of_ranks(world_size: int) -> None:
    flags = np.random.default_rng(0).random(100_000) < 0.9
    made = plan(100_000, world_size, mask=flags, sharding="shuffled")
    assert len(html(made).findall(".//tbody/tr")) <= 19
    assert len(made._repr_html_()) < 300_000
    assert len(repr(made)) < 200


def test_the_short_form_says_what_an_epoch_is() -> None:
    assert repr(plan(100, 3)) == "<EpochPlan of epoch 0: 3 ranks, 96 rows of 100, up to 4 batches each, 4 lost>"
    assert repr(plan(100, 3, remainder="pad")).endswith("120 rows of 100, up to 5 batches each, 20 repeated>")
    assert "4 virtual ranks" in repr(plan(100, 2, virtual_ranks=4))


def test_what_a_plan_says_would_lose_none_loses_none() -> None:
    text = str(plan(20_000, 3))
    (line,) = [line for line in text.splitlines() if line.startswith("to lose none")]
    (size,) = re.findall(r"batch_size=(\d+)", line) or [None]
    policies = re.findall(r'"(\w+)"', line)
    assert policies == ["exact", "keep", "pad"]
    assert size is None  # 20,000 is no multiple of 3
    for policy in policies:
        assert plan(20_000, 3, remainder=policy).n_lost == 0
