"""Prefetching: the order of items and errors, the number of requests, and the end of threads."""

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

from annbatch_distributed.loader.prefetch import prefetched
from annbatch_distributed.loader.prefetch import threads as pool

if TYPE_CHECKING:
    from collections.abc import Generator

#: Time limit of a thread on a busy machine, in seconds.
SECONDS = 60


class Requests:
    """Six requests of three items each, and counts of their reads."""

    def __init__(self, takes: float = 0.0) -> None:
        self.takes = takes
        self.requests = iter(range(6))
        self.n_started = self.n_items = self.n_at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def read(self, number: int) -> Generator[int]:
        with self.lock:
            self.n_started += 1
            self.n_at_once += 1
            self.most_at_once = max(self.most_at_once, self.n_at_once)
        time.sleep(self.takes)
        for item in range(3):
            with self.lock:
                self.n_items += 1
            yield number * 3 + item
        with self.lock:
            self.n_at_once -= 1


#: Threads of iterators that earlier tests left open, such as the examples of a page.
others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _ignore_threads_of_other_tests() -> None:
    others.clear()
    others.update(threads())


def threads() -> list[threading.Thread]:
    """Return the prefetching threads that this test started and that are alive."""
    return [
        thread for thread in threading.enumerate() if "annbatch-distributed" in thread.name and thread not in others
    ]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("n_ahead", [0, 1, 2, 9])
def test_items_keep_order_after_empty_requests(n_ahead: int) -> None:
    """Items come in order, also after requests without items."""
    requests: list[list[int]] = [[0, 1], [], [2], [], [], [3, 4, 5], []]
    assert list(prefetched(iter(requests), iter, n_ahead)) == list(range(6))
    wait_until(lambda: not threads())


@pytest.mark.parametrize("n_ahead", [1, 2])
def test_number_of_prefetched_requests_is_exact(n_ahead: int) -> None:
    """Exactly the given number of requests is read while items are in use."""
    source = Requests()
    items = prefetched(source.requests, source.read, n_ahead)
    for number in range(18):
        assert next(items) == number
        expected = min(6, number // 3 + 1 + n_ahead)
        wait_until(lambda expected=expected: source.n_items == 3 * expected)
        time.sleep(0.005)
        assert (source.n_started, source.n_items) == (expected, 3 * expected)
    assert next(items, None) is None


@pytest.mark.parametrize("n_ahead", [1, 3])
def test_number_of_concurrent_requests_is_exact(n_ahead: int) -> None:
    source = Requests(takes=0.1)
    assert list(prefetched(source.requests, source.read, n_ahead)) == list(range(18))
    assert source.most_at_once == n_ahead


def test_several_share_the_threads_that_they_are_given() -> None:
    sources = Requests(takes=0.02), Requests(takes=0.02)
    with pool(1) as readers:
        both = [prefetched(own.requests, own.read, 1, readers) for own in sources]
        assert list(zip(*both, strict=True)) == [(number, number) for number in range(18)]
        assert len(threads()) == 1
        other = prefetched(iter(range(3)), lambda number: [number], 1, readers)
        assert next(other) == 0
        other.close()
        assert readers.submit(int).result() == 0  # the threads are not shut down


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
@pytest.mark.parametrize("n_before", [0, 1, 3, 4])
def test_error_is_raised_in_place_of_its_item(n_before: int, error: type[BaseException]) -> None:
    """An error is raised in the place of its item, and nothing comes after it."""

    def read(number: int) -> Generator[int]:
        for item in range(3 * number, 3 * number + 3):
            if item == n_before:
                raise error(item)
            yield item

    items = prefetched(iter(range(9)), read, 2)
    assert list(islice(items, n_before)) == list(range(n_before))
    with pytest.raises(error, match=str(n_before)):
        next(items)
    assert next(items, None) is None
    wait_until(lambda: not threads())


def test_error_of_request_iterator_comes_after_items() -> None:
    """An error of the iterator of requests comes after the items of earlier requests."""

    def requests() -> Generator[list[int]]:
        yield [0, 1]
        raise KeyError("second")

    items = prefetched(requests(), iter, 1)
    assert list(islice(items, 2)) == [0, 1]
    with pytest.raises(KeyError, match="second"):
        next(items)


def test_items_are_read_in_consumer_context() -> None:
    """Items are read with the context variables of their consumer."""
    variable = contextvars.ContextVar("variable", default="of no one")
    token = variable.set("of the consumer")
    try:
        assert list(prefetched(iter(range(4)), lambda _: [variable.get()], 2)) == ["of the consumer"] * 4
    finally:
        variable.reset(token)


@pytest.mark.parametrize("how", ["closed", "collected as garbage"])
@pytest.mark.parametrize("n_taken", [1, 4, 18])
def test_close_starts_no_further_request(n_taken: int, how: str) -> None:
    """Closing does not wait, and no request starts after it."""
    source, may_continue = Requests(), threading.Event()

    def read(number: int) -> Generator[int]:
        assert number < (n_taken + 2) // 3 or may_continue.wait(SECONDS)
        yield from source.read(number)

    class Consumer:
        def __init__(self) -> None:
            self.items = prefetched(source.requests, read, 3)
            self.itself = self

    consumer = Consumer()
    assert list(islice(consumer.items, n_taken)) == list(range(n_taken))
    if how == "closed":
        consumer.items.close()
    del consumer
    gc.collect()
    may_continue.set()
    wait_until(lambda: not threads())
    assert source.n_started <= min(6, (n_taken + 2) // 3 + 3)
    assert len(list(source.requests)) == 6 - min(6, (n_taken + 2) // 3 + 3)


def script(then: str, *, n_requests: int = 100, read: str = "time.sleep(0.3)") -> subprocess.Popen[str]:
    """Start a process that takes an item, prints it, and then runs `then`."""
    folder = str(Path(sys.modules[prefetched.__module__].__file__ or "").parent)
    code = f"""
import os, signal, sys, time
sys.path.append({folder!r})  # without the package, which takes seconds to import
from prefetch import prefetched

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT in background jobs

def read(number):
    {read}
    yield number

items = prefetched(iter(range({n_requests})), read, 1)
print(next(items), flush=True)
{textwrap.dedent(then)}
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("then", ["list(items)", "items.close()"])
def test_forked_process_raises_and_closes(then: str) -> None:
    """In a forked process, taking an item raises, and closing does not wait."""
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
    out, err = script(fork, n_requests=4).communicate()
    assert out == f"0\n{int(is_error)} 1 2 3\n"
    assert err.count("RuntimeError: This iterator was made in the parent process") == is_error


def test_the_interpreter_ends_while_a_thread_reads() -> None:
    process = script("sys.exit(3)")
    out, err = process.communicate()
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
    out, err = process.communicate()
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0
    assert "reading 99" not in out
