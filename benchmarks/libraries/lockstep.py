"""A rank that reads in lock-step with others, as one that trains does."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from itertools import chain, cycle, islice
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.libraries.cells import numbers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: How wide the model is, and of how many labels: its step takes about as long as reading does, some milliseconds.
HIDDEN, LABELS = 32, 10
#: Steps without reading have this many batches in turns, which no cache holds, as none holds one that was read.
N_IN_TURNS = 32


class Model:
    """A small classifier, and its training: under DDP where there are several ranks."""

    def __init__(self) -> None:
        self._model: torch.nn.Module | None = None

    def __call__(self, cells: Any) -> None:  # noqa: ANN401 whatever a library gives
        """Take a step with a batch of cells, and labels that are made up."""
        if isinstance(cells, torch.Tensor):
            values = cells.to_dense()
        else:
            values = torch.from_numpy(cells if isinstance(cells, np.ndarray) else cells.toarray())
        if self._model is None:
            layers = torch.nn.Linear(values.shape[1], HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, LABELS)
            self._model = torch.nn.Sequential(*layers)
            if torch.distributed.get_world_size() > 1:
                self._model = torch.nn.parallel.DistributedDataParallel(self._model)
            self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._optimizer.zero_grad()
        labels = torch.arange(len(values)) % LABELS
        torch.nn.functional.cross_entropy(self._model(values), labels).backward()
        self._optimizer.step()


class Meeting:
    """Where ranks wait for each other in every step, and hear whether all have a batch.

    A collective between GPUs takes some dozens of microseconds. So does this, by sockets of the file system. By gloo it
    takes a third of a millisecond, and three where both ranks have just slept, which is as long as reading a batch.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        """Meet for the first time, after ``torch.distributed`` is there."""
        address = str(Path(tempfile.gettempdir(), "steps"))
        if rank == 0:
            with Listener(address, "AF_UNIX", backlog=world_size) as listener:
                torch.distributed.barrier()
                self._others = [listener.accept() for _ in range(world_size - 1)]
        else:
            torch.distributed.barrier()
            self._others = [Client(address, "AF_UNIX")]
        self._is_first = rank == 0

    def all_have(self, batch: object) -> bool:
        """Return whether no rank has come without a batch."""
        if self._is_first:
            has_batch = all([*(other.recv() for other in self._others), batch is not None])
            for other in self._others:
                other.send(has_batch)
            return has_batch
        (first,) = self._others
        first.send(batch is not None)
        return bool(first.recv())


def in_lock_step(loader: Iterable[Any], work: Callable[[Any], None] | None, meeting: Meeting) -> dict[str, float]:
    """Read an epoch with all ranks in every step, until one of them has no batch left.

    Parameters
    ----------
    loader
        Yields the cells of each batch.
    work
        Is called with them.
    meeting
        Where the ranks meet before each step, so that none works on a batch that others don't have.

    Returns
    -------
    Seconds, seconds of all threads on cores, rows and batches of this rank; of the seconds that a step waits for its
    batch, but for the first, the longest and the 99th percentile; and the seconds until the first batch.
    """
    n_rows, waits = 0, []
    meeting.all_have(loader)  # all begin together
    batches = iter(loader)
    began = asked = time.perf_counter()
    on_cores = time.process_time()
    while True:
        cells = next(batches, None)
        waits.append(time.perf_counter() - asked)
        if not meeting.all_have(cells) or cells is None:
            break
        if work is not None:
            work(cells)
        n_rows += cells.shape[0]
        asked = time.perf_counter()
    took = time.perf_counter() - began
    later = waits[1:-1]
    return {
        "seconds": took,
        "core seconds": time.process_time() - on_cores,
        "rows": n_rows,
        "batches": len(waits) - 1,
        "longest wait": max(later),
        "99 % of waits": float(np.quantile(later, 0.99)),
        "first wait": waits[0],
    }


def threads_run_on(cores: set[int]) -> None:
    """Let threads that Python starts from now on have some cores only, and with them those that they start."""
    run = threading.Thread.run

    def run_there(thread: threading.Thread) -> None:
        os.sched_setaffinity(0, cores)
        run(thread)

    # Python has no hook for the start of a thread
    threading.Thread.run = run_there  # type: ignore[assignment, method-assign]  # threads begin here


def reads_on(cores: set[int], loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches that this thread reads on some cores, and restore its cores for the consumer."""
    elsewhere, batches = os.sched_getaffinity(0), iter(loader)
    while True:
        os.sched_setaffinity(0, cores)
        batch = next(batches, None)
        os.sched_setaffinity(0, elsewhere)
        if batch is None:
            return
        yield batch


def serve(library: Any, out: Any, folder: str, cores: str, *configuration: str) -> None:  # noqa: ANN401 a module, and a file
    """Read epochs in lock-step with the other ranks, as the requests on standard input say.

    A request names a way, an epoch and a step: how many seconds it sleeps, "model", or "note", after which the answer
    has the numbers of the cells. One without a way is for a hundred steps without reading. Where ``cores`` is "apart",
    threads that read have one core for all ranks together, and steps have the others; where it is "shared", both have
    what the kernel gives them.
    """
    all_cores = os.sched_getaffinity(0) if cores == "apart" else set()
    for_steps = all_cores - {min(all_cores, default=0)}
    if for_steps:  # threads by which ranks meet belong to the steps
        os.sched_setaffinity(0, for_steps)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    there = Path(tempfile.gettempdir(), "meeting").as_uri()
    torch.distributed.init_process_group("gloo", init_method=there, rank=rank, world_size=world_size)
    meeting = Meeting(rank, world_size)
    if for_steps:
        threads_run_on(all_cores - for_steps)
    loaders = library.loaders(Path(folder), tuple(map(int, configuration)), rank, world_size)
    print(json.dumps(list(loaders)), file=out, flush=True)
    model = Model()
    in_memory = list(islice(loaders[next(iter(loaders))](0), N_IN_TURNS))
    model(in_memory[0])  # is made
    for line in sys.stdin:
        asked = json.loads(line)
        step = asked["step"]
        work = model if step == "model" else sleep_for(step) if isinstance(step, float) and step else None
        loader = loaders[asked["way"]](asked["epoch"]) if "way" in asked else islice(cycle(in_memory), 100)
        # a thread that reads ahead has its core already
        if for_steps and "way" in asked and not (step and "prefetch" in asked["way"]):
            loader = reads_on(all_cores - for_steps, loader)
        numbers = list[list[int]]()
        note = compose(numbers.append, numbers_of)
        answer: dict[str, Any] = in_lock_step(loader, note if step == "note" else work, meeting)
        if numbers:
            answer["numbers"] = [*chain.from_iterable(numbers)]
        print(json.dumps(answer), file=out, flush=True)
    torch.distributed.destroy_process_group()


def compose(last: Callable[[Any], None], first: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a function that calls one function with the result of another."""
    return lambda value: last(first(value))


def sleep_for(seconds: float) -> Callable[[Any], None]:
    """Return a step that sleeps."""
    return lambda _: time.sleep(seconds)
