"""Processes that exchange texts in a store: here numbered threads, which arrive at times that Hypothesis chooses.

Their clock advances only while all of them sleep, so a timeout takes no time and a busy machine has no effect.
"""

from __future__ import annotations

import heapq
import threading
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, TCPStore

from annbatch_distributed.checks import exchange
from annbatch_distributed.checks.exchange import enumerated, gather_texts, store_of
from annbatch_distributed.ranks import RankSource
from tests.processes.launch import free_port

if TYPE_CHECKING:
    from annbatch_distributed.checks.exchange import Store

NUMBERS = (2, 3, 7, 11)
TEXTS = {number: f"I am {number}" for number in NUMBERS}


class Clock:
    """A clock of some threads. Once all of them sleep, it advances to the time at which the first one wakes."""

    def __init__(self, n_threads: int) -> None:
        self._now, self._n_awake, self._alarms = 0.0, n_threads, list[float]()
        self._changed = threading.Condition()

    def time(self) -> float:
        """Return the time in seconds."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let this thread wait."""
        with self._changed:
            alarm = self._now + seconds
            heapq.heappush(self._alarms, alarm)
            self._fall_asleep()
            self._changed.wait_for(lambda: self._now >= alarm)

    def leave(self) -> None:
        """Remove this thread, which ends, so that the clock no longer waits for it."""
        with self._changed:
            self._fall_asleep()

    def _fall_asleep(self) -> None:
        self._n_awake -= 1
        if self._n_awake == 0 and self._alarms:
            self._now = self._alarms[0]
            while self._alarms and self._alarms[0] <= self._now:
                heapq.heappop(self._alarms)
                self._n_awake += 1
            self._changed.notify_all()


def meet(
    store: Store,
    delays: dict[int, float],
    seconds: float,
    numbers: tuple[int, ...] = NUMBERS,
    clock: Clock | None = None,
) -> dict[int, object]:
    """Let some processes arrive, each after a delay, and return the outcome of each."""
    outcomes: dict[int, object] = {}
    clock = clock or Clock(len(delays))

    def arrive(number: int) -> None:
        clock.sleep(delays[number])
        try:
            outcomes[number] = exchange._meet(
                TEXTS[number], number, numbers, store, seconds, clock=clock.time, sleep=clock.sleep
            )
        except TimeoutError as error:
            outcomes[number] = str(error)
        finally:
            clock.leave()

    threads = [threading.Thread(target=arrive, args=(number,), daemon=True) for number in delays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert outcomes.keys() == delays.keys()
    return outcomes


delays = st.fixed_dictionaries({number: st.sampled_from([0.0, 0.01, 0.05, 0.9]) for number in NUMBERS})


@given(delays)
def test_exchange_delivers_every_text_to_every_process(delays: dict[int, float]) -> None:
    """Every process receives the texts of all processes soon after the last of them arrives."""
    store = HashStore()
    for _ in range(2):  # the second time in the same store
        clock = Clock(len(NUMBERS))
        assert meet(store, delays, seconds=20, clock=clock) == dict.fromkeys(NUMBERS, TEXTS)
        assert clock.time() < max(delays.values()) + 0.5  # soon after the last arrival


@given(delays, st.sets(st.sampled_from(NUMBERS), min_size=1, max_size=3))
def test_missing_process_is_named_on_every_rank(delays: dict[int, float], missing: set[int]) -> None:
    """A missing process is named in the error of every process, its own included; the next exchange works."""
    store = HashStore()
    present = {number: delay for number, delay in delays.items() if number not in missing}
    clock = Clock(len(present))
    (message,) = set(meet(store, present, seconds=1, clock=clock).values())
    assert clock.time() < max(present.values()) + 1.5  # the first process doesn't wait for the missing ones either
    assert f"of 4 processes, {enumerated('process', sorted(missing))} did not make this call within 1 seconds" in str(
        message
    )
    assert meet(store, dict.fromkeys(missing, 0.0), seconds=20) == dict.fromkeys(missing, message)
    assert meet(store, delays, seconds=20) == dict.fromkeys(NUMBERS, TEXTS)


def test_interrupted_process_is_named_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that is interrupted while it waits is named to the others; the next exchange works."""

    def interrupt(store: Store, key: str) -> str | None:
        raise KeyboardInterrupt

    store = HashStore()
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "_read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            exchange._meet(TEXTS[3], 3, NUMBERS, store, 20)
    (message,) = set(meet(store, {2: 0, 7: 0.05, 11: 0}, seconds=20).values())
    assert message == "The ranks can't be checked: process 3 failed while waiting, with KeyboardInterrupt()"
    assert meet(store, dict.fromkeys(NUMBERS, 0.0), seconds=20) == dict.fromkeys(NUMBERS, TEXTS)


class Overtaken(HashStore):
    """A store into which another process writes an outcome just before this one does."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        if key.endswith("/outcome"):
            self.set(key, '"a process has given up"')
        return super().compare_set(key, expected_value, desired_value)


def test_first_outcome_is_final_for_all() -> None:
    """The first outcome in the store applies to every process, even if two write at the same time."""
    assert meet(Overtaken(), {2: 0}, 20, numbers=(2,)) == {2: "a process has given up"}
    assert meet(HashStore(), {2: 0}, 20, numbers=(2,)) == {2: {2: TEXTS[2]}}


def test_different_groups_share_a_store() -> None:
    """Different groups of processes use one store without interference."""
    store = HashStore()
    two = {2: TEXTS[2], 3: TEXTS[3]}
    assert meet(store, {2: 0, 3: 0}, 20, numbers=(2, 3)) == {2: two, 3: two}
    assert meet(store, dict.fromkeys(NUMBERS, 0.0), 20) == dict.fromkeys(NUMBERS, TEXTS)


def test_store_keeps_no_texts() -> None:
    """The store contains only each process's number of calls after an exchange."""
    store = HashStore()
    for _ in range(3):
        meet(store, dict.fromkeys(NUMBERS, 0.0), seconds=20)
    assert store.num_keys() == len(NUMBERS)  # the number of calls of each


def test_first_process_leaves_after_all_have_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first process may serve the store, so it leaves only after the others have read the outcome."""
    store = HashStore()
    events: list[str] = []
    clock = Clock(2)
    read = exchange._read

    def slow(where: Store, key: str) -> str | None:
        text = read(where, key)
        if threading.current_thread().name == "3" and key.endswith("/outcome") and text:
            clock.sleep(0.5)
            events.append("3 has read")
        return text

    def arrive(number: int) -> None:
        exchange._meet("I am here", number, (2, 3), store, 20, clock=clock.time, sleep=clock.sleep)
        events.append(f"{number} leaves")
        clock.leave()

    monkeypatch.setattr(exchange, "_read", slow)
    threads = [threading.Thread(target=arrive, args=(number,), name=str(number), daemon=True) for number in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert events.index("3 has read") < events.index("2 leaves")


def test_pytorch_processes_meet_in_their_own_store() -> None:
    """Processes of PyTorch exchange texts in the store of their default group."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert gather_texts("I am alone", RankSource.of("torch").placement, seconds=20) == {0: "I am alone"}
    finally:
        dist.destroy_process_group()


def test_pytorch_without_a_store_suggests_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for processes of PyTorch without a store suggests `gather=`."""
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: None)
    with pytest.raises(RuntimeError, match=r"no store.*Pass gather="):
        store_of("torch")


def test_store_that_is_gone_is_named() -> None:
    """The error names the store that is gone; PyTorch's own error mentions only a broken connection."""
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", port, is_master=False)
    assert client.add("number", 1) == 1
    del server
    with pytest.raises(RuntimeError, match="PyTorch's store is gone"):
        exchange._meet(TEXTS[2], 2, NUMBERS, client, 20)
