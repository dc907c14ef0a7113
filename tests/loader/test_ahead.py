"""Items that are made ahead in a thread: their order, how many there are, errors, and the end of it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from annbatch_distributed.loader import ahead
from annbatch_distributed.loader.ahead import Ahead

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


class Made:
    """Stretches of items, which says how many stretches and items were made, and where."""

    def __init__(self, n_stretches: int = 6, n_items: int = 3, takes: float = 0.0) -> None:
        self.n_stretches, self.n_items, self.takes = n_stretches, n_items, takes
        self.n_begun = self.n_made = 0
        self.by_thread: Counter[str] = Counter()
        self.is_closed = False

    def stretches(self) -> Generator[Iterator[int]]:
        try:
            for number in range(self.n_stretches):
                self.n_begun += 1
                self.by_thread[threading.current_thread().name] += 1
                time.sleep(self.takes)
                yield self._items(number)
        finally:
            self.is_closed = True

    def _items(self, number: int) -> Iterator[int]:
        for item in range(self.n_items):
            self.n_made += 1
            yield number * self.n_items + item


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "annbatch-distributed: Ahead"]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("most_times", [0, 8, 1e12])
@pytest.mark.parametrize("n_ahead", [1, 2, 9])
def test_items_come_in_their_order(n_ahead: int, most_times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MOST_TIMES", most_times)
    made = Made()
    assert list(Ahead(made.stretches(), n_ahead)) == list(range(18))
    assert made.is_closed
    wait_until(lambda: not running())


@pytest.mark.parametrize("n_ahead", [1, 2])
def test_as_many_stretches_are_made_ahead_as_were_asked_for_and_no_more(
    n_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST_TIMES", 1e12)
    made = Made()
    items = Ahead(made.stretches(), n_ahead)
    for number in range(18):
        assert next(items) == number
        expected = min(6, number // 3 + 1 + n_ahead)
        wait_until(lambda expected=expected: made.n_made == 3 * expected)
        time.sleep(0.005)
        assert (made.n_begun, made.n_made) == (expected, 3 * expected)
    items.close()


def test_a_thread_is_at_work_while_items_are_in_use_and_not_where_that_gains_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used, unused = Made(takes=0.01), Made(takes=0.01)
    with monkeypatch.context() as patient:  # with a machine that stands still for a while
        patient.setattr(ahead, "_MOST_TIMES", 1e4)
        for _ in Ahead(used.stretches(), 1):
            time.sleep(0.005)
    assert used.by_thread == {"annbatch-distributed: Ahead": 6}
    assert list(Ahead(unused.stretches(), 1)) == list(range(18))
    # the second stretch was begun before it was known how long the first one is in use
    assert unused.by_thread["MainThread"] >= 4


def test_what_is_known_of_the_use_of_items_is_where_the_next_ones_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    used, unused = Made(takes=0.01), Made(takes=0.01)
    monkeypatch.setattr(ahead, "_MOST_TIMES", 1e4)
    items = Ahead(used.stretches(), 1, is_worth_it=False)
    for item in items:
        assert items.is_worth_it is (item >= 3)
        # nothing is made before the second stretch has shown otherwise
        assert (used.n_made == item + 1) or item >= 3
        time.sleep(0.005)
    assert used.by_thread == {"MainThread": 1, "annbatch-distributed: Ahead": 5}
    monkeypatch.setattr(ahead, "_MOST_TIMES", 0)
    items = Ahead(unused.stretches(), 1, is_worth_it=False)
    assert list(items) == list(range(18))
    assert unused.by_thread == {"MainThread": 6}
    assert not items.is_worth_it


@pytest.mark.parametrize("n_ahead", [1, 2])
def test_a_thread_stops_where_it_gains_nothing_and_goes_on_where_it_does(
    n_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, by_main = Made(n_stretches=24), []
    items = Ahead(made.stretches(), n_ahead)
    for number, item in enumerate(items):
        assert item == number
        # for six stretches it does, and for the next six it doesn't
        monkeypatch.setattr(ahead, "_MOST_TIMES", 0 if number // 18 % 2 else 1e12)
        by_main.append(made.by_thread["MainThread"])
    # it is known when the next stretch is begun, and those that were made ahead are taken first
    assert by_main[20] == 0
    assert 6 - n_ahead <= by_main[38] == by_main[56] <= 6
    assert 5 - n_ahead <= by_main[-1] - by_main[56] <= 5
    assert made.by_thread.total() == 24
    wait_until(lambda: not running())


@pytest.mark.parametrize("most_times", [0, 1e12])
def test_errors_are_raised_where_the_item_would_be_and_then_it_is_over(
    most_times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST_TIMES", most_times)

    def stretches() -> Generator[Iterator[int]]:
        yield iter([0, 1])
        yield iter([2, 3])
        raise KeyError("third")

    items = Ahead(stretches(), 1)
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="third"):
        next(items)
    assert next(items, None) is None
    items.close()
    assert next(Ahead((iter(()) for _ in range(2000)), 1), None) is None


@pytest.mark.parametrize("most_times", [0, 1e12])
def test_an_error_in_the_middle_of_a_stretch_comes_after_the_items_before_it(
    most_times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST_TIMES", most_times)

    def items(stretch: int) -> Generator[int]:
        for item in range(3):
            if (stretch, item) == (2, 1):
                raise MemoryError("eighth")
            yield 3 * stretch + item

    taken = Ahead((items(stretch) for stretch in range(9)), 1)
    assert [next(taken) for _ in range(7)] == list(range(7))
    with pytest.raises(MemoryError, match="eighth"):
        next(taken)
    taken.close()


class Forgotten:
    """A consumer in a cycle of references, with what is made for it ahead."""

    def __init__(self, stretches: Generator[Iterator[int]]) -> None:
        self.taken = self._take(Ahead(stretches, 1))
        next(self.taken)

    def _take(self, items: Ahead[int]) -> Generator[int]:
        with closing(items):
            yield from items


@pytest.mark.parametrize("where", ["elsewhere", "in the thread"])
def test_one_that_is_collected_as_garbage_ends_without_anybody_waiting_for_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST_TIMES", 1e12)
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    is_forgotten, is_closed = threading.Event(), threading.Event()

    def stretches() -> Generator[Iterator[int]]:
        try:
            yield iter([0])
            assert is_forgotten.wait(20)
            if where == "in the thread":
                gc.collect()
            yield iter([1])
        finally:
            is_closed.set()

    forgotten = Forgotten(stretches())
    wait_until(running)
    del forgotten
    if where == "elsewhere":
        gc.collect()  # which would wait for ever, if it waited for the thread
    is_forgotten.set()
    assert is_closed.wait(20)
    wait_until(lambda: not running())
    assert not unraisable


@pytest.mark.parametrize("n_taken", [0, 1, 4, 18])
def test_closing_waits_for_the_thread_and_closes_what_makes_the_items(
    n_taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST_TIMES", 1e12)
    made = Made(takes=0.01)
    items = Ahead(made.stretches(), 1)
    for _ in range(n_taken):
        next(items)
    items.close()
    assert not running()
    n_begun = made.n_begun
    items.close()
    assert made.is_closed or not n_taken
    assert made.n_begun == n_begun <= 6


def test_where_no_thread_can_be_started_that_is_the_error_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    made = Made()
    items = Ahead(made.stretches(), 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(items)
    items.close()
    assert next(items, None) is None
    assert made.n_begun == 0


def test_one_that_is_forgotten_with_its_consumer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MOST_TIMES", 1e12)

    def consumer() -> Generator[int]:
        items = Ahead(Made().stretches(), 1)
        try:
            yield from items
        finally:
            items.close()

    taken = consumer()
    assert next(taken) == 0
    assert running()
    del taken
    gc.collect()
    assert not running()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_in_a_process_that_was_forked_it_is_an_error_and_closing_it_doesn_t_wait() -> None:
    items = Ahead(Made().stretches(), 1)
    next(items)
    child = os.fork()
    if not child:
        code = 1
        try:
            next(items)
        except RuntimeError as error:
            items.close()
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(items) == 1
    items.close()


SCRIPT = """
import sys, time
from annbatch_distributed.loader import ahead

def stretches():
    for number in range(100):
        {read}
        yield iter([number])

ahead._MOST_TIMES = 1e12
items = ahead.Ahead(stretches(), 1)
print(next(items), flush=True)
{then}
"""


def script(read: str, then: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(SCRIPT).format(read=read, then=then)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_interpreter_ends_while_a_thread_reads() -> None:
    process = script("time.sleep(0.3)", "sys.exit(3)")
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("0\n", "", 3)


@pytest.mark.parametrize("which", [0, 2])
def test_waiting_for_an_item_can_be_interrupted(which: int) -> None:
    read = f'print("reading", number, flush=True); time.sleep(5 if number == {which} else 0)'
    process = script(read, "list(items)")
    assert process.stdout is not None
    while process.stdout.readline() != f"reading {which}\n":
        assert process.poll() is None
    time.sleep(1.0)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0
    assert time.monotonic() - began < 20  # the read that is under way is waited for
