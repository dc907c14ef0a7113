"""Jobs: functions that run in this process, in several processes of this machine, or on a dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.processes import follow_parent


@contextmanager
def executor_of(jobs: int, scheduler: str | None) -> Iterator[Executor | None]:
    """Start processes on this machine, or use the workers of a dask cluster; None for this process alone."""
    if scheduler is not None:
        from dask.distributed import Client

        with Client(scheduler) as client, client.get_executor() as workers:
            yield workers
    elif jobs == 1:
        yield None
    else:
        # a fork would copy locks that threads of this process hold
        with ProcessPoolExecutor(jobs, get_context("spawn"), follow_parent) as processes:
            yield processes


def run_each[Task, Result](
    function: Callable[[Task], Result], tasks: Sequence[Task], executor: Executor | None
) -> Iterator[tuple[int, Result]]:
    """Yield the number and the result of each task, in any order."""
    if executor is None or len(tasks) < 2:
        yield from ((number, function(task)) for number, task in enumerate(tasks))
        return
    futures = {executor.submit(function, task): number for number, task in enumerate(tasks)}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise Problems(
            "a process ended, as it does if the machine runs out of memory: pass a smaller memory, or fewer jobs. "
            "In Python, call collect under if __name__ == '__main__':"
        ) from error
    finally:
        for future in futures:
            future.cancel()
