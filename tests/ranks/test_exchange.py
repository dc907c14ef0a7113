"""Processes that meet in a store: here threads, each with its own number, that come and go as Hypothesis has it."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from annbatch_distributed.ranks.exchange import Verdict, _Meeting
from annbatch_distributed.ranks.stores import TorchStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from annbatch_distributed.ranks.stores import Store

NUMBERS = [2, 3, 7, 11]


def judge(texts: Sequence[str], numbers: Sequence[int]) -> Verdict:
    """Say what was heard of whom."""
    return Verdict("disagreement", json.dumps(dict(zip(numbers, texts, strict=True))))


def meet(
    store: Store, delays: dict[int, float], timeout: float, numbers: Sequence[int] = NUMBERS
) -> dict[int, Verdict]:
    """Let some processes come, each after a while, and return what each of them heard."""
    heard: dict[int, Verdict] = {}

    def come(number: int) -> None:
        time.sleep(delays[number])
        heard[number] = _Meeting(store, number, numbers).hold(f"I am {number}", judge, timeout)

    threads = [threading.Thread(target=come, args=(number,)) for number in delays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert heard.keys() == delays.keys()
    return heard


delays = st.fixed_dictionaries({number: st.sampled_from([0.0, 0.01, 0.05]) for number in NUMBERS})


@settings(max_examples=15)
@given(delays)
def test_whoever_comes_last_all_hear_the_verdict_on_what_all_have_said(delays: dict[int, float]) -> None:
    store = TorchStore(HashStore())
    for _ in range(2):  # and again in the same store
        verdicts = meet(store, delays, timeout=20)
        assert set(verdicts.values()) == {judge([f"I am {number}" for number in NUMBERS], NUMBERS)}


@settings(max_examples=15)
@given(delays, st.sets(st.sampled_from(NUMBERS), min_size=1, max_size=3))
def test_who_does_not_come_is_named_to_all_others(delays: dict[int, float], missing: set[int]) -> None:
    store = TorchStore(HashStore())
    there = {number: delay for number, delay in delays.items() if number not in missing}
    verdicts = meet(store, there, timeout=0.3)
    (verdict,) = set(verdicts.values())
    assert verdict.kind == "timeout"
    assert f"process {', '.join(map(str, sorted(missing)))} didn't come within 0.3 seconds" in verdict.text
    # who comes later hears the same, and then all are together again
    late = meet(store, dict.fromkeys(sorted(missing), 0.0), timeout=20)
    assert set(late.values()) == {verdict}
    assert {verdict.kind for verdict in meet(store, delays, timeout=20).values()} == {"disagreement"}


@settings(max_examples=25)
@given(st.fixed_dictionaries({number: st.sampled_from([0.0, 0.1, 0.19, 0.2, 0.21, 0.22, 0.3]) for number in NUMBERS}))
def test_even_if_one_comes_just_when_another_gives_up_all_hear_the_same(delays: dict[int, float]) -> None:
    verdicts = meet(TorchStore(HashStore()), delays, timeout=0.2)
    assert len(set(verdicts.values())) == 1


def test_other_processes_meet_elsewhere_in_the_same_store() -> None:
    store = TorchStore(HashStore())
    assert {verdict.kind for verdict in meet(store, {2: 0, 3: 0}, 20, numbers=[2, 3]).values()} == {"disagreement"}
    assert {verdict.kind for verdict in meet(store, dict.fromkeys(NUMBERS, 0.0), 20).values()} == {"disagreement"}


def test_what_was_said_is_not_kept() -> None:
    store = HashStore()
    meet(TorchStore(store), dict.fromkeys(NUMBERS, 0.0), timeout=20)
    # how often each process has called, how many have come, how many verdicts there were, and the first of these
    assert store.num_keys() == len(NUMBERS) + 3


def test_if_the_last_to_come_does_not_answer_the_others_say_so() -> None:
    store = TorchStore(HashStore())

    def fails(texts: Sequence[str], numbers: Sequence[int]) -> Verdict:
        raise MemoryError

    thread = threading.Thread(target=lambda: meet(store, {2: 0.0}, 0.5, numbers=[2, 3]))
    thread.start()
    time.sleep(0.2)
    with pytest.raises(MemoryError):
        _Meeting(store, 3, [2, 3]).hold("I am 3", fails, 1)
    thread.join(20)
    assert "the last to come didn't answer within 0.5 seconds" in str(store.get(_verdict([2, 3])))


def _verdict(numbers: Sequence[int]) -> str:
    """The key of the first verdict of some processes."""
    from hashlib import blake2b

    who = blake2b(repr(tuple(numbers)).encode(), digest_size=8).hexdigest()
    return f"annbatch_distributed/{who}/1/verdict"


def _use(store: Store) -> None:
    """Do what a meeting does with a store."""
    assert store.get("room/text") is None
    store.set("room/text", "what is said: \N{GREEK SMALL LETTER ALPHA}")
    assert store.get("room/text") == "what is said: \N{GREEK SMALL LETTER ALPHA}"
    store.delete("room/text")
    assert store.get("room/text") is None
    assert [store.add("room/count"), store.add("room/count")] == [1, 2]


def test_the_store_in_which_torchs_processes_met_is_where_it_is_expected() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        _use(TorchStore.current())
    finally:
        dist.destroy_process_group()


def test_torchs_processes_without_a_store_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: None)
    with pytest.raises(RuntimeError, match=r"no store.*Pass gather="):
        TorchStore.current()
