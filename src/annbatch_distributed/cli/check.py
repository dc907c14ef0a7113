"""The command ``check``: one process per rank reads a collection and verifies its rows.

1. Each rank reads an epoch as a user's loop would, and counts its rows.
2. All ranks call ``check_epoch_read``. The parent process passes the message of each rank to all ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from annbatch_distributed.cli import CommandError
from annbatch_distributed.core.processes import follow_parent

if TYPE_CHECKING:
    from annbatch_distributed import StatefulLoader

#: Sends a message to all ranks, and returns the messages of all ranks.
type Meet = Callable[[Any], list[Any]]


class _Read(NamedTuple):
    """Rows that a rank has read in an epoch."""

    numbers: dict[str, Any]
    """Numbers of the rank in the table and in JSON."""
    is_planned: bool
    """True if all ranks together have read the rows of the plan."""
    verdict: str
    """Result or error message of ``check_epoch_read``."""


def run(options: Namespace) -> int:
    """Print the rows of each rank in each epoch, and differences from the plan."""
    if options.data:
        from annbatch_distributed.cli import data

        return data.run(options)
    if options.jobs is not None:
        raise CommandError("--jobs is the number of processes of --data. For epochs, pass --ranks")
    # the fork server imports the modules once, for all ranks
    if _start_method() == "forkserver":
        needed = [
            "annbatch_distributed.cli.check",
            "annbatch_distributed.cli.collection",
            "annbatch_distributed.loader",
        ]
        forkserver.set_forkserver_preload(needed)
        with interrupts_held():  # the server ignores interrupts only after its imports
            forkserver.ensure_running()
    # imported here, and not at the top, so that the server imports at the same time
    import pandas as pd

    from annbatch_distributed.cli.collection import Cells, choose_sizes, plans_of, settings_of

    cells = Cells(options)
    if lost := cells.lost():
        if options.json:
            print(json.dumps({"n_obs": cells.n_obs, "ok": False, "problems": lost, "epochs": []}))
        else:
            print(
                *lost,
                "zarr would read missing chunks as fill values, mostly 0, so no epoch was read. Copy or write the "
                "collection again.",
                sep="\n",
            )
        return 1
    # made once and sent to the ranks, as reading a column of obs may take long
    mask = cells.mask(options.rows, options.where)
    choose_sizes(options, mask, cells)
    plans_of(options, mask, cells.n_obs)  # raises for invalid options before a rank starts
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
    """Return the start method of the ranks: forkserver, or spawn on Windows."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay an interrupt until the context ends; processes started in it ignore interrupts, except on Windows."""
    signals: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))  # any thread may get it
    block = getattr(signal, "pthread_sigmask", None)
    if block:
        resource_tracker.ensure_running()  # multiprocessing starts it before other processes, and it unblocks signals
    before = block(signal.SIG_BLOCK, {signal.SIGINT}) if block else None
    try:
        yield
    finally:
        if block:
            block(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if signals:
            signal.raise_signal(signal.SIGINT)


def _streamed(options: Namespace, mask: Any) -> Iterator[list[_Read]]:  # noqa: ANN401 any mask
    """Start the ranks, and yield the rows that they read in each epoch; a CommandError if one raises or dies."""
    context: Any = multiprocessing.get_context(_start_method())
    # by this process's end of the pipe to each rank
    ranks: dict[Any, BaseProcess] = {}
    try:
        # an interrupt waits until all ranks have started, as it could leave one with half of its arguments
        with interrupts_held():
            for rank in range(options.ranks):
                parent_end, child_end = context.Pipe()
                arguments = options, mask, rank, child_end
                process = context.Process(target=_rank, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                ranks[parent_end] = process  # those in it are stopped, so it has started ones only
                child_end.close()  # otherwise this process wouldn't notice that the rank has ended
        # all ranks send the same kind of message: first "ready", then what check_epoch_read gathers, then a _Read
        n_read = 0
        while n_read < options.epochs:
            messages = _messages_of(ranks)
            if isinstance(messages[0], _Read):
                n_read += 1
                yield messages
            for pipe in ranks:
                with suppress(OSError):  # a dead rank, for which _messages_of raises next
                    pipe.send(messages)
    finally:
        for process in ranks.values():
            process.kill()
            process.join()


def _messages_of(ranks: dict[Any, BaseProcess]) -> list[Any]:
    """Return the next message of each rank."""
    messages: dict[Any, Any] = {}
    while len(messages) < len(ranks):
        pipe: Any
        for pipe in connection.wait([pipe for pipe in ranks if pipe not in messages]):
            try:
                messages[pipe] = pipe.recv()
            except (EOFError, OSError):  # the rank has ended
                ranks[pipe].join()
                code = ranks[pipe].exitcode or 0
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                raise CommandError(f"{ranks[pipe].name} ended with {how}, so all ranks were stopped", code=1) from None
            if isinstance(messages[pipe], CommandError):
                raise messages[pipe]
    return [messages[pipe] for pipe in ranks]


def _rank(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:  # noqa: ANN401 any mask
    """Run a rank until its epochs are read or the parent ends."""
    follow_parent()
    warnings.simplefilter("ignore")  # the parent shows them

    def meet(message: Any) -> list[Any]:  # noqa: ANN401 anything
        pipe.send(message)
        messages: list[Any] = pipe.recv()
        return messages

    try:
        as_rank(options, mask, rank, meet)
    except Exception as error:  # noqa: BLE001 the parent prints it
        with suppress(OSError):  # the parent is gone
            pipe.send(CommandError(f"rank {rank}: {type(error).__name__}: {error}", code=1))


def as_rank(options: Namespace, mask: Any, rank: int, meet: Meet) -> None:  # noqa: ANN401 any mask
    """Read each epoch as a rank, and send the rows that were read."""
    from annbatch_distributed import StatefulLoader
    from annbatch_distributed.cli.collection import Cells, sampler_of

    loader = StatefulLoader(
        batch_sampler=sampler_of(options, mask, rank),
        return_index=True,
        preload_to_gpu=False,
        prefetch=options.prefetch,
    ).use_collection(Cells(options).collection, names=False)
    meet("ready")  # so that all ranks read at the same time
    for epoch in range(options.epoch, options.epoch + options.epochs):
        loader.set_epoch(epoch)
        meet(_read(loader, rank, meet))


def _read(loader: StatefulLoader, rank: int, meet: Meet) -> _Read:
    from annbatch_distributed.checks import Tally

    # counted here, as in a user's loop, to find a loader that reports other rows than it yields
    tally, longest_wait = Tally(), 0.0
    start = last = perf_counter()
    for batch in loader:
        longest_wait = max(longest_wait, perf_counter() - last)
        tally.add(batch["index"])
        last = perf_counter()
    numbers = {
        "rank": rank,
        "rows": tally.n_rows,
        "batches": tally.n_batches,
        "rows_per_second": round(tally.n_rows / (perf_counter() - start)),
        "longest_wait": round(longest_wait, 3),
    }
    try:
        return _Read(numbers, True, loader.check_epoch_read(tally, gather=meet))
    except ValueError as error:
        return _Read(numbers, False, str(error))
