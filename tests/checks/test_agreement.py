"""Ranks that compare their descriptions get an error that names each difference, or none if they agree."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank, Shuffled
from annbatch_distributed.checks import Tally
from annbatch_distributed.checks.agreement import Description, compare
from annbatch_distributed.checks.exchange import enumerated
from annbatch_distributed.ranks import Placement, deferred
from tests.meeting import heard, met

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch_distributed.checks.exchange import Gather
    from annbatch_distributed.core.rows import Rows


def described(rank: int, world_size: int, n_peers: int = 1) -> Description:
    """The description of one process of a job."""
    return Description(rank, world_size, n_peers, {"a": 1, "b": None}, "plan", {"c": 2})


def message_of(processes: list[Description], numbers: list[int] | None = None) -> str:
    """The message of the error of some processes, or an empty string."""
    try:
        compare(dict(zip(numbers or range(len(processes)), processes, strict=True)))
    except ValueError as error:
        return str(error)
    return ""


def agreement(ranks: list[DistributedSampler], n_obs: int = 100) -> list[str]:
    """The outcome of the check on each rank of a job."""
    return heard([partial(_check, sampler, n_obs) for sampler in ranks])


def _check(sampler: DistributedSampler, n_obs: int, gather: Gather) -> None:
    sampler.check_ranks_agree(n_obs, gather=gather)


@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_agreement_names_the_only_different_process(world_size: int, n_peers: int, data: st.DataObject) -> None:
    """Equal processes agree; a single process that differs is named in the error."""
    processes = [described(rank, world_size, n_peers) for rank in range(world_size) for _ in range(n_peers)]
    processes = data.draw(st.permutations(processes))
    assert message_of(processes) == ""
    if len(processes) == 1:
        return
    odd = data.draw(st.integers(0, len(processes) - 1))
    has = data.draw(
        st.sampled_from(["a", "b", "rank", "world_size", "n_peers", "plan", "problem"] + ["c"] * (n_peers > 1))
    )
    match has:
        case "rank":
            change = replace(processes[odd], rank=(processes[odd].rank + 1) % world_size)
        case "world_size" | "n_peers":
            change = replace(processes[odd], **{has: getattr(processes[odd], has) + 1})
        case "plan" | "problem":
            change = replace(processes[odd], **{has: "odd"})
        case "c":
            change = replace(processes[odd], same_for_peers={"c": "odd"})
        case _:
            change = replace(processes[odd], same=processes[odd].same | {has: "odd"})
    if change == processes[odd]:  # the only rank
        return
    processes[odd] = change
    text = message_of(processes)
    by_rank = [process.rank for process in processes] == list(range(len(processes)))
    assert f"{'rank' if by_rank else 'process'} {odd}" in text or has == "rank"
    assert text.count("\n") <= 4
    if has not in ("rank", "world_size", "n_peers"):
        assert "odd" in text


def test_processes_keep_the_numbers_of_their_framework() -> None:
    """Errors name processes by the numbers that their framework assigned."""
    peers = [described(0, 1, 2), replace(described(0, 1, 2), same_for_peers={"c": 3})]
    assert "c, of rank 0: 2 on process 4; 3 on process 6" in message_of(peers, [4, 6])
    assert "a: 1 on process 4; 3 on process 6" in message_of(
        [peers[0], replace(peers[0], same={"a": 3, "b": None})], [4, 6]
    )
    twice = [described(0, 2), described(0, 2)]
    assert "rank 0 belongs to processes 4 and 6\n  rank 1 belongs to no process" in message_of(twice, [4, 6])


def test_number_of_processes_must_match_world_size() -> None:
    """A number of processes that contradicts the world size is an error that names both numbers."""
    assert "there are 3 processes, but the world size is 2\n" in message_of(
        [described(rank % 2, 2) for rank in range(3)]
    )
    three_peers = [described(rank % 2, 2, 2) for rank in range(3)]
    assert "there are 3 processes, but the world size is 2 with 2 processes for each rank\n" in message_of(three_peers)


def test_differences_are_listed_up_to_a_limit() -> None:
    """A message about 200 different ranks lists about ten of them."""
    many = [described(rank, 200) for rank in range(200)]
    values = [replace(one, same={"a": rank}) for rank, one in enumerate(many)]
    assert message_of(values).count(";") == 10
    assert message_of([replace(one, rank=0) for one in many]).count("\n") == 12


@given(st.sets(st.integers(0, 30), min_size=1))
def test_enumeration_names_every_number_and_no_other(numbers: set[int]) -> None:
    """A list of numbers in a message names each number, and no other number."""
    text = enumerated("rank", sorted(numbers))
    listed_numbers: set[int] = set()
    for part in text.removeprefix("ranks ").removeprefix("rank ").replace(" and ", ", ").split(", "):
        first, *last = part.split(" to ")
        listed_numbers |= set(range(int(first), int(last[0] if last else first) + 1))
    assert listed_numbers == numbers


def of_three(rank: int, *, preload_nchunks: int = 2, **options: Any) -> DistributedSampler:
    """One of three ranks, which differs from the others only by its options."""
    wrapped = RandomSampler(4, preload_nchunks, 4, rng=np.random.default_rng(0))
    options = {"seed": 0, "sharding": "shuffled", "virtual_ranks": 3, **options}
    return DistributedSampler(wrapped, dist_info=Rank(rank, 3), **options)


def with_options(**options: Any) -> Callable[[], DistributedSampler]:
    return lambda: of_three(1, **options)


def in_epoch_3() -> DistributedSampler:
    sampler = of_three(1)
    sampler.set_epoch(3)
    return sampler


def resumed() -> DistributedSampler:
    sampler = of_three(1)
    sampler.load_state_dict(sampler.state_dict(batches_done=2))
    return sampler


def after_a_pass() -> DistributedSampler:
    sampler = of_three(1)
    list(sampler.sample(100))
    return sampler


#: A function that makes the second of three ranks, and the message on all of them.
ODD = {
    "seed": (with_options(seed=1), "seed: 0 on ranks 0 and 2; 1 on rank 1"),
    "remainder": (with_options(remainder="exact"), "remainder: drop on ranks 0 and 2; exact on rank 1"),
    "sharding": (
        with_options(sharding=Shuffled(5)),
        "sharding.block_size: 4 on ranks 0 and 2; 5 on rank 1",
    ),
    "sampler": (with_options(preload_nchunks=4), "sampler.preload_nchunks: 2 on ranks 0 and 2; 4 on rank 1"),
    "virtual ranks": (with_options(virtual_ranks=6), "virtual ranks: 3 on ranks 0 and 2; 6 on rank 1"),
    "epoch": (in_epoch_3, "epoch: 0 on ranks 0 and 2; 3 on rank 1"),
    "batches done": (resumed, "batches done: none on ranks 0 and 2; 2 on 3 ranks on rank 1"),
    "a whole pass of its own": (after_a_pass, "epoch: 0 on ranks 0 and 2; 1 on rank 1"),
    "too few rows": (
        with_options(mask=slice(0, 2)),
        "The mask selects 2 rows, too few for one full batch on every rank",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_difference_of_one_rank_raises_on_all(name: str) -> None:
    """A setting that differs on one rank raises the same error on every rank."""
    make, expected = ODD[name]
    (text,) = set(agreement([of_three(0), make(), of_three(2)]))
    assert expected in text


def test_different_calls_or_libraries_are_named() -> None:
    """Different calls, numbers of rows and library versions are named in the error, with their ranks."""

    def different_call(gather: Gather) -> None:
        of_three(1).check_epoch_read(100, Tally(), gather=gather)

    def with_another_annbatch(gather: Gather) -> None:
        known = "annbatch_distributed.checks.agreement._version"
        with patch(known, lambda name: "odd" if name == "annbatch" else version(name)):
            _check(of_three(1), 100, gather)

    others = [partial(_check, of_three(rank), 100) for rank in (0, 2)]
    (text,) = set(heard([others[0], different_call, others[1]]))
    assert text.endswith(" (process 1)\nAll of them must make the same calls in the same order.")
    (text,) = set(heard([others[0], partial(_check, of_three(1), 99), others[1]]))
    assert "n_obs: 100 on ranks 0 and 2; 99 on rank 1" in text
    (text,) = set(heard([others[0], with_another_annbatch, others[1]]))
    assert f"version of annbatch: {version('annbatch')} on ranks 0 and 2; odd on rank 1" in text


def test_generators_must_agree_within_a_shard_only() -> None:
    """Ranks may have different generators, unless they read the same shard."""

    def rank(number: int, n_peers: int) -> DistributedSampler:
        placement = Placement(number // n_peers, 2 // n_peers, "a mesh", n_peers=n_peers)
        return DistributedSampler(RandomSampler(4, 2, 4, rng=np.random.default_rng(number)), dist_info=placement)

    assert agreement([rank(0, 1), rank(1, 1)]) == ["", ""]
    peers = agreement([rank(0, 2), rank(1, 2)])
    assert len(set(peers)) == 1
    assert "randomness (a seed makes it the same), of rank 0: " in peers[0]


class Turned:
    """A sharding that starts, or turns the rows 8:24, at a row which no description shows."""

    def __init__(self, first: int, *, is_within: bool) -> None:
        self.hidden, self.is_within = io.StringIO(str(first)), is_within

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        first = int(self.hidden.getvalue())
        if not self.is_within:
            return rows.cyclic(first, len(rows))
        return rows.cut(0, 8) + rows.cut(8, 24).cyclic(first, 16) + rows.cut(24, len(rows))


@pytest.mark.parametrize("is_within", [False, True])
def test_hidden_difference_between_plans_raises(is_within: bool) -> None:
    """Plans that differ by a value that no setting shows raise the same error on every rank."""

    def rank(number: int, first: int) -> DistributedSampler:
        sharding = Turned(first, is_within=is_within)
        return DistributedSampler(SequentialSampler(4, 2, 4), dist_info=Rank(number, 2), sharding=sharding)

    assert agreement([rank(0, 8), rank(1, 8)]) == ["", ""]
    wrong = agreement([rank(0, 8), rank(1, 12)])
    assert len(set(wrong)) == 1
    assert "  plan, which must depend on another setting of a custom sampler or sharding: " in wrong[0]


def test_single_rank_agrees_without_communication() -> None:
    """A job of one rank checks itself without a process group."""
    DistributedSampler(SequentialSampler(4, 2, 4), dist_info=Rank(0, 1)).check_ranks_agree(100)


SECONDS = 20.0

#: Arguments of rank 1, and the error on both ranks.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no timeout": (
        {"timeout": None},
        "TypeError: timeout must be a number of seconds or a datetime.timedelta, got N",
    ),
    "a boolean": (
        {"timeout": True},
        "TypeError: timeout must be a number of seconds or a datetime.timedelta, got T",
    ),
    "nan": ({"timeout": float("nan")}, "ValueError: timeout must be positive and finite"),
    "no time": ({"timeout": timedelta(0)}, "ValueError: timeout must be positive and finite"),
    "no function": ({"gather": "allgather"}, "TypeError: gather must be a function"),
    "no rows": ({"n_obs": -1}, "ValueError: n_obs must be"),
}


def checking(rank: int, n_obs: int = 100, **kwargs: Any) -> Callable[[], str | None]:
    """A call of one of two ranks."""
    sampler = DistributedSampler(SequentialSampler(4, 2, 4), dist_info=Rank(rank, 2))
    return lambda: sampler.check_ranks_agree(n_obs, **{"timeout": SECONDS, **kwargs})


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_of_one_rank_raises_on_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid argument of one rank raises the same error on every rank."""
    options, expected = WRONG[name]
    (message,) = set(met([checking(0), checking(1, **options)], monkeypatch))
    assert message.startswith(f"ValueError: The ranks of this job can't be compared:\n  {expected}")
    assert message.endswith("(rank 1)")


@pytest.mark.parametrize("timeout", [np.float32(20), timedelta(seconds=20)])
def test_timeout_takes_seconds_or_a_timedelta(timeout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` is a number of seconds or a `timedelta`, after which the missing process is named."""
    assert met([checking(rank, timeout=timeout) for rank in range(2)], monkeypatch) == ["", ""]
    alone = [checking(0, timeout=type(timeout)(1) if not isinstance(timeout, timedelta) else timedelta(seconds=1))]
    message, _ = met([*alone, lambda: "nothing"], monkeypatch)
    assert "process 1 did not make this call within 1 seconds" in message


def test_process_of_unknown_rank_waits_until_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that can't determine its rank waits for the others until the timeout, then raises its own error."""

    def rank_too_early() -> tuple[int, int]:
        raise RuntimeError("the job has not begun")

    def time_out(text: str, job: Any, *, seconds: float, gather: Any) -> dict[int, str]:
        timeouts.append(seconds)
        raise TimeoutError

    timeouts: list[float] = []
    monkeypatch.setattr("annbatch_distributed.checks.agreement.initialized", lambda: "torch")
    monkeypatch.setattr("annbatch_distributed.checks.agreement.gather_texts", time_out)
    sampler = DistributedSampler(SequentialSampler(4, 2, 4), dist_info=deferred(rank_too_early))
    with pytest.raises(RuntimeError, match="the job has not begun"):
        sampler.check_ranks_agree(100, timeout=1)
    assert timeouts == [1]


def test_masks_that_differ_in_a_row_are_named() -> None:
    chosen = np.random.default_rng(0).random(10_000) < 0.8
    other = chosen.copy()
    other[np.flatnonzero(chosen)[100]], other[np.flatnonzero(~chosen)[100]] = False, True
    ranks = [
        DistributedSampler(RandomSampler(8, 2, 8), dist_info=Rank(rank, 3), mask=mask, seed=0)
        for rank, mask in enumerate([chosen, chosen, other])
    ]
    (text,) = set(agreement(ranks, 10_000))
    assert re.search(r"\n  rows.digest: [0-9a-f]{32} on ranks 0 and 1; [0-9a-f]{32} on rank 2\n", text)
