"""Ahead: items that are made in stretches, in a thread while whoever takes them uses those of the stretch before.

1. As many stretches as were asked for are made ahead, and no more: so what is held is bounded.
2. Stretches are made whole in the thread, also the first, so that malloc has memory for them in one place. But while
   items are used for no longer than an eighth of the time that it takes to make them, a thread has nothing to gain, and
   costs some: then they are made where they are taken. Whether that is so is known from the second stretch on, and
   before that from whoever has taken the items of another generator in the same way.
3. What making an item raises is raised where that item would be.
4. ``close`` waits until the stretch that is being made is there: nothing goes on behind the back of whoever closes. At
   the end of the interpreter, all are closed. Where garbage is collected, which can be in any thread and wherever that
   holds a lock, nothing is waited for: the thread closes what it runs when it has come to its end.

A thread stays in its process when that is forked: there, to take another item is an error.
"""

from __future__ import annotations

import atexit
import contextvars
import gc
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Ahead"]

#: How many times longer it may take to make a stretch than its items are used, for a thread to gain anything.
_MOST_TIMES = 8


class Ahead[Item](Iterator[Item]):
    """The items of a generator of stretches, each of which is an iterator that is run to its end before the next one.

    ``n_ahead`` is how many stretches are made, at most, that no item was taken of. ``is_worth_it`` is whether a thread
    has anything to gain, as far as is known: at first what is given, and then what the stretch taken before has shown.

    >>> list(Ahead((iter(stretch) for stretch in ("ab", "cd")), 1))
    ['a', 'b', 'c', 'd']
    """

    def __init__(self, stretches: Generator[Iterator[Item]], n_ahead: int, *, is_worth_it: bool = True) -> None:
        self._stretches, self._n_ahead, self.is_worth_it = stretches, n_ahead, is_worth_it
        self._taken: Iterator[Item] = iter(())
        # how long the items of the last stretch were in use, since when the last one is, and how long they took to make
        self._used_for, self._used_since, self._made_in = 0.0, perf_counter(), 0.0 if is_worth_it else math.inf
        # shared with the thread: how many stretches are to be made ahead, those that are, and whether it makes one
        self._changed = threading.Condition()
        self._n_wanted, self._is_making, self._is_over, self._is_forgotten = 0, False, False, False
        self._made: deque[Iterator[Item]] = deque()
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        _open.add(self)

    def __next__(self) -> Item:
        if self._process != os.getpid():
            raise RuntimeError(
                "This iterator reads ahead in a thread of the process that has made it, and this process was forked "
                "from that one. Begin a pass of its own here, with iter(loader)."
            )
        self._used_for += perf_counter() - self._used_since
        while True:
            for item in self._taken:
                self._used_since = perf_counter()
                return item
            self._taken = self._next_stretch()

    def _next_stretch(self) -> Iterator[Item]:
        self.is_worth_it = self._used_for * _MOST_TIMES >= self._made_in
        self._used_for = 0.0
        if self.is_worth_it and self._thread is None and not self._is_over:
            run, name = contextvars.copy_context().run, "annbatch-distributed: Ahead"
            thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)
            thread.start()
            self._thread = thread
        with self._changed:
            self._n_wanted = self._n_ahead if self.is_worth_it else 0
            self._changed.notify_all()
            self._changed.wait_for(self._is_answered)
            if self._made:
                self._changed.notify_all()
                return self._made.popleft()
        if self._is_over:
            self._raise()
        return self._make(is_whole=False)

    def _is_answered(self) -> bool:
        """Whether the thread has made a stretch, or nothing more is to be had of it."""
        is_at_work = self._is_making or (self.is_worth_it and not self._is_over)
        return bool(self._made) or not is_at_work

    def _raise(self) -> None:
        error, self._error = self._error, None
        raise StopIteration if error is None else error

    def _make(self, *, is_whole: bool) -> Iterator[Item]:
        """Make a stretch, or only begin it."""
        began = perf_counter()
        try:
            stretch = next(self._stretches)
            found = _Emptied(stretch) if is_whole else stretch
        except BaseException:
            self._is_over = True
            raise
        self._made_in = perf_counter() - began
        return found

    def _run(self) -> None:
        while self._has_to_make():
            try:
                self._made.append(self._make(is_whole=True))
            except StopIteration:
                pass
            except BaseException as error:  # noqa: BLE001 it is raised where the items are taken
                self._error = error
            with self._changed:
                self._is_making = False
                self._changed.notify_all()
        if self._is_forgotten:
            self._stretches.close()

    def _has_to_make(self) -> bool:
        """Wait until a stretch is to be made; return False if none is any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self._made) < self._n_wanted)
            self._is_making = not self._is_over
            return self._is_making

    def close(self) -> None:
        """End it, and wait until nothing of it runs any more."""
        if self._process != os.getpid():  # whoever held the lock is not here to let go of it
            return
        with self._changed:
            self._is_over, self._is_forgotten = True, _collecting.is_now
            self._changed.notify_all()
        if _collecting.is_now:
            return
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            self._made.clear()
        self._stretches.close()


class _Collecting(threading.local):
    """Whether this thread collects garbage."""

    is_now = False

    def note(self, phase: str, _info: dict[str, int]) -> None:
        self.is_now = phase == "start"


_collecting = _Collecting()
gc.callbacks.append(_collecting.note)


class _Emptied[Item](Iterator[Item]):
    """The items of an iterator, which has been run, and then what it has raised; each is let go of as it is taken."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items: deque[Item] = deque()
        self._error: Exception | None = None
        try:
            self._items.extend(items)  # those before the error too
        except Exception as error:  # noqa: BLE001 it is raised where the item would be
            self._error = error

    def __next__(self) -> Item:
        if self._items:
            return self._items.popleft()
        error, self._error = self._error, None
        raise StopIteration if error is None else error


_open: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()


@atexit.register  # a thread that reads while the interpreter ends takes it down
def _close_all() -> None:
    for ahead in list(_open):
        with suppress(ValueError):  # one that another thread takes from, and is making
            ahead.close()
