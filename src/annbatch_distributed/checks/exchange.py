"""Exchange: every process of a job says a string, and hears those of all.

The processes meet in a store, a table of keys and strings in which a framework's processes met before.

1. Each process writes its string into the store.
2. The first process waits until all have written, or time is up, and writes the outcome: all strings, or who is
   missing. A process that has waited too long does the same, so that nobody depends on the first one.
3. All return or raise by that outcome, which is written once. The first process, which may be the one that serves the
   store, leaves last.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from itertools import groupby
from numbers import Real
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Literal

from annbatch_distributed.ranks import jax, torch
from annbatch_distributed.ranks.rank import Framework, Placement

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as TorchStore


type Store = TorchStore | JaxStore


def store_of(framework: Framework) -> Store:
    """Return the store of a framework; a RuntimeError if its processes met elsewhere, as under torch's MPI backend."""
    # JAX has no public way to it, and torch not in all versions; the tests notice if it is kept elsewhere
    if framework == "jax":
        from jax._src.distributed import global_state

        return JaxStore(global_state.client)
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:
        raise RuntimeError(
            "torch's processes have no store through which they could be checked. Pass gather=, a function that is "
            "given a text and returns the texts of all processes, for instance one around all_gather_object."
        )
    return store


class JaxStore:
    """The table of JAX's coordination service."""

    def __init__(self, client: Any) -> None:  # noqa: ANN401 JAX has no type for a connection to the service
        self._client = client

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return it."""
        return int(self._client.key_value_increment(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether there are texts at all of some keys."""
        try:
            return all(self.get(key) for key in keys)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return False
            raise

    def get(self, key: str) -> bytes:
        """Return the text at a key, at which there is one."""
        return str(self._client.key_value_try_get(key)).encode()

    def compare_set(self, key: str, expected: str, text: str) -> None:
        """Write a text where there is none, which is what an empty text is expected for."""
        assert not expected
        try:
            self._client.key_value_set(key, text)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def delete_key(self, key: str) -> None:
        """Delete a text, if there is one."""
        self._client.key_value_delete(key)


type Gather = Callable[[str], Sequence[str]]
type Kind = Literal["rank", "process"]
type Timeout = float | timedelta

#: For how many seconds the first process waits for the others to hear the outcome.
_GRACE = 10.0


def seconds_of(timeout: object) -> float:
    """Return a timeout of a user's in seconds; a TypeError or a ValueError if it is none."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        kind = type(timeout).__name__
        raise TypeError(
            f"timeout must be a number of seconds or a datetime.timedelta, got {shortened(timeout)} of type {kind}."
        )
    if not 0 < float(seconds) < math.inf:
        raise ValueError(
            "timeout must be more than 0 seconds, and finite so that no process waits for ever, got "
            f"{shortened(timeout)}."
        )
    return float(seconds)


def gather_texts(text: str, job: Placement, *, seconds: float, gather: Gather | None = None) -> dict[int, str]:
    """Say a text to all processes of a job, and return what each of them says, by its number.

    ``gather`` returns the texts of all processes, in the same order everywhere. Without it, they meet through the
    framework that ``job`` is from, or else the one that is initialised, torch first; all get a TimeoutError if one
    doesn't come within some seconds, or fails while it waits.
    """
    if gather is not None:
        texts = gather(text)
        if not isinstance(texts, list | tuple) or not all(isinstance(said, str) for said in texts) or text not in texts:
            raise TypeError(
                "gather must return a list with the texts of all processes, that of this one included, got "
                f"{shortened(texts)}."
            )
        return dict(enumerate(texts))
    framework = job.framework or initialized()
    if framework is None:
        # alone, there is nobody to meet
        if job.rank.world_size == 1 and job.n_peers in (None, 1):
            return {0: text}
        raise RuntimeError(
            f"The {job.rank.world_size} ranks can't reach each other: neither torch.distributed nor jax.distributed is "
            "initialized. Initialize one of them first, or pass gather=, a function that is given a text and returns "
            "the texts of all processes, for instance mpi4py's comm.allgather."
        )
    here = torch.default_group() if framework == "torch" else jax.all_processes()
    # processes go by the numbers that the framework gives them, of which a mesh may have some only
    numbers = job.processes or tuple(range(here.rank.world_size))
    return _meet(text, here.rank.rank, numbers, store_of(framework), seconds)


def initialized() -> Framework | None:
    """Return the framework that knows the processes of this job, if any does."""
    return "torch" if torch.is_initialized() else "jax" if jax.is_initialized() else None


def listed(kind: Kind, numbers: Sequence[int]) -> str:
    """Return ascending numbers of ranks or processes as a text.

    >>> listed("rank", [0, 2, 3, 4, 7])
    'ranks 0, 2 to 4 and 7'
    """
    # 0 2 3 4 7 minus their places 0 1 2 3 4 are 0 1 1 1 3, which is the same within a stretch
    stretches: list[str] = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        stretch = [str(number) for _, number in group]
        # two neighbors are listed, "2 and 3", and more are a range, "2 to 4"
        stretches += [f"{stretch[0]} to {stretch[-1]}"] if len(stretch) > 2 else stretch
    plural = {"rank": "ranks", "process": "processes"}[kind]
    *others, last = stretches
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
    # other processes, or some of these with others, meet elsewhere in the same store; each call has a place of its own:
    # annbatch_distributed/9f3c.../1/said/0, .../1/outcome, .../1/heard/0
    place = f"annbatch_distributed/{blake2b(repr(numbers).encode(), digest_size=8).hexdigest()}"
    is_first = number == numbers[0]
    deadline, pause = clock() + seconds, 0.002
    said: dict[int, str] = {}
    try:
        place = f"{place}/{store.add(f'{place}/calls/{number}', 1)}"
        store.compare_set(f"{place}/said/{number}", "", text)
        while (outcome := _read(store, f"{place}/outcome")) is None:
            # the first process looks for all strings in each round, the others only when time is up
            is_late = clock() > deadline
            if is_first or is_late:
                for other in numbers:
                    if other not in said and (its := _read(store, f"{place}/said/{other}")) is not None:
                        said[other] = its
                missing = [other for other in numbers if other not in said]
                if is_late or not missing:
                    # of two that decide at once, the first to write it has decided for all
                    decided = _missing(missing, len(numbers), seconds) if missing else [said[one] for one in numbers]
                    store.compare_set(f"{place}/outcome", "", json.dumps(decided))
            sleep(pause)
            pause = min(2 * pause, 0.2)
    except BaseException as error:
        failed = f"The ranks can't be checked: process {number} has failed meanwhile with {error!r}"
        with suppress(Exception):  # whatever it is, it is raised here; the others hear of it if they can
            store.compare_set(f"{place}/outcome", "", json.dumps(failed))
            store.compare_set(f"{place}/heard/{number}", "", "yes")
        if type(error).__name__ == "DistNetworkError":  # of torch, which says no more than that a connection failed
            raise RuntimeError(
                "The ranks can't be checked: torch's store is gone, with torchrun or the process of rank 0 that held "
                "it. End the ranks that are left, and start the job again from its last checkpoint."
            ) from error
        raise
    store.compare_set(f"{place}/heard/{number}", "", "yes")
    if is_first:
        _clear(place, numbers, store, clock, sleep)
    heard: str | list[str] = json.loads(outcome)
    if isinstance(heard, str):
        raise TimeoutError(heard)
    return dict(zip(numbers, heard, strict=True))


def _missing(missing: Sequence[int], n_processes: int, seconds: float) -> str:
    return (
        f"The ranks can't be checked: of {n_processes} processes, {listed('process', missing)} didn't come within "
        f"{seconds:g} seconds. All of them must make the same calls. Look for one that failed or hangs; if it is slow, "
        "pass a larger timeout."
    )


def _read(store: Store, key: str) -> str | None:
    """Return a text that nobody deletes meanwhile, None if there is none."""
    return store.get(key).decode() if store.check([key]) else None


def _clear(
    place: str, numbers: Sequence[int], store: Store, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Wait until all that have come have heard the outcome, and delete what nobody needs any more."""
    deadline = clock() + _GRACE
    came = waiting = [number for number in numbers if store.check([f"{place}/said/{number}"])]
    while waiting and clock() < deadline:
        waiting = [number for number in waiting if not store.check([f"{place}/heard/{number}"])]
        sleep(0.01)
    for number in came:
        store.delete_key(f"{place}/said/{number}")
        store.delete_key(f"{place}/heard/{number}")
    if len(came) == len(numbers) and not waiting:  # else a process may come later
        store.delete_key(f"{place}/outcome")
