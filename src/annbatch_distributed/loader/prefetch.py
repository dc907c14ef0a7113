"""Reading ahead: load requests are read in threads, while the batches of the one before are in use.

1. As many requests are read at once as asked for, beside the one in use, and no more: so what is held is bounded.
2. Items come in the order of the requests. An error is raised where its item would be, and no item comes after it.
3. Requests are made where items are taken: only reading is done in other threads.
4. Closing, as ``break`` does, cancels the reads that wait. One under way is finished, and dropped.
5. Threads stay in their process when that is forked: in the child, to take another item is an error.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context


def threads(n_ahead: int) -> ThreadPoolExecutor:
    """Return as many threads as requests are read ahead at once."""
    return ThreadPoolExecutor(n_ahead, thread_name_prefix="annbatch-distributed: ahead")


def prefetch[Request, Item](
    requests: Iterator[Request],
    read: Callable[[Request], Iterable[Item]],
    n_ahead: int,
    readers: Executor | None = None,
) -> Generator[Item]:
    """Return the items of what is read for each request.

    ``n_ahead`` is how many requests are read, at most, beside the one whose items are taken, by ``readers``, or by
    threads of its own. With 0 items are read where they are taken.

    >>> list(prefetch(iter(["ab", "cd"]), iter, 1))
    ['a', 'b', 'c', 'd']
    """
    if not n_ahead:
        for request in requests:
            yield from read(request)
        return
    # threads of this process: a child that is forked later has the iterator, but not them
    process, pool = os.getpid(), readers or threads(n_ahead)
    reads: deque[Future[_Read[Item]]] = deque()
    try:
        while True:
            # with the one that is taken next
            while len(reads) <= n_ahead and (begun := _begin(requests, read, pool)) is not None:
                reads.append(begun)
            if not reads:
                return
            items, error = reads.popleft().result()
            while items:
                yield items.popleft()
                if os.getpid() != process:
                    raise RuntimeError(
                        "This iterator reads ahead in threads of the process that has made it, and this process was "
                        "forked from that one. Begin a pass of its own here, with iter(loader)."
                    )
            if error is not None:
                raise error
    finally:
        if os.getpid() == process:
            for waiting in reads:
                waiting.cancel()
            if readers is None:
                pool.shutdown(wait=False)


#: The items of a request, and what was raised after them.
type _Read[Item] = tuple[deque[Item], BaseException | None]


def _read[Request, Item](read: Callable[[Request], Iterable[Item]], request: Request) -> _Read[Item]:
    """Read a request to its end."""
    items: deque[Item] = deque()
    try:
        items.extend(read(request))
    except BaseException as error:  # noqa: BLE001 it is raised where the item would be
        return items, error
    return items, None


def _begin[Request, Item](
    requests: Iterator[Request], read: Callable[[Request], Iterable[Item]], pool: Executor
) -> Future[_Read[Item]] | None:
    """Have the next request read; None if there is none."""
    try:
        request = next(requests)
    except StopIteration:
        return None
    except Exception as error:  # noqa: BLE001 it is raised after the items of the requests before
        failed: Future[_Read[Item]] = Future()
        failed.set_exception(error)
        return failed
    return pool.submit(copy_context().run, _read, read, request)
