"""A job: processes of this machine, one for each rank, that stream epochs of a collection and check what they read.

1. Each rank streams an epoch as a user's loop would, counts its rows, and keeps a few cells.
2. All ranks call ``check_epoch_read``; what they say meets in the process that has started them.
3. The cells that were kept are compared with what the store has for their rows.

Nothing of it outlives the process that started it: each rank notices when that is no more, and ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed.cli.cells import Cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from annbatch_distributed import StatefulLoader
    from annbatch_distributed.cli.settings import Settings

__all__ = ["Job", "RankError", "Read", "readings"]

#: How many cells of a rank are compared with the store in an epoch, and how many rows that differ are named.
_COMPARED, _NAMED = 64, 5
#: After so many seconds it is said how far a rank is.
_SAID = 0.2


class RankError(Exception):
    """A rank didn't come to its end; the message says which one, and what it was."""


@dataclass(frozen=True)
class Read:
    """What a rank has read in an epoch."""

    rank: int
    epoch: int
    n_rows: int
    n_batches: int
    seconds: float
    """How long the pass took."""
    longest_wait: float
    """For how many seconds it waited for a batch at most."""
    n_compared: int
    """How many cells were compared with what the store has for their rows."""
    other_cells: list[int]
    """The rows of those that were other cells."""
    is_planned: bool
    """Whether all ranks together have read what was planned."""
    verdict: str
    """What ``check_epoch_read`` says, the same on every rank."""

    @property
    def rows_per_second(self) -> float:
        """How many rows were read in a second of the pass."""
        return self.n_rows / max(self.seconds, 1e-9)

    @property
    def problems(self) -> list[str]:
        """What is otherwise than it should be on this rank, beside the verdict on all of them."""
        n_others, first = len(self.other_cells), self.other_cells[:_NAMED]
        rows = f"{n_others} row{'s' * (n_others > 1)}: {', '.join(map(str, first))}{', ...' * (n_others > _NAMED)}"
        return [f"rank {self.rank} has read other cells than the store has for {rows}"] if n_others else []


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
        processes: list[BaseProcess] = []
        pipes: list[Connection[Any, Any]] = []
        try:
            for rank in range(self.settings.world_size):
                here, there = context.Pipe()
                processes.append(context.Process(target=_stream, args=(self, rank, there), daemon=True))
                try:
                    processes[-1].start()
                except OSError as error:
                    raise RankError(f"rank {rank} can't be started: {error}") from error
                there.close()
                pipes.append(here)
            return self._received(pipes, processes, say)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()

    def _received(
        self, pipes: list[Connection[Any, Any]], processes: list[BaseProcess], say: Callable[[int], object]
    ) -> list[Read]:
        read: list[Read] = []
        texts: dict[int, str] = {}
        n_expected = len(pipes) * len(self.settings.epochs)
        while len(read) < n_expected:
            for ready in connection.wait(pipes):
                rank = next(rank for rank, pipe in enumerate(pipes) if pipe is ready)
                match _message(pipes[rank]):
                    case int() as n_rows:
                        say(n_rows)
                    case Read() as its:
                        read.append(its)
                    case str() as text:
                        texts[rank] = text
                    case RankError() as error:
                        raise RankError(f"rank {rank}: {error}")
                    case _:
                        processes[rank].join()
                        raise RankError(f"rank {rank} {_end_of(processes[rank])}; the other ranks were ended")
            if len(texts) == len(pipes):
                for pipe in pipes:
                    pipe.send([texts[rank] for rank in range(len(pipes))])
                texts = {}
        return read


def _message(pipe: Connection[Any, Any]) -> object:
    try:
        return pipe.recv()
    except (EOFError, OSError):  # the rank is no more
        return None


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode or 0
    if code >= 0:
        return f"ended with exit code {code}"
    why = ", as the system does where memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{why}"


def _stream(job: Job, rank: int, pipe: Connection[Any, Any]) -> None:
    """Stream the epochs as a rank, and send what was read, or what is wrong."""
    _watch_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all; the parent ends this process
    warnings.simplefilter("ignore")  # the parent has had those that matter

    def meet(text: str) -> list[str]:
        pipe.send(text)
        texts: list[str] = pipe.recv()
        return texts

    try:
        for read in readings(Cells(job.path), job.settings, rank, meet=meet, say=pipe.send):
            pipe.send(read)
        pipe.recv()  # until the parent has all it waits for, and ends this process
    except Exception as error:  # noqa: BLE001 the parent says it
        with suppress(OSError):  # of a parent that is no more
            pipe.send(RankError(f"{type(error).__name__}: {error}"))


def _watch_parent() -> None:
    """End this process as soon as its parent is no more."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_it() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()


def readings(
    cells: Cells, settings: Settings, rank: int, *, meet: Callable[[str], list[str]], say: Callable[[int], object]
) -> Iterator[Read]:
    """Stream each epoch as a rank, and yield what was read in it. In ``meet``, texts of all ranks are exchanged."""
    from annbatch_distributed import StatefulLoader

    loader = StatefulLoader(
        batch_sampler=settings.sampler(rank),
        return_index=True,
        preload_to_gpu=False,
        read_ahead=settings.read_ahead,
    ).use_collection(cells.collection)
    if loader.n_obs != cells.n_obs:
        raise RuntimeError(f"the loader has {loader.n_obs} rows, and the collection {cells.n_obs}")
    for epoch in settings.epochs:
        loader.set_epoch(epoch)
        meet("")  # so that all ranks read at the same time
        yield _read(loader, cells, rank, epoch, meet, say)


def _read(
    loader: StatefulLoader,
    cells: Cells,
    rank: int,
    epoch: int,
    meet: Callable[[str], list[str]],
    say: Callable[[int], object],
) -> Read:
    """Stream an epoch: count all rows, keep a cell of every so many batches, and say now and then how far it is."""
    from annbatch_distributed import Tally

    tally, kept, n_said = Tally(), dict[int, tuple[Any, Any]](), 0
    every = -(-len(loader) // _COMPARED)
    began = asked = said = perf_counter()
    longest_wait = 0.0
    for batch in loader:
        now = perf_counter()
        longest_wait = max(longest_wait, now - asked)
        rows = np.asarray(batch["index"])
        if not tally.n_batches % every:
            place, obs = tally.n_batches % len(rows), batch.get("obs")
            kept[int(rows[place])] = batch["X"][[place]], None if obs is None else obs.iloc[place]
        tally.add(rows)
        if now - said > _SAID:
            say(tally.n_rows - n_said)
            n_said, said = tally.n_rows, now
        asked = perf_counter()
    seconds = perf_counter() - began
    say(tally.n_rows - n_said)
    try:
        is_planned, verdict = True, loader.check_epoch_read(tally, gather=meet)
    except ValueError as error:
        is_planned, verdict = False, str(error)
    stored = cells.stored([row for row in kept if row < cells.n_obs])
    others = sorted(row for row, values, obs in stored if not _is_same(*kept[row], values, obs))
    pass_ = tally.n_rows, tally.n_batches, seconds, longest_wait
    return Read(rank, epoch, *pass_, len(kept), others, is_planned, verdict)


def _is_same(values: Any, obs: Any, stored_values: Any, stored_obs: Any) -> bool:  # noqa: ANN401 what batches hold
    """Whether a cell of a batch is the one of the store."""
    import pandas as pd

    values = np.asarray(values.toarray() if hasattr(values, "toarray") else values).reshape(-1)
    if not np.array_equal(values, stored_values, equal_nan=values.dtype.kind == "f"):
        return False
    if obs is None:
        return True
    pairs = [(obs[column], stored_obs[column]) for column in obs.index]
    # asked first, because pandas' NA equals nothing and is no answer either
    return all(pd.isna(one) == pd.isna(other) and (pd.isna(one) or one == other) for one, other in pairs)
