"""The command ``check``: one process for each rank streams a collection and checks what it has read.

1. Each rank streams an epoch as a user's loop would, and counts its rows.
2. All ranks call ``check_epoch_read``. The process that started them passes on what each says to all others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from annbatch_distributed.cli import CommandError

if TYPE_CHECKING:
    from annbatch_distributed import StatefulLoader

#: Says something to all ranks, and returns what each of them has said.
type Meet = Callable[[Any], list[Any]]


class _Read(NamedTuple):
    """What a rank has read in an epoch."""

    numbers: dict[str, Any]
    """What the table and JSON show of the rank."""
    is_planned: bool
    """Whether all ranks together have read what was planned."""
    verdict: str
    """What ``check_epoch_read`` says, or raises."""


def run(options: Namespace) -> int:
    """Print what the ranks have read in each epoch, and what is not as planned."""
    # a process that imports what ranks need; ranks are forked from it, and don't have to import it again
    if _start_method() == "forkserver":
        needed = ["annbatch_distributed.cli.check", "annbatch_distributed.cli.cells", "annbatch_distributed.loader"]
        forkserver.set_forkserver_preload(needed)
        with interrupts_held():  # the server ignores interrupts as soon as it has imported all
            forkserver.ensure_running()
    # imported here, and not at the top, because the server imports the same at the same time
    import pandas as pd

    from annbatch_distributed.cli.cells import Cells, plans_of, settings_of

    cells = Cells(options.path)
    if lost := cells.lost():
        if options.json:
            print(json.dumps({"n_obs": cells.n_obs, "ok": False, "problems": lost, "epochs": []}))
        else:
            print(
                *lost,
                "zarr would read fill values, mostly 0, for what is lost, so no epoch was read: copy or write the "
                "collection again",
                sep="\n",
            )
        return 1
    # made once, and sent to the ranks: to read a column of obs may take long
    mask = cells.mask(options.mask, options.where)
    plans_of(options, mask, cells.n_obs)  # raises what is wrong before a rank is started
    epochs: list[dict[str, Any]] = []
    for read in _streamed(options, mask):
        ranks, problems = [rank.numbers for rank in read], [] if read[0].is_planned else read[0].verdict.splitlines()
        if not options.json:
            table = pd.DataFrame(ranks).to_string(index=False)
            print("\n" * bool(epochs) + table, read[0].verdict, sep="\n", flush=True)
        epochs.append({"epoch": options.epoch + len(epochs), "ok": not problems, "problems": problems, "ranks": ranks})
    n_planned = sum(epoch["ok"] for epoch in epochs)
    if options.json:
        settings = settings_of(options, cells.n_obs)
        print(json.dumps(settings | {"ok": n_planned == len(epochs), "problems": [], "epochs": epochs}))
    elif len(epochs) > 1:
        print(f"\n{n_planned} of {len(epochs)} epochs were read as planned")
    return int(n_planned < len(epochs))


def _start_method() -> str:
    """Return how ranks are started: forked from the server, or spawned on Windows, which has none."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay an interrupt until the context ends; processes started in it ignore interrupts, except on Windows."""
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number))  # another thread may get it
    block = getattr(signal, "pthread_sigmask", None)
    before = block(signal.SIG_BLOCK, {signal.SIGINT}) if block else None
    try:
        yield
    finally:
        if block:
            block(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _streamed(options: Namespace, mask: Any) -> Iterator[list[_Read]]:  # noqa: ANN401 any mask
    """Start the ranks, and yield what they have read in each epoch; a CommandError if one raises or dies."""
    context: Any = multiprocessing.get_context(_start_method())
    # by this process's end of the pipe to each
    ranks: dict[Any, BaseProcess] = {}
    try:
        # an interrupt waits until the ranks have started: it would leave one with half of its arguments
        with interrupts_held():
            for rank in range(options.ranks):
                here, there = context.Pipe()
                arguments = options, mask, rank, there
                ranks[here] = context.Process(target=_rank, args=arguments, name=f"rank {rank}", daemon=True)
                ranks[here].start()
                there.close()  # else this process wouldn't notice that the rank has ended
        # ranks answer in step: "ready" first, then what check_epoch_read gathers, then what each has read
        n_read = 0
        while n_read < options.epochs:
            said = _said(ranks)
            if isinstance(said[0], _Read):
                n_read += 1
                yield said
            for pipe in ranks:
                with suppress(OSError):  # a dead rank, which _said notices next
                    pipe.send(said)
    finally:
        for process in ranks.values():
            process.kill()
            process.join()


def _said(ranks: dict[Any, BaseProcess]) -> list[Any]:
    """Return what each rank says next, through its pipe."""
    said: dict[Any, Any] = {}
    while len(said) < len(ranks):
        pipe: Any
        for pipe in connection.wait([pipe for pipe in ranks if pipe not in said]):
            try:
                said[pipe] = pipe.recv()
            except (EOFError, OSError):  # the rank has ended
                ranks[pipe].join()
                code = ranks[pipe].exitcode or 0
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                raise CommandError(f"{ranks[pipe].name} ended with {how}; the other ranks were ended", code=1) from None
            if isinstance(said[pipe], CommandError):
                raise said[pipe]
    return [said[pipe] for pipe in ranks]


def _rank(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:  # noqa: ANN401 any mask
    """Be a rank, until its epochs are read or the parent ends."""
    # a rank whose parent was killed would wait for it for ever
    threading.Thread(target=_end_with, args=[multiprocessing.parent_process()], daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends this process
    warnings.simplefilter("ignore")  # the parent has shown them

    def meet(said: Any) -> list[Any]:  # noqa: ANN401 anything
        pipe.send(said)
        heard: list[Any] = pipe.recv()
        return heard

    try:
        as_rank(options, mask, rank, meet)
    except Exception as error:  # noqa: BLE001 the parent prints it
        with suppress(OSError):  # the parent is gone
            pipe.send(CommandError(f"rank {rank}: {type(error).__name__}: {error}", code=1))


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def as_rank(options: Namespace, mask: Any, rank: int, meet: Meet) -> None:  # noqa: ANN401 any mask
    """Stream each epoch as a rank, and say what was read in it."""
    from annbatch_distributed import StatefulLoader
    from annbatch_distributed.cli.cells import Cells, sampler_of

    loader = StatefulLoader(
        batch_sampler=sampler_of(options, mask, rank),
        return_index=True,
        preload_to_gpu=False,
        read_ahead=options.read_ahead,
    ).use_collection(Cells(options.path).collection)
    meet("ready")  # all ranks read at the same time
    for epoch in range(options.epoch, options.epoch + options.epochs):
        loader.set_epoch(epoch)
        meet(_read(loader, rank, meet))


def _read(loader: StatefulLoader, rank: int, meet: Meet) -> _Read:
    from annbatch_distributed.checks import Tally

    # counted as in a user's loop: a loader that says other rows than it yields is found out
    tally, longest_wait = Tally(), 0.0
    began = asked = perf_counter()
    for batch in loader:
        longest_wait = max(longest_wait, perf_counter() - asked)
        tally.add(batch["index"])
        asked = perf_counter()
    numbers = {
        "rank": rank,
        "rows": tally.n_rows,
        "batches": tally.n_batches,
        "rows_per_second": round(tally.n_rows / (perf_counter() - began)),
        "longest_wait": round(longest_wait, 3),
    }
    try:
        return _Read(numbers, True, loader.check_epoch_read(tally, gather=meet))
    except ValueError as error:
        return _Read(numbers, False, str(error))
