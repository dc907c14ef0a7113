"""Exchange: an all-gather of one string per process.

The processes communicate through the store of their framework, a table of keys and strings.

1. Each process writes its string into the store.
2. The first process waits until all have written, or time is up, and writes the outcome: all strings, or which
   processes are missing. A process that has waited too long does the same, so none depends on the first process.
3. All processes return or raise according to the outcome, which is written once. The first process, which may also
   serve the store, leaves last.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from numbers import Real
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Literal

from annbatch_distributed.core.rank import Framework, Placement
from annbatch_distributed.core.values import digest
from annbatch_distributed.ranks import jax, torch

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as TorchStore


type Store = TorchStore | JaxStore


def store_of(framework: Framework) -> Store:
    """Return the store of a framework; a RuntimeError if it has none, as under PyTorch's MPI backend."""
    # JAX has no public function for it, and PyTorch not in all versions; the tests fail if its place changes
    if framework == "jax":
        from jax._src.distributed import global_state

        return JaxStore(global_state.client)
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:
        raise RuntimeError(
            "The processes of torch.distributed have no store to communicate through. Pass gather=, a function that "
            "takes a string and returns the strings of all processes, for example with all_gather_object."
        )
    return store


class JaxStore:
    """Store of JAX's coordination service."""

    def __init__(self, client: Any) -> None:  # noqa: ANN401 JAX has no type for a connection to the service
        self._client = client

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return it."""
        return int(self._client.key_value_increment(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Return True if the store has a string for each of some keys."""
        try:
            return all(self.get(key) for key in keys)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return False
            raise

    def get(self, key: str) -> bytes:
        """Return the string of a key that the store has."""
        return str(self._client.key_value_try_get(key)).encode()

    def compare_set(self, key: str, expected: str, text: str) -> None:
        """Write a string unless the key has one already; ``expected`` is always empty."""
        assert not expected
        try:
            self._client.key_value_set(key, text)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def delete_key(self, key: str) -> None:
        """Delete the string of a key, if it has one."""
        self._client.key_value_delete(key)


type Gather = Callable[[str], Sequence[str]]
type Kind = Literal["rank", "process"]
type Timeout = float | timedelta

#: Time that the first process waits for others to read the outcome, in seconds.
_GRACE = 10.0


def seconds_of(timeout: object) -> float:
    """Return a user's timeout in seconds; a TypeError or a ValueError if it is invalid."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        kind = type(timeout).__name__
        raise TypeError(
            f"timeout must be a number of seconds or a datetime.timedelta, got {shortened(timeout)} of type {kind}. "
            "Pass timeout=300, for example."
        )
    if not 0 < float(seconds) < math.inf:
        raise ValueError(
            f"timeout must be positive and finite, got {shortened(timeout)}. Pass a number of seconds, such as 300."
        )
    return float(seconds)


def gather_texts(text: str, job: Placement, *, seconds: float, gather: Gather | None = None) -> dict[int, str]:
    """Send a string to all processes of a job, and return the strings of all, by number.

    ``gather`` returns the strings of all processes, in the same order in every process. Without it, they communicate
    through the framework of ``job``, or else the one that is initialized, PyTorch first. All raise a TimeoutError if
    one of them doesn't make this call in time, or fails while it waits.
    """
    if gather is not None:
        texts = gather(text)
        if not isinstance(texts, list | tuple) or not all(isinstance(own, str) for own in texts) or text not in texts:
            raise TypeError(
                "gather must return a list with the strings of all processes, including its argument, got "
                f"{shortened(texts)}. Return the strings unchanged, as comm.allgather of mpi4py does."
            )
        return dict(enumerate(texts))
    framework = job.framework or initialized()
    if framework is None:
        # a single process has no others to wait for
        if job.world_size == 1 and job.n_peers in (None, 1):
            return {0: text}
        raise RuntimeError(
            f"The {job.world_size} ranks can't communicate, since neither torch.distributed nor jax.distributed "
            "is initialized. Initialize one of them first, or pass gather=, a function that takes a string and returns "
            "the strings of all processes, such as comm.allgather of mpi4py."
        )
    here = torch.default_group() if framework == "torch" else jax.all_processes()
    # processes are numbered by the framework; a mesh may hold only some of them
    numbers = job.processes or tuple(range(here.world_size))
    return _meet(text, here.rank, numbers, store_of(framework), seconds)


def initialized() -> Framework | None:
    """Return the framework that is initialized, PyTorch first; None if none is."""
    return "torch" if torch.is_initialized() else "jax" if jax.is_initialized() else None


def enumerated(kind: Kind, numbers: Sequence[int]) -> str:
    """Format ascending numbers of ranks or processes.

    >>> enumerated("rank", [0, 2, 3, 4, 7])
    'ranks 0, 2 to 4 and 7'
    """
    # 0 2 3 4 7 minus their places 0 1 2 3 4 are 0 1 1 1 3, which are equal within a range of consecutive numbers
    parts: list[str] = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        consecutive = [str(number) for _, number in group]
        # two neighbors are listed, "2 and 3"; three or more are a range, "2 to 4"
        parts += [f"{consecutive[0]} to {consecutive[-1]}"] if len(consecutive) > 2 else consecutive
    plural = {"rank": "ranks", "process": "processes"}[kind]
    *others, last = parts
    return f"{plural} {', '.join(others)} and {last}" if others else f"{kind if len(numbers) == 1 else plural} {last}"


def _meet(
    text: str,
    number: int,
    numbers: Sequence[int],
    store: Store,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[int, str]:
    """Return the strings of all processes with some ascending numbers, once all have called this."""
    # each set of processes, and each call of them, has its own keys in the store:
    # annbatch_distributed/9f3c.../1/said/0, .../1/outcome, .../1/heard/0
    place = f"annbatch_distributed/{digest(repr(numbers), size=8)}"
    is_first = number == numbers[0]
    deadline, pause = clock() + seconds, 0.002
    strings: dict[int, str] = {}
    try:
        place = f"{place}/{store.add(f'{place}/calls/{number}', 1)}"
        store.compare_set(f"{place}/said/{number}", "", text)
        while (outcome := _read(store, f"{place}/outcome")) is None:
            # the first process looks for all strings in each round, the others only when time is up
            is_late = clock() > deadline
            if is_first or is_late:
                for other in numbers:
                    if other not in strings and (string := _read(store, f"{place}/said/{other}")) is not None:
                        strings[other] = string
                missing = [other for other in numbers if other not in strings]
                if is_late or not missing:
                    # if two processes decide at once, the first one to write decides for all
                    decision = _missing(missing, len(numbers), seconds) if missing else [strings[it] for it in numbers]
                    store.compare_set(f"{place}/outcome", "", json.dumps(decision))
            sleep(pause)
            pause = min(2 * pause, 0.2)
    except BaseException as error:
        failure = f"The ranks can't be checked: process {number} failed while waiting, with {error!r}"
        with suppress(Exception):  # the error is raised here anyway; the others receive it if the store works
            store.compare_set(f"{place}/outcome", "", json.dumps(failure))
            store.compare_set(f"{place}/heard/{number}", "", "yes")
        if type(error).__name__ == "DistNetworkError":  # of PyTorch, whose message only names a failed connection
            raise RuntimeError(
                "The ranks can't be checked: PyTorch's store is gone, since torchrun or the process of rank 0 has "
                "ended. End the remaining ranks, and start the job again from its last checkpoint."
            ) from error
        raise
    store.compare_set(f"{place}/heard/{number}", "", "yes")
    if is_first:
        _clear(place, numbers, store, clock, sleep)
    result: str | list[str] = json.loads(outcome)
    if isinstance(result, str):
        raise TimeoutError(result)
    return dict(zip(numbers, result, strict=True))


def _missing(missing: Sequence[int], n_processes: int, seconds: float) -> str:
    absent = enumerated("process", missing)
    return (
        f"The ranks can't be checked: of {n_processes} processes, {absent} did not make this call within "
        f"{seconds:g} seconds. Check their logs for errors and hangs; if they are slow, pass a larger timeout."
    )


def _read(store: Store, key: str) -> str | None:
    """Return the string of a key that no process deletes meanwhile; None if it has none."""
    return store.get(key).decode() if store.check([key]) else None


def _clear(
    place: str, numbers: Sequence[int], store: Store, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Wait until all processes that made the call have read the outcome, and delete keys that are no longer needed."""
    deadline = clock() + _GRACE
    present = waiting = [number for number in numbers if store.check([f"{place}/said/{number}"])]
    while waiting and clock() < deadline:
        waiting = [number for number in waiting if not store.check([f"{place}/heard/{number}"])]
        sleep(0.01)
    for number in present:
        store.delete_key(f"{place}/said/{number}")
        store.delete_key(f"{place}/heard/{number}")
    if len(present) == len(numbers) and not waiting:  # else a process may still read it
        store.delete_key(f"{place}/outcome")
