"""Processes that meet in a store: here threads, each with its own number, that come and go as Hypothesis has it."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from annbatch_distributed.checks.exchange import Rendezvous, Verdict, listed
from annbatch_distributed.checks.stores import TorchStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from annbatch_distributed.checks.stores import Store

NUMBERS = (2, 3, 7, 11)


def judge(texts: Sequence[str], numbers: Sequence[int]) -> Verdict:
    """Say what was heard of whom."""
    return Verdict("disagreement", json.dumps(dict(zip(numbers, texts, strict=True))))


def meet(
    store: Store, delays: dict[int, float], timeout: float, numbers: tuple[int, ...] = NUMBERS
) -> dict[int, Verdict]:
    """Let some processes come, each after a while, and return what each of them heard."""
    heard: dict[int, Verdict] = {}

    def come(number: int) -> None:
        time.sleep(delays[number])
        heard[number] = Rendezvous(store, number, numbers).verdict(f"I am {number}", judge, timeout)

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


@settings(max_examples=8)
@given(delays, st.sets(st.sampled_from(NUMBERS), min_size=1, max_size=3))
def test_who_does_not_come_is_named_to_all_others_and_they_can_meet_again(
    delays: dict[int, float], missing: set[int]
) -> None:
    store = TorchStore(HashStore())
    there = {number: delay for number, delay in delays.items() if number not in missing}
    for _ in range(2):
        verdicts = meet(store, there, timeout=1)
        (verdict,) = set(verdicts.values())
        assert verdict.kind == "timeout"
        assert f"{listed('process', sorted(missing))} didn't come within 1 seconds" in verdict.text
    # nobody hears of what was before, however often the others have called meanwhile
    assert {verdict.kind for verdict in meet(store, delays, timeout=20).values()} == {"disagreement"}


@settings(max_examples=25)
@given(st.fixed_dictionaries({number: st.sampled_from([0.0, 0.1, 0.19, 0.2, 0.21, 0.22, 0.3]) for number in NUMBERS}))
def test_even_if_one_comes_just_when_another_gives_up_it_is_a_timeout_for_all_or_for_none(
    delays: dict[int, float],
) -> None:
    verdicts = meet(TorchStore(HashStore()), delays, timeout=0.2)
    assert len({verdict.kind for verdict in verdicts.values()}) == 1


def test_other_processes_meet_elsewhere_in_the_same_store() -> None:
    store = TorchStore(HashStore())
    assert {verdict.kind for verdict in meet(store, {2: 0, 3: 0}, 20, numbers=(2, 3)).values()} == {"disagreement"}
    assert {verdict.kind for verdict in meet(store, dict.fromkeys(NUMBERS, 0.0), 20).values()} == {"disagreement"}


def test_what_was_said_is_not_kept() -> None:
    store = HashStore()
    meet(TorchStore(store), dict.fromkeys(NUMBERS, 0.0), timeout=20)
    # how many have come, how many verdicts there were, the first of these, and which round is open
    assert store.num_keys() == 4


@pytest.mark.parametrize("error", [MemoryError("no more"), KeyboardInterrupt()])
def test_if_the_last_to_come_fails_the_others_hear_of_it_at_once(error: BaseException) -> None:
    store = TorchStore(HashStore())

    def fails(texts: Sequence[str], numbers: Sequence[int]) -> Verdict:
        raise error

    heard: list[Verdict] = []
    thread = threading.Thread(target=lambda: heard.append(Rendezvous(store, 2, (2, 3)).verdict("I am 2", judge, 20)))
    thread.start()
    place = f"{Rendezvous(store, 2, (2, 3)).place}/0"
    while store.store.add(f"{place}/arrived", 0) == 0:
        time.sleep(0.01)
    with pytest.raises(type(error)):
        Rendezvous(store, 3, (2, 3)).verdict("I am 3", fails, 20)
    thread.join(20)
    assert f"process 3 has failed meanwhile with {type(error).__name__}" in heard[0].text


def test_who_fails_while_it_waits_ends_the_wait_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TorchStore(HashStore())
    monkeypatch.setattr(Rendezvous, "_wait", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        Rendezvous(store, 2, (2, 3)).verdict("I am 2", judge, 20)
    monkeypatch.undo()
    assert {one.kind for one in meet(store, {2: 0, 3: 0}, 20, numbers=(2, 3)).values()} == {"disagreement"}


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_first_process_leaves_when_all_that_came_have_heard_since_it_may_serve_the_store() -> None:
    store = TorchStore(HashStore())
    happened: list[str] = []

    class Slow(TorchStore):
        def set(self, key: str, text: str) -> None:
            if "/heard/" in key:
                time.sleep(0.5)
                happened.append("3 says that it has heard")
            super().set(key, text)

    def come(number: int, its: TorchStore) -> None:
        Rendezvous(its, number, (2, 3)).verdict("I am here", judge, 20)
        happened.append(f"{number} leaves")

    threads = [threading.Thread(target=come, args=pair) for pair in ((2, store), (3, Slow(store.store)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert happened.index("3 says that it has heard") < happened.index("2 leaves")


class Written(TorchStore):
    """A store into which somebody else writes."""

    written: ClassVar[dict[str, str]] = {}

    def get(self, key: str) -> str | None:
        text = super().get(key)
        return next((other for end, other in self.written.items() if key.endswith(end) and text is not None), text)


@pytest.mark.parametrize(
    "noise", ["", "garbage", "[" * 10**5, '{"kind": "fine", "text": ""', '{"kind": "good", "text": ""}']
)
def test_a_verdict_that_somebody_else_has_written_is_the_same_error_for_all(
    noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Written, "written", {"/verdict": noise})
    (verdict,) = set(meet(Written(HashStore()), dict.fromkeys(NUMBERS, 0.0), timeout=20).values())
    assert verdict.kind == "disagreement"
    assert "their verdict can't be read: " in verdict.text


@pytest.mark.parametrize("noise", ["garbage", "-1", "1.5", "9" * 5000, "\N{SUPERSCRIPT TWO}"])
def test_a_round_that_somebody_else_has_opened_is_the_same_error_for_all(
    noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    store.set(f"{Rendezvous(TorchStore(store), 2, NUMBERS).place}/open", noise)
    for number in NUMBERS:
        with pytest.raises(ValueError, match=r"their store says that round .* is open, which is no number"):
            Rendezvous(TorchStore(store), number, NUMBERS).verdict("I am here", judge, 20)


def test_what_is_no_text_is_read_as_one_that_nobody_says() -> None:
    store = HashStore()
    store.set("key", b"\xff\x00".decode("latin-1"))
    raw = Raw(store)
    assert TorchStore(raw).get("key") == "\N{REPLACEMENT CHARACTER}\x00"


class Raw:
    """A store like torch's, with bytes that are no text."""

    def __init__(self, store: HashStore) -> None:
        self.check = store.check

    def get(self, key: str) -> bytes:
        return b"\xff\x00"


def _use(store: Store) -> None:
    """Do what a rendezvous does with a store."""
    assert store.get("round/text") is None
    store.set("round/text", "what is said: \N{GREEK SMALL LETTER ALPHA}")
    assert store.get("round/text") == "what is said: \N{GREEK SMALL LETTER ALPHA}"
    store.set("round/text", "something else")
    assert store.get("round/text") == "something else"
    store.delete("round/text")
    assert store.get("round/text") is None
    assert [store.add("round/count"), store.add("round/count")] == [1, 2]


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
