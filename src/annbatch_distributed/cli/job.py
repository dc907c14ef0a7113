"""A job: processes of this machine, one for each rank, that stream epochs of a collection.

Nothing of it outlives the process that started it. That one ends its ranks whatever signal it is sent, and where it is
killed, each rank notices and ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Self

from annbatch_distributed.cli.cells import Cells
from annbatch_distributed.cli.reading import Read, readings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from multiprocessing.synchronize import Barrier
    from types import FrameType

    from annbatch_distributed.cli.settings import Settings

__all__ = ["Job", "RankError"]

#: What ends a job: a terminal's Ctrl-C, a scheduler, a terminal that is closed.
_ENDINGS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class RankError(Exception):
    """A rank didn't come to its end; the message says which one, and what it was."""


@dataclass(frozen=True)
class Job:
    """What all ranks do."""

    path: str
    """Where the collection is."""
    settings: Settings
    """What they make their samplers with."""

    def run(self, say: Callable[[int], object]) -> list[Read]:
        """Start the ranks, and return what each of them has read in each epoch.

        Parameters
        ----------
        say
            Called with the number of rows that were read since it was called before.

        Raises
        ------
        RankError
            If a rank raises or dies; the others have been ended then.
        """
        context = multiprocessing.get_context("spawn")
        together = context.Barrier(self.settings.world_size)
        processes: list[BaseProcess] = []
        receivers: dict[Any, int] = {}
        read: list[Read] = []
        with _Endings() as endings:
            try:
                for rank in range(self.settings.world_size):
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_stream, args=(self, rank, together, sender), daemon=True)
                    try:
                        with endings.held(), _ignored_by_children():
                            process.start()
                            processes.append(process)
                    except OSError as error:
                        raise RankError(f"rank {rank} can't be started: {error}") from error
                    sender.close()
                    receivers[receiver] = rank
                while receivers:
                    for ready in connection.wait(list(receivers)):
                        rank = receivers[ready]
                        match _received(ready):
                            case int() as n_rows:
                                say(n_rows)
                            case Read() as its:
                                read.append(its)
                            case str() as problem:
                                raise RankError(f"rank {rank}: {problem}")
                            case _ if sum(one.rank == rank for one in read) == len(self.settings.epochs):
                                del receivers[ready]
                            case _:
                                processes[rank].join()
                                raise RankError(f"rank {rank} {_end_of(processes[rank])}; the other ranks were ended")
                for started in processes:
                    started.join(timeout=10)
            finally:
                for started in processes:
                    started.kill()
                    started.join()
        return read


def _received(receiver: Any) -> object:  # noqa: ANN401 one end of a pipe
    try:
        return receiver.recv()
    except (EOFError, OSError):  # the rank is no more
        return None


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode or 0
    if code >= 0:
        return f"ended with exit code {code}"
    why = ", as the system does where memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{why}"


class _Endings:
    """Signals that end this process by an exception, so that what it has started can be ended first."""

    def __init__(self) -> None:
        self._is_held, self._noted = False, 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # what is ignored stays ignored, as SIGHUP is under nohup
        heeded = [number for number in _ENDINGS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._end) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put off what a signal does until a process is started, which could not be ended in the middle of it."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._noted:
            self._end(self._noted, None)

    def _end(self, number: int, _: FrameType | None) -> None:
        if self._is_held:
            self._noted = number
            return
        for ending in _ENDINGS:  # once is enough, and the ranks are still to be ended
            signal.signal(ending, signal.SIG_IGN)
        raise SystemExit(128 + number)


@contextmanager
def _ignored_by_children() -> Iterator[None]:
    """Keep from processes that are started here the SIGINT that a terminal sends to all: their parent ends them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _stream(job: Job, rank: int, together: Barrier, sender: Connection[Any, Any]) -> None:
    """Stream the epochs as a rank, and send what was read, or what is wrong."""
    _watch_parent()
    warnings.simplefilter("ignore")  # the parent has had those that matter
    try:
        for read in readings(Cells(job.path), job.settings, rank, begin=together.wait, say=sender.send):
            sender.send(read)
    except Exception as error:  # noqa: BLE001 the parent says it
        with suppress(OSError):  # of a parent that is no more
            sender.send(f"{type(error).__name__}: {error}")


def _watch_parent() -> None:
    """End this process as soon as its parent is no more."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_it() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()
