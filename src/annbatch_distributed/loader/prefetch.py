"""Prefetching: threads read load requests while the batches of the current one are in use.

1. At most ``n_ahead`` requests are read or held in addition to the current one, which bounds the memory.
2. Items come in the order of the requests. An error is raised in place of its item, and no item follows.
3. The thread that takes items makes the requests. Other threads only read.
4. Closing, as by ``break``, cancels the reads that haven't started. A running read finishes, and its items are dropped.
5. A forked process has no threads of its parent, so taking an item there raises.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context


def threads(n_ahead: int) -> ThreadPoolExecutor:
    """Return a pool with one thread for each request that is prefetched."""
    return ThreadPoolExecutor(n_ahead, thread_name_prefix="annbatch-distributed: ahead")


def prefetched[Request, Item](
    requests: Iterator[Request],
    read: Callable[[Request], Iterable[Item]],
    n_ahead: int,
    readers: Executor | None = None,
) -> Generator[Item]:
    """Yield the items that are read for each request.

    ``n_ahead`` is the largest number of requests to prefetch, in the threads of ``readers`` or in a new pool. Under 0,
    the consumer's thread reads.

    >>> list(prefetched(iter(["ab", "cd"]), iter, 1))
    ['a', 'b', 'c', 'd']
    """
    if not n_ahead:
        for request in requests:
            yield from read(request)
        return
    # a child that is forked later has a copy of the iterator, but not the threads
    process, pool = os.getpid(), readers or threads(n_ahead)
    reads: deque[Future[_Read[Item]]] = deque()
    try:
        while True:
            # n_ahead + 1 reads, including the one whose items come next
            while len(reads) <= n_ahead and (future := _begin(requests, read, pool)) is not None:
                reads.append(future)
            if not reads:
                return
            items, error = reads.popleft().result()
            while items:
                yield items.popleft()
                if os.getpid() != process:
                    raise RuntimeError(
                        "This iterator was made in the parent process, whose threads a forked process doesn't have. "
                        "Make a new iterator in this process with iter(loader)."
                    )
            if error is not None:
                raise error
    finally:
        if os.getpid() == process:
            for future in reads:
                future.cancel()
            if readers is None:
                pool.shutdown(wait=False)


#: The items of a request, and the error that was raised after them.
type _Read[Item] = tuple[deque[Item], BaseException | None]


def _read[Request, Item](read: Callable[[Request], Iterable[Item]], request: Request) -> _Read[Item]:
    """Read all items of a request."""
    items: deque[Item] = deque()
    try:
        items.extend(read(request))
    except BaseException as error:  # noqa: BLE001 it is raised in place of the next item
        return items, error
    return items, None


def _begin[Request, Item](
    requests: Iterator[Request], read: Callable[[Request], Iterable[Item]], pool: Executor
) -> Future[_Read[Item]] | None:
    """Submit the next request to the pool; None if there is none."""
    try:
        request = next(requests)
    except StopIteration:
        return None
    except Exception as error:  # noqa: BLE001 it is raised after the items of earlier requests
        failed: Future[_Read[Item]] = Future()
        failed.set_exception(error)
        return failed
    return pool.submit(copy_context().run, _read, read, request)
