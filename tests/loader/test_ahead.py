"""Reading ahead: the same items and errors in the same places, so many stretches and no more, and an end to it."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from annbatch_distributed.loader.ahead import ahead

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

#: How long a thread has for what it does at once, on a busy machine.
SECONDS = 20


class Made:
    """Six stretches of three items, which keep what was made."""

    def __init__(self, takes: float = 0.0) -> None:
        self.takes = takes
        self.n_begun = self.n_made = 0
        self.is_closed = False

    def stretches(self) -> Generator[Iterator[int]]:
        try:
            for number in range(6):
                self.n_begun += 1
                time.sleep(self.takes)
                yield self._items(number)
        finally:
            self.is_closed = True

    def _items(self, number: int) -> Iterator[int]:
        for item in range(3):
            self.n_made += 1
            yield number * 3 + item


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "annbatch-distributed" in thread.name]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("n_ahead", [1, 2, 9])
def test_items_come_in_their_order_also_after_stretches_without_any(n_ahead: int) -> None:
    stretches: list[list[int]] = [[0, 1], [], [2], [], [], [3, 4, 5], []]
    assert list(ahead((iter(stretch) for stretch in stretches), n_ahead)) == list(range(6))
    assert not threads()


@pytest.mark.parametrize("n_ahead", [1, 2])
def test_as_many_stretches_are_made_while_items_are_in_use_as_were_asked_for_and_no_more(n_ahead: int) -> None:
    made = Made()
    items = ahead(made.stretches(), n_ahead)
    for number in range(18):
        assert next(items) == number
        expected = min(6, number // 3 + 1 + n_ahead)
        wait_until(lambda expected=expected: made.n_made == 3 * expected)
        time.sleep(0.005)
        assert (made.n_begun, made.n_made) == (expected, 3 * expected)
    assert next(items, None) is None


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
@pytest.mark.parametrize("n_before", [0, 1, 3, 4])
def test_an_error_is_raised_where_its_item_would_be_and_nothing_is_made_after_it(
    n_before: int, error: type[BaseException]
) -> None:
    begun = []

    def stretch(number: int) -> Generator[int]:
        for item in range(3 * number, 3 * number + 3):
            if item == n_before:
                raise error(item)
            yield item

    def stretches() -> Generator[Iterator[int]]:
        for number in range(9):
            begun.append(number)
            yield stretch(number)

    items = ahead(stretches(), 2)
    assert list(islice(items, n_before)) == list(range(n_before))
    with pytest.raises(error, match=str(n_before)):
        next(items)
    assert next(items, None) is None
    assert begun == list(range(n_before // 3 + 1))
    assert not threads()


def test_an_error_of_what_makes_the_stretches_comes_after_the_items_before_it() -> None:
    def stretches() -> Generator[Iterator[int]]:
        yield iter([0, 1])
        raise KeyError("second")

    items = ahead(stretches(), 1)
    assert list(islice(items, 2)) == [0, 1]
    with pytest.raises(KeyError, match="second"):
        next(items)


def test_items_are_made_in_the_context_of_whoever_takes_them() -> None:
    variable = contextvars.ContextVar("variable", default="of no one")
    token = variable.set("of the consumer")
    try:
        assert list(ahead((iter([variable.get()]) for _ in range(2)), 1)) == ["of the consumer"] * 2
    finally:
        variable.reset(token)


@pytest.mark.parametrize("how", ["closed", "dropped"])
@pytest.mark.parametrize("n_taken", [1, 4, 18])
def test_closing_waits_for_what_is_being_made_and_nothing_is_made_after_it(n_taken: int, how: str) -> None:
    made = Made(takes=0.05)
    stretches = made.stretches()
    items = ahead(stretches, 3)
    list(islice(items, n_taken))
    n_begun = min(6, (n_taken - 1) // 3 + 2)
    wait_until(lambda: made.n_begun >= n_begun)
    assert threads()
    if how == "closed":
        items.close()
    del items
    assert not threads()
    assert made.is_closed
    assert made.n_begun == n_begun


class Forgotten:
    """A consumer in a cycle of references."""

    def __init__(self, stretches: Generator[Iterator[int]]) -> None:
        self.taken = self._take(ahead(stretches, 1))
        next(self.taken)

    def _take(self, items: Generator[int]) -> Generator[int]:
        yield from items


@pytest.mark.parametrize("where", ["elsewhere", "in the thread"])
def test_one_that_is_collected_as_garbage_ends_without_anybody_waiting_for_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    is_forgotten, is_closed = threading.Event(), threading.Event()

    def stretches() -> Generator[Iterator[int]]:
        try:
            yield iter([0])
            assert is_forgotten.wait(SECONDS)
            if where == "in the thread":
                gc.collect()
            yield iter([1])
        finally:
            is_closed.set()

    forgotten = Forgotten(stretches())
    del forgotten
    began = time.monotonic()
    if where == "elsewhere":
        gc.collect()
    assert time.monotonic() - began < SECONDS / 2
    is_forgotten.set()
    assert is_closed.wait(SECONDS)
    wait_until(lambda: not threads())
    assert not unraisable


def script(then: str, *, n_stretches: int = 100, read: str = "time.sleep(0.3)") -> subprocess.Popen[str]:
    """Take an item in a process of its own, print it, and do something then."""
    folder = str(Path(sys.modules[ahead.__module__].__file__ or "").parent)
    code = f"""
import os, signal, sys, time
sys.path.append({folder!r})  # without the package, which takes seconds to import
from ahead import ahead

signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells that start a job in the background have ignored

def stretches():
    for number in range({n_stretches}):
        {read}
        yield iter([number])

items = ahead(stretches(), 1)
print(next(items), flush=True)
{textwrap.dedent(then)}
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("then", ["list(items)", "items.close()"])
def test_in_a_process_that_was_forked_it_is_an_error_and_closing_it_doesn_t_wait(then: str) -> None:
    fork = f"""
        child = os.fork()
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(code, *items, flush=True)
        else:
            signal.alarm({SECONDS})
            {then}
    """
    is_error = then == "list(items)"
    out, err = script(fork, n_stretches=4).communicate(timeout=60)
    assert out == f"0\n{int(is_error)} 1 2 3\n"
    assert err.count("RuntimeError: This iterator reads ahead in a thread of the process") == is_error


def test_the_interpreter_ends_while_a_thread_reads() -> None:
    process = script("sys.exit(3)")
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("0\n", "", 3)


@pytest.mark.parametrize("which", [0, 2])
def test_waiting_for_an_item_can_be_interrupted(which: int) -> None:
    read = f'print("reading", number, flush=True); time.sleep(2 if number == {which} else 0)'
    process = script("list(items)", read=read)
    assert process.stdout is not None
    while process.stdout.readline() != f"reading {which}\n":
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0
    assert "reading 99" not in out
