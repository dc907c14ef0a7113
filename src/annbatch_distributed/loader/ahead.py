"""Reading ahead: stretches of items are made in a thread, while the items of the stretch before are in use.

1. As many stretches as asked for are made beside the one in use, and no more: so what is held is bounded.
2. What making an item raises is raised where that item would be, and nothing is made after it.
3. Closing, as ``break`` does, cancels the stretches that wait, and waits for the one that is being made.
4. Where garbage is collected, nothing is waited for: that may be in any thread, whatever lock it holds, and the thread
   that makes the stretch may need that lock. It finishes the stretch, drops it, and ends.
5. A thread stays in its process when that is forked: in the child, to take another item is an error.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from concurrent.futures import Future

__all__ = ["ahead"]


def ahead[Item](stretches: Generator[Iterator[Item]], n_ahead: int) -> Generator[Item]:
    """Return the items of stretches, each of which a thread runs to its end before it asks for the next.

    ``n_ahead`` is how many stretches are made, at most, beside the one whose items are taken. With 0 there is no
    thread: items are made where they are taken.

    >>> list(ahead((iter(stretch) for stretch in ("ab", "cd")), 1))
    ['a', 'b', 'c', 'd']
    """
    if not n_ahead:
        with closing(stretches):
            yield from chain.from_iterable(stretches)
            return
    process, context = os.getpid(), copy_context()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="annbatch-distributed: ahead")
    made: deque[Future[_Stretch[Item] | None]] = deque()
    try:
        while True:
            while len(made) <= n_ahead:  # with the one that is taken next
                made.append(thread.submit(context.run, _make, stretches))
            stretch = made.popleft().result()
            if stretch is None:
                return
            items, errors = stretch
            while items:
                yield items.popleft()
                if os.getpid() != process:
                    raise RuntimeError(
                        "This iterator reads ahead in a thread of the process that has made it, and this process was "
                        "forked from that one. Begin a pass of its own here, with iter(loader)."
                    )
            if errors:
                raise errors.pop()
    finally:
        if os.getpid() == process:
            may_wait = not _collecting.is_now
            thread.shutdown(wait=may_wait, cancel_futures=True)
            if may_wait:
                stretches.close()


#: The items of a stretch, and what was raised after them.
type _Stretch[Item] = tuple[deque[Item], list[BaseException]]


def _make[Item](stretches: Generator[Iterator[Item]]) -> _Stretch[Item] | None:
    """Make the items of the next stretch; None if there is no next one."""
    items: deque[Item] = deque()
    try:
        stretch = next(stretches, None)
        if stretch is None:
            return None
        items.extend(stretch)
    except BaseException as error:  # noqa: BLE001 it is raised where the item would be
        stretches.close()
        return items, [error]
    return items, []


class _Collecting(threading.local):
    """Whether this thread collects garbage: an iterator can't tell being closed from being collected."""

    is_now = False

    def note(self, phase: str, _info: dict[str, int]) -> None:
        self.is_now = phase == "start"


_collecting = _Collecting()
gc.callbacks.append(_collecting.note)
